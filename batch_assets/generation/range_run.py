"""One range of batches on its way through engines: rows from the store, outcomes into journal and batch objects.

No Dagster here. The op (`op.py`) owns the lease and the ledger; this owns what happens between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import queue
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from batch_assets import settings
from batch_assets.asset_metadata.batch_rows import ShownBatches
from batch_assets.gates.quality_gates import GateTrip, QualityGates
from batch_assets.generation.range_job import RangeJob, RunClaims
from batch_assets.generation.range_plan import Intent, RangePlan, RunIdentity, Work, mixed, plan_range, vector_length
from batch_assets.generation.store_reads import StoreReads
from batch_assets.generation.user_engine import UserEngine
from batch_assets.worker.job_worker import JobWorker, client_of
from gpu_runner.batch_api.batch_client import LEAVE_SECONDS, SETTLE_SECONDS, BatchClient
from gpu_runner.batch_api.submitted_batches import SubmittedBatch
from gpu_runner.client.engine_client import EngineClient, EngineInfo, EngineLost, EngineRefused
from gpu_runner.client.vector_length import VectorLength
from gpu_runner.inference.failures.failing_requests import FailingRequests
from gpu_runner.inference.feed import FeedPolicy, FeedProgress
from gpu_runner.inference.prefix_order import PrefixPolicy
from gpu_runner.request_limits import BatchLimits
from gpu_runner.rows import POOLED, SIMULATED, Batch, Outcome, Row
from resources.fleet.resource import LeasedEngine
from resources.objects.opening import CorruptObject
from resources.objects.store_health import StoreHealth
from resources.store.dataset_store import (
    BatchEntry,
    BatchFooter,
    BatchObject,
    DatasetStore,
    SnapshotManifest,
    check_object,
)
from resources.store.journal import note_furthest
from resources.store.outcome_tables import outcomes_from
from resources.store.reusable_answers import ReusableAnswers, ReusableBatch
from resources.store.row_condition import RowCondition
from resources.store.stored_batches import RANGE, StoredBatches, range_of_record

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class Claimed(enum.Enum):
    """What a run's try to claim a batch came to."""

    MINE = "mine"
    MINE_AND_MORE_KNOWN = "mine_and_more_known"  # the journal was read meanwhile: more may be known of its rows
    NOT_NOW = "not_now"  # another run has done it or holds it: it comes later, or not at all


