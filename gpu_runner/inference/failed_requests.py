"""Failed and denied requests of one engine, until it is known whose fault they were.

A failed request keeps its slot until it is judged (retry.py): so no more rows than one window can fail before somebody
knows whether the engine lives, and an outage or a storm of refusals costs one window of requests, not the whole
dataset. A judged row is tried again, or becomes a dead letter. What a denied request means, `denials` decides.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol

from gpu_runner.client.protocol import RequestDenied, Transient
from gpu_runner.inference.engine_monitor import Watchdog
from gpu_runner.inference.failures.denials import Denial, Denials, Evidence
from gpu_runner.inference.failures.retry import backoff, classify_failure
from gpu_runner.inference.policy import FeedPolicy
from gpu_runner.inference.row_queue import Work
from gpu_runner.inference.row_state import Item
from gpu_runner.inference.windows.concurrency_window import Window
from gpu_runner.inference.worker_state import WorkerLife


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request that keeps its slot until it is judged. `at`: seconds of the loop."""

    item: Item
    error: Transient
    at: float


class Slots(Protocol):
    """What is needed of the engine worker whose requests failed. `in_flight`: rows that were sent, without these."""

    @property
    def in_flight(self) -> Sized: ...
    @property
    def life(self) -> WorkerLife: ...
    @property
    def watchdog(self) -> Watchdog: ...
    def fill(self) -> None: ...
    def end_dead(self, item: Item, code: str, message: str, last: int = 1) -> None: ...


