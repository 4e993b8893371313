"""Two runs of one range: who asks for which batch, and what becomes of a batch when its run ends or dies."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine_supply import NEED, FleetClient, Heartbeat
from support.fleet_databases import Clock
from support.range_runs import leased, step_until
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.snapshots import MODEL, questions, write_snapshot
from support.timing import PATIENCE

from batch_assets.generation import range_run
from batch_assets.generation.engine_supervisor import WAITS, EngineSupervisor
from batch_assets.generation.loop_thread import LoopThread
from batch_assets.generation.range_job import RangeJob
from batch_assets.generation.range_run import Intent, RangeRun, RunClaims, RunIdentity, plan_range
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.wait_reason import RunActivity, WaitKind, WaitReason
from gpu_runner.inference.feed import FeedPolicy
from gpu_runner.inference.windows.concurrency_window import WindowPolicy
from gpu_runner.rows import Outcome
from resources.objects.opening import StoreError, open_objects
from resources.store.dataset_store import BatchFooter, BatchObject, DatasetStore, SnapshotManifest

ROWS, BATCH = 200, 20
SILENT = 10.0
WHOLE = ("00000", f"{ROWS // BATCH - 1:05d}")


class SharedDataset:
    """A dataset, the fleet's database with a clock of its own, and one engine for all runs."""

    def __init__(self, folder: Path, fleet_db: FleetDatabase, clock: Clock, engine: SimulatedEngine) -> None:
        self.store = DatasetStore(open_objects(str(folder / "store")), "d")
        self.manifest: SnapshotManifest = write_snapshot(self.store, questions(ROWS), batch_rows=BATCH)
        self.fleet_db, self.clock, self.engine = fleet_db, clock, engine

    def begin(
        self,
        run_id: str,
        keys: tuple[str, str] = WHOLE,
        intent: Intent | None = None,
        policy: FeedPolicy | None = None,
        journal_seconds: float = 0.1,
    ) -> RangeRun:
        """A run that has planned its range."""
        self.fleet_db.begin_run(run_id, "d", *keys)
        intent = intent or Intent(run_id)
        entries = [entry for entry in self.store.entries(self.manifest.snapshot) if keys[0] <= entry.key <= keys[1]]
        plan = plan_range(self.store, entries, intent)
        claims = RunClaims(self.fleet_db, run_id, "d", SILENT)
        identity = RunIdentity(run_id, intent, keys)
        return RangeRun(
            self.store, self.manifest, plan, identity, policy=policy, journal_seconds=journal_seconds, claims=claims
        )

    async def work(self, run: RangeRun) -> bool:
        """Generate all of it; whether an engine was needed."""
        async with asyncio.timeout(60 * PATIENCE):
            with contextlib.closing(run):
                needed = await run.prepare()
                if needed:
                    await run.serve(leased(self.engine.url))
        self.fleet_db.end_run(run.identity.run_id)
        return needed

    async def until(self, run: RangeRun, rows: int) -> asyncio.Task[None]:
        """Serve until so many rows are done, and go on."""
        assert await run.prepare()
        serving = asyncio.create_task(run.serve(leased(self.engine.url)))
        while run.progress().rows_done < rows:  # noqa: ASYNC110  (progress has no event)
            await asyncio.sleep(0.005)
        return serving

    @property
    def asked(self) -> int:
        """Requests that the engine got."""
        return int(self.engine.get("/simulator/stats")["requests"])

    def committed_by(self) -> Counter[str]:
        """Batches by the run that wrote them."""
        plan = plan_range(self.store, self.store.entries(self.manifest.snapshot), Intent("x"))
        assert plan.todo == []
        return Counter(footer.run_id for footer in plan.done)


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedEngine]:
    with simulated_engine("--speed", "50", "--max-num-seqs", "16", model=MODEL) as engine:
        yield engine


@pytest.fixture
def site(tmp_path: Path, engine: SimulatedEngine) -> Iterator[SharedDataset]:
    clock = Clock()
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db", now=clock)) as fleet_db:
        yield SharedDataset(tmp_path, fleet_db, clock, engine)


@contextlib.contextmanager
def asking_at_most(site: SharedDataset, rows: int) -> Iterator[None]:
    """What the engine is asked meanwhile; two requests may be canaries."""
    before = site.asked
    yield
    assert rows <= site.asked - before <= rows + 2


