"""A set of 128-bit digests in about 16 bytes each: a million custom_ids in 16 MB, of which Python's set makes 100."""

from __future__ import annotations

from array import array
from bisect import bisect_left

import numpy as np

MOST_RECENT = 65_536


class DigestSet:
    """New digests are in a set of Python's; each time it is full it is merged into two sorted columns of 64 bits."""

    def __init__(self, most_recent: int = MOST_RECENT) -> None:
        self._most_recent, self._recent = most_recent, set[bytes]()
        self._high, self._low = array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self._recent) + len(self._high)

    def add(self, digest: bytes) -> bool:
        """Add 16 bytes. False: they were there already."""
        if digest in self._recent or self._merged(digest):
            return False
        self._recent.add(digest)
        if len(self._recent) >= self._most_recent:
            self._merge()
        return True

    def _merged(self, digest: bytes) -> bool:
        high, low = int.from_bytes(digest[:8]), int.from_bytes(digest[8:])
        place = bisect_left(self._high, high)
        while place < len(self._high) and self._high[place] == high:
            if self._low[place] == low:
                return True
            place += 1
        return False

    def _merge(self) -> None:
        fresh = np.frombuffer(b"".join(self._recent), dtype=">u8").astype(np.uint64)
        self._recent.clear()
        high = np.concatenate([np.frombuffer(self._high, dtype=np.uint64), fresh[0::2]])
        low = np.concatenate([np.frombuffer(self._low, dtype=np.uint64), fresh[1::2]])
        order = np.argsort(high)
        self._high, self._low = _sorted(high, order), _sorted(low, order)


def _sorted(column: np.ndarray, order: np.ndarray) -> array[int]:
    found = array("Q")
    found.frombytes(column[order].data.cast("B"))
    return found
