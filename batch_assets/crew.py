"""The engines at work for one run: normally one, two while it moves, none while it waits.

Everything is decided here, in the op's main thread, a few times a second; rows flow on the loop thread, and a lease is
asked for in a thread of its own, because a boot takes minutes in which the engine that is to be left still works.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from batch_assets.loop_thread import LoopThread, Running
from batch_assets.range_run import RangeRun
from gpu_runner.engine import EngineLost, EngineRefused
from gpu_runner.fleet import RunEnded
from gpu_runner.heart import Heart
from resources.fleet import EngineStartError, FleetConfigError, LeasedEngine, Requirement
from resources.renting import Decision, NoneStart, Renter

WAIT_SECONDS = 0.2
CANCEL_SECONDS = 2.0
HIRE_CANCEL_SECONDS = 4.0
REST_SECONDS = 15.0
FRUITLESS_ENGINES = 15  # bisecting a batch for a row that kills engines takes at most 9 (DESIGN section 5)
FAILED_STARTS = 3
LOOK_SECONDS = 1.0


class GivenUp(Exception):
    """Nobody waits for this lease any more."""


class Hire:
    """A lease that is being asked for, in a thread. `drop` gives back one that nobody takes any more."""

    def __init__(
        self,
        ask: Callable[[Callable[[float], None]], LeasedEngine],
        drop: Callable[[LeasedEngine], None],
        instead_of: Shift | None = None,
    ) -> None:
        self.instead_of = instead_of
        self.leased: LeasedEngine | None = None
        self.error: Exception | None = None
        self._ask, self._drop = ask, drop
        self._given_up = threading.Event()
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="hire", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            leased = self._ask(self._pause)
        except GivenUp:
            return
        except Exception as error:
            self.error = error
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
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """True when done within this time."""
        self._thread.join(seconds)
        return self.done

    def cancel(self) -> LeasedEngine | None:
        """Give it up. Returns the lease if it was there already; a later one is given back by itself."""
        with self._guard:
            self._given_up.set()
            leased, self.leased = self.leased, None
        return leased


@dataclass(eq=False)
class Shift:
    """One engine at work. `leaving` says why it takes no more rows; `handed_on`: another run may use it already."""

    leased: LeasedEngine
    serving: Running[None]
    stop: asyncio.Event
    leaving: str = ""
    retire: bool = False
    handed_on: bool = False
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
        self._before = run.progress()
        self._fruitless = self._unused = self._failed_starts = 0
        self._rest_until = self._look_at = self._scout_at = 0.0
        self._scout = ThreadPoolExecutor(1, thread_name_prefix="scout")
        self._scouting: Future[Decision | None] | None = None

    def step(self) -> str | None:
        """Move on by one look. None: go on; "": nothing is left to do; else why the run cannot go on."""
        for shift in list(self.shifts):
            if (reason := self._watch(shift)) is not None:
                return reason
        if (reason := self._hired()) is not None:
            return reason
        if not self.shifts and self.hire is None:
            if self.run.progress().finished:
                return ""
            if time.monotonic() >= self._rest_until:
                self.hire = Hire(lambda pause: self.renter.acquire(self.need, say=self.say, pause=pause), self._drop)
        self._move()
        self._scouted()
        return None

    def wait(self, seconds: float) -> None:
        """Until something may have changed, or the time is over."""
        if self.shifts:
            self.shifts[0].serving.wait(seconds)
        elif self.hire is not None:
            self.hire.wait(seconds)
        else:
            time.sleep(seconds)

    def end(self) -> None:
        """Stop everything and give every lease back once. For the op's last act, whatever its reason."""
        hire, self.hire = self.hire, None
        if hire is not None and (leased := hire.cancel()) is not None:
            self._drop(leased)
        for shift in self.shifts:
            shift.serving.cancel(0)
        for shift in list(self.shifts):
            shift.serving.cancel(CANCEL_SECONDS)
            self._release(shift, "the run ended")
        if hire is not None:
            hire.wait(HIRE_CANCEL_SECONDS)
        self._scout.shutdown(wait=False, cancel_futures=True)

    def _drop(self, leased: LeasedEngine) -> None:
        self.renter.release(leased, reason="the run ended")

    # shifts

    def _begin(self, leased: LeasedEngine) -> Shift:
        stop = asyncio.Event()
        self.say(f"leased {leased.name} ({leased.instance_type}), epoch {leased.epoch}")
        if leased.offer is not None:
            self.leased(leased)
        shift = Shift(leased, self.loop.submit(self.run.serve(leased, stop)), stop)
        self.shifts.append(shift)
        return shift

    def _release(self, shift: Shift, reason: str, *, retire: bool = False, lost: bool = False) -> None:
        self.shifts.remove(shift)
        self.renter.release(shift.leased, reason=reason, retire=retire, lost=lost)
        if shift.leased.offer is not None:
            self.given_back(shift.leased, reason)

    def _watch(self, shift: Shift) -> str | None:
        """Ends a shift that is over. Returns what `step` shall return, or None."""
        if not shift.serving.wait(0):
            if not self.heart.check(shift.leased.lease):
                shift.serving.cancel(CANCEL_SECONDS)
                self._release(shift, "lease lost")
                return self._lost(f"lease on {shift.leased.name} lost (epoch {shift.leased.epoch})")
            if not shift.handed_on and self.run.progress().last_rows:
                shift.handed_on = self.renter.hand_on(shift.leased)
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
            self._failed_starts = 0
            self._begin(hire.leased)
            if hire.instead_of in self.shifts:
                self._leave(hire.instead_of)
            return None
        if hire.instead_of is not None:
            self.warn(f"stays on {hire.instead_of.leased.name}: {hire.error or 'the move was given up'}")
            if not hire.instead_of.retire:
                hire.instead_of.leaving = ""
            return None
        if isinstance(hire.error, NoneStart):
            return str(hire.error)
        if isinstance(hire.error, EngineStartError):
            self._failed_starts += 1
            if self._failed_starts >= FAILED_STARTS:
                return f"{self._failed_starts} engines in a row did not start; the last one: {hire.error}"
            return self._lost(str(hire.error))
        if isinstance(hire.error, FleetConfigError | RunEnded | EngineRefused):
            return str(hire.error)
        if hire.error is not None:
            raise hire.error
        return None

    def _leave(self, shift: Shift) -> None:
        """It takes no more rows; its lease ends when the last ones are answered."""
        shift.retire = True
        self.loop.call(shift.stop.set)

    def _move(self) -> None:
        """Looks for a notice, or for a better offer, and starts to hire what is to replace a shift."""
        now = time.monotonic()
        if now < self._look_at or not self.shifts:
            return
        self._look_at = now + LOOK_SECONDS
        for shift in self.shifts:
            if shift.leased.offer is None or shift.stop.is_set():
                continue
            left = self.renter.notice(shift.leased)
            if left is not None and (not shift.leaving or left <= self._drain_seconds(shift)):
                if not shift.leaving:
                    shift.leaving = f"it will be taken away in {left:.0f} s"
                    self.warn(f"{shift.leased.name}: {shift.leaving}")
                if left <= self._drain_seconds(shift):
                    self._leave(shift)
                if self.hire is None and not self.run.progress().last_rows:
                    self._replace(shift)
        if len(self.shifts) == 1 and self.hire is None:
            self._roll_over(self.shifts[0], now)

    def _drain_seconds(self, shift: Shift) -> float:
        """How long the rows in flight will take: three times the mean of those that were answered."""
        progress = self.run.progress()
        return 2 + 3 * progress.mean_seconds

    def _replace(self, shift: Shift) -> None:
        self.hire = Hire(
            lambda pause: self.renter.acquire(self.need, say=self.say, pause=pause, replaces=shift.leased),
            self._drop,
            shift,
        )

    def _roll_over(self, shift: Shift, now: float) -> None:
        """Asks the market from time to time, in a thread: to say what is left of many batches takes seconds."""
        if shift.leased.offer is None or shift.leaving or self.run.progress().last_rows:
            return
        if self._scouting is None and now >= self._scout_at:
            self._scout_at = now + self.renter.config.move_seconds
            self._scouting = self._scout.submit(self.renter.better, self.need, shift.leased)

    def _scouted(self) -> None:
        """What the look at the market found; a move begins if it pays and nothing else has happened meanwhile."""
        if self._scouting is None or not self._scouting.done():
            return
        scouted, self._scouting = self._scouting, None
        if (error := scouted.exception()) is not None:
            self.warn(f"no look at other offers: {type(error).__name__}: {error}")
            return
        decision = scouted.result()
        shift = self.shifts[0] if len(self.shifts) == 1 else None
        if decision is None or shift is None or decision.instance != shift.leased.name:
            return
        if self.hire is not None or shift.leaving:
            return
        self.decided(decision)
        shift.leaving = decision.sentence
        self.hire = Hire(
            lambda pause: self.renter.move(self.need, shift.leased, decision, say=self.say, pause=pause),
            self._drop,
            shift,
        )
