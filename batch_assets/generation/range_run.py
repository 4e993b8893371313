"""One range of batches on its way through engines: rows from the store, outcomes into journal and batch objects.

No Dagster here. The op (`op.py`) owns the lease and the ledger; this owns what happens between them.
"""

from __future__ import annotations

import asyncio
import queue
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from batch_assets import settings
from batch_assets.generation.mixed_rows import mixed
from batch_assets.generation.range_claims import RunClaims
from batch_assets.generation.range_job import RangeJob
from batch_assets.generation.range_plan import Intent, RangePlan, RunIdentity, Work, plan_range
from batch_assets.generation.range_source import RangeSource
from batch_assets.generation.vector_length import vector_length
from batch_assets.worker.job_worker import JobWorker
from gpu_runner.client.engine_client import EngineClient, EngineInfo, EngineLost, EngineRefused, TimeOuts
from gpu_runner.client.vector_length import VectorLength
from gpu_runner.inference.failures.failing_requests import FailingRequests
from gpu_runner.inference.feed import FeedPolicy, FeedProgress
from gpu_runner.rows import SIMULATED, Origin
from resources.fleet.resource import LeasedEngine
from resources.objects.store_health import StoreHealth
from resources.store.dataset_store import BatchFooter, DatasetStore, SnapshotManifest

__all__ = ["Intent", "RangePlan", "RangeRun", "RunClaims", "RunIdentity", "Work", "plan_range"]

UNDECIDED_SECONDS = 0.05
LINGER_SECONDS = 2.0
RELEASE_SECONDS = 0.5
CLOSE_SECONDS = 2.0
# Vectors take eight times as much memory as store.
VECTOR_MEMORY = 4


class RangeRun:
    """Feeds one range's rows to one engine after another until every batch is committed.

    All methods but `serve` may be called from any thread. `fence` and `claims`: see RangeJob. `reuse`: whose answers
    rows take, where the snapshot has some beside it. `simulated`: which known answers are taken, see RangeSource.
    `neighbours`: True where committed batches of the dataset are simulated, False where some are not: a table never has
    both.
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
        self.health = health or StoreHealth()
        self._answer_bytes = settings.max_answer_bytes()
        self._journal_seconds, self._neighbours = journal_seconds, neighbours
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="store")
        self._job = RangeJob(store, manifest, plan, identity, fence=fence, claims=claims, health=self.health)
        self.source = RangeSource(self._job, reuse=reuse, simulated=simulated)
        self._worker = JobWorker[RangeJob](
            self.source.batches(),
            self._pool,
            policy=self._enough_memory(policy or FeedPolicy()),
            rng=rng,
            vectors=VectorLength(vector_length(store, manifest, reuse)),
            committed=RangeJob.committed,
        )
        self._worker.add(self._job)

    @property
    def committed(self) -> queue.SimpleQueue[BatchFooter]:
        """Footers of batches that this run committed or found committed, for the ledger."""
        return self._job.reports

    def progress(self) -> FeedProgress:
        """Where the feed stands."""
        return self._worker.progress()

    def failing(self, before: float) -> FailingRequests | None:
        """What every request meets, since `before` (by time.monotonic) or longer; None: one is answered."""
        return self._worker.failing(before)

    @property
    def rows(self) -> int:
        """Rows that this run has to do, the finished ones among them included."""
        return self._job.rows

    @property
    def batches(self) -> int:
        """Batches of the range that have rows."""
        return len(self._job.keys)

    def missing(self) -> list[str]:
        """Keys that are not committed."""
        return self._job.missing()

    def store_is_there(self) -> bool:
        """The store has the snapshot of this run."""
        return self._job.store_is_there()

    @property
    def waits(self) -> bool:
        """Other runs hold the batches that are left; with no row queued, an engine is of no use now."""
        return self.source.waited > LINGER_SECONDS and self._worker.progress().queued == 0

    async def prepare(self) -> bool:
        """Commit the batches that need no engine. False: nothing is left, so none need be leased.

        Not to be called beside `serve`. Returns True as soon as there is a row that nobody else asks for.
        """
        if self._job.claims is None:
            return await self._worker.prepare()
        preparing = asyncio.create_task(self._worker.prepare())
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
        if self._job.failure is not None:
            raise self._job.failure
        return True

    def _needs_engine(self) -> bool:
        """The next batch has rows to ask for, and those before it are committed (or cannot be)."""
        committing = self._worker.progress().open_batches > 0 and self._job.failure is None
        return self.source.wants_engine.is_set() and not committing

    async def serve(self, leased: LeasedEngine, stop: asyncio.Event | None = None) -> None:
        """Generate on this engine until all is committed, or until `stop` is set and its rows are answered.

        Raises EngineLost, and may be called again with the next engine, or with two at once: they share the rows.
        """
        self._job.epoch = leased.epoch
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
                self._worker.not_ready(error)
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
            flushing = asyncio.create_task(self._worker.flush_often(self._journal_seconds))
            self.source.engine_comes()
            try:
                await self._worker.serve(engine, origin, leased, stop=stop)
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
        """Write what waits for the journal, once more when a run stands down."""
        await self._in_thread(self._job.write_journal)

    async def write_again(self) -> None:
        """After a write that failed: one more, of what waits for the journal, else of something small.

        `health` knows what became of it. What waits comes first: a full disk may still take a small object. Nothing is
        tried beside a flush, which has taken what waited.
        """
        journal = self._job.journal
        if journal.flushing:
            return
        before = journal.sequence
        await self.flush()
        if journal.sequence == before:
            await self._in_thread(self._job.test_write)

    def close(self) -> None:
        """Drop segments whose batches are all committed; the others stay for whoever continues."""
        self.source.close()
        self._job.journal.wait_for_write(CLOSE_SECONDS)
        self._job.drop_finished()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _release_often(self) -> None:
        """Until cancelled: another run may wait for the claims on what this one has committed, and this one for its."""
        while True:
            await self._in_thread(self._job.release_committed)
            await asyncio.sleep(RELEASE_SECONDS)

    async def _in_thread(self, call: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _enough_memory(self, policy: FeedPolicy) -> FeedPolicy:
        factor = VECTOR_MEMORY if self.generation.task == "embedding" else 1
        return replace(policy, open_bytes=factor * policy.open_bytes)
