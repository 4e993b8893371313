"""The engines at work for one run: normally one, two while it moves, none while it waits.

Everything is decided here, in the op's main thread, a few times a second; rows flow on the loop thread. Whatever may
block (the fleet's database, a provider, a boot of minutes) is a background task: done in a thread, looked at later.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from batch_assets.durations import duration
from batch_assets.gates.quality_gates import GateTrip
from batch_assets.generation.loop_thread import BackgroundTask, LoopThread, Running
from batch_assets.generation.progress_report import late_words
from batch_assets.generation.range_run import RangeRun
from batch_assets.generation.user_engine import UserEngineAway
from gpu_runner.client.protocol import EngineLost, EngineRefused
from gpu_runner.fleet_database.database import FleetDatabaseError, RunEnded
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.fleet_database.wait_reason import RequestFailure, WaitKind, WaitReason
from gpu_runner.inference.failures.failing_requests import FailingRequests
from gpu_runner.reachability import Reachability
from resources.fleet.client import FleetClient, NoInstanceStarted, ProvisioningFailed
from resources.fleet.leased_engine import LeaseSignals
from resources.fleet.migration import Migration
from resources.fleet.resource import EngineStartError, FleetConfigError, LeasedEngine, Requirement
from resources.objects.store_health import GIVE_UP_SILENT_SECONDS, RELEASE_SILENT_SECONDS, SAY_SILENT_SECONDS

WAITS = "waits for batches that another run works on"
UNREACHABLE_SECONDS = 3.0  # a way that is broken for less is not worth a word


class LeaveKind(enum.Enum):
    """Why an engine takes no more rows of a run."""

    OTHER_RUN = "other_run"  # what is left is another run's to make
    MIGRATION = "migration"  # another instance takes its place
    PREEMPTION_NOTICE = "preemption_notice"  # its provider takes it away
    RETIRED = "retired"  # the fleet gives it up
    BUDGET = "budget"  # it is paid by the token, and the budget pays for no further row
    GATE = "gate"  # too many of the rows that come are bad
    ELSEWHERE = "elsewhere"  # rows that came back wrong are another engine's to do


@dataclass(frozen=True, slots=True)
class LeaveReason:
    """`detail`: of a migration the decision, of a retired instance why the fleet gives it up; sentences for people.

    `notice_seconds`: with PREEMPTION_NOTICE, until it is taken away; `detail` then has its provider's words for why.
    """

    kind: LeaveKind
    detail: str = ""
    notice_seconds: float = 0.0

    def describe(self) -> str:
        """For people."""
        if self.kind is LeaveKind.OTHER_RUN:
            return WAITS
        if self.kind is LeaveKind.BUDGET:
            return "the budget pays for no further row"
        if self.kind is LeaveKind.PREEMPTION_NOTICE:
            return f"it will be taken away in {self.notice_seconds:.0f} s" + (f": {self.detail}" if self.detail else "")
        return self.detail


class StepKind(enum.Enum):
    """What a look of the supervisor comes to."""

    CONTINUE = "continue"
    DONE = "done"  # nothing is left to do
    FAILED = "failed"  # the run cannot go on


@dataclass(frozen=True, slots=True)
class StepResult:
    """`failure`: why the run cannot go on, for people; "" otherwise. `refused`: the engine refuses every request."""

    kind: StepKind
    failure: str = ""
    refused: bool = False


CONTINUE = StepResult(StepKind.CONTINUE)
DONE = StepResult(StepKind.DONE)


def failed(why: object) -> StepResult:
    """The run cannot go on."""
    return StepResult(StepKind.FAILED, str(why), refused=isinstance(why, EngineRefused))


@dataclass(eq=False)
class EngineSession:
    """One engine at work. `leaving`: why it takes no more rows; `handing_on`: telling that others may have it.

    `looking`: what its instance's row says, asked for now and then. `succeeded`: another run has it already.
    `unreachable`: the way to it is being made anew, and has been for UNREACHABLE_SECONDS.
    """

    leased: LeasedEngine
    serving: Running[None]
    stop: asyncio.Event
    leaving: LeaveReason | None = None
    retire: bool = False
    handing_on: BackgroundTask[bool] | None = None
    looking: BackgroundTask[LeaseSignals] | None = None
    look_at: float = 0.0
    succeeded: bool = False
    began: float = field(default_factory=time.monotonic)
    unreachable: bool = False
    broken_at: float | None = None

    def reachability_changed(self, now: float) -> bool:
        """Look at the way to it; whether `unreachable` is another one now. `now`: by the clock of all looks."""
        if self.leased.reachability() is not Reachability.RESTORING:
            self.broken_at = None
        elif self.broken_at is None:
            self.broken_at = now
        before, self.unreachable = (
            self.unreachable,
            self.broken_at is not None and now - self.broken_at >= UNREACHABLE_SECONDS,
        )
        return before != self.unreachable


WAIT_SECONDS = 0.2
CANCEL_SECONDS = 2.0
GIVE_BACK_SECONDS = 4.0
REST_SECONDS = 15.0
FRUITLESS_ENGINES = 15  # bisecting a batch for a row that kills engines takes at most 9
FAILED_STARTS = 3
LOOK_SECONDS = 1.0
FAILING_SECONDS = 10.0  # without one request that is answered, before that is said
WHY_SECONDS = 2.0  # a lost engine's provider may take so long to say what has become of it
FAILED_MOVE_SECONDS = 15.0
LONGEST_DRAIN = 300.0


class GivenUp(Exception):
    """Nobody waits for this lease any more."""


class PendingLease:
    """A lease that is being asked for. `drop` gives back one that nobody takes any more."""

    def __init__(
        self,
        ask: Callable[[Callable[[float], None]], LeasedEngine],
        drop: Callable[[LeasedEngine], None],
    ) -> None:
        self.leased: LeasedEngine | None = None
        self._ask, self._drop = ask, drop
        self._given_up = threading.Event()
        self._guard = threading.Lock()
        self._task = BackgroundTask(self._run)

    def _run(self) -> None:
        try:
            leased = self._ask(self._pause)
        except GivenUp:
            return
        with self._guard:
            if not self._given_up.is_set():
                self.leased = leased
                return
        self._drop(leased)

    def _pause(self, seconds: float) -> None:
        if self._given_up.wait(seconds):
            raise GivenUp

    @property
    def done(self) -> bool:
        """Whether the request has its lease, or an error, or was given up."""
        return self._task.done

    @property
    def error(self) -> Exception | None:
        """Why there is no lease."""
        return self._task.error

    def wait(self, seconds: float) -> bool:
        """True when done within this time."""
        return self._task.wait(seconds)

    def cancel(self) -> LeasedEngine | None:
        """Give it up. Returns the lease if it was there already; a later one is given back by itself."""
        with self._guard:
            self._given_up.set()
            leased, self.leased = self.leased, None
        return leased


@dataclass(frozen=True, eq=False)
class _LeaseRequest:
    """A lease that is asked for. `instead_of`: the session that it is to replace; `decision`: why, if it is a move."""

    pending: PendingLease
    instead_of: EngineSession | None = None
    decision: Migration | None = None


class EngineSupervisor:
    """Serves a range run with one engine after the other until nothing is missing."""

    def __init__(
        self,
        client: FleetClient,
        heartbeat: Heartbeat,
        need: Requirement,
        run: RangeRun,
        loop: LoopThread,
        *,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        decided: Callable[[Migration], None],
        leased: Callable[[LeasedEngine], None] = lambda _: None,
        given_back: Callable[[LeasedEngine, str], None] = lambda *_: None,
        paused: Callable[[GateTrip], None] = lambda _: None,
    ) -> None:
        self.client, self.heartbeat, self.need, self.run, self.loop = client, heartbeat, need, run, loop
        self.say, self.warn, self.decided = say, warn, decided
        self.leased, self.given_back, self.paused = leased, given_back, paused
        self.sessions: list[EngineSession] = []
        self.lease_request: _LeaseRequest | None = None
        heartbeat.drain_seconds = self._drain_seconds
        self._before = run.progress()
        self._fruitless = self._unused = self._failed_starts = self._failed_asks = 0
        self._rest_until = self._scout_at = self._replace_at = 0.0
        self._migration_check: BackgroundTask[Migration | None] | None = None
        self._preparing: Running[bool] | None = None
        self._pausing: tuple[GateTrip, BackgroundTask[bool]] | None = None
        self._silent = False
        self._late = self._usual = ""
        self._failing: FailingRequests | None = None

    def step(self) -> StepResult:
        """Move on by one look."""
        silent = self.run.health.silent_seconds()
        if silent >= SAY_SILENT_SECONDS or self._silent:
            return self._store_is_silent(silent)
        return self._step()

    def _store_is_silent(self, seconds: float) -> StepResult:
        """Say so, give back what costs money when it lasts, and go on when the store answers again."""
        if not seconds:
            self.say("the store answers again")
            self._silent = False
            self.heartbeat.tell("")
            return CONTINUE
        words = self.run.health.words(time.time())
        if not self._silent:
            self._silent = True
            self.warn(f"{words}; finished rows are kept in memory until it does")
        if seconds >= GIVE_UP_SILENT_SECONDS:
            return failed(f"{words}; start it again when the store is back")
        self.heartbeat.tell(words, WaitReason(WaitKind.STORE))
        if seconds < RELEASE_SILENT_SECONDS:
            return self._step()
        lease_request, self.lease_request = self.lease_request, None
        if lease_request is not None and (leased := lease_request.pending.cancel()) is not None:
            self._give_back(leased, words)
        for session in list(self.sessions):
            session.serving.cancel(CANCEL_SECONDS)
            self._release(session, words)
        return CONTINUE

    def _step(self) -> StepResult:
        self._look_at_gates()
        for session in list(self.sessions):
            if (result := self._watch(session)) != CONTINUE:
                return result
        if (result := self._leased()) != CONTINUE:
            return result
        if not self.sessions and self.lease_request is None:
            if self.run.progress().finished:
                return DONE
            if (result := self._prepared()) != CONTINUE:
                return result
            if self._preparing is None and time.monotonic() >= self._rest_until and not self._silent:
                self.lease_request = _LeaseRequest(
                    PendingLease(lambda pause: self.client.acquire(self.need, say=self.say, pause=pause), self._drop)
                )
        for session in self.sessions:
            self._look(session)
            if self.run.waits and not session.leaving:
                self._stand_by(session)
            if not session.leaving and self.run.progress().only_held_back:
                self._ask_elsewhere(session, "rows that its batches did not bring go elsewhere")
        self._tell_late()
        self._roll_over()
        self._tell_failing(time.monotonic())
        return CONTINUE

    def _look_at_gates(self) -> None:
        """Pause the request for a gate that has tripped, unless somebody has accepted that."""
        if self._pausing is None:
            if (trip := self.run.tripped()) is not None:
                self._pausing = trip, self._pause_for(trip)
            return
        trip, asking = self._pausing
        if not asking.done:
            return
        if asking.error is not None:  # the fleet's database does not answer
            self._pausing = trip, self._pause_for(trip)
            return
        self._pausing = None
        if not asking.result:
            self.say(f"{trip.describe()}; it is accepted for this request")
            return
        self.paused(trip)
        self.warn(f"paused: {trip.describe()}")
        for session in self.sessions:
            if session.leaving is None:
                session.leaving = LeaveReason(LeaveKind.GATE, trip.describe())
                self.loop.call(session.stop.set)

    def _pause_for(self, trip: GateTrip) -> BackgroundTask[bool]:
        return BackgroundTask(lambda: self.client.fleet_db.trip_gate(self.need.dataset, trip.gate, trip.describe()))

    def _tell_late(self) -> None:
        """Rows that are late, unless the run has something else to say."""
        late, note = late_words(self.run.progress().late), self.heartbeat.activity.note
        usual = {"", *(f"on {session.leased.name}" for session in self.sessions)}
        if note in usual:
            self._usual = note
        if late != self._late and note in (*usual, self._late):
            self.heartbeat.tell(late or self._usual)
            self._late = late

    def _stand_by(self, session: EngineSession) -> None:
        """Nothing to ask before another run has done its batches: it may need this very engine for them."""
        session.leaving = LeaveReason(LeaveKind.OTHER_RUN)
        self.say(f"gives {session.leased.name} back: {session.leaving.describe()}")
        self.loop.call(session.stop.set)

    def _ask_elsewhere(self, session: EngineSession, why: str) -> None:
        """No batch is sent by this run any more: what is left is for an engine that answers at once."""
        self.need = replace(self.need, batches=False)
        session.leaving = LeaveReason(LeaveKind.ELSEWHERE, why)
        self.say(f"leaves {session.leased.name}: {why}")
        self.loop.call(session.stop.set)

    def _tell_failing(self, now: float) -> None:
        """What every request meets, for as long as it does, unless the run says already what else it waits for."""
        failing, before = self.run.failing(now - FAILING_SECONDS), self._failing
        self._failing = failing
        if failing is None:
            if before is not None and self.sessions:
                self.say(f"requests are answered again, after {duration(now - before.since)}")
                self.heartbeat.tell(f"on {self.sessions[0].leased.name}")
            return
        words = failing.describe(time.time() - (now - failing.since))
        if before is None or before.code != failing.code:
            self.warn(words)
        if not self._silent and (self.sessions or (self.lease_request is None and self._preparing is None)):
            met = RequestFailure(failing.code, failing.status, failing.sentence)
            self.heartbeat.tell(words, WaitReason(WaitKind.REQUESTS_FAIL, failure=met, seconds=now - failing.since))

    def _prepared(self) -> StepResult:
        """Without an engine, and while other runs hold what is left: wait for them. DONE when they have done it all."""
        if self._preparing is None:
            if self.run.waits:
                self.heartbeat.tell(WAITS, WaitReason(WaitKind.OTHER_RUN))
                self._preparing = self.loop.submit(self.run.prepare())
            return CONTINUE
        if self.heartbeat.ended.is_set():
            return failed(RunEnded(self.heartbeat.run_id))
        if not self._preparing.wait(0):
            return CONTINUE
        preparing, self._preparing = self._preparing, None
        self.heartbeat.tell("")
        return CONTINUE if preparing.result() else DONE

    def wait(self, seconds: float) -> None:
        """Until something may have changed, or the time is over."""
        if self.sessions:
            self.sessions[0].serving.wait(seconds)
        elif self.lease_request is not None:
            self.lease_request.pending.wait(seconds)
        elif self._preparing is not None:
            self._preparing.wait(seconds)
        else:
            time.sleep(seconds)

    def end(self) -> None:
        """Stop everything and give every lease back once. For the op's last act, whatever its reason."""
        self.run.ending = True
        lease_request, self.lease_request = self.lease_request, None
        if lease_request is not None and (leased := lease_request.pending.cancel()) is not None:
            self._drop(leased)
        if self._preparing is not None:
            self._preparing.cancel(CANCEL_SECONDS)
        for session in self.sessions:
            session.serving.cancel(0)
        with contextlib.ExitStack() as each:  # all of them, also where the end of one cannot be told
            if lease_request is not None:
                each.callback(lease_request.pending.wait, GIVE_BACK_SECONDS)
            for session in reversed(self.sessions):
                each.callback(self._break_off, session)

    def _break_off(self, session: EngineSession) -> None:
        session.serving.cancel(CANCEL_SECONDS)
        self._release(session, "the run ended")

    def _drop(self, leased: LeasedEngine) -> None:
        self._give_back(leased, "the run ended")

    def _give_back(self, leased: LeasedEngine, reason: str, *, retire: bool = False, lost: bool = False) -> None:
        task = BackgroundTask(lambda: self.client.release(leased, reason=reason, retire=retire, lost=lost))
        if not task.wait(GIVE_BACK_SECONDS) or task.error is not None:
            failed = type(task.error).__name__ if task.error else "no answer yet"
            self.warn(f"{leased.name} was not given back ({failed}): its lease lapses by itself")

    # sessions

    def _begin(self, leased: LeasedEngine) -> None:
        stop = asyncio.Event()
        # First of all: what is told may not be heard, and `end` gives back what it finds here.
        self.sessions.append(EngineSession(leased, self.loop.submit(self.run.serve(leased, stop)), stop))
        self.say(f"leased {leased.name} ({leased.instance_type}), epoch {leased.epoch}")
        if leased.offer is not None:
            self.leased(leased)

    def _release(self, session: EngineSession, reason: str, *, retire: bool = False, lost: bool = False) -> None:
        self.sessions.remove(session)
        self._give_back(session.leased, reason, retire=retire, lost=lost)
        if session.leased.offer is not None:
            self.given_back(session.leased, reason)

    def _watch(self, session: EngineSession) -> StepResult:
        """Ends a session that is over. Returns what `step` shall return."""
        if not session.serving.wait(0):
            if not self.heartbeat.check(session.leased.lease):
                session.serving.cancel(CANCEL_SECONDS)
                why = self._why_lost(session)
                self._release(session, f"lease lost{why}")
                return self._lost(f"lease on {session.leased.name} lost (epoch {session.leased.epoch}){why}")
            self._hand_on(session)
            return CONTINUE
        try:
            session.serving.result()
        except EngineLost as error:
            why = self._why_lost(session)
            self._release(session, f"engine lost: {error}{why}", retire=True, lost=True)
            return self._lost(f"engine {session.leased.name} lost: {error}{why}")
        except (EngineRefused, UserEngineAway) as error:
            self._release(session, str(error))
            return failed(error)
        except BaseException:
            self._release(session, "the run failed")
            raise
        self._release(session, "done" if session.leaving is None else session.leaving.describe(), retire=session.retire)
        return DONE if self.run.progress().finished and not self.sessions else CONTINUE

    def _why_lost(self, session: EngineSession) -> str:
        """What its provider says of an engine that was lost, to be put behind what we saw ourselves."""
        if session.leased.offer is None:
            return ""
        asking = BackgroundTask(lambda: self.client.why_lost(session.leased))
        return f"; {asking.result}" if asking.wait(WHY_SECONDS) and asking.result else ""

    def _hand_on(self, session: EngineSession) -> None:
        """With the last rows in flight the next run may have the engine, unless it is being left."""
        if session.handing_on is not None and session.handing_on.done and not session.handing_on.result:
            session.handing_on = None  # the fleet's database did not answer: say it again
        if session.handing_on is None and not session.leaving and self.run.progress().last_rows:
            session.handing_on = BackgroundTask(lambda: self.client.begin_handover(session.leased))

    def _lost(self, reason: str) -> StepResult:
        self.warn(f"{reason}; asking for another engine")
        now, before = self.run.progress(), self._before
        fruitless = (now.rows_done, now.turns) == (before.rows_done, before.turns)
        self._fruitless = self._fruitless + 1 if fruitless else 0
        self._unused = self._unused + 1 if now.requests == before.requests else 0
        self._before = now
        if self.heartbeat.ended.is_set():
            return failed(RunEnded(self.heartbeat.run_id))
        if self._fruitless >= FRUITLESS_ENGINES:
            return failed(f"{self._fruitless} engines in a row finished no row; the last one: {reason}")
        # A server behind a proxy answers 503 at once for as long as it starts: minutes.
        self._rest_until = time.monotonic() + min(REST_SECONDS, WAIT_SECONDS * 2**self._unused)
        return CONTINUE

    # lease requests

    def _leased(self) -> StepResult:
        lease_request = self.lease_request
        if lease_request is None or not lease_request.pending.done:
            return CONTINUE
        self.lease_request = None
        if (leased := lease_request.pending.leased) is not None:
            self._failed_starts = self._failed_asks = 0
            self._begin(leased)
            if lease_request.decision is not None:
                self.decided(lease_request.decision)
            if lease_request.instead_of in self.sessions:
                self._leave(lease_request.instead_of)
            return CONTINUE
        if lease_request.instead_of is not None:
            self._stay(lease_request.instead_of, lease_request)
            return CONTINUE
        return self._no_lease(lease_request.pending.error)

    def _stay(self, session: EngineSession, lease_request: _LeaseRequest) -> None:
        """What was to replace an engine could not be had."""
        if not session.retire:
            self.warn(f"stays on {session.leased.name}: {lease_request.pending.error or 'the move was given up'}")
        self._replace_at = self._scout_at = time.monotonic() + FAILED_MOVE_SECONDS
        if lease_request.decision is not None and not session.retire:
            session.leaving = None

    def _no_lease(self, error: Exception | None) -> StepResult:
        if isinstance(error, NoInstanceStarted | FleetConfigError | RunEnded | EngineRefused):
            return failed(error)
        if isinstance(error, EngineStartError):
            self._failed_starts += 1
            if self._failed_starts >= FAILED_STARTS:
                return failed(f"{self._failed_starts} engines in a row did not start; the last one: {error}")
            return self._lost(str(error))
        if isinstance(error, FleetDatabaseError | OSError | ProvisioningFailed):
            self._failed_asks += 1
            self._rest_until = time.monotonic() + min(REST_SECONDS, WAIT_SECONDS * 2**self._failed_asks)
            self.warn(f"the fleet does not answer ({type(error).__name__}); asking again")
            return CONTINUE
        if error is not None:
            raise error
        return CONTINUE

    def _leave(self, session: EngineSession) -> None:
        """Let the engine take no more rows; its lease ends when the last ones are answered."""
        session.retire = True
        self.loop.call(session.stop.set)

    # moving

    def _look(self, session: EngineSession) -> None:
        """Once a second: can it be reached, was notice given, is it to end, has another run taken over?"""
        now = time.monotonic()
        if session.reachability_changed(now):
            self._tell_reachability(session)
        if session.leased.exhausted and not session.leaving:
            session.leaving = LeaveReason(LeaveKind.BUDGET)
            self.warn(f"leaves {session.leased.name}: {session.leaving.describe()}")
            self.loop.call(session.stop.set)
        if session.looking is None:
            if now >= session.look_at:
                session.look_at = now + LOOK_SECONDS
                client, leased, need = self.client, session.leased, self.need
                session.looking = BackgroundTask(
                    lambda: client.look(leased) if leased.offer is not None else client.look_for_dataset(need, leased)
                )
            return
        if not session.looking.done:
            return
        looked, session.looking = session.looking, None
        if looked.result is None:
            return
        seen = looked.result
        if seen.succeeded and not session.succeeded:
            session.succeeded = True
            self.loop.call(lambda: session.leased.spending.succeed(time.monotonic()))
        if session.retire:  # not `stop`: the loop sets that a little later
            return
        if seen.late is not None:
            if not session.leaving:
                self._ask_elsewhere(session, seen.late)
        elif seen.retired is not None:
            session.leaving = LeaveReason(LeaveKind.RETIRED, seen.retired)
            self.warn(f"leaves {session.leased.name}: {seen.retired}")
            self._leave(session)
        elif seen.notice_seconds is not None:
            self._on_preemption_notice(session, seen.notice_seconds, seen.notice_reason)

    def _tell_reachability(self, session: EngineSession) -> None:
        if session.unreachable:
            self.warn(f"{session.leased.name} cannot be reached for now{self._why_lost(session)}; its rows wait for it")
        elif session.leased.reachability() is Reachability.OPEN:  # else it is lost, which is told with its reason
            self.say(f"{session.leased.name} can be reached again")

    def _drain_seconds(self) -> float:
        """How long the rows in flight take to be answered, nearly all of them."""
        return min(LONGEST_DRAIN, 2 + 3 * self.run.progress().mean_seconds)

    def _on_preemption_notice(self, session: EngineSession, left: float, why: str) -> None:
        """The instance is taken away in so many seconds: another one is asked for, and this one drained in time."""
        if session.leaving is None:
            session.leaving = LeaveReason(LeaveKind.PREEMPTION_NOTICE, why, notice_seconds=left)
            self.warn(f"{session.leased.name}: {session.leaving.describe()}")
        if left <= self._drain_seconds():
            self._leave(session)
        if self.lease_request is None and time.monotonic() >= self._replace_at and not self.run.progress().last_rows:
            pending = PendingLease(
                lambda pause: self.client.acquire(self.need, say=self.say, pause=pause, replaces=session.leased),
                self._drop,
            )
            self.lease_request = _LeaseRequest(pending, session)

    def _roll_over(self) -> None:
        """Asks the market now and then whether a move pays; if it does, asks for a lease of what is to be moved to."""
        now, progress = time.monotonic(), self.run.progress()
        session = self.sessions[0] if len(self.sessions) == 1 else None
        if (
            session is None
            or self.lease_request is not None
            or session.leased.offer is None
            or session.leaving
            or progress.last_rows
        ):
            return
        if self._migration_check is None:
            if now >= self._scout_at:
                self._scout_at = now + self.client.config.move_seconds
                rows_left = self.run.rows - progress.rows_done
                self._migration_check = BackgroundTask(lambda: self.client.better(self.need, session.leased, rows_left))
            return
        if not self._migration_check.done:
            return
        scouted, self._migration_check = self._migration_check, None
        if scouted.error is not None:
            self.warn(f"no look at other offers: {type(scouted.error).__name__}: {scouted.error}")
        if (decision := scouted.result) is None or decision.instance != session.leased.name:
            return
        session.leaving = LeaveReason(LeaveKind.MIGRATION, decision.sentence)
        pending = PendingLease(
            lambda pause: self.client.move(self.need, session.leased, decision, say=self.say, pause=pause), self._drop
        )
        self.lease_request = _LeaseRequest(pending, session, decision)