class RangeSource:
    """The batches of a range as the feed takes them. `batches` is run in one thread; the rest is for several.

    Two runs may have the same range. A run asks for the rows of a batch only while it has an engine and holds the claim
    on the batch (`fleet_database.claims`); batches that another living run holds come last, when that run has
    committed them or is gone. Once another run is seen, every batch is looked up in the store before it is asked for.
    Segments of the job's journal that other writers have left are taken in. Without claims the run is alone. `reuse`:
    True, or the datasets whose answers are taken, where some lie beside the snapshot. While the store is away,
    everything that is read from it is waited for. `simulated`: whose rows are taken where some are known, an engine
    simulator's or a model's; None: both.
    """

    def __init__(self, job: RangeJob, *, reuse: bool | Sequence[str] = False, simulated: bool | None = None) -> None:
        self._job, self._simulated = job, simulated
        self._store, self._manifest, self._works = job.store, job.manifest, job.works
        self._reads = StoreReads(job.health, job.store_is_there)
        self._journaled: dict[str, dict[tuple[str, str], Outcome]] = defaultdict(dict)
        self._answers = ReusableAnswers(job.store.objects, job.store.dataset, reuse) if reuse else None
        self._reusable: Mapping[str, ReusableBatch] = {}
        self._gone: frozenset[str] = frozenset()
        self._aside: dict[str, Work] = {}
        self._engines = 0
        self._engine_there = threading.Event()
        self._closed = threading.Event()
        self._guard = threading.Lock()
        self.wants_engine = threading.Event()
        self._waiting_since: float | None = None

    @property
    def waited(self) -> float:
        """For how many seconds there has been nothing to open, because other runs hold what is left."""
        since = self._waiting_since
        return 0.0 if since is None else time.monotonic() - since

    def engine_comes(self) -> None:
        """Rows may be asked for."""
        with self._guard:
            self._engines += 1
            self._engine_there.set()

    def engine_goes(self) -> None:
        """The counterpart of `engine_comes`."""
        with self._guard:
            self._engines -= 1
            if not self._engines:
                self._engine_there.clear()

    def close(self) -> None:
        """No batch is opened any more; a thread that waits in `batches` ends."""
        self._closed.set()
        self._reads.close()
        self._engine_there.set()

    def batches(self) -> Iterator[Batch]:
        """Every batch that this run has to do; with claims, those that need an engine only while there is one."""
        self._read_journal()
        self._find_reusable()
        for entry, rows in self._rows():
            work = self._works[entry.key]
            batch = self._batch(work, rows)
            known = len(batch.known) == len(rows)
            mine = Claimed.MINE if known or self._job.claims is None else self._claim(work, self._job.claims)
            if self._closed.is_set():
                return
            if mine is not Claimed.NOT_NOW:
                yield self._batch(work, rows) if mine is Claimed.MINE_AND_MORE_KNOWN else batch
                self._journaled.pop(entry.key, None)

    def _rows(self) -> Iterator[tuple[BatchEntry, tuple[Row, ...]]]:
        """The rows of the batches in order."""
        seed = self._manifest.settings().sampling.get("seed")
        wanted: list[BatchEntry] = []
        given = iter(wanted.pop, None)  # one at a time, so that waiting for the next one is no call of the store
        found = self._store.rows(self._manifest, given)

        def rows_of(entry: BatchEntry) -> tuple[BatchEntry, tuple[Row, ...]]:
            nonlocal found
            wanted[:] = [entry]
            try:
                return next(found)
            except Exception:  # ends the generator
                found = self._store.rows(self._manifest, given)
                raise

        for entry in self._in_order():
            found_entry, rows = self._reads.read(partial(rows_of, entry))
            yield found_entry, tuple(row.seeded(seed) for row in rows) if seed is not None else rows

    def _in_order(self) -> Iterator[BatchEntry]:
        """In key order, then those that other runs held, as they become free."""
        yield from [work.entry for work in self._works.values()]
        while self._aside and not self._closed.is_set():
            assert self._job.claims is not None
            free = self._job.claims.take(list(self._aside)).object
            if free is not None:
                self._waiting_since = None
                yield self._aside.pop(free).entry
                continue
            if self._waiting_since is None:
                self._waiting_since = time.monotonic()
            self._closed.wait(POLL_SECONDS)

    def _claim(self, work: Work, claims: RunClaims) -> Claimed:
        """Whether its rows are ours to ask for, with an engine there."""
        name, journal_read = self._name(work), False
        while not self._closed.is_set():
            claim = claims.take([name])
            if claim.object is None:
                self._aside[name] = work
                return Claimed.NOT_NOW
            if claim.rivals and self._done_by_another(work):
                claims.release([name])
                return Claimed.NOT_NOW
            if self._engine_there.is_set() and not claim.gone <= self._gone:
                self._read_journal()
                self._gone |= claim.gone
                journal_read = True
            if self._engine_there.is_set():  # still: the store may have been waited for
                return Claimed.MINE_AND_MORE_KNOWN if journal_read else Claimed.MINE
            claims.release([name])  # who has no engine keeps nobody off
            self.wants_engine.set()
            self._engine_there.wait()
            self.wants_engine.clear()
        return Claimed.NOT_NOW

    def _done_by_another(self, work: Work) -> bool:
        """Adopt what another run has committed. A damaged object is replaced by the next generation, later."""
        newest = self._reads.look(lambda: self._newest(work))
        if newest is None:
            return False
        try:
            footer = self._reads.read(lambda: check_object(self._store, work.entry, newest))
        except (CorruptObject, FileNotFoundError):
            again = replace(work, generation=newest.generation + 1)
            self._works[work.entry.key] = self._aside[self._name(again)] = again
            return True
        self._journaled.pop(work.entry.key, None)
        self._job.adopt(work, footer)
        return True

    def _newest(self, work: Work) -> BatchObject | None:
        """The highest generation in the store, from the one on that this run was to write."""
        newest, batch = None, self._job.object_of(work)
        while self._store.objects.exists(self._store.batch_path(batch)):
            newest, batch = batch, replace(batch, generation=batch.generation + 1)
        return newest

    def _name(self, work: Work) -> str:
        return self._job.object_of(work).name

    def _batch(self, work: Work, rows: tuple[Row, ...]) -> Batch:
        keys = {row.row_id: row.row_key for row in rows}

        def of_this_batch(outcomes: Iterable[Outcome]) -> dict[str, Outcome]:
            own = (one for one in outcomes if keys.get(one.row_id) == one.row_key)
            return {one.row_id: one for one in own if self._simulated in (None, one.origin.simulated)}

        self._job.opened(work.entry.key, rows)
        elsewhere = {} if work.anew else self._reusable_outcomes(work.entry, rows)
        kept = of_this_batch(elsewhere.values()) | of_this_batch(self.kept(work))
        new = list(self._new_in_journal(work))
        journaled = of_this_batch(outcome for outcome in new if not outcome.begun)
        self._job.reused[work.entry.key] = len(kept.keys() - journaled.keys())
        asked_by = Counter(outcome.origin.run_id for outcome in journaled.values())
        del asked_by[self._job.name]  # what it is asked to do once more
        self._job.journaled[work.entry.key] = dict(sorted(asked_by.items()))
        begun = [outcome for outcome in new if outcome.begun]
        if any(row.turns for row in rows):
            begun += [outcome for outcome in self._tried_again(work) if outcome.turns]
        furthest = of_this_batch(sorted(begun, key=lambda outcome: outcome.texts))
        turns = {row_id: outcome.turns for row_id, outcome in furthest.items()}
        return Batch(work.entry.key, rows, kept | journaled, job=self._job.name, begun=turns)

    def _new_in_journal(self, work: Work) -> Iterable[Outcome]:
        """What the journal has of a batch: where it is made anew, nothing that its former object has, too."""
        found = self._journaled.get(work.entry.key, {}).values()
        former = work.anew
        if former is None or not found:
            return found
        try:
            outcomes = self._reads.read(lambda: self._store.outcomes(former))
        except (CorruptObject, FileNotFoundError):
            return found
        newest = max(outcome.started_at for outcome in outcomes)
        return [outcome for outcome in found if outcome.started_at > newest]

    def _find_reusable(self) -> None:
        """Which batches have answers of other datasets beside the snapshot. A regenerate asks for all rows."""
        answers, works = self._answers, list(self._works)
        if answers is not None and works and not self._job.identity.intent.regenerate:
            snapshot = self._manifest.snapshot
            self._reusable = self._reads.look(lambda: answers.of_snapshot(snapshot, works[0], works[-1]))

    def _reusable_outcomes(self, entry: BatchEntry, rows: tuple[Row, ...]) -> dict[str, Outcome]:
        """Answers of other datasets by row id; what is gone or damaged is generated."""
        answers, batch = self._answers, self._reusable.get(entry.key)
        if answers is None or batch is None:
            return {}
        try:
            alike = [row for row in rows if row.seed is None or not row.asks_again]  # another seed, another request
            return self._reads.read(lambda: answers.read(batch, alike))
        except (CorruptObject, FileNotFoundError) as error:
            log.warning("%s: %s; its rows are generated", batch.path, type(error).__name__)
            return {}

    def kept(self, work: Work) -> Iterator[Outcome]:
        """Outcomes of earlier objects: of one row a completion wins over a dead letter, then the newest one."""
        if work.anew is not None:
            yield from self._kept_beside(work.anew, work.where)
            return
        kept = (outcome for outcome in self._earlier(work) if work.keeps(outcome))
        yield from sorted(kept, key=lambda outcome: (outcome.ok, outcome.started_at))

    def _tried_again(self, work: Work) -> Iterator[Outcome]:
        """Dead letters of earlier objects that are to be tried again: a conversation goes on after its last answer."""
        return (outcome for outcome in self._earlier(work) if not work.keeps(outcome))

    def _earlier(self, work: Work) -> Iterator[Outcome]:
        """Outcomes of earlier objects."""
        for batch in work.keep:
            try:
                yield from self._reads.read(partial(self._store.outcomes, batch))
            except (CorruptObject, FileNotFoundError):
                continue  # verify names it; its rows are generated again

    def _kept_beside(self, former: BatchObject, where: str) -> Iterator[Outcome]:
        """Return, of a batch that is made anew, the outcomes of rows that are not asked again."""
        if not where:
            return
        with contextlib.suppress(CorruptObject, FileNotFoundError):
            table = self._reads.read(partial(self._store.batch_table, former))
            asked = RowCondition(where).rows(table)
            yield from (outcome for outcome in outcomes_from(table) if outcome.row_id not in asked)

    def _read_journal(self) -> None:
        """Read the segments that were not read before: of runs before this one, and of rivals that are gone."""
        for path in self._reads.look(self._job.journal.unread):
            outcomes = self._segment(path)
            self._job.journal.take_in(path, outcomes)
            for key, rows in outcomes.items():
                if key in self._works:
                    note_furthest(self._journaled[key], rows)

    def _segment(self, path: str) -> dict[str, list[Outcome]]:
        try:
            return self._reads.read(partial(self._store.journal.read, path))
        except (CorruptObject, FileNotFoundError):  # deleted by the run that committed its batches
            return {}


