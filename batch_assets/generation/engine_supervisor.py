"""The engines at work for one run: normally one, two while it moves, none while it waits.

Everything is decided here, in the op's main thread, a few times a second; rows flow on the loop thread. Whatever may
block (the fleet's database, a provider, a boot of minutes) is a background task: done in a thread, looked at later.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from batch_assets.durations import duration
from batch_assets.generation.engine_session import (
    CONTINUE,
    DONE,
    WAITS,
    EngineSession,
    LeaveKind,
    LeaveReason,
    StepResult,
    failed,
)
from batch_assets.generation.loop_thread import LoopThread, Running
from batch_assets.generation.pending_lease import BackgroundTask, PendingLease
from batch_assets.generation.progress_report import late_words
from batch_assets.generation.range_run import RangeRun
from gpu_runner.client.engine_client import EngineLost, EngineRefused
from gpu_runner.fleet.database import FleetDatabaseError, RunEnded
from gpu_runner.fleet.heartbeat import Heartbeat
from gpu_runner.fleet.wait_reason import RequestFailure, WaitKind, WaitReason
from gpu_runner.inference.failures.failing_requests import FailingRequests
from gpu_runner.reachability import Reachability
from resources.fleet.client import FleetClient, NoInstanceStarted, ProvisioningFailed
from resources.fleet.migration import Migration
from resources.fleet.resource import EngineStartError, FleetConfigError, LeasedEngine, Requirement
from resources.objects.health import GIVE_UP_SILENT_SECONDS, RELEASE_SILENT_SECONDS, SAY_SILENT_SECONDS

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


@dataclass(frozen=True, eq=False)
class _Hire:
    """A lease that is asked for. `instead_of`: the session that it is to replace; `decision`: why, if it is a move."""

    pending: PendingLease
    instead_of: EngineSession | None = None
    decision: Migration | None = None


class EngineSupervisor:
    """Serves a range run with one engine after the other until nothing is missing."""

    def __init__(
        self,
        renter: FleetClient,
        heart: Heartbeat,
        need: Requirement,
        run: RangeRun,
        loop: LoopThread,
        *,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        decided: Callable[[Migration], None],
        leased: Callable[[LeasedEngine], None] = lambda _: None,
        given_back: Callable[[LeasedEngine, str], None] = lambda *_: None,
    ) -> None:
        self.renter, self.heart, self.need, self.run, self.loop = renter, heart, need, run, loop
        self.say, self.warn, self.decided = say, warn, decided
        self.leased, self.given_back = leased, given_back
        self.shifts: list[EngineSession] = []
        self.hire: _Hire | None = None
        heart.drain_seconds = self._drain_seconds
        self._before = run.progress()
        self._fruitless = self._unused = self._failed_starts = self._failed_asks = 0
        self._rest_until = self._scout_at = self._replace_at = 0.0
        self._migration_check: BackgroundTask[Migration | None] | None = None
        self._preparing: Running[bool] | None = None
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
            self.heart.tell("")
            return CONTINUE
        words = self.run.health.words(time.time())
        if not self._silent:
            self._silent = True
            self.warn(f"{words}; finished rows are kept in memory until it does")
        if seconds >= GIVE_UP_SILENT_SECONDS:
            return failed(f"{words}; start it again when the store is back")
        self.heart.tell(words, WaitReason(WaitKind.STORE))
        if seconds < RELEASE_SILENT_SECONDS:
            return self._step()
        hire, self.hire = self.hire, None
        if hire is not None and (leased := hire.pending.cancel()) is not None:
            self._give_back(leased, words)
        for shift in list(self.shifts):
            shift.serving.cancel(CANCEL_SECONDS)
            self._release(shift, words)
        return CONTINUE

    def _step(self) -> StepResult:
        for shift in list(self.shifts):
            if (result := self._watch(shift)) != CONTINUE:
                return result
        if (result := self._hired()) != CONTINUE:
            return result
        if not self.shifts and self.hire is None:
            if self.run.progress().finished:
                return DONE
            if (result := self._prepared()) != CONTINUE:
                return result
            if self._preparing is None and time.monotonic() >= self._rest_until and not self._silent:
                self.hire = _Hire(
                    PendingLease(lambda pause: self.renter.acquire(self.need, say=self.say, pause=pause), self._drop)
                )
        for shift in self.shifts:
            self._look(shift)
            if self.run.waits and not shift.leaving:
                self._stand_by(shift)
        self._tell_late()
        self._roll_over()
        self._tell_failing(time.monotonic())
        return CONTINUE

    def _tell_late(self) -> None:
        """Rows that are late, unless the run has something else to say."""
        late, note = late_words(self.run.progress().late), self.heart.activity.note
        usual = {"", *(f"on {shift.leased.name}" for shift in self.shifts)}
        if note in usual:
            self._usual = note
        if late != self._late and note in (*usual, self._late):
            self.heart.tell(late or self._usual)
            self._late = late

    def _stand_by(self, shift: EngineSession) -> None:
        """Nothing to ask before another run has done its batches: it may need this very engine for them."""
        shift.leaving = LeaveReason(LeaveKind.OTHER_RUN)
        self.say(f"gives {shift.leased.name} back: {shift.leaving.describe()}")
        self.loop.call(shift.stop.set)

    def _tell_failing(self, now: float) -> None:
        """What every request meets, for as long as it does, unless the run says already what else it waits for."""
        failing, before = self.run.failing(now - FAILING_SECONDS), self._failing
        self._failing = failing
        if failing is None:
            if before is not None and self.shifts:
                self.say(f"requests are answered again, after {duration(now - before.since)}")
                self.heart.tell(f"on {self.shifts[0].leased.name}")
            return
        words = failing.describe(time.time() - (now - failing.since))
        if before is None or before.code != failing.code:
            self.warn(words)
        if not self._silent and (self.shifts or (self.hire is None and self._preparing is None)):
            met = RequestFailure(failing.code, failing.status, failing.sentence)
            self.heart.tell(words, WaitReason(WaitKind.REQUESTS_FAIL, failure=met, seconds=now - failing.since))

    def _prepared(self) -> StepResult:
        """Without an engine, and while other runs hold what is left: wait for them. DONE when they have done it all."""
        if self._preparing is None:
            if self.run.waits:
                self.heart.tell(WAITS, WaitReason(WaitKind.OTHER_RUN))
                self._preparing = self.loop.submit(self.run.prepare())
            return CONTINUE
        if self.heart.ended.is_set():
            return failed(RunEnded(self.heart.run_id))
        if not self._preparing.wait(0):
            return CONTINUE
        preparing, self._preparing = self._preparing, None
        self.heart.tell("")
        return CONTINUE if preparing.result() else DONE

    def wait(self, seconds: float) -> None:
        """Until something may have changed, or the time is over."""
        if self.shifts:
            self.shifts[0].serving.wait(seconds)
        elif self.hire is not None:
            self.hire.pending.wait(seconds)
        elif self._preparing is not None:
            self._preparing.wait(seconds)
        else:
            time.sleep(seconds)

    def end(self) -> None:
        """Stop everything and give every lease back once. For the op's last act, whatever its reason."""
        hire, self.hire = self.hire, None
        if hire is not None and (leased := hire.pending.cancel()) is not None:
            self._drop(leased)
        if self._preparing is not None:
            self._preparing.cancel(CANCEL_SECONDS)
        for shift in self.shifts:
            shift.serving.cancel(0)
        with contextlib.ExitStack() as each:  # all of them, also where the end of one cannot be told
            if hire is not None:
                each.callback(hire.pending.wait, GIVE_BACK_SECONDS)
            for shift in reversed(self.shifts):
                each.callback(self._break_off, shift)

    def _break_off(self, shift: EngineSession) -> None:
        shift.serving.cancel(CANCEL_SECONDS)
        self._release(shift, "the run ended")

    def _drop(self, leased: LeasedEngine) -> None:
        self._give_back(leased, "the run ended")

    def _give_back(self, leased: LeasedEngine, reason: str, *, retire: bool = False, lost: bool = False) -> None:
        task = BackgroundTask(lambda: self.renter.release(leased, reason=reason, retire=retire, lost=lost))
        if not task.wait(GIVE_BACK_SECONDS) or task.error is not None:
            failed = type(task.error).__name__ if task.error else "no answer yet"
            self.warn(f"{leased.name} was not given back ({failed}): its lease lapses by itself")

    # shifts

    def _begin(self, leased: LeasedEngine) -> None:
        stop = asyncio.Event()
        # First of all: what is told may not be heard, and `end` gives back what it finds here.
        self.shifts.append(EngineSession(leased, self.loop.submit(self.run.serve(leased, stop)), stop))
        self.say(f"leased {leased.name} ({leased.instance_type}), epoch {leased.epoch}")
        if leased.offer is not None:
            self.leased(leased)

    def _release(self, shift: EngineSession, reason: str, *, retire: bool = False, lost: bool = False) -> None:
        self.shifts.remove(shift)
        self._give_back(shift.leased, reason, retire=retire, lost=lost)
        if shift.leased.offer is not None:
            self.given_back(shift.leased, reason)

    def _watch(self, shift: EngineSession) -> StepResult:
        """Ends a shift that is over. Returns what `step` shall return."""
        if not shift.serving.wait(0):
            if not self.heart.check(shift.leased.lease):
                shift.serving.cancel(CANCEL_SECONDS)
                why = self._why_lost(shift)
                self._release(shift, f"lease lost{why}")
                return self._lost(f"lease on {shift.leased.name} lost (epoch {shift.leased.epoch}){why}")
            self._hand_on(shift)
            return CONTINUE
        try:
            shift.serving.result()
        except EngineLost as error:
            why = self._why_lost(shift)
            self._release(shift, f"engine lost: {error}{why}", retire=True, lost=True)
            return self._lost(f"engine {shift.leased.name} lost: {error}{why}")
        except EngineRefused as error:
            self._release(shift, str(error))
            return failed(error)
        except BaseException:
            self._release(shift, "the run failed")
            raise
        self._release(shift, "done" if shift.leaving is None else shift.leaving.describe(), retire=shift.retire)
        return DONE if self.run.progress().finished and not self.shifts else CONTINUE

    def _why_lost(self, shift: EngineSession) -> str:
        """What its provider says of an engine that was lost, to be put behind what we saw ourselves."""
        if shift.leased.offer is None:
            return ""
        asking = BackgroundTask(lambda: self.renter.why_lost(shift.leased))
        return f"; {asking.result}" if asking.wait(WHY_SECONDS) and asking.result else ""

    def _hand_on(self, shift: EngineSession) -> None:
        """With the last rows in flight the next run may have the engine, unless it is being left."""
        if shift.handing_on is not None and shift.handing_on.done and not shift.handing_on.result:
            shift.handing_on = None  # the fleet's database did not answer: say it again
        if shift.handing_on is None and not shift.leaving and self.run.progress().last_rows:
            shift.handing_on = BackgroundTask(lambda: self.renter.begin_handover(shift.leased))

    def _lost(self, reason: str) -> StepResult:
        self.warn(f"{reason}; asking for another engine")
        now, before = self.run.progress(), self._before
        self._fruitless = self._fruitless + 1 if now.rows_done == before.rows_done else 0
        self._unused = self._unused + 1 if now.requests == before.requests else 0
        self._before = now
        if self.heart.ended.is_set():
            return failed(RunEnded(self.heart.run_id))
        if self._fruitless >= FRUITLESS_ENGINES:
            return failed(f"{self._fruitless} engines in a row finished no row; the last one: {reason}")
        # A server behind a proxy answers 503 at once for as long as it starts: minutes.
        self._rest_until = time.monotonic() + min(REST_SECONDS, WAIT_SECONDS * 2**self._unused)
        return CONTINUE

    # hiring

    def _hired(self) -> StepResult:
        hire = self.hire
        if hire is None or not hire.pending.done:
            return CONTINUE
        self.hire = None
        if (leased := hire.pending.leased) is not None:
            self._failed_starts = self._failed_asks = 0
            self._begin(leased)
            if hire.decision is not None:
                self.decided(hire.decision)
            if hire.instead_of in self.shifts:
                self._leave(hire.instead_of)
            return CONTINUE
        if hire.instead_of is not None:
            self._stay(hire.instead_of, hire)
            return CONTINUE
        return self._not_hired(hire.pending.error)

    def _stay(self, shift: EngineSession, hire: _Hire) -> None:
        """What was to replace an engine could not be had."""
        if not shift.retire:
            self.warn(f"stays on {shift.leased.name}: {hire.pending.error or 'the move was given up'}")
        self._replace_at = self._scout_at = time.monotonic() + FAILED_MOVE_SECONDS
        if hire.decision is not None and not shift.retire:
            shift.leaving = None

    def _not_hired(self, error: Exception | None) -> StepResult:
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

    def _leave(self, shift: EngineSession) -> None:
        """Let the engine take no more rows; its lease ends when the last ones are answered."""
        shift.retire = True
        self.loop.call(shift.stop.set)

    # moving

    def _look(self, shift: EngineSession) -> None:
        """Once a second: can it be reached, was notice given, is it to end, has another run taken over?"""
        now = time.monotonic()
        if shift.reachability_changed(now):
            self._tell_reachability(shift)
        if shift.leased.spending.exhausted and not shift.leaving:
            shift.leaving = LeaveReason(LeaveKind.BUDGET)
            self.warn(f"leaves {shift.leased.name}: {shift.leaving.describe()}")
            self.loop.call(shift.stop.set)
        if shift.leased.offer is None:
            return
        if shift.looking is None:
            if now >= shift.look_at:
                shift.look_at = now + LOOK_SECONDS
                shift.looking = BackgroundTask(lambda: self.renter.look(shift.leased))
            return
        if not shift.looking.done:
            return
        looked, shift.looking = shift.looking, None
        if looked.result is None:
            return
        seen = looked.result
        if seen.succeeded and not shift.succeeded:
            shift.succeeded = True
            self.loop.call(lambda: shift.leased.spending.succeed(time.monotonic()))
        if shift.retire:  # not `stop`: the loop sets that a little later
            return
        if seen.retired is not None:
            shift.leaving = LeaveReason(LeaveKind.RETIRED, seen.retired)
            self.warn(f"leaves {shift.leased.name}: {seen.retired}")
            self._leave(shift)
        elif seen.notice_seconds is not None:
            self._on_preemption_notice(shift, seen.notice_seconds, seen.notice_reason)

    def _tell_reachability(self, shift: EngineSession) -> None:
        if shift.unreachable:
            self.warn(f"{shift.leased.name} cannot be reached for now{self._why_lost(shift)}; its rows wait for it")
        elif shift.leased.reachability() is Reachability.OPEN:  # else it is lost, which is told with its reason
            self.say(f"{shift.leased.name} can be reached again")

    def _drain_seconds(self) -> float:
        """How long the rows in flight take to be answered, nearly all of them."""
        return min(LONGEST_DRAIN, 2 + 3 * self.run.progress().mean_seconds)

    def _on_preemption_notice(self, shift: EngineSession, left: float, why: str) -> None:
        """The instance is taken away in so many seconds: another one is asked for, and this one drained in time."""
        if shift.leaving is None:
            shift.leaving = LeaveReason(LeaveKind.PREEMPTION_NOTICE, why, notice_seconds=left)
            self.warn(f"{shift.leased.name}: {shift.leaving.describe()}")
        if left <= self._drain_seconds():
            self._leave(shift)
        if self.hire is None and time.monotonic() >= self._replace_at and not self.run.progress().last_rows:
            pending = PendingLease(
                lambda pause: self.renter.acquire(self.need, say=self.say, pause=pause, replaces=shift.leased),
                self._drop,
            )
            self.hire = _Hire(pending, shift)

    def _roll_over(self) -> None:
        """Asks the market from time to time whether a move pays; if it does, hires what is to be moved to."""
        now, progress = time.monotonic(), self.run.progress()
        shift = self.shifts[0] if len(self.shifts) == 1 else None
        if shift is None or self.hire is not None or shift.leased.offer is None or shift.leaving or progress.last_rows:
            return
        if self._migration_check is None:
            if now >= self._scout_at:
                self._scout_at = now + self.renter.config.move_seconds
                rows_left = self.run.rows - progress.rows_done
                self._migration_check = BackgroundTask(lambda: self.renter.better(self.need, shift.leased, rows_left))
            return
        if not self._migration_check.done:
            return
        scouted, self._migration_check = self._migration_check, None
        if scouted.error is not None:
            self.warn(f"no look at other offers: {type(scouted.error).__name__}: {scouted.error}")
        if (decision := scouted.result) is None or decision.instance != shift.leased.name:
            return
        shift.leaving = LeaveReason(LeaveKind.MIGRATION, decision.sentence)
        pending = PendingLease(
            lambda pause: self.renter.move(self.need, shift.leased, decision, say=self.say, pause=pause), self._drop
        )
        self.hire = _Hire(pending, shift, decision)
