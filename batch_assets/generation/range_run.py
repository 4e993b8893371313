"""One range of batches on its way through engines: rows from the store, outcomes into journal and batch objects.

No Dagster here. The op (rows.py) owns the lease and the ledger; this owns what happens between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from batch_assets import settings
from batch_assets.generation.mixed_rows import mixed
from batch_assets.generation.range_plan import Intent, RangePlan, RunIdentity, Work, plan_range
from batch_assets.generation.range_source import RangeSource, RunClaims
from batch_assets.generation.vector_length import vector_length
from batch_assets.work.part_journal import PartJournal
from gpu_runner.client.engine_client import EngineClient, EngineInfo, EngineLost, EngineRefused, TimeOuts
from gpu_runner.client.vector_length import VectorLength
from gpu_runner.inference.failures.failing_requests import FailingRequests
from gpu_runner.inference.feed import Feed, FeedPolicy, FeedProgress
from gpu_runner.rows import SIMULATED, Origin, Outcome
from resources.fleet.resource import LeasedEngine
from resources.objects.health import StoreHealth, is_store_trouble
from resources.objects.opening import StoreError, self_test
from resources.store.dataset_store import BatchFooter, DatasetStore, SnapshotManifest

__all__ = ["Intent", "RangePlan", "RangeRun", "RunClaims", "RunIdentity", "Work", "plan_range"]

log = logging.getLogger(__name__)

UNDECIDED_SECONDS = 0.05
LINGER_SECONDS = 2.0
RETRY_SECONDS = 1.0
RELEASE_SECONDS = 0.5
CLOSE_SECONDS = 2.0
# Vectors take eight times as much memory as store.
VECTOR_MEMORY = 4


class RangeRun:
    """Feeds one range's rows to one engine after another until every batch is committed.

    All methods but `serve` may be called from any thread. `fence` says whether this run may still clean up after
    itself: one that was declared dead deletes nothing, its successor does. `committed` receives the footer of every
    batch that this run committed or found committed, for the ledger. `claims` keep it from asking for rows that another
    run of these batches asks for. `reuse`: whose answers rows take, where the snapshot has some beside it.
    `simulated`: which known answers are taken, see RangeSource. `neighbours`: True where committed batches of the
    dataset are simulated, False where some are not: a table never has both.
    """

    def __init__(
        self,
        store: DatasetStore,
        manifest: SnapshotManifest,
        plan: RangePlan,
        identity: RunIdentity,
        *,
        policy: FeedPolicy | None = None,
        journal_seconds: float = 2.0,
        fence: Callable[[], bool] = lambda: True,
        claims: RunClaims | None = None,
        health: StoreHealth | None = None,
        rng: random.Random | None = None,
        reuse: bool | Sequence[str] = False,
        simulated: bool | None = None,
        neighbours: frozenset[bool] = frozenset(),
    ) -> None:
        self.store, self.manifest, self.identity = store, manifest, identity
        self.generation = manifest.settings()
        self.committed: queue.SimpleQueue[BatchFooter] = queue.SimpleQueue()
        self.epoch = 0
        self._work = {work.entry.key: work for work in plan.todo}
        self._rows = sum(work.entry.rows for work in plan.todo)
        self._answer_bytes = settings.max_answer_bytes()
        self._journal_seconds = journal_seconds
        self._fence = fence
        self._neighbours = neighbours
        self.health = health or StoreHealth()
        self._committed_keys: set[str] = {footer.key for footer in plan.done}
        self._released: set[str] = set(self._committed_keys)
        self._claims = claims
        self._commit_error: Exception | None = None
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="store")
        task = self.generation.task
        writing = self._writing_to_store
        self._journal = PartJournal(store, identity.writer, task, closed=self._is_committed, writing=writing)
        self.source = RangeSource(
            store,
            manifest,
            self._work,
            identity,
            claims,
            adopted=self._adopted,
            journal=self._journal,
            health=self.health,
            store_is_there=self.store_is_there,
            reuse=reuse,
            simulated=simulated,
        )
        self._feed = Feed(
            self.source.batches(),
            on_row=self._on_row,
            on_batch=self._on_batch,
            policy=self._enough_memory(policy or FeedPolicy()),
            rng=rng or random.Random(),
            vectors=VectorLength(vector_length(store, manifest, reuse)),
        )

    def progress(self) -> FeedProgress:
        """Where the feed stands."""
        return self._feed.progress()

    def failing(self, before: float) -> FailingRequests | None:
        """What every request meets, since `before` (by time.monotonic) or longer; None: one is answered."""
        return self._feed.failing(before)

    @property
    def rows(self) -> int:
        """Rows that this run has to do, the finished ones among them included."""
        return self._rows

    @property
    def batches(self) -> int:
        """Batches of the range that have rows."""
        return len(self._work.keys() | self._committed_keys)

    def missing(self) -> list[str]:
        """Keys that are not committed."""
        return [key for key in self._work if key not in self._committed_keys]

    @property
    def waits(self) -> bool:
        """Other runs hold the batches that are left; with no row queued, an engine is of no use now."""
        return self.source.waited > LINGER_SECONDS and self._feed.progress().queued == 0

    async def prepare(self) -> bool:
        """Commit the batches that need no engine. False: nothing is left, so none need be leased.

        Not to be called beside `serve`. Returns True as soon as there is a row that nobody else asks for.
        """
        if self._claims is None:
            return await self._feed.prepare()
        preparing = asyncio.create_task(self._feed.prepare())
        releasing = asyncio.create_task(self._release_often())
        try:
            while not preparing.done() and not self._needs_engine():
                await asyncio.wait([preparing], timeout=UNDECIDED_SECONDS)
                if releasing.done():
                    releasing.result()  # raises: it ends in no other way
            if preparing.done():
                return preparing.result()
        finally:
            releasing.cancel()
            preparing.cancel()  # the batch that is being read is taken up again by the next call
            await asyncio.gather(preparing, releasing, return_exceptions=True)
        if self._commit_error is not None:
            raise self._commit_error
        return True

    def _needs_engine(self) -> bool:
        """The next batch has rows to ask for, and those before it are committed (or cannot be)."""
        committing = self._feed.progress().open_batches > 0 and self._commit_error is None
        return self.source.wants_engine.is_set() and not committing

    async def serve(self, leased: LeasedEngine, stop: asyncio.Event | None = None) -> None:
        """Generate on this engine until all is committed, or until `stop` is set and its rows are answered.

        Raises EngineLost, and may be called again with the next engine, or with two at once: they share the rows.
        """
        self.epoch = leased.epoch
        time_outs = TimeOuts(request=leased.limits.request_seconds)
        async with EngineClient(
            leased.endpoint,
            self.generation,
            api_key=leased.api_key,
            time_outs=time_outs,
            answer_bytes=self._answer_bytes,
            reachability=leased.reachability,
            tls=leased.tls,
        ) as engine:
            try:
                info = await engine.info()
            except EngineLost as error:
                self._feed.not_ready(error)
                raise
            self._check_context(info)
            self._check_alike(info)
            origin = Origin(
                model=f"{info.model} ({SIMULATED})" if info.simulated else info.model,
                engine=info.version,
                provider=leased.provider,
                instance_type=leased.instance_type,
                spot=leased.spot,
                run_id=self.identity.run_id,
            )
            flushing = asyncio.create_task(self._flush_often())
            self.source.engine_comes()
            try:
                await self._feed.serve(
                    engine,
                    origin,
                    leased.max_num_seqs,
                    stop=stop,
                    spending=leased.spending,
                    limits=leased.limits,
                )
            finally:
                self.source.engine_goes()
                flushing.cancel()
                await asyncio.gather(flushing, return_exceptions=True)

    def _check_context(self, info: EngineInfo) -> None:
        """A max_tokens above the model's context would make every row a dead letter: refuse before the first."""
        wanted = self.generation.most_tokens
        if info.max_model_len is not None and wanted is not None and wanted >= info.max_model_len:
            raise EngineRefused(
                f"sampling.{self.generation.limit_fields[0]}: expected less than the engine's context of "
                f"{info.max_model_len} tokens, found {wanted}; lower it in the dataset, or start the engine with a "
                "larger --max-model-len"
            )

    def _check_alike(self, info: EngineInfo) -> None:
        """Simulated rows and those of a model never stand in one table. Raises EngineRefused."""
        if (not info.simulated) in self._neighbours:
            raise EngineRefused(mixed(self.store.dataset, simulated=info.simulated))

    async def flush(self) -> None:
        """Write what waits for the journal; called often, and once more when a run stands down."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self._journal.flush)

    async def write_again(self) -> None:
        """After a write that failed: one more, of what waits for the journal, else of something small.

        `health` knows what became of it. What waits comes first: a full disk may still take a small object. Nothing is
        tried beside a flush, which has taken what waited.
        """
        if self._journal.flushing:
            return
        before = self._journal.sequence
        await self.flush()
        if self._journal.sequence == before:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._test_write)

    def _test_write(self) -> None:
        with self._writing_to_store():
            self_test(self.store.objects)

    def store_is_there(self) -> bool:
        """The store has the snapshot of this run: it is the one that was there at the start, and it answers."""
        return self.store.objects.exists(self.store.snapshot_path(self.manifest.snapshot, "manifest.json"))

    @contextlib.contextmanager
    def _writing_to_store(self) -> Iterator[None]:
        """A write in the body. Never into what is left where the store was, as an empty mount point."""
        with self.health.call("write"):
            if not self.store_is_there():
                raise StoreError(f"{self.store.objects.root}: the store has not the snapshot of this run any more")
            yield

    def close(self) -> None:
        """Drop segments whose batches are all committed; the others stay for whoever continues."""
        self.source.close()
        self._journal.wait_for_write(CLOSE_SECONDS)
        self._drop_finished()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _drop_finished(self) -> None:
        self._journal.drop_finished(self._is_committed, lambda: not self.health.silent_seconds() and self._fence())

    def _is_committed(self, key: str) -> bool:
        return key in self._committed_keys

    async def _release_often(self) -> None:
        """Until cancelled: another run may wait for the claims on what this one has committed, and this one for its."""
        while True:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._release_committed)
            await asyncio.sleep(RELEASE_SECONDS)

    def _release_committed(self) -> None:
        """Give up the claims on committed batches; those of the last ones end with the run."""
        keys = [key for key in list(self._committed_keys) if key not in self._released]
        if self.source.release_committed(keys):
            self._released.update(keys)

    # what the feed calls

    def _adopted(self, work: Work, footer: BatchFooter) -> None:
        """Another run has committed this batch meanwhile: it is reported, and its rows are no work of ours."""
        self._rows -= work.entry.rows
        self._committed_keys.add(work.entry.key)
        self.committed.put(footer)

    def _on_row(self, _: str, key: str, outcome: Outcome) -> None:
        self._journal.note(key, outcome)

    def _enough_memory(self, policy: FeedPolicy) -> FeedPolicy:
        factor = VECTOR_MEMORY if self.generation.task == "embedding" else 1
        return replace(policy, open_bytes=factor * policy.open_bytes)

    async def _on_batch(self, _: str, key: str, outcomes: list[Outcome]) -> None:
        try:
            footer = await self._committed(key, outcomes)
        except Exception as error:
            self._commit_error = error
            raise
        self._committed_keys.add(key)
        self._journal.forget(key)
        self.committed.put(footer)

    async def _committed(self, key: str, outcomes: Sequence[Outcome]) -> BatchFooter:
        """Commit, again and again while the store does not answer: what is finished is worth waiting for.

        Who gives leases back and at last ends the run watches `health`.
        """
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._pool, self._commit, key, outcomes)
            except Exception as error:
                if not is_store_trouble(error):
                    raise
                log.warning("run %s: batch %s not written: %s", self.identity.run_id, key, type(error).__name__)
            await asyncio.sleep(RETRY_SECONDS)

    def _commit(self, key: str, outcomes: Sequence[Outcome]) -> BatchFooter:
        work = self._work[key]
        footer = BatchFooter.of(
            self.store.dataset,
            work.entry,
            outcomes,
            snapshot=self.manifest.snapshot,
            generation=work.generation,
            epoch=self.epoch,
            run_id=self.identity.run_id,
            root_run_id=self.identity.intent.root_run_id,
            reused=self.source.reused(key),
        )
        with self._writing_to_store():
            return self.store.commit(footer, outcomes, self.generation.task)[0]

    # journal

    async def _flush_often(self) -> None:
        """Journal until cancelled. A write that failed is tried again; a store that stays away fails the commits."""
        while True:
            started = time.monotonic()
            try:
                await self.flush()
                await asyncio.get_running_loop().run_in_executor(self._pool, self._drop_finished)
                await asyncio.get_running_loop().run_in_executor(self._pool, self._release_committed)
            except Exception as error:
                log.warning("run %s: journal not written: %s", self.identity.run_id, type(error).__name__)
            await asyncio.sleep(max(0.1, self._journal_seconds - (time.monotonic() - started)))
