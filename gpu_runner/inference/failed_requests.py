"""Failed and denied requests of one engine, until it is known whose fault they were.

A failed request keeps its slot until it is judged (retry.py): so no more rows than one window can fail before somebody
knows whether the engine lives, and an outage or a storm of refusals costs one window of requests, not the whole
dataset. A judged row is tried again, or becomes a dead letter. What a denied request means, `denials` decides.
"""

from __future__ import annotations

import asyncio
import bisect
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_runner.client.protocol import EngineRefused, RequestDenied, Transient
from gpu_runner.inference.engine_liveness import EngineLiveness
from gpu_runner.inference.failures.denials import Denial, Denials, Evidence
from gpu_runner.inference.failures.retry import backoff, classify_failure
from gpu_runner.inference.policy import FeedPolicy
from gpu_runner.inference.row_queue import Work
from gpu_runner.inference.row_state import Item
from gpu_runner.inference.windows.concurrency_window import Window
from gpu_runner.rows import Row

MOST_BROKEN = 4096  # connections that are remembered


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request that keeps its slot until it is judged. `at`: seconds of the loop."""

    item: Item
    error: Transient
    at: float


@dataclass(frozen=True, slots=True)
class DeadRow:
    """A row that is to become a dead letter; `last` as in `RowOutcomes.dead`."""

    item: Item
    code: str
    message: str
    last: int = 1


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What the engine worker is to do: end rows, or leave the engine. Rows to try again are in the queue already."""

    dead: Sequence[DeadRow] = ()
    refused: EngineRefused | None = None


class FailedRequests:
    """Those of one engine, oldest first. `wake` is called when rows may move.

    `in_flight`, of the methods: rows that were sent to this engine, without these.
    """

    def __init__(
        self,
        liveness: EngineLiveness,
        work: Work,
        policy: FeedPolicy,
        rng: random.Random,
        window: Window,
        wake: Callable[[], None],
    ) -> None:
        self._liveness, self._work, self._policy, self._rng, self._window = liveness, work, policy, rng, window
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._undecided: deque[Failure] = deque()
        self._broken: list[float] = []  # when connections broke, of late
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

    def evidence_wanted(self, now: float, in_flight: int) -> Evidence | None:
        """The request that denied rows wait for."""
        return self.denials.wanted(now, self._window.size, in_flight)

    # --- what happened ---

    def failed(self, rows: Sequence[Item], error: Transient, now: float, in_flight: int) -> None:
        """A request of these rows failed; they are not in flight any more."""
        self._work.failures.failed(error, error.code, error.message, now, rows[0].prompt)
        for item in rows:
            item.fail()
            self._work.count_failure()
            self._undecided.append(Failure(item, error, now))
            first = item.tries == 0 and item.voids == 0
            throttled = error.overload and self._window.on_refused(in_flight, first=first)
            if throttled and error.retry_after:
                self._rest_until(now + min(error.retry_after, self._policy.retry.retry_after_max))
        if error.broken:
            self._broken.append(now)
            del self._broken[: max(0, len(self._broken) - MOST_BROKEN)]
            self._liveness.suspect()

    def denied(self, item: Item, error: RequestDenied, now: float, in_flight: int) -> None:
        """The row waits until it is known whether it is the row that is not wanted, or we are. `judge` is to follow."""
        self._work.count_failure()
        self._work.failures.failed(error, error.code, error.message, now, item.prompt)
        self.denials.add(Denial(item, error, now))
        if self.evidence_wanted(now, in_flight) is not None:
            self._liveness.suspect()

    def canary_failed(self, error: Transient, now: float) -> None:
        """A request that no row needed failed as well."""
        self._work.failures.failed(error, error.code, error.message, now)

    @property
    def reason(self) -> str:
        """What the newest failed request met, for people; "" where one was answered since."""
        failing = self._work.failures.failing()
        return "" if failing is None else failing.reason

    def answered(self, item: Item, now: float, asked: Row | None = None) -> bool:
        """The engine has answered a request, of this row among others. Returns whether `judge` is to follow.

        `asked`: the row as the engine was shown it, where that is another one now.
        """
        self._work.failures.answered()
        self.denials.remember(asked or item.row)
        if not self:
            return False
        self.denials.row_answered(item.sent)
        self._liveness.succeeded(item.sent, now)
        return True

    def _rest_until(self, until: float) -> None:
        if self._liveness.rest_until(until):
            self._loop.call_at(until, self._wake)

    # --- what becomes of them ---

    def judge(self, in_flight: int) -> Verdicts:
        """Frees the slots of failures that can be judged now, oldest first."""
        size = self._window.size
        if (refused := self.denials.of_engine(size, in_flight)) is not None:
            return Verdicts(refused=refused)
        dead: list[DeadRow] = []
        judged, liveness = self._judge_denied(in_flight, dead), self._liveness
        while self._undecided:
            failure = self._undecided[0]
            verdict = classify_failure(
                self._policy.retry,
                # A refusal for want of room was written by a server that lives.
                liveness.claims if failure.error.overload else liveness.proof,
                failure.at,
                failure.error,
                voids=failure.item.voids,
                outage=failure.at <= liveness.outage_at or self._one_of_many(failure),
                by_chance=self._window.refusals.by_chance(in_flight),
                health_counts=liveness.canary_useless,
            )
            if verdict == "undecided":
                break
            self._undecided.popleft()
            dead += self._try_again(failure.item, failure.error, failure.at, charged=verdict == "charged")
            judged = True
        if judged:
            self._loop.call_soon(self._wake)
        return Verdicts(dead)

    def _one_of_many(self, failure: Failure) -> bool:
        """Whether many connections broke when this one did."""
        policy = self._policy.retry
        if not failure.error.broken:
            return False
        first = bisect.bisect_left(self._broken, failure.at - policy.burst_seconds)
        together = bisect.bisect_right(self._broken, failure.at + policy.burst_seconds) - first
        return together >= max(policy.burst_rows, policy.burst_share * self._window.size)

    def _judge_denied(self, in_flight: int, dead: list[DeadRow]) -> bool:
        """Takes out the rows whose denial was their own. Returns whether there are any."""
        if not self.denials:
            return False
        now, exhausted = self._loop.time(), self._work.exhausted and not self._work.ready
        own = self.denials.of_rows(now, self._window.size, in_flight, exhausted=exhausted)
        for denial in own:
            self._liveness.answered(now)
            if denial.error.of_account:  # a limit that has passed, or one account of several behind a gateway
                charged = denial.item.voids >= self._policy.retry.max_voids
                dead += self._try_again(denial.item, denial.error, now, charged=charged)
            else:
                dead.append(DeadRow(denial.item, denial.error.code, denial.error.message))
        return bool(own)

    def _try_again(
        self, item: Item, error: Transient | RequestDenied, failed_at: float, *, charged: bool
    ) -> list[DeadRow]:
        """Puts the row into the queue, or returns it, where that was its last try."""
        policy = self._policy.retry
        if charged:
            self._work.charge(item)
            if item.tries >= policy.max_tries:
                return [DeadRow(item, error.code, error.message, 0)]
        else:
            self._work.void(item)
        asked = error.retry_after if isinstance(error, Transient) else None
        wait = backoff(policy, item.tries if charged else item.voids, asked, self._rng.random)
        self._work.later(item, failed_at + wait)
        return []

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
