"""The engines of one run: replaced when lost, left on notice or for a better offer, handed on with the last rows."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from support.engine_supply import NEED, FleetClient, Heartbeat, engines
from support.fake_batch_api import FakeBatchApi, error_line, fake_batch_api, line
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.snapshots import MODEL, questions, write_snapshot
from support.timing import PATIENCE

from batch_assets.generation import engine_supervisor
from batch_assets.generation.engine_supervisor import EngineSupervisor, StepKind
from batch_assets.generation.loop_thread import LoopThread
from batch_assets.generation.range_run import Intent, RangeRun, RunIdentity, plan_range
from gpu_runner.fleet_database.database import Lease
from gpu_runner.fleet_database.wait_reason import RequestFailure, WaitKind, WaitReason
from gpu_runner.inference.failures.failing_requests import FailingRequests
from gpu_runner.inference.failures.retry import RetryPolicy
from gpu_runner.inference.policy import FeedPolicy
from gpu_runner.providers.engine_process import EngineStartError
from gpu_runner.reachability import Reachability
from gpu_runner.request_limits import BatchLimits, RequestLimits
from resources.fleet.client import ProvisioningFailed
from resources.fleet.leased_engine import LeasedEngine, LeaseSignals, Requirement
from resources.fleet.migration import Migration
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import DatasetStore
from resources.store.stored_batches import StoredBatches

ROWS = 320


class Job:
    """A range of rows, a supervisor for it, and the log of what it said."""

    def __init__(
        self, objects: Objects, client: FleetClient, loop: LoopThread, rows: int, policy: FeedPolicy | None
    ) -> None:
        self.store = DatasetStore(objects, "d")
        manifest = write_snapshot(self.store, questions(rows))
        self.entries = entries = self.store.entries(manifest.snapshot)
        identity = RunIdentity("run", Intent("run"), (entries[0].key, entries[-1].key))
        plan = plan_range(self.store, entries, Intent("run"))
        self.run = RangeRun(self.store, manifest, plan, identity, policy=policy)
        self.heartbeat, self.client = Heartbeat(), client
        self.said: list[str] = []
        self.decisions: list[Migration] = []
        self.supervisor = EngineSupervisor(
            client,
            self.heartbeat,
            NEED,
            self.run,
            loop,
            say=self.said.append,
            warn=self.said.append,
            decided=self.decisions.append,
        )

    def work(self, until: Callable[[], object] | None = None, seconds: float = 30) -> str | None:
        """Steps until it ends: "", or why it cannot go on; None when something is true before."""
        deadline = time.monotonic() + PATIENCE * seconds
        while (result := self.supervisor.step()).kind is StepKind.CONTINUE:
            if until is not None and until():
                return None
            assert time.monotonic() < deadline, self.said
            self.supervisor.wait(0.02)
        assert (result.kind is StepKind.DONE) == (result.failure == "")
        return result.failure


@contextmanager
def a_job(folder: Path, client: FleetClient, rows: int = ROWS, policy: FeedPolicy | None = None) -> Iterator[Job]:
    with LoopThread() as loop:
        job = Job(open_objects(str(folder)), client, loop, rows, policy)
        try:
            yield job
        finally:
            job.supervisor.end()
            job.run.close()


def prompts_asked(found: list[SimulatedEngine]) -> int:
    return sum(requests(engine) for engine in found)


def requests(engine: SimulatedEngine) -> int:
    return int(engine.get("/simulator/stats")["requests"])


@pytest.mark.slow
def test_one_engine_does_it_all_is_handed_on_with_the_last_rows_and_given_back_once(tmp_path: Path):
    with engines(1, speed="50") as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        assert job.work() == ""
    assert len(client.handed_on) == 1
    assert client.released == [("i1", "done", False)]
    assert job.run.missing() == []


@pytest.mark.slow
def test_a_better_offer_is_moved_to_while_rows_flow_and_no_row_is_asked_twice(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 20)
        client.offers_better = True
        assert job.work() == ""
        assert prompts_asked(found) == ROWS
        assert all(requests(engine) > 10 for engine in found)
    assert [decision.saved_usd for decision in job.decisions] == [1.5]
    assert client.released[0] == ("i1", "i1: move and save 1.50 $", True)
    assert client.released[1] == ("i2", "done", False)


def test_late_rows_are_named_until_none_is_late_and_never_in_place_of_a_reason_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with engines(1, speed="50") as found, a_job(tmp_path, FleetClient(*found)) as job:
        progress = job.run.progress
        told: list[str] = []

        def step(late: int) -> None:
            monkeypatch.setattr(job.run, "progress", lambda: replace(progress(), late=late))
            job.supervisor.step()
            told.append(job.heartbeat.activity.note)

        for rows in (0, 1, 1200, 0):
            step(rows)
        job.work(until=lambda: job.run.progress().rows_done > 0)
        monkeypatch.setattr(job.run, "progress", progress)
        on_engine = f"on {job.supervisor.sessions[0].leased.name}"
        job.heartbeat.tell(on_engine)
        for rows in (1, 0):
            step(rows)
        job.heartbeat.tell("the store does not answer")
        step(1)
        assert told == [
            "",
            "1 row is late and is asked for once more",
            "1,200 rows are late and are asked for once more",
            "",
            "1 row is late and is asked for once more",
            on_engine,
            "the store does not answer",
        ]


@pytest.mark.slow
def test_a_move_that_fails_leaves_the_engine_where_it_is(tmp_path: Path):
    with engines(1) as found, a_job(tmp_path, client := FleetClient(*found, ProvisioningFailed("no capacity"))) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        client.offers_better = True
        assert job.work() == ""
    assert client.released == [("i1", "done", False)]
    assert job.decisions == []  # nothing was saved
    assert any("stays on i1: no capacity" in text for text in job.said)


@pytest.mark.slow
def test_on_a_notice_another_engine_is_leased_and_the_old_one_drained_first(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        client.notices["i1"] = 60.0
        assert job.work() == ""
        assert prompts_asked(found) == ROWS
    name, reason, retire = client.released[0]
    assert (name, retire) == ("i1", True)
    assert "taken away in 60 s" in reason


@pytest.mark.slow
def test_on_a_notice_one_other_engine_is_asked_for_also_while_the_loop_is_busy(tmp_path: Path):
    """The old engine's session learns late that it is over; what it says of its notice meanwhile asks for nothing."""

    class Late:
        def __init__(self, loop: LoopThread) -> None:
            self.loop = loop

        def __getattr__(self, name: str) -> Any:
            return getattr(self.loop, name)

        def call(self, callback: Callable[[], None]) -> None:
            threading.Timer(1.0, self.loop.call, [callback]).start()

    with engines(2, speed="1") as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        job.supervisor.loop = Late(job.supervisor.loop)
        client.notices["i1"] = 60.0
        job.work(until=lambda: client.released)
        assert client.released[0][0] == "i1"
        assert client.asked == 2


