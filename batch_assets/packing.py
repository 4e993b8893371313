"""Which ranges of batches to run next: pure functions over positions in partition order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A contiguous range of batches, both ends included."""

    first: str
    last: str

    def __contains__(self, key: str) -> bool:
        return self.first <= key <= self.last


def pack(
    keys: Sequence[str], wanted: Collection[str], busy: Sequence[KeyRange], *, batches_per_run: int, spread: int = 10
) -> list[KeyRange]:
    """Few ranges that cover every wanted key that no busy range covers, and touch no busy range.

    `keys` are all partitions in order. A range holds at most `batches_per_run` wanted keys and may bridge gaps of
    finished batches (they are reported again for a few milliseconds each), up to `spread` times as many keys in all.
    """
    ranges: list[KeyRange] = []
    start = end = -1
    count = 0
    for position, key in enumerate(keys):
        if any(key in run for run in busy):
            if count:
                ranges.append(KeyRange(keys[start], keys[end]))
            count = 0
        elif key in wanted:
            if count and (count == batches_per_run or position - start >= spread * batches_per_run):
                ranges.append(KeyRange(keys[start], keys[end]))
                count = 0
            if not count:
                start = position
            end, count = position, count + 1
    if count:
        ranges.append(KeyRange(keys[start], keys[end]))
    return ranges
