"""What the rows on one engine cost: its time, handed out to them by their tokens.

While at least one row is in flight the clock runs into a pot. A row that gets its outcome takes its share: its tokens
against those still expected of the rows in flight, of which half is taken to be done. So the shares of a long run
follow the tokens, and whatever the guess was worth, the last row takes the rest: they add up to the busy time exactly.
Pure: times are arguments, in seconds of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeaseUsage:
    """How a lease used its instance so far, in real seconds; `wasted` went to rows that got no outcome here."""

    useful_seconds: float = 0.0
    wasted_seconds: float = 0.0
    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class CostMeter:
    """The fleet's database of one engine while it serves. `usd_per_second` is None while no price is known."""

    def __init__(self, usd_per_second: float | None = None) -> None:
        self.usd_per_second = usd_per_second
        self._since: float | None = None
        self._pot = 0.0
        self._useful = 0.0
        self._wasted = 0.0
        self._rows = self._prompt_tokens = self._completion_tokens = 0
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
        self, prompt_tokens: int, completion_tokens: int, in_flight: int, now: float, *, together: int = 0
    ) -> float | None:
        """A row has its outcome, `in_flight` others have not: its share in US dollars.

        `together`: rows besides that the same answer brought, which are settled next and have used as much of it.
        """
        self._accrue(now)
        self._rows += 1
        self._prompt_tokens += prompt_tokens
        self._completion_tokens += completion_tokens
        tokens = max(1, prompt_tokens + completion_tokens)
        mean = max(1.0, (self._prompt_tokens + self._completion_tokens) / self._rows)
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

    def spent(self) -> LeaseUsage:
        """Totals so far. Read from other threads: each figure is right, together they may be one row apart."""
        return LeaseUsage(self._useful, self._wasted, self._rows, self._prompt_tokens, self._completion_tokens)

    def _accrue(self, now: float) -> None:
        if self._since is not None:
            self._pot += now - self._since
            self._since = now


class SharedMeter(CostMeter):
    """The meter of one feed on an engine that others use beside it: its time is counted once, in `whole`.

    `users`: the meters of all feeds on it, this one among them from now on; who leaves takes its own out.
    """

    def __init__(self, whole: CostMeter, users: list[CostMeter]) -> None:
        super().__init__(whole.usd_per_second)
        self._whole, self._users = whole, users
        self._in_flight = 0  # at least: rows since the last outcome are not counted
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
        self, prompt_tokens: int, completion_tokens: int, in_flight: int, now: float, *, together: int = 0
    ) -> float | None:
        """As of the whole, where the rows of others are in flight too."""
        self._in_flight = in_flight + together
        others = self._others
        return self._whole.settle(prompt_tokens, completion_tokens, in_flight + others, now, together=together)

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
