"""The engines of one run: replaced when lost, left on notice or for a better offer, handed on with the last rows."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pace import PATIENCE
from simulated_engine import SimulatedEngine, simulated_engine
from snapshots import MODEL, questions, write_snapshot

from batch_assets.crew import Crew
from batch_assets.loop_thread import LoopThread
from batch_assets.range_run import Intent, RangeRun, RunIdentity, plan_range
from gpu_runner.fleet import BookError, Lease
from gpu_runner.offers import Offer
from gpu_runner.providers.local import EngineStartError
from resources.leased import LeasedEngine, Look, Requirement
from resources.moving import Decision
from resources.objects import Objects, open_objects
from resources.renting import NotRented
from resources.store import DatasetStore

OFFER = Offer("sim", "r", "h100", "H100", 1, 80, False, 3.0, 60.0, 1.0, 0.0, "test")
NEED = Requirement("d", MODEL, "chat")
ROWS = 320


class Heart:
    """A heart that somebody else stops."""

    run_id = "run"
    drain_seconds: Callable[[], float]

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.ended = SimpleNamespace(is_set=lambda: False)

    def check(self, lease: Lease) -> bool:
        return lease.instance not in self.lost


class Renter:
    """Hands out the engines that a test lines up, in order, and remembers what was given back and why."""

    def __init__(self, *engines: SimulatedEngine | Exception) -> None:
        self.config = SimpleNamespace(move_seconds=0.2)
        self.waiting = list(engines)
        self.released: list[tuple[str, str, bool]] = []
        self.handed_on: list[str] = []
        self.notices: dict[str, float] = {}
        self.retired: dict[str, str] = {}
        self.offers_better = False
        self.hold_on = self.away = False
        self.succeeded: set[str] = set()
        self.asked = 0

    def acquire(
        self, need: Requirement, *, say: Any, pause: Callable[[float], None], replaces: LeasedEngine | None = None
    ) -> LeasedEngine:
        self.asked += 1
        if self.away:
            raise BookError
        while self.hold_on or not self.waiting:
            pause(0.02)
        engine = self.waiting.pop(0)
        if isinstance(engine, Exception):
            raise engine
        name = f"i{self.asked}"
        return LeasedEngine(Lease(name, 1, "run", "d"), engine.url, None, 8, "sim", "h100", offer=OFFER)

    def move(self, need: Requirement, leased: LeasedEngine, decision: Decision, **more: Any) -> LeasedEngine:
        return self.acquire(need, say=more["say"], pause=more["pause"], replaces=leased)

    def better(self, need: Requirement, leased: LeasedEngine, rows_left: int) -> Decision | None:
        if not self.offers_better:
            return None
        self.offers_better = False
        return Decision(leased.name, OFFER, OFFER, 1e6, 1e3, 1e3, 1.5, f"{leased.name}: move and save 1.50 $")

    def release(self, leased: LeasedEngine, *, reason: str = "", retire: bool = False, lost: bool = False) -> None:
        self.released.append((leased.name, reason, retire))

    def hand_on(self, leased: LeasedEngine) -> bool:
        if self.away:
            raise BookError
        self.handed_on.append(leased.name)
        return True

    def look(self, leased: LeasedEngine) -> Look:
        if self.away:
            raise BookError
        name = leased.name
        return Look(self.notices.get(name), name in self.succeeded, self.retired.get(name, ""))


class Job:
    """A range of rows, a crew for it, and the log of what it said."""

    def __init__(self, objects: Objects, renter: Renter, loop: LoopThread, rows: int) -> None:
        self.store = DatasetStore(objects, "d")
        manifest = write_snapshot(self.store, questions(rows))
        entries = self.store.entries(manifest.snapshot)
        identity = RunIdentity("run", Intent("run"), (entries[0].key, entries[-1].key))
        self.run = RangeRun(self.store, manifest, plan_range(self.store, entries, Intent("run")), identity)
        self.heart, self.renter = Heart(), renter
        self.said: list[str] = []
        self.decisions: list[Decision] = []
        self.crew = Crew(
            renter,
            self.heart,
            NEED,
            self.run,
            loop,
            say=self.said.append,
            warn=self.said.append,
            decided=self.decisions.append,
        )

    def work(self, until: Callable[[], object] | None = None, seconds: float = 30) -> str | None:
        """Steps until it ends or something is true; its answer."""
        deadline = time.monotonic() + PATIENCE * seconds
        while (reason := self.crew.step()) is None:
            if until is not None and until():
                return None
            assert time.monotonic() < deadline, self.said
            self.crew.wait(0.02)
        return reason


@contextmanager
def a_job(folder: Path, renter: Renter, rows: int = ROWS) -> Iterator[Job]:
    with LoopThread() as loop:
        job = Job(open_objects(str(folder)), renter, loop, rows)
        try:
            yield job
        finally:
            job.crew.end()
            job.run.close()


@contextmanager
def engines(count: int, *, speed: str = "6") -> Iterator[list[SimulatedEngine]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(simulated_engine("--speed", speed, "--max-num-seqs", "8", model=MODEL))
            for _ in range(count)
        ]


def prompts_asked(found: list[SimulatedEngine]) -> int:
    return sum(requests(engine) for engine in found)


def requests(engine: SimulatedEngine) -> int:
    return int(engine.get("/simulator/stats")["requests"])


def test_one_engine_does_it_all_is_handed_on_with_the_last_rows_and_given_back_once(tmp_path: Path):
    with engines(1, speed="50") as found, a_job(tmp_path, renter := Renter(*found)) as job:
        assert job.work() == ""
    assert len(renter.handed_on) == 1
    assert renter.released == [("i1", "done", False)]
    assert job.run.missing() == []


def test_a_better_offer_is_moved_to_while_rows_flow_and_no_row_is_asked_twice(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, renter := Renter(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 20)
        renter.offers_better = True
        assert job.work() == ""
        assert prompts_asked(found) == ROWS
        assert all(requests(engine) > 10 for engine in found)
    assert [decision.saved_usd for decision in job.decisions] == [1.5]
    assert renter.released[0] == ("i1", "i1: move and save 1.50 $", True)
    assert renter.released[1] == ("i2", "done", False)


def test_a_move_that_fails_leaves_the_engine_where_it_is(tmp_path: Path):
    with engines(1) as found, a_job(tmp_path, renter := Renter(*found, NotRented("no capacity"))) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        renter.offers_better = True
        assert job.work() == ""
    assert renter.released == [("i1", "done", False)]
    assert job.decisions == []  # nothing was saved
    assert any("stays on i1: no capacity" in text for text in job.said)


def test_on_a_notice_another_engine_is_leased_and_the_old_one_drained_first(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, renter := Renter(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        renter.notices["i1"] = 60.0
        assert job.work() == ""
        assert prompts_asked(found) == ROWS
    name, reason, retire = renter.released[0]
    assert (name, retire) == ("i1", True)
    assert "taken away in 60 s" in reason


def test_on_a_notice_one_other_engine_is_asked_for_also_while_the_loop_is_busy(tmp_path: Path):
    """The old engine's shift learns late that it is over; what it says of its notice meanwhile asks for nothing."""

    class Late:
        def __init__(self, loop: LoopThread) -> None:
            self.loop = loop

        def __getattr__(self, name: str) -> Any:
            return getattr(self.loop, name)

        def call(self, callback: Callable[[], None]) -> None:
            threading.Timer(1.0, self.loop.call, [callback]).start()

    with engines(2, speed="1") as found, a_job(tmp_path, renter := Renter(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        job.crew.loop = Late(job.crew.loop)
        renter.notices["i1"] = 60.0
        job.work(until=lambda: renter.released)
        assert renter.released[0][0] == "i1"
        assert renter.asked == 2


def test_with_little_time_left_an_engine_takes_no_more_rows_even_before_there_is_another(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, renter := Renter(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        renter.hold_on = True
        renter.notices["i1"] = 0.5
        job.work(until=lambda: renter.released)
        assert renter.released[0][0] == "i1"
        before = job.run.progress().rows_done
        assert before < ROWS
        renter.hold_on = False
        assert job.work() == ""
        assert prompts_asked(found) == ROWS


def test_an_instance_that_is_to_end_is_drained_first_and_the_run_waits_for_the_next_one(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, renter := Renter(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 20)
        renter.hold_on = True
        renter.retired["i1"] = "budget of 12.00 $ is nearly reached (11.40 $ spent)"
        job.work(until=lambda: renter.released)
        assert renter.released == [("i1", "budget of 12.00 $ is nearly reached (11.40 $ spent)", True)]
        before = job.run.progress().rows_done
        assert 20 < before < ROWS
        job.work(until=lambda: renter.asked == 2)  # it may take long until the budget is raised
        assert job.run.progress().rows_done == before
        renter.hold_on = False
        assert job.work() == ""
        assert prompts_asked(found) == ROWS
    assert "i1" not in renter.handed_on


def test_an_instance_that_is_to_end_is_left_also_while_a_better_one_is_asked_for(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, renter := Renter(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        renter.hold_on = renter.offers_better = True
        job.work(until=lambda: renter.asked == 2)
        renter.retired["i1"] = "the fleet shrinks to 1"
        job.work(until=lambda: renter.released)
        renter.hold_on = False
        assert job.work() == ""
        assert prompts_asked(found) == ROWS
    assert renter.released[0] == ("i1", "the fleet shrinks to 1", True)


def test_the_heart_knows_how_long_the_rows_in_flight_take(tmp_path: Path):
    with engines(1) as found, a_job(tmp_path, Renter(*found)) as job:
        assert job.heart.drain_seconds() == 2
        job.work(until=lambda: job.run.progress().rows_done > 20)
        mean = job.run.progress().mean_seconds
        assert mean > 0
        assert 2 + 2 * mean < job.heart.drain_seconds() < 2 + 6 * mean


def test_a_lost_engine_is_retired_and_its_rows_go_to_the_next_one(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, renter := Renter(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 20)
        found[0].process.kill()
        assert job.work() == ""
    assert renter.released[0][0] == "i1"
    assert renter.released[0][2]
    assert job.run.missing() == []


def test_a_lost_lease_is_given_up_and_another_one_asked_for(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, renter := Renter(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 20)
        job.heart.lost.add("i1")
        assert job.work() == ""
    assert Counter(name for name, _, _ in renter.released) == {"i1": 1, "i2": 1}
    assert ("i1", "lease lost", False) in renter.released


def test_engines_that_do_not_start_end_the_run_after_three(tmp_path: Path):
    failures = [EngineStartError(f"no {i}") for i in range(3)]
    with a_job(tmp_path, Renter(*failures)) as job:
        assert job.work() == "3 engines in a row did not start; the last one: no 2"


def test_ending_while_a_lease_is_asked_for_gives_it_back_also_when_it_comes_too_late(tmp_path: Path):
    with engines(1) as found, a_job(tmp_path, renter := Renter(*found)) as job:
        renter.hold_on = True
        job.work(until=lambda: renter.asked)
        job.crew.end()
        assert renter.released == []  # it gave up while it waited
    with engines(1) as found, a_job(tmp_path, renter := Renter(*found)) as job:
        acquire = renter.acquire

        def slow(*words: Any, **more: Any) -> LeasedEngine:
            leased = acquire(*words, **more)
            time.sleep(0.5)
            return leased

        renter.acquire = slow
        job.work(until=lambda: renter.asked)
        job.crew.end()
        assert renter.released == [("i1", "the run ended", False)]


def test_ending_in_the_middle_gives_back_every_engine_once(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, renter := Renter(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        renter.offers_better = True
        job.work(until=lambda: len(job.crew.shifts) == 2)
        started = time.monotonic()
        job.crew.end()
        assert time.monotonic() - started < 4
    assert Counter(name for name, _, _ in renter.released) == {"i1": 1, "i2": 1}


def test_an_engine_that_refuses_the_request_fails_the_run_with_its_words(tmp_path: Path):
    with simulated_engine("--speed", "4", model="another") as wrong, a_job(tmp_path, Renter(wrong)) as job:
        reason = job.work()
    assert reason is not None
    assert "another" in reason


def test_a_database_that_is_away_fails_nobody_whose_rows_flow(tmp_path: Path):
    with engines(1) as found, a_job(tmp_path, renter := Renter(*found)) as job:
        renter.away = True
        job.work(until=lambda: renter.asked >= 2)
        renter.away = False
        job.work(until=lambda: job.run.progress().rows_done > 5)
        renter.away = True
        job.work(until=lambda: job.run.progress().rows_done > 100)
        renter.away = False
        assert job.work() == ""
    assert len(renter.handed_on) == 1


def test_an_engine_that_is_being_left_is_not_handed_on(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, renter := Renter(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 20)
        renter.offers_better = True
        assert job.work() == ""
    assert "i1" not in renter.handed_on


def test_once_another_run_has_the_engine_ours_pays_no_more(tmp_path: Path):
    with engines(1, speed="1") as found, a_job(tmp_path, renter := Renter(*found), rows=60) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        spending = job.crew.shifts[0].leased.spending
        renter.succeeded.add("i1")
        job.work(until=lambda: job.crew.shifts and job.crew.shifts[0].succeeded)
        time.sleep(0.3)
        at, then = time.monotonic(), spending.spent().useful_seconds
        assert job.work() == ""
        assert time.monotonic() - at > 1
        assert spending.spent().useful_seconds - then < 1  # what had come together is shared, nothing is added
