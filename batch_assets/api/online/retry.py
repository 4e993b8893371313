"""When a task is tried again, and when it is given up. Pure; randomness is an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`tries`: requests to engines that may fail. `deliveries`: times that a task may be claimed because consumers
    died, before it is held to be why. Seconds: of the first wait, and the longest.
    """

    tries: int = 3
    deliveries: int = 20
    first_seconds: float = 0.25
    longest_seconds: float = 5.0

    def wait(self, number: int, uniform: Callable[[], float]) -> float:
        """Seconds before try `number` + 1: exponential backoff with full jitter, at least a tenth of it.

        Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015. `uniform`: 0 to 1.
        """
        ceiling = min(self.longest_seconds, self.first_seconds * 2.0 ** min(max(0, number - 1), MOST_DOUBLINGS))
        return ceiling * (0.1 + 0.9 * uniform())

    def exhausted(self, failures: int) -> bool:
        """Whether a task with so many failed tries is given up."""
        return failures >= self.tries


USUAL = RetryPolicy()
