"""A clock that nobody sets, and what it proves about one that was set: seconds since the machine booted.

On Linux CLOCK_BOOTTIME, which counts while the machine sleeps and is the same for all processes of a machine (time
namespaces apart); elsewhere the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Steady = Callable[[], float]

LEAST_JUMP = 2.0  # seconds; a leap second is no jump
SLEW = 0.001  # of the time between two looks: the kernel slews a clock by at most half of that


def boot_seconds() -> float:
    """Seconds since boot, steady whatever is done to the clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def boot_name() -> str:
    """What `boot_seconds` counts from: two processes that say the same may compare it. "" where nobody knows."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A reading of a wall clock, and of the steady one before and after it: a process may be stopped in between."""

    wall: float
    low: float
    high: float

    @classmethod
    def read(cls, wall: Callable[[], float] = time.time, steady: Steady = boot_seconds) -> ClockReading:
        """Now."""
        low = steady()
        return cls(wall(), low, steady())


def jump(before: ClockReading, now: ClockReading) -> float:
    """Seconds by which the wall clock was set between two moments, forward or (negative) back; 0.0 when it was not."""
    passed, least, most = now.wall - before.wall, now.low - before.high, now.high - before.low
    slack = LEAST_JUMP + SLEW * max(0.0, most)
    if passed < least - slack:
        return passed - least
    return passed - most if passed > most + slack else 0.0


class JumpWatch:
    """Tells once of each jump of a wall clock while this process lives."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Steady = boot_seconds) -> None:
        self._wall, self._steady = wall, steady
        self._last = ClockReading.read(wall, steady)

    def jumped(self) -> float:
        """Seconds by which it was set since the last look; 0.0 when it was not."""
        now = ClockReading.read(self._wall, self._steady)
        found = jump(self._last, now)
        self._last = now
        return found
