"""Ranges of batches: what a run of one is, and which to run next. Pure functions over positions in partition order."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

# refused: it failed because its engine refuses every request (key, credit, quota, model, settings).
RunOutcome = Literal["unfinished", "succeeded", "failed", "refused", "canceled"]


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A contiguous range of batches, both ends included."""

    first: str
    last: str

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.first <= key <= self.last


@dataclass(frozen=True, slots=True)
class RangeRunRecord:
    """A run over a range of batches, as the catalog knows it; retries share their first run's `root_run_id`."""

    run_id: str
    keys: KeyRange
    outcome: RunOutcome
    request: str | None
    root_run_id: str = ""


def pack(
    keys: Sequence[str],
    wanted: Collection[str],
    busy: Sequence[KeyRange],
    *,
    batches_per_run: int,
    spread: int = 10,
    most: int = sys.maxsize,
) -> list[KeyRange]:
    """Few ranges that cover every wanted key that no busy range covers, and touch no busy range; the first `most`.

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
                if len(ranges) >= most:
                    return ranges
                start = position
            end, count = position, count + 1
    if count:
        ranges.append(KeyRange(keys[start], keys[end]))
    return ranges[:most]


ATTEMPTS = 3


def worth_trying(wanted: Iterable[str], own: Sequence[RangeRunRecord]) -> set[str]:
    """The wanted keys that fewer than three runs of the request failed on; a run and its retries count as one."""
    failed = {run.root_run_id or run.run_id: run.keys for run in own if run.outcome == "failed"}
    failures = Counter(key for keys in failed.values() for key in wanted if key in keys)
    return {key for key in wanted if failures[key] < ATTEMPTS}
