"""How long tests wait, and how large the longest ones are. They run on machines that do other work too."""

from __future__ import annotations

import hashlib
import os
import time

MEASURED = "BATCH_ASSETS_TEST_SLOWNESS"  # where the workers of pytest-xdist find what the first process measured
REFERENCE_SECONDS = 0.05  # what `_work` takes on a quiet core of the machine that time-outs were chosen on
MOST = 8.0


def _work() -> None:
    """Work of a fixed size: Python's own, and that of a library in C."""
    total = 0
    for number in range(500_000):
        total += number & 7
    hashlib.sha256(bytes(16_000_000)).digest()


def slowness() -> float:
    """How many times longer the same work takes now than on a quiet core of the reference machine, from 1 to `MOST`.

    Measured by the clock, so other work counts; once, by the process that starts the tests.
    """
    if known := os.environ.get(MEASURED):
        return float(known)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        _work()
        took.append(time.perf_counter() - began)
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    found = min(MOST, max(1.0, waiting, sorted(took)[1] / REFERENCE_SECONDS))
    os.environ[MEASURED] = f"{found:.2f}"
    return found


# A wait that is over its limit has failed: what it waits for will not come. Limits are many times what a quiet machine
# needs and say nothing about speed; a test that passes ends before.
PATIENCE = 2.5 * slowness()

# Full sizes of the longest tests: what docs/evidence.md shows. Without it they are shortened to fit a CI run.
SOAK = bool(os.environ.get("BATCH_ASSETS_SOAK"))
