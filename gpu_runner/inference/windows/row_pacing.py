"""When the next row may go to an engine that interactive requests share. Pure: no clock, no I/O.

Rows of one length that were sent together end together. The rows that take their places are then prefilled in one
step, and whoever waits for a first token waits for that step. So rows are spread over the time that they take: a window
of n rows that take t seconds each has n / t of them end in a second (Little's law), and so many may be sent, and some
more, so that places which came free together are filled again. A token bucket: what was not used is kept, up to a small
share of the window.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST_WAIT = 0.001  # timers are no finer, and a wait below a clock's resolution would never end


@dataclass(frozen=True, slots=True)
class PacingPolicy:
    """`excess`: rows that may be sent, as a multiple of those that end at a full window. `saved`: rows that may be sent
    at once, as a share of the window; one in any case. `remembered`: answers that the mean of their seconds is over.
    """

    excess: float = 1.5
    saved: float = 0.02
    remembered: int = 50


class RowPacing:
    """The pace of one engine's rows. Times are monotonic seconds. Until the first answer nothing is held back."""

    def __init__(self, policy: PacingPolicy | None = None) -> None:
        self._policy = policy or PacingPolicy()
        self._answers = 0
        self._seconds = 0.0  # that a row takes, in the mean
        self._credit = 1.0
        self._at: float | None = None

    def on_answer(self, seconds: float) -> None:
        """A row was answered so long after it was sent."""
        self._answers = min(self._answers + 1, self._policy.remembered)
        self._seconds += (max(0.0, seconds) - self._seconds) / self._answers

    def on_sent(self) -> None:
        """A row is being sent."""
        self._credit -= 1.0

    def wait(self, now: float, window: int) -> float:
        """Seconds until the next row may be sent; 0.0: now. `window`: rows that may be in flight."""
        if not self._answers or self._seconds <= 0.0:
            return 0.0
        rate = self._policy.excess * max(1, window) / self._seconds
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._credit = min(max(1.0, self._policy.saved * window), max(0.0, self._credit) + passed * rate)
        return 0.0 if self._credit >= 1.0 else max(SHORTEST_WAIT, (1.0 - self._credit) / rate)