@pytest.mark.slow
@pytest.mark.parametrize("intent", [{}, {"regenerate": True}])
def test_two_runs_of_one_range_at_once_ask_for_each_row_once(site: SharedDataset, intent: dict[str, bool]) -> None:
    runs = [site.begin(name, intent=Intent(name, **intent)) for name in ("one", "two")]

    async def both() -> None:
        await asyncio.gather(*[site.work(run) for run in runs])

    with asking_at_most(site, ROWS):
        asyncio.run(both())
    assert site.committed_by().keys() <= {"one", "two"}
    assert all(run.missing() == [] and run.committed.qsize() == ROWS // BATCH for run in runs)
    assert site.fleet_db.claims("d") == {}


@pytest.mark.slow
def test_runs_do_not_wait_for_each_other_when_each_has_committed_what_the_other_waits_for(
    site: SharedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim ends when its batch is committed, also when its run has no engine any more, and writes no journal."""
    monkeypatch.setattr(range_run, "LINGER_SECONDS", 0.1)

    async def ends(run: RangeRun) -> None:
        while await run.prepare():
            stop = asyncio.Event()
            serving = asyncio.create_task(run.serve(leased(site.engine.url), stop))
            while not serving.done():
                await asyncio.wait([serving], timeout=0.02)
                if run.waits:
                    stop.set()
            await serving

    async def both() -> None:
        one_ahead = FeedPolicy(ahead=1, window=WindowPolicy(largest=BATCH))
        runs = [site.begin(name, policy=one_ahead, journal_seconds=1000.0) for name in ("one", "two")]
        with contextlib.closing(runs[0]), contextlib.closing(runs[1]):
            async with asyncio.timeout(20 * PATIENCE):
                await asyncio.gather(*map(ends, runs))

    with asking_at_most(site, ROWS):
        asyncio.run(both())
    assert site.committed_by().keys() == {"one", "two"}


def test_a_run_looks_again_when_it_gets_its_engine(site: SharedDataset) -> None:
    """Both had planned the whole range; the second waited for the only engine all the while."""

    async def one_after_the_other() -> None:
        first, second = site.begin("one"), site.begin("two")
        assert await second.prepare()
        await site.work(first)
        with contextlib.closing(second):
            await second.serve(leased(site.engine.url))
            assert second.missing() == [] and second.progress().finished

    with asking_at_most(site, ROWS):
        asyncio.run(one_after_the_other())
    assert site.committed_by() == {"one": ROWS // BATCH}


def test_no_engine_is_wanted_while_another_run_works_on_all_that_is_left(site: SharedDataset) -> None:
    keys = ("00000", "00001")

    async def beside() -> None:
        first, second = site.begin("one", keys), site.begin("two", keys)
        serving = await site.until(first, 1)
        while first.progress().open_batches + first.progress().batches_done < len(keys):  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # it holds both claims then
        needed = asyncio.create_task(site.work(second))
        await serving
        assert not needed.done()  # the first may still fail to commit
        site.fleet_db.end_run("one")
        first.close()
        assert not await needed

    with asking_at_most(site, 2 * BATCH):
        asyncio.run(beside())


@pytest.mark.slow
def test_a_run_goes_on_with_what_a_dead_one_left_and_asks_only_for_what_was_in_flight(site: SharedDataset) -> None:
    lost, written = 0, 70

    async def a_death() -> None:
        nonlocal lost
        first, second = site.begin("one"), site.begin("two")
        serving = await site.until(first, written)
        await first.flush()
        serving.cancel()  # and no word to the fleet's database: as a kill would have it
        await asyncio.gather(serving, return_exceptions=True)
        lost = first.progress().requests - journaled_or_committed(site)
        other = asyncio.create_task(site.work(second))
        while not second.source.waited:
            await asyncio.sleep(0.01)
            assert not other.done()
        site.clock.forward(SILENT + 1)
        await other
        first.close()

    before = site.asked
    asyncio.run(a_death())
    assert site.asked - before <= ROWS + lost + 2
    assert 0 < lost <= ROWS - written  # all of them may be in flight at once
    assert site.committed_by()["two"] > 0


def test_a_run_commits_all_that_a_dead_one_left_in_the_journal_before_it_gets_an_engine(
    site: SharedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More whole batches than are written at once, and rows behind them that nobody has asked for."""

    whole, commit = 2 * FeedPolicy().commits, RangeJob.commit

    def away(job: RangeJob, part: str, outcomes: list[Outcome]) -> BatchFooter:
        raise StoreError("the store does not answer")

    async def a_death() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(RangeJob, "commit", away)
            first = site.begin("one", ("00000", f"{whole - 1:05d}"))
            serving = await site.until(first, whole * BATCH)
            await first.flush()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        second = site.begin("two")

        def slow(job: RangeJob, part: str, outcomes: list[Outcome]) -> BatchFooter:
            if not all_is_read.is_set():
                second.source.wants_engine.wait()
                all_is_read.set()
            return commit(job, part, outcomes)

        all_is_read = threading.Event()
        monkeypatch.setattr(RangeJob, "commit", slow)
        site.clock.forward(SILENT + 1)
        site.fleet_db.beat("two", "waiting", RunActivity(), 0)
        await site.work(second)
        first.close()

    with asking_at_most(site, ROWS):
        asyncio.run(a_death())
    assert site.committed_by() == {"two": ROWS // BATCH}


def journaled_or_committed(site: SharedDataset) -> int:
    """Rows that are safe."""
    entries = site.store.entries(site.manifest.snapshot)
    done = {footer.key for footer in plan_range(site.store, entries, Intent("x")).done}
    segments = [site.store.journal.read(path) for path in site.store.journal.segments(WHOLE)]
    waiting = {o.row_id for found in segments for key, rows in found.items() if key not in done for o in rows}
    return len(done) * BATCH + len(waiting)


@pytest.mark.slow
def test_a_regenerate_and_an_ordinary_run_are_distinct_work(site: SharedDataset) -> None:
    asyncio.run(site.work(site.begin("zero")))
    ordinary, again = site.begin("one"), site.begin("two", intent=Intent("two", regenerate=True))

    async def both() -> list[bool]:
        return await asyncio.gather(site.work(ordinary), site.work(again))

    with asking_at_most(site, ROWS):
        assert asyncio.run(both()) == [False, True]
    assert {batch.generation for found in site.store.objects_by_batch().values() for batch in found} == {0, 1}


def test_an_adopted_batch_is_the_newest_generation_that_another_run_wrote(site: SharedDataset) -> None:
    keys = ("00000", "00000")
    late = site.begin("late", keys)
    asyncio.run(site.work(site.begin("one", keys)))
    asyncio.run(site.work(site.begin("two", keys, Intent("two", regenerate=True))))
    with asking_at_most(site, 0):
        asyncio.run(site.work(late))
    assert [late.committed.get_nowait().generation] == [1]


def test_a_run_gives_its_engine_back_while_another_one_holds_what_is_left(site: SharedDataset) -> None:
    """The other one may wait for this very engine: were it kept, both would wait for ever."""
    held = BatchObject("00003", site.store.entries(site.manifest.snapshot)[3].data_version, 0).name
    site.fleet_db.begin_run("holder", "d", *WHOLE)
    assert site.fleet_db.claim("holder", "d", [held], SILENT).object == held
    run, client, said = site.begin("mine"), FleetClient(site.engine, site.engine), list[str]()
    with LoopThread() as loop, contextlib.closing(run), asking_at_most(site, ROWS):
        supervisor = EngineSupervisor(
            client, Heartbeat(), NEED, run, loop, say=said.append, warn=said.append, decided=lambda _: None
        )
        try:
            step_until(supervisor, lambda: bool(client.released))
            assert (run.missing(), client.released) == (["00003"], [("i1", WAITS, False)])
            step_until(
                supervisor, lambda: supervisor.heartbeat.activity == RunActivity(WAITS, WaitReason(WaitKind.OTHER_RUN))
            )
            assert client.asked == 1  # and no other engine is asked for
            site.fleet_db.end_run("holder")
            step_until(supervisor, lambda: not run.missing())
        finally:
            supervisor.end()
    assert client.asked == 2


# --- the fleet's database ---


def test_a_claim_stands_while_its_run_lives_and_passes_on_when_it_is_silent_or_over(site: SharedDataset) -> None:
    fleet_db = site.fleet_db
    for name in ("one", "two", "three"):
        fleet_db.begin_run(name, "d", *WHOLE)
    assert fleet_db.claim("one", "d", ["a"], SILENT).object == "a"
    assert fleet_db.claim("one", "d", ["a"], SILENT).object == "a"
    assert fleet_db.claim("two", "d", ["a"], SILENT).object is None
    assert fleet_db.claim("two", "d", ["a", "b"], SILENT).object == "b"
    site.clock.forward(SILENT + 1)
    fleet_db.beat("two", "waiting", RunActivity(), 0)
    fleet_db.beat("three", "waiting", RunActivity(), 0)
    taken = fleet_db.claim("three", "d", ["b", "a"], SILENT)
    assert (taken.object, taken.rivals, taken.gone) == ("a", {"one", "two"}, {"one"})
    fleet_db.end_run("two")
    assert fleet_db.claim("three", "d", ["b"], SILENT).object == "b"
    fleet_db.release_claims("three", "d", ["a"])
    assert fleet_db.claims("d") == {"b": "three"}
    fleet_db.end_run("three")
    assert fleet_db.claims("d") == {} and fleet_db.claim("three", "d", ["a"], SILENT).object is None


def test_runs_of_other_batches_and_datasets_and_runs_that_ended_before_are_no_rivals(site: SharedDataset) -> None:
    fleet_db = site.fleet_db
    fleet_db.begin_run("over", "d", *WHOLE)
    fleet_db.end_run("over")
    site.clock.forward(SILENT + 1)
    fleet_db.begin_run("mine", "d", "00000", "00003")
    fleet_db.begin_run("beyond", "d", "00004", "00009")
    fleet_db.begin_run("other", "e", *WHOLE)
    fleet_db.begin_run("table", "d", "", "")
    assert fleet_db.claim("mine", "d", ["a"], SILENT).rivals == frozenset()
    fleet_db.begin_run("rival", "d", "00003", "00009")
    fleet_db.end_run("rival")
    assert fleet_db.claim("mine", "d", ["a"], SILENT).rivals == {"rival"}
