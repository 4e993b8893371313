"""A refused list is cut in halves until the inputs at fault are alone: log2(n) steps for one. Pure.

A server that refuses a list says rarely which input it means. It may also mean the list: some servers take fewer inputs
than we send (text-embeddings-inference: 32 by default). That shows when all inputs are answered in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def halves(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """The two parts to ask for one by one. At least two items."""
    middle = len(items) // 2
    return list(items[:middle]), list(items[middle:])


class RefusedList:
    """One refused list, while its parts are asked for. `left` inputs have no verdict yet."""

    def __init__(self, size: int) -> None:
        self.left = size
        self._refused = 0
        self._failed = 0
        self._largest = 0

    def answered(self, size: int) -> None:
        """A part of so many inputs was answered."""
        self.left -= size
        self._largest = max(self._largest, size)

    def refused_alone(self) -> None:
        """An input was refused with no other in its request."""
        self.left -= 1
        self._refused += 1

    def failed(self, size: int) -> None:
        """A part failed for another reason, which says nothing of its inputs."""
        self.left -= size
        self._failed += size

    @property
    def most_taken(self) -> int | None:
        """How many inputs the server takes at once, where none of them was at fault; None where that is not known."""
        proved = self.left == 0 and not self._refused and not self._failed
        return max(1, self._largest) if proved else None
