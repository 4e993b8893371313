"""What a hostile input is, and what must become of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """`kind` says who reads `given` (see `judge`); `words` must be in the error, None: it is accepted safely."""

    kind: str
    name: str
    given: Any
    words: str | None = None


def cases(kind: str, *found: tuple[str, Any, str | None]) -> list[Case]:
    """Cases of one kind."""
    return [Case(kind, name, given, words) for name, given, words in found]