@pytest.mark.slow
def test_with_little_time_left_an_engine_takes_no_more_rows_even_before_there_is_another(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        client.hold_on = True
        client.notices["i1"] = 0.5
        job.work(until=lambda: client.released)
        assert client.released[0][0] == "i1"
        before = job.run.progress().rows_done
        assert before < ROWS
        client.hold_on = False
        assert job.work() == ""
        assert prompts_asked(found) == ROWS


@pytest.mark.slow
def test_an_instance_that_is_to_end_is_drained_first_and_the_run_waits_for_the_next_one(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 20)
        client.hold_on = True
        client.retired["i1"] = "budget of 12.00 $ is nearly reached (11.40 $ spent)"
        job.work(until=lambda: client.released)
        assert client.released == [("i1", "budget of 12.00 $ is nearly reached (11.40 $ spent)", True)]
        before = job.run.progress().rows_done
        assert 20 < before < ROWS
        job.work(until=lambda: client.asked == 2)  # it may take long until the budget is raised
        assert job.run.progress().rows_done == before
        client.hold_on = False
        assert job.work() == ""
        assert prompts_asked(found) == ROWS
    assert "i1" not in client.handed_on


@pytest.mark.slow
def test_an_instance_that_is_to_end_is_left_also_while_a_better_one_is_asked_for(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        client.hold_on = client.offers_better = True
        job.work(until=lambda: client.asked == 2)
        client.retired["i1"] = "the fleet shrinks to 1"
        job.work(until=lambda: client.released)
        client.hold_on = False
        assert job.work() == ""
        assert prompts_asked(found) == ROWS
    assert client.released[0] == ("i1", "the fleet shrinks to 1", True)


@pytest.mark.slow
def test_what_every_request_meets_is_said_once_and_again_when_it_changes_and_ends(tmp_path: Path):
    with engines(1) as found, a_job(tmp_path, FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        began = time.monotonic() - 75
        words = []
        for code, status in (("http_429", 429), ("http_429", 429), ("garbage_body", 200)):
            failing = FailingRequests(code, status, "as it is", began, 20)
            job.run.failing = lambda before, failing=failing: failing if failing.since <= before else None
            job.supervisor.step()
            words.append(job.heartbeat.activity.note)
            wait = job.heartbeat.activity.wait
            assert wait == WaitReason(WaitKind.REQUESTS_FAIL, failure=RequestFailure(code, status, "as it is"))
            assert wait.seconds == pytest.approx(75, abs=20)
        del job.run.failing
        job.supervisor.step()
        assert job.work() == ""
    assert [note.partition(": ")[2] for note in words] == [
        *["http_429: as it is"] * 2,
        "garbage_body (status 200): as it is",
    ]
    assert all(note.startswith("every request fails since ") for note in words)
    told = [text for text in job.said if "request" in text]
    assert told == [words[0], words[2], "requests are answered again, after 1 min 15 s"]


def test_the_heart_knows_how_long_the_rows_in_flight_take(tmp_path: Path):
    with engines(1) as found, a_job(tmp_path, FleetClient(*found)) as job:
        assert job.heartbeat.drain_seconds() == 2
        job.work(until=lambda: job.run.progress().rows_done > 20)
        mean = job.run.progress().mean_seconds
        assert mean > 0
        assert 2 + 2 * mean < job.heartbeat.drain_seconds() < 2 + 6 * mean


@pytest.mark.slow
def test_a_lost_engine_is_retired_and_its_rows_go_to_the_next_one(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 20)
        client.why["i1"] = "its pod has ended: out of memory"
        found[0].process.kill()
        assert job.work() == ""
    name, reason, retire = client.released[0]
    assert (name, retire) == ("i1", True)
    assert reason.startswith("engine lost: ") and reason.endswith("; its pod has ended: out of memory")
    assert any(text.endswith("; its pod has ended: out of memory; asking for another engine") for text in job.said)
    assert job.run.missing() == []


@pytest.mark.slow
def test_a_lost_lease_is_given_up_and_another_one_asked_for(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 20)
        job.heartbeat.lost.add("i1")
        assert job.work() == ""
    assert Counter(name for name, _, _ in client.released) == {"i1": 1, "i2": 1}
    assert ("i1", "lease lost", False) in client.released


@pytest.mark.slow
def test_an_engine_that_cannot_be_reached_for_a_while_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_supervisor, "UNREACHABLE_SECONDS", 0.1)
    with engines(1) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        client.why["i1"] = "the API server does not answer"
        client.reachability = Reachability.RESTORING
        words = "i1 cannot be reached for now; the API server does not answer; its rows wait for it"
        job.work(until=lambda: words in job.said)
        client.reachability = Reachability.OPEN
        job.work(until=lambda: "i1 can be reached again" in job.said)
        assert job.work() == ""
    assert client.released == [("i1", "done", False)]
    assert job.said.count(words) == 1


@pytest.mark.slow
def test_an_engine_that_is_lost_after_it_could_not_be_reached_is_not_told_to_be_reached_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_supervisor, "UNREACHABLE_SECONDS", 0.1)
    with engines(2) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        client.reachability = Reachability.RESTORING
        job.work(until=lambda: any("cannot be reached for now" in line for line in job.said))
        (session,) = job.supervisor.sessions
        client.reachability = Reachability.LOST
        job.work(until=lambda: not session.unreachable)
        client.reachability = Reachability.OPEN
        assert job.work() == ""
    assert not [line for line in job.said if line.endswith("can be reached again")]


def test_a_way_that_is_broken_for_a_moment_is_not_worth_a_word(tmp_path: Path):
    with engines(1) as found, a_job(tmp_path, FleetClient(*found)) as job:
        job.work(until=lambda: job.supervisor.sessions)
        (session,) = job.supervisor.sessions
        for way, now in ((Reachability.RESTORING, 0.0), (Reachability.RESTORING, 2.9), (Reachability.OPEN, 3.0)):
            session.leased.reachability = lambda way=way: way
            assert not session.reachability_changed(now)
        session.leased.reachability = lambda: Reachability.RESTORING
        assert [session.reachability_changed(now) for now in (4.0, 6.9, 7.0, 8.0)] == [False, False, True, False]
        session.leased.reachability = lambda: Reachability.OPEN
        assert session.reachability_changed(9.0) and not session.unreachable


def test_engines_that_do_not_start_end_the_run_after_three(tmp_path: Path):
    failures = [EngineStartError(f"no {i}") for i in range(3)]
    with a_job(tmp_path, FleetClient(*failures)) as job:
        assert job.work() == "3 engines in a row did not start; the last one: no 2"


def test_ending_while_a_lease_is_asked_for_gives_it_back_also_when_it_comes_too_late(tmp_path: Path):
    with engines(1) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        client.hold_on = True
        job.work(until=lambda: client.asked)
        job.supervisor.end()
        assert client.released == []  # it gave up while it waited
    with engines(1) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        acquire = client.acquire

        def slow(*words: Any, **more: Any) -> LeasedEngine:
            leased = acquire(*words, **more)
            time.sleep(0.5)
            return leased

        client.acquire = slow
        job.work(until=lambda: client.asked)
        job.supervisor.end()
        assert client.released == [("i1", "the run ended", False)]


def test_ending_in_the_middle_gives_back_every_engine_once(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        client.offers_better = True
        job.work(until=lambda: len(job.supervisor.sessions) == 2)
        job.supervisor.end()
    assert Counter(name for name, _, _ in client.released) == {"i1": 1, "i2": 1}


def test_an_engine_is_given_back_also_where_its_lease_or_its_end_cannot_be_told(tmp_path: Path):
    """Dagster's event log, which hears of them, may be away."""

    class Unheard(Exception):
        pass

    def unheard(*_: object) -> None:
        raise Unheard

    with engines(2) as found, a_job(tmp_path / "one", client := FleetClient(*found)) as job:
        job.supervisor.leased = unheard
        with pytest.raises(Unheard):
            job.work()
        job.supervisor.end()
        assert client.released == [("i1", "the run ended", False)]
    with engines(2) as found, a_job(tmp_path / "two", client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        client.notices["i1"] = 600.0
        job.work(until=lambda: len(job.supervisor.sessions) == 2)
        job.supervisor.given_back = unheard
        with pytest.raises(Unheard):
            job.supervisor.end()
        assert sorted(client.released) == [("i1", "the run ended", False), ("i2", "the run ended", False)]


def test_an_engine_that_refuses_the_request_fails_the_run_with_its_words(tmp_path: Path):
    with simulated_engine("--speed", "4", model="another") as wrong, a_job(tmp_path, FleetClient(wrong)) as job:
        reason = job.work()
    assert reason is not None
    assert "another" in reason


@pytest.mark.slow
def test_a_database_that_is_away_fails_nobody_whose_rows_flow(tmp_path: Path):
    with engines(1) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        client.away = True
        job.work(until=lambda: client.asked >= 2)
        client.away = False
        job.work(until=lambda: job.run.progress().rows_done > 5)
        client.away = True
        job.work(until=lambda: job.run.progress().rows_done > 100)
        client.away = False
        assert job.work() == ""
    assert len(client.handed_on) == 1


@pytest.mark.slow
def test_an_engine_that_is_being_left_is_not_handed_on(tmp_path: Path):
    with engines(2) as found, a_job(tmp_path, client := FleetClient(*found)) as job:
        job.work(until=lambda: job.run.progress().rows_done > 20)
        client.offers_better = True
        assert job.work() == ""
    assert "i1" not in client.handed_on


@pytest.mark.slow
def test_once_another_run_has_the_engine_ours_pays_no_more(tmp_path: Path):
    with engines(1, speed="1") as found, a_job(tmp_path, client := FleetClient(*found), rows=60) as job:
        job.work(until=lambda: job.run.progress().rows_done > 5)
        spending = job.supervisor.sessions[0].leased.spending
        client.succeeded.add("i1")
        job.work(until=lambda: job.supervisor.sessions and job.supervisor.sessions[0].succeeded)
        time.sleep(0.3)
        at, then = time.monotonic(), spending.spent().useful_seconds
        assert job.work() == ""
        assert time.monotonic() - at > 1
        assert spending.spent().useful_seconds - then < 1  # what had come together is shared, nothing is added


QUICK_RETRIES = FeedPolicy(retry=RetryPolicy(backoff_min=0.02, backoff_max=0.05, proof_lag=0.05), poll_seconds=0.1)


class BatchesFirst(FleetClient):
    """Has a Batch API for who takes one, and then the engines that are lined up. `late`: as the fleet says it."""

    def __init__(self, api: FakeBatchApi, *engines: SimulatedEngine) -> None:
        super().__init__(*engines)
        self.api, self.late = api, ""
        self.needs: list[bool] = []

    def acquire(self, need: Requirement, **more: Any) -> LeasedEngine:
        self.needs.append(need.batches)
        if not need.batches:
            return super().acquire(need, **more)
        limits = RequestLimits(batches=BatchLimits(gather_seconds=0.1, poll_seconds=0.05, elsewhere=True))
        lease = Lease("hosted", 1, "run", "d")
        return LeasedEngine(self.api.url, None, None, "hosted", "batch_api", limits=limits, lease=lease)

    def look_for_dataset(self, need: Requirement, leased: LeasedEngine) -> LeaseSignals:
        return LeaseSignals(late=self.late or None)


@contextmanager
def a_batch_api(**how: Any) -> Iterator[FakeBatchApi]:
    started: SimpleQueue[FakeBatchApi] = SimpleQueue()

    async def serve() -> None:
        async with fake_batch_api(MODEL, **how) as api:
            started.put(api)
            await asyncio.Event().wait()

    with LoopThread() as loop:
        serving = loop.submit(serve())
        yield started.get(timeout=10)
        serving.cancel(10)


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runner.batch_api.batch_client.FIRST_POLL_SECONDS", 0.02)
    monkeypatch.setattr("gpu_runner.batch_api.patient_calls.LOOK_AFTER_SECONDS", (0.0,))
    monkeypatch.setattr("batch_assets.generation.engine_supervisor.LOOK_SECONDS", 0.05)


def rows_of_the_table(job: Job) -> list[str]:
    """The id of every row that is committed, with its answer."""
    batches = job.store.current_objects(job.entries).values()
    return [one.row_id for batch in batches for one in job.store.outcomes(batch) if one.ok]


@pytest.mark.usefixtures("quick_looks")
def test_rows_that_batches_did_not_bring_are_asked_of_another_engine_and_no_other_row_is(tmp_path: Path):
    def answer(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        """Of four rows one is missing, one has expired, and one is answered with what is no answer."""
        kept = [line(one) for number, one in enumerate(asked) if number % 4 == 0]
        wrong = [line(one, {"choices": []}) for number, one in enumerate(asked) if number % 4 == 1]
        return kept + wrong, [error_line(one, "batch_expired") for number, one in enumerate(asked) if number % 4 == 2]

    with a_batch_api(answer=answer) as api, engines(1, speed="50") as found:
        with a_job(tmp_path, client := BatchesFirst(api, *found), 40, QUICK_RETRIES) as job:
            job.supervisor.need = replace(NEED, batches=True)
            assert job.work() == ""
            assert client.needs == [True, False]
            assert len(api.asked) == 40 and requests(found[0]) == 30
            rows = rows_of_the_table(job)
        assert len(rows) == len(set(rows)) == 40
    assert client.released[0][0] == "hosted" and "go elsewhere" in client.released[0][1]


@pytest.mark.usefixtures("quick_looks")
def test_a_batch_that_will_be_late_is_cancelled_and_what_it_had_not_finished_is_asked_of_another_engine(tmp_path: Path):
    with a_batch_api(ends=False, finished=13) as api, engines(1, speed="50") as found:
        with a_job(tmp_path, client := BatchesFirst(api, *found), 40, QUICK_RETRIES) as job:
            job.supervisor.need = replace(NEED, batches=True)
            job.work(until=lambda: any(one.batch_id for one in StoredBatches(job.store.objects, "d").all()))
            assert job.run.progress().rows_done == 0
            client.late = "the 2 h that are left are needed to do the work elsewhere"
            assert job.work() == ""
            assert [one["status"] for one in api.batches.values()] == ["cancelled"]
            assert client.needs == [True, False]
            assert len(api.asked) == 40 and requests(found[0]) == 27
            rows = rows_of_the_table(job)
            assert not list(job.store.objects.list("d/submitted_batches/"))
        assert len(rows) == len(set(rows)) == 40
    assert client.released[0] == ("hosted", client.late, False)
    assert sum(client.late in words for words in job.said) == 1