__all__ = ["Intent", "RangePlan", "RangeRun", "RunClaims", "RunIdentity", "Work", "plan_range"]

UNDECIDED_SECONDS = 0.05
LINGER_SECONDS = 2.0
RELEASE_SECONDS = 0.5
CLOSE_SECONDS = 2.0
# Vectors take eight times as much memory as store.
VECTOR_MEMORY = 4
# Rows that are put in the order of their prompts together: the more, the more share a document; the fewer, the earlier
# batches are committed, and the less of a range is claimed ahead.
PREFIX_ROWS = 4_000


class RangeRun:
    """Feeds one range's rows to one engine after another until every batch is committed.

    All methods but `serve` may be called from any thread. `fence` and `claims`: see RangeJob. `reuse`: whose answers
    rows take, where the snapshot has some beside it. `simulated`: which known answers are taken, see RangeSource.
    `neighbours`: True where committed batches of the dataset are simulated, False where some are not: a table never has
    both. `user_elsewhere`: the model that plays the user has an engine of its own, which each leased one brings along.
    `gates`: of its rows, see `tripped`. `scores`, `shown`: see RangeJob.
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
        user_elsewhere: bool = False,
        gates: QualityGates | None = None,
        scores: Sequence[str] = (),
        shown: ShownBatches | None = None,
    ) -> None:
        self.store, self.manifest, self.identity = store, manifest, identity
        self.generation = manifest.settings()
        self.health = health or StoreHealth()
        self.ending = False  # nobody goes on with this run: batches that a provider has of it are cancelled
        self._answer_bytes = settings.max_answer_bytes()
        self._journal_seconds, self._neighbours = journal_seconds, neighbours
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="store")
        self._job = RangeJob(
            store,
            manifest,
            plan,
            identity,
            fence=fence,
            claims=claims,
            health=self.health,
            gates=gates,
            scores=scores,
            shown=shown,
        )
        self.source = RangeSource(self._job, reuse=reuse, simulated=simulated)
        self._worker = JobWorker[RangeJob](
            self.source.batches(),
            self._pool,
            policy=self._enough_memory(policy or self._policy()),
            rng=rng,
            vectors=VectorLength(vector_length(store, manifest, reuse)),
            user_elsewhere=user_elsewhere,
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

    def shown_rows(self, key: str) -> str:
        """Some rows of a committed batch as Markdown, once; empty where they are not shown."""
        return self._job.shown_rows(key)

    def tripped(self) -> GateTrip | None:
        """A gate that has tripped, each once."""
        with contextlib.suppress(queue.Empty):
            return self._job.trips.get_nowait()
        return None

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
        Raises UserEngineAway where the model that plays the user cannot be asked.
        """
        self._job.epoch, stop = leased.epoch, stop or asyncio.Event()
        kind: Callable[..., EngineClient] = EngineClient
        generation = self.generation if leased.user is None else self.generation.without_user
        if leased.limits.batches is not None:  # which refuses a user's model, wherever that is
            kind, generation = self._batch_client(leased.limits.batches), self.generation
        async with client_of(leased, kind, generation, answer_bytes=self._answer_bytes) as engine:
            try:
                info = await engine.info()
            except EngineLost as error:
                self._worker.not_ready(error)
                raise
            self._check_context(info)
            self._check_alike(info)
            model = f"{info.model} ({SIMULATED})" if info.simulated else info.model
            flushing = asyncio.create_task(self._worker.flush_often(self._journal_seconds))
            self.source.engine_comes()
            serving = self._worker.serve(
                engine, leased, model=model, version=info.version, run_id=self.identity.run_id, stop=stop
            )
            user = self._user_engine(leased.user, info) if leased.user is not None else None
            try:
                if isinstance(engine, BatchClient):
                    await self._in_batches(engine, serving, stop)
                else:
                    await (serving if user is None else user.beside(serving, stop))
            finally:
                self.source.engine_goes()
                flushing.cancel()
                await asyncio.gather(flushing, return_exceptions=True)

    def _user_engine(self, leased: LeasedEngine, answering: EngineInfo) -> UserEngine:
        asked = self.generation.of_user_elsewhere
        assert asked is not None
        return UserEngine(leased, asked, self._worker, answering, self.identity.run_id, self._answer_bytes)

    def _batch_client(self, limits: BatchLimits) -> Callable[..., BatchClient]:
        purpose, (first, last) = self.identity.intent.purpose, self.identity.key_range
        labels = {"dataset": self.store.dataset, "snapshot": self.manifest.snapshot, RANGE: f"{first}-{last}"}
        records = StoredBatches(self.store.objects, self.store.dataset, purpose)
        return partial(BatchClient, batches=limits, records=records, labels=labels)

    async def _in_batches(
        self, engine: BatchClient, serving: Coroutine[Any, Any, None], stop: asyncio.Event | None
    ) -> None:
        """Serve with batches of hours. At `stop` they are cancelled: what is finished is kept, the rest goes back."""
        work = asyncio.create_task(serving)
        stopping = asyncio.create_task((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await engine.withdraw()
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
        except asyncio.CancelledError:
            if self.ending:
                await engine.cancel_batches()
            raise
        finally:
            for task in (work, stopping):
                task.cancel()
            await asyncio.gather(work, stopping, return_exceptions=True)
            if await self._worker.flush():
                seconds = LEAVE_SECONDS if self.ending else SETTLE_SECONDS
                with contextlib.suppress(Exception):  # a store that is away: they are forgotten by the next run
                    await engine.settle(self._nobody_asks(), seconds)

    def _nobody_asks(self) -> Callable[[SubmittedBatch], bool] | None:
        """Whether the rows of a batch that was sent are all committed; None: not those of this run."""
        keys = self._job.keys

        def committed(record: SubmittedBatch) -> bool:
            found = range_of_record(record)
            return found is not None and self.identity.has_all(*found, keys)

        return None if self._job.missing() else committed

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

    def _policy(self) -> FeedPolicy:
        if self.generation.task in POOLED:  # of which engines keep no prefixes
            return FeedPolicy()
        return FeedPolicy(prefixes=PrefixPolicy(rows=PREFIX_ROWS))

    def _enough_memory(self, policy: FeedPolicy) -> FeedPolicy:
        factor = VECTOR_MEMORY if self.generation.task == "embedding" else 1
        return replace(policy, open_bytes=factor * policy.open_bytes)