class FailedRequests:
    """Those of one engine, oldest first. `wake` is called when rows may move."""

    def __init__(
        self,
        slots: Slots,
        work: Work,
        policy: FeedPolicy,
        rng: random.Random,
        window: Window,
        wake: Callable[[], None],
    ) -> None:
        self._slots, self._work, self._policy, self._rng, self._window = slots, work, policy, rng, window
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._undecided: deque[Failure] = deque()
        self.denials = Denials()

    def __bool__(self) -> bool:
        return bool(self._undecided or self.denials)

    @property
    def slots_kept(self) -> int:
        """Slots that are taken by requests which failed, or were denied."""
        denied = self.denials.slots(self._window.size) if self.denials else 0
        return len(self._undecided) + denied

    @property
    def oldest(self) -> float | None:
        """Since when a failure waits to be judged."""
        return self._undecided[0].at if self._undecided else None

    @property
    def oldest_break(self) -> float | None:
        """The same, of failures in which the connection was lost or refused."""
        return next((failure.at for failure in self._undecided if failure.error.broken), None)

    def evidence_wanted(self, now: float) -> Evidence | None:
        """The request that denied rows wait for."""
        return self.denials.wanted(now, self._window.size, len(self._slots.in_flight))

    # --- what happened ---

    def failed(self, rows: Sequence[Item], error: Transient, now: float) -> None:
        """A request of these rows failed; they are not in flight any more."""
        self._work.failures.failed(error, error.code, error.message, now, rows[0].row.prompt)
        for item in rows:
            item.fail()
            self._work.count_failure()
            self._undecided.append(Failure(item, error, now))
            first = item.tries == 0 and item.voids == 0
            throttled = error.overload and self._window.on_refused(len(self._slots.in_flight), first=first)
            if throttled and error.retry_after:
                self._rest_until(now + min(error.retry_after, self._policy.retry.retry_after_max))
        if error.broken:
            self._slots.watchdog.suspect()

    def denied(self, item: Item, error: RequestDenied, now: float) -> None:
        """The row waits until it is known whether it is the row that is not wanted, or we are."""
        self._work.count_failure()
        self._work.failures.failed(error, error.code, error.message, now, item.row.prompt)
        self.denials.add(Denial(item, error, now))
        if self.evidence_wanted(now) is not None:
            self._slots.watchdog.suspect()
        self.judge()

    def canary_failed(self, error: Transient, now: float) -> None:
        """A request that no row needed failed as well."""
        self._work.failures.failed(error, error.code, error.message, now)

    @property
    def reason(self) -> str:
        """What the newest failed request met, for people; "" where one was answered since."""
        failing = self._work.failures.failing()
        return "" if failing is None else failing.reason

    def answered(self, item: Item, now: float) -> None:
        """The engine has answered a request, of this row among others."""
        self._work.failures.answered()
        self.denials.remember(item.row.prompt)
        if self:
            self.denials.row_answered(item.sent)
            self._slots.watchdog.succeeded(item.sent, now)
            self.judge()

    def _rest_until(self, until: float) -> None:
        if self._slots.watchdog.rest_until(until):
            self._loop.call_at(until, self._wake)

    # --- what becomes of them ---

    def judge(self) -> None:
        """Frees the slots of failures that can be judged now, oldest first."""
        judged, watchdog = self._judge_denied(), self._slots.watchdog
        while self._undecided and not self._slots.life.over:
            failure = self._undecided[0]
            verdict = classify_failure(
                self._policy.retry,
                # A refusal for want of room was written by a server that lives.
                watchdog.claims if failure.error.overload else watchdog.proof,
                failure.at,
                failure.error,
                voids=failure.item.voids,
                outage=failure.at <= watchdog.outage_at,
                by_chance=self._window.refusals.by_chance(len(self._slots.in_flight)),
                health_counts=watchdog.canary_useless,
            )
            if verdict == "undecided":
                break
            self._undecided.popleft()
            self._try_again(failure.item, failure.error, failure.at, charged=verdict == "charged")
            judged = True
        if judged:
            self._loop.call_soon(self._wake)

    def _judge_denied(self) -> bool:
        """Dead letters for the rows whose denial was their own; ends the worker where the engine denies everything."""
        if not self.denials or self._slots.life.over:
            return False
        self._slots.fill()  # rows to take bring evidence
        size, in_flight = self._window.size, len(self._slots.in_flight)
        refused = self.denials.of_engine(size, in_flight)
        if refused is not None:
            self._slots.life.end(refused)
            return False
        now, exhausted = self._loop.time(), self._work.exhausted and not self._work.ready
        own = self.denials.of_rows(now, size, in_flight, exhausted=exhausted)
        for denial in own:
            self._slots.watchdog.answered(now)
            if denial.error.of_account:  # a limit that has passed, or one account of several behind a gateway
                charged = denial.item.voids >= self._policy.retry.max_voids
                self._try_again(denial.item, denial.error, now, charged=charged)
            else:
                self._slots.end_dead(denial.item, denial.error.code, denial.error.message)
        return bool(own)

    def _try_again(self, item: Item, error: Transient | RequestDenied, failed_at: float, *, charged: bool) -> None:
        policy = self._policy.retry
        if charged:
            self._work.charge(item)
            if item.tries >= policy.max_tries:
                self._slots.end_dead(item, error.code, error.message, 0)
                return
        else:
            self._work.void(item)
        asked = error.retry_after if isinstance(error, Transient) else None
        wait = backoff(policy, item.tries if charged else item.voids, asked, self._rng)
        self._work.later(item, failed_at + wait)

    def remove(self, is_gone: Callable[[Item], bool]) -> list[Item]:
        """Takes out rows that are asked for no more; what was seen of the engine stays."""
        gone = [failure.item for failure in self._undecided if is_gone(failure.item)]
        self._undecided = deque(failure for failure in self._undecided if not is_gone(failure.item))
        return gone + self.denials.remove(is_gone)

    def give_up(self) -> tuple[list[Item], list[Item]]:
        """Takes out all rows, of which nothing was proved, and says which of them the engine may have worked on."""
        undecided = list(self._undecided)
        self._undecided.clear()
        items = [failure.item for failure in undecided] + self.denials.give_up()
        return items, [failure.item for failure in undecided if failure.error.taken]
