"""What a caller asks for: seconds until the first token and between tokens, in two headers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

TTFT_HEADER = "x-target-ttft-seconds"
TPOT_HEADER = "x-target-tpot-seconds"
HEADROOM_HEADER = "x-target-headroom-seconds"  # of the answer
MOST_SECONDS = 3600.0


class InvalidTarget(ValueError):
    """A header that is no number of seconds."""


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """Seconds; None: any."""

    ttft: float | None = None
    tpot: float | None = None


ANY_LATENCY = LatencyTarget()


def read_target(headers: Mapping[str, str]) -> LatencyTarget:
    """The target of a request. Raises InvalidTarget."""
    return LatencyTarget(_seconds(headers, TTFT_HEADER), _seconds(headers, TPOT_HEADER))


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MOST_SECONDS:
        raise InvalidTarget(f"{name}: expected seconds, more than 0 and at most {MOST_SECONDS:.0f}, found {text!r:.40}")
    return value
