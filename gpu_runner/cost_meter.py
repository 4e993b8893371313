"""What the rows on one engine cost: its time, handed out to them by their tokens.

While at least one row is in flight the clock runs into a pot. A row that gets its outcome takes its share: its tokens
against those still expected of the rows in flight, of which half is taken to be done. So the shares of a long run
follow the tokens, and whatever the guess was worth, the last row takes the rest: they add up to the busy time exactly.
Pure: times are arguments, in seconds of one monotonic clock.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from gpu_runner.token_price import TokenPrice


@dataclass(frozen=True, slots=True)
class LeaseUsage:
    """How a lease used its instance so far, in real seconds; `wasted` went to rows that got no outcome here.

    `useful_usd`, `wasted_usd`: of an engine that is paid by the token; 0 where time is paid.
    """

    useful_seconds: float = 0.0
    wasted_seconds: float = 0.0
    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    useful_usd: float = 0.0
    wasted_usd: float = 0.0


class CostMeter:
    """The fleet's database of one engine while it serves. `usd_per_second` is None while no price is known."""

    by_tokens = False  # whether tokens are paid, not time

    def __init__(self, usd_per_second: float | None = None) -> None:
        self.usd_per_second = usd_per_second
        self._since: float | None = None
        self._pot = 0.0
        self._useful = 0.0
        self._wasted = 0.0
        self._rows = self._shares = self._prompt_tokens = self._completion_tokens = 0
        self._succeeded = False

    def succeed(self, now: float) -> None:
        """Another run holds the engine now, and pays for it; our last rows share what has come together so far."""
        self._accrue(now)
        self._since, self._succeeded = None, True

    def begin(self, now: float) -> None:
        """A row was submitted."""
        if self._since is None and not self._succeeded:
            self._since = now

    def settle(
        self,
        prompt_tokens: int,
        completion_tokens: int,
        in_flight: int,
        now: float,
        *,
        together: int = 0,
        cached_tokens: int = 0,
        over: bool = True,
    ) -> float | None:
        """A row has its outcome, `in_flight` others have not: its share in US dollars.

        `together`: rows besides that the same answer brought, which are settled next and have used as much of it.
        `cached_tokens`: of the prompt's, those that the engine had in its cache. `over`: False where the row goes on
        with another turn, of which this is the share.
        """
        self._accrue(now)
        self._rows += over
        self._shares += 1
        self._prompt_tokens += prompt_tokens
        self._completion_tokens += completion_tokens
        tokens = max(1, prompt_tokens + completion_tokens)
        mean = max(1.0, (self._prompt_tokens + self._completion_tokens) / self._shares)
        share = self._pot * tokens / (tokens + together * mean + in_flight * mean / 2)
        self._pot -= share
        self._useful += share
        if in_flight + together == 0:
            self._since = None
        return None if self.usd_per_second is None else share * self.usd_per_second

    def rest(self, now: float) -> None:
        """Nothing is in flight, though the last row got no outcome: it will be tried again."""
        self._accrue(now)
        self._since = None

    def lose(self, now: float) -> None:
        """The engine serves no longer: what no row has taken is wasted."""
        self.rest(now)
        self._wasted += self._pot
        self._pot = 0.0

    def count(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> None:
        """An answer of so many tokens has come, whatever becomes of its row."""

    def fly(self, rows: int) -> None:
        """So many rows are with the engine now."""

    def give_up(self, rows: int) -> None:
        """A request of so many rows was broken off: it may have to be paid."""

    @property
    def room(self) -> int:
        """How many further rows may be sent now."""
        return sys.maxsize

    @property
    def exhausted(self) -> bool:
        """Whether nothing is with the engine, and no row may be sent for want of money."""
        return False

    def spent(self) -> LeaseUsage:
        """Totals so far. Read from other threads: each figure is right, together they may be one row apart."""
        return LeaseUsage(self._useful, self._wasted, self._rows, self._prompt_tokens, self._completion_tokens)

    def _accrue(self, now: float) -> None:
        if self._since is not None:
            self._pot += now - self._since
            self._since = now


class TokenMeter(CostMeter):
    """The meter of an engine that is paid by the token: what its answers cost, whatever time they took.

    No row is sent that could pass what is granted (`hold`, `grant`), which is unbounded at first: each row with the
    engine counts as the dearest one, of `row_usd`, until it is answered.
    """

    by_tokens = True

    def __init__(self, price: TokenPrice, row_usd: float) -> None:
        super().__init__()
        self.price, self.row_usd = price, row_usd
        self._granted = math.inf
        self._held = False
        self._flying = self._given_up = 0
        self._answered_usd = self._settled_usd = self._lost_usd = 0.0

    def count(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> None:
        """An answer of so many tokens has come: that is what is paid."""
        usd = self.price.usd(prompt_tokens, completion_tokens, cached_tokens)
        self.row_usd = max(self.row_usd, usd)
        self._answered_usd += usd

    def fly(self, rows: int) -> None:
        """So many rows are with the engine now."""
        self._flying = rows

    def give_up(self, rows: int) -> None:
        """Count the request as with the engine for ever: against what is granted, and in no bill."""
        self._given_up += rows

    def settle(
        self,
        prompt_tokens: int,
        completion_tokens: int,
        in_flight: int,
        now: float,
        *,
        together: int = 0,
        cached_tokens: int = 0,
        over: bool = True,
    ) -> float | None:
        """A row has its outcome: what all its answers cost."""
        super().settle(prompt_tokens, completion_tokens, in_flight, now, together=together, over=over)
        usd = self.price.usd(prompt_tokens, completion_tokens, cached_tokens)
        self._settled_usd += usd
        return usd

    def lose(self, now: float) -> None:
        """The engine serves no longer: answers of rows without an outcome here were paid in vain."""
        super().lose(now)
        self._lost_usd = max(0.0, self._answered_usd - self._settled_usd)

    @property
    def room(self) -> int:
        """How many further rows may be sent: none while it is asked for how much is granted."""
        if self._held:
            return 0
        left = self._granted - self._answered_usd
        if math.isinf(left) or self.row_usd <= 0:
            return sys.maxsize
        return max(0, int(left / self.row_usd + 1e-9) - self._flying - self._given_up)

    @property
    def exhausted(self) -> bool:
        """Whether nothing is with the engine, and what is granted pays for no row."""
        return self._flying == 0 and not self._held and self.room == 0

    def hold(self) -> float:
        """Send nothing until `grant`. Returns the most US dollars that are spent with what was sent already."""
        self._held = True
        return self._answered_usd + (self._flying + self._given_up) * self.row_usd

    def grant(self, usd: float | None) -> None:
        """So many US dollars may be spent here in all; None: as many as before."""
        self._granted = self._granted if usd is None else usd
        self._held = False

    def spent(self) -> LeaseUsage:
        """Totals so far."""
        time = super().spent()
        useful = min(self._answered_usd, self._settled_usd)
        tokens = (time.rows, time.prompt_tokens, time.completion_tokens)
        return LeaseUsage(time.useful_seconds, time.wasted_seconds, *tokens, useful, self._lost_usd)


class SharedMeter(CostMeter):
    """The meter of one feed on an engine that others use beside it: its time is counted once, in `whole`.

    `users`: the meters of all feeds on it, this one among them from now on; who leaves takes its own out.
    """

    def __init__(self, whole: CostMeter, users: list[CostMeter]) -> None:
        super().__init__(whole.usd_per_second)
        self._whole, self._users = whole, users
        self._in_flight = 0  # at least: rows since the last outcome are not counted
        self._flying = 0
        self.by_tokens = whole.by_tokens
        users.append(self)

    @property
    def _others(self) -> int:
        return sum(one._in_flight for one in self._users if isinstance(one, SharedMeter) and one is not self)

    def succeed(self, now: float) -> None:
        """As of the whole."""
        self._whole.succeed(now)

    def begin(self, now: float) -> None:
        """A row was submitted."""
        self._in_flight = max(1, self._in_flight)
        self._whole.begin(now)

    def settle(
        self,
        prompt_tokens: int,
        completion_tokens: int,
        in_flight: int,
        now: float,
        *,
        together: int = 0,
        cached_tokens: int = 0,
        over: bool = True,
    ) -> float | None:
        """As of the whole, where the rows of others are in flight too."""
        self._in_flight = in_flight + together
        others = self._others
        in_flight += others
        return self._whole.settle(
            prompt_tokens, completion_tokens, in_flight, now, together=together, cached_tokens=cached_tokens, over=over
        )

    def count(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> None:
        """As of the whole."""
        self._whole.count(prompt_tokens, completion_tokens, cached_tokens)

    def give_up(self, rows: int) -> None:
        """As of the whole."""
        self._whole.give_up(rows)

    def fly(self, rows: int) -> None:
        """So many rows of this feed are with the engine now, beside those of others."""
        self._flying = rows
        self._whole.fly(sum(one._flying for one in self._users if isinstance(one, SharedMeter)))

    @property
    def room(self) -> int:
        """As of the whole."""
        return self._whole.room

    @property
    def exhausted(self) -> bool:
        """As of the whole."""
        return self._whole.exhausted

    def rest(self, now: float) -> None:
        """Nothing of this feed is in flight."""
        self._in_flight = 0
        if not self._others:
            self._whole.rest(now)

    def lose(self, now: float) -> None:
        """This feed is served no longer: what no row has taken is wasted, unless others are served still."""
        self._in_flight = 0
        if not self._others:
            self._whole.lose(now)

    def spent(self) -> LeaseUsage:
        """Totals of the whole."""
        return self._whole.spent()
