"""Whether the way to an engine stands. A way that is broken says nothing about the engine at its end."""

from __future__ import annotations

from enum import Enum


class Reachability(Enum):
    """OPEN: what fails is the engine's. RESTORING: the way is made anew; nothing is known. LOST: nothing is there."""

    OPEN = "open"
    RESTORING = "restoring"
    LOST = "lost"


def always_open() -> Reachability:
    """The way to an engine that is reached by its address alone."""
    return Reachability.OPEN
