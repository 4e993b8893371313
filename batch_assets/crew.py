"""The engines at work for one run: normally one, two while it moves, none while it waits.

Everything is decided here, in the op's main thread, a few times a second; rows flow on the loop thread. Whatever may
block (the fleet's database, a provider, a boot of minutes) is an errand: done in a thread, and looked at afterwards.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from batch_assets.loop_thread import LoopThread, Running
from batch_assets.range_run import RangeRun
from gpu_runner.engine import EngineLost, EngineRefused
from gpu_runner.fleet import BookError, RunEnded
from gpu_runner.heart import Heart
from resources.fleet import EngineStartError, FleetConfigError, LeasedEngine, Requirement
from resources.leased import Look
from resources.moving import Decision
from resources.renting import NoneStart, NotRented, Renter

WAIT_SECONDS = 0.2
CANCEL_SECONDS = 2.0
GIVE_BACK_SECONDS = 4.0
REST_SECONDS = 15.0
FRUITLESS_ENGINES = 15  # bisecting a batch for a row that kills engines takes at most 9 (DESIGN section 5)
FAILED_STARTS = 3
LOOK_SECONDS = 1.0
FAILED_MOVE_SECONDS = 15.0
LONGEST_DRAIN = 300.0
WAITS = "waits for batches that another run works on"

# A store that does not answer: when it is said, when leases are given back, when the run ends. A restart of a store or
# a fail-over takes less than a minute; a run without a lease costs no GPU, and holds what is finished in its memory.
SAY_SILENT_SECONDS, RELEASE_SILENT_SECONDS, GIVE_UP_SILENT_SECONDS = 10.0, 60.0, 1800.0

Result = TypeVar("Result")


class GivenUp(Exception):
    """Nobody waits for this lease any more."""


class Errand(Generic[Result]):
    """Something that may take long, done in a thread that ends with the process."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self.result: Result | None = None
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="errand", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error

    @property
    def done(self) -> bool:
        """It has its result or an error."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """True when done within this time."""
        self._thread.join(seconds)
        return self.done


class Hire:
    """A lease that is being asked for. `drop` gives back one that nobody takes any more.

    `instead_of`: the shift that it is to replace; `decision`: why, when that is a move.
    """

    def __init__(
        self,
        ask: Callable[[Callable[[float], None]], LeasedEngine],
        drop: Callable[[LeasedEngine], None],
        instead_of: Shift | None = None,
        decision: Decision | None = None,
    ) -> None:
        self.instead_of, self.decision = instead_of, decision
        self.leased: LeasedEngine | None = None
        self._ask, self._drop = ask, drop
        self._given_up = threading.Event()
        self._guard = threading.Lock()
        self._errand = Errand(self._run)

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
        """It has its lease, or an error, or was given up."""
        return self._errand.done

    @property
    def error(self) -> Exception | None:
        """Why there is no lease."""
        return self._errand.error

    def wait(self, seconds: float) -> bool:
        """True when done within this time."""
        return self._errand.wait(seconds)

    def cancel(self) -> LeasedEngine | None:
        """Give it up. Returns the lease if it was there already; a later one is given back by itself."""
        with self._guard:
            self._given_up.set()
            leased, self.leased = self.leased, None
        return leased


@dataclass(eq=False)
class Shift:
    """One engine at work. `leaving` says why it takes no more rows; `handing_on`: telling that others may have it.

    `looking`: what its instance's row says, asked for now and then. `succeeded`: another run has it already.
    """

    leased: LeasedEngine
    serving: Running[None]
    stop: asyncio.Event
    leaving: str = ""
    retire: bool = False
    handing_on: Errand[bool] | None = None
    looking: Errand[Look] | None = None
    look_at: float = 0.0
    succeeded: bool = False
    began: float = field(default_factory=time.monotonic)


class Crew:
    """Serves a range run with one engine after the other until nothing is missing."""

    def __init__(
        self,
        renter: Renter,
        heart: Heart,
        need: Requirement,
        run: RangeRun,
        loop: LoopThread,
        *,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        decided: Callable[[Decision], None],
        leased: Callable[[LeasedEngine], None] = lambda _: None,
        given_back: Callable[[LeasedEngine, str], None] = lambda *_: None,
    ) -> None:
        self.renter, self.heart, self.need, self.run, self.loop = renter, heart, need, run, loop
        self.say, self.warn, self.decided = say, warn, decided
        self.leased, self.given_back = leased, given_back
        self.shifts: list[Shift] = []
        self.hire: Hire | None = None
        heart.drain_seconds = self._drain_seconds
        self._before = run.progress()
        self._fruitless = self._unused = self._failed_starts = self._failed_asks = 0
        self._rest_until = self._scout_at = self._replace_at = 0.0
        self._scouting: Errand[Decision | None] | None = None
        self._preparing: Running[bool] | None = None
        self._silent = False

    def step(self) -> str | None:
        """Move on by one look. None: go on; "": nothing is left to do; else why the run cannot go on."""
        silent = self.run.health.silent_seconds()
        if silent >= SAY_SILENT_SECONDS or self._silent:
            return self._store_is_silent(silent)
        return self._step()

    def _store_is_silent(self, seconds: float) -> str | None:
        """Say so, give back what costs money when it lasts, and go on when the store answers again."""
        if not seconds:
            self.say("the store answers again")
            self.heart.note, self._silent = "", False
            return None
        words = self.run.health.words(time.time())
        if not self._silent:
            self._silent = True
            self.warn(f"{words}; finished rows are kept in memory until it does")
        if seconds >= GIVE_UP_SILENT_SECONDS:
            return f"{words}; start it again when the store is back"
        self.heart.note = words
        if seconds < RELEASE_SILENT_SECONDS:
            return self._step()
        hire, self.hire = self.hire, None
        if hire is not None and (leased := hire.cancel()) is not None:
            self._give_back(leased, words)
        for shift in list(self.shifts):
            shift.serving.cancel(CANCEL_SECONDS)
            self._release(shift, words)
        return None

    def _step(self) -> str | None:
        for shift in list(self.shifts):
            if (reason := self._watch(shift)) is not None:
                return reason
        if (reason := self._hired()) is not None:
            return reason
        if not self.shifts and self.hire is None:
            if self.run.progress().finished:
                return ""
            if (reason := self._prepared()) is not None:
                return reason
            if self._preparing is None and time.monotonic() >= self._rest_until and not self._silent:
                self.hire = Hire(lambda pause: self.renter.acquire(self.need, say=self.say, pause=pause), self._drop)
        for shift in self.shifts:
            self._look(shift)
            if self.run.waits and not shift.leaving:
                self._stand_by(shift)
        self._roll_over()
        return None

    def _stand_by(self, shift: Shift) -> None:
        """Nothing to ask before another run has done its batches: it may need this very engine for them."""
        shift.leaving = WAITS
        self.say(f"gives {shift.leased.name} back: {WAITS}")
        self.loop.call(shift.stop.set)

    def _prepared(self) -> str | None:
        """Without an engine, and while other runs hold what is left: wait for them. "" when they have done it all."""
        if self._preparing is None:
            if self.run.waits:
                self.heart.note = WAITS
                self._preparing = self.loop.submit(self.run.prepare())
            return None
        if self.heart.ended.is_set():
            return str(RunEnded(self.heart.run_id))
        if not self._preparing.wait(0):
            return None
        preparing, self._preparing = self._preparing, None
        self.heart.note = ""
        return None if preparing.result() else ""

    def wait(self, seconds: float) -> None:
        """Until something may have changed, or the time is over."""
        if self.shifts:
            self.shifts[0].serving.wait(seconds)
        elif self.hire is not None:
            self.hire.wait(seconds)
        elif self._preparing is not None:
            self._preparing.wait(seconds)
        else:
            time.sleep(seconds)

    def end(self) -> None:
        """Stop everything and give every lease back once. For the op's last act, whatever its reason."""
        hire, self.hire = self.hire, None
        if hire is not None and (leased := hire.cancel()) is not None:
            self._drop(leased)
        if self._preparing is not None:
            self._preparing.cancel(CANCEL_SECONDS)
        for shift in self.shifts:
            shift.serving.cancel(0)
        for shift in list(self.shifts):
            shift.serving.cancel(CANCEL_SECONDS)
            self._release(shift, "the run ended")
        if hire is not None:
            hire.wait(GIVE_BACK_SECONDS)

    def _drop(self, leased: LeasedEngine) -> None:
        self._give_back(leased, "the run ended")

    def _give_back(self, leased: LeasedEngine, reason: str, *, retire: bool = False, lost: bool = False) -> None:
        errand = Errand(lambda: self.renter.release(leased, reason=reason, retire=retire, lost=lost))
        if not errand.wait(GIVE_BACK_SECONDS) or errand.error is not None:
            failed = type(errand.error).__name__ if errand.error else "no answer yet"
            self.warn(f"{leased.name} was not given back ({failed}): its lease lapses by itself")

    # shifts

    def _begin(self, leased: LeasedEngine) -> None:
        stop = asyncio.Event()
        self.say(f"leased {leased.name} ({leased.instance_type}), epoch {leased.epoch}")
        if leased.offer is not None:
            self.leased(leased)
        self.shifts.append(Shift(leased, self.loop.submit(self.run.serve(leased, stop)), stop))

    def _release(self, shift: Shift, reason: str, *, retire: bool = False, lost: bool = False) -> None:
        self.shifts.remove(shift)
        self._give_back(shift.leased, reason, retire=retire, lost=lost)
        if shift.leased.offer is not None:
            self.given_back(shift.leased, reason)

    def _watch(self, shift: Shift) -> str | None:
        """Ends a shift that is over. Returns what `step` shall return, or None."""
        if not shift.serving.wait(0):
            if not self.heart.check(shift.leased.lease):
                shift.serving.cancel(CANCEL_SECONDS)
                self._release(shift, "lease lost")
                return self._lost(f"lease on {shift.leased.name} lost (epoch {shift.leased.epoch})")
            self._hand_on(shift)
            return None
        try:
            shift.serving.result()
        except EngineLost as error:
            self._release(shift, f"engine lost: {error}", retire=True, lost=True)
            return self._lost(f"engine {shift.leased.name} lost: {error}")
        except EngineRefused as error:
            self._release(shift, str(error))
            return str(error)
        except BaseException:
            self._release(shift, "the run failed")
            raise
        self._release(shift, shift.leaving or "done", retire=shift.retire)
        return "" if self.run.progress().finished and not self.shifts else None

    def _hand_on(self, shift: Shift) -> None:
        """With the last rows in flight the next run may have the engine, unless it is being left."""
        if shift.handing_on is not None and shift.handing_on.done and not shift.handing_on.result:
            shift.handing_on = None  # the book did not answer: say it again
        if shift.handing_on is None and not shift.leaving and self.run.progress().last_rows:
            shift.handing_on = Errand(lambda: self.renter.hand_on(shift.leased))

    def _lost(self, reason: str) -> str | None:
        self.warn(f"{reason}; asking for another engine")
        now, before = self.run.progress(), self._before
        self._fruitless = self._fruitless + 1 if now.rows_done == before.rows_done else 0
        self._unused = self._unused + 1 if now.requests == before.requests else 0
        self._before = now
        if self.heart.ended.is_set():
            return str(RunEnded(self.heart.run_id))
        if self._fruitless >= FRUITLESS_ENGINES:
            return f"{self._fruitless} engines in a row finished no row; the last one: {reason}"
        # A server behind a proxy answers 503 at once for as long as it starts: minutes.
        self._rest_until = time.monotonic() + min(REST_SECONDS, WAIT_SECONDS * 2**self._unused)
        return None

    # hiring

    def _hired(self) -> str | None:
        hire = self.hire
        if hire is None or not hire.done:
            return None
        self.hire = None
        if hire.leased is not None:
            self._failed_starts = self._failed_asks = 0
            if hire.decision is not None:
                self.decided(hire.decision)
            self._begin(hire.leased)
            if hire.instead_of in self.shifts:
                self._leave(hire.instead_of)
            return None
        if hire.instead_of is not None:
            self._stay(hire.instead_of, hire)
            return None
        return self._not_hired(hire.error)

    def _stay(self, shift: Shift, hire: Hire) -> None:
        """What was to replace an engine could not be had."""
        if not shift.retire:
            self.warn(f"stays on {shift.leased.name}: {hire.error or 'the move was given up'}")
        self._replace_at = self._scout_at = time.monotonic() + FAILED_MOVE_SECONDS
        if hire.decision is not None and not shift.retire:
            shift.leaving = ""

    def _not_hired(self, error: Exception | None) -> str | None:
        if isinstance(error, NoneStart | FleetConfigError | RunEnded | EngineRefused):
            return str(error)
        if isinstance(error, EngineStartError):
            self._failed_starts += 1
            if self._failed_starts >= FAILED_STARTS:
                return f"{self._failed_starts} engines in a row did not start; the last one: {error}"
            return self._lost(str(error))
        if isinstance(error, BookError | OSError | NotRented):
            self._failed_asks += 1
            self._rest_until = time.monotonic() + min(REST_SECONDS, WAIT_SECONDS * 2**self._failed_asks)
            self.warn(f"the fleet does not answer ({type(error).__name__}); asking again")
            return None
        if error is not None:
            raise error
        return None

    def _leave(self, shift: Shift) -> None:
        """It takes no more rows; its lease ends when the last ones are answered."""
        shift.retire = True
        self.loop.call(shift.stop.set)

    # moving

    def _look(self, shift: Shift) -> None:
        """Once a second: was notice given, is it to end, has another run taken over?"""
        now = time.monotonic()
        if shift.leased.offer is None:
            return
        if shift.looking is None:
            if now >= shift.look_at:
                shift.look_at = now + LOOK_SECONDS
                shift.looking = Errand(lambda: self.renter.look(shift.leased))
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
        if seen.leave:
            shift.leaving = seen.leave
            self.warn(f"leaves {shift.leased.name}: {seen.leave}")
            self._leave(shift)
        elif seen.notice_seconds is not None:
            self._heed(shift, seen.notice_seconds)

    def _drain_seconds(self) -> float:
        """How long the rows in flight take to be answered, nearly all of them."""
        return min(LONGEST_DRAIN, 2 + 3 * self.run.progress().mean_seconds)

    def _heed(self, shift: Shift, left: float) -> None:
        """The instance is taken away in so many seconds: another one is asked for, and this one drained in time."""
        if not shift.leaving:
            shift.leaving = f"it will be taken away in {left:.0f} s"
            self.warn(f"{shift.leased.name}: {shift.leaving}")
        if left <= self._drain_seconds():
            self._leave(shift)
        if self.hire is None and time.monotonic() >= self._replace_at and not self.run.progress().last_rows:
            self.hire = Hire(
                lambda pause: self.renter.acquire(self.need, say=self.say, pause=pause, replaces=shift.leased),
                self._drop,
                shift,
            )

    def _roll_over(self) -> None:
        """Asks the market from time to time whether a move pays; if it does, hires what is to be moved to."""
        now, progress = time.monotonic(), self.run.progress()
        shift = self.shifts[0] if len(self.shifts) == 1 else None
        if shift is None or self.hire is not None or shift.leased.offer is None or shift.leaving or progress.last_rows:
            return
        if self._scouting is None:
            if now >= self._scout_at:
                self._scout_at = now + self.renter.config.move_seconds
                rows_left = self.run.rows - progress.rows_done
                self._scouting = Errand(lambda: self.renter.better(self.need, shift.leased, rows_left))
            return
        if not self._scouting.done:
            return
        scouted, self._scouting = self._scouting, None
        if scouted.error is not None:
            self.warn(f"no look at other offers: {type(scouted.error).__name__}: {scouted.error}")
        if (decision := scouted.result) is None or decision.instance != shift.leased.name:
            return
        shift.leaving = decision.sentence
        self.hire = Hire(
            lambda pause: self.renter.move(self.need, shift.leased, decision, say=self.say, pause=pause),
            self._drop,
            shift,
            decision,
        )
