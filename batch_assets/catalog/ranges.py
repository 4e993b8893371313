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
    """A range of batches, both ends included. `only`: those of it that are meant; None: all."""

    first: str
    last: str
    only: frozenset[str] | None = None

    def __contains__(self, key: object) -> bool:
        inside = isinstance(key, str) and self.first <= key <= self.last
        return inside and (self.only is None or key in self.only)


@dataclass(frozen=True, slots=True)
class RangeRunRecord:
    """A run over a range of batches, as the catalog knows it; retries share their first run's `root_run_id`.

    `queued`: it waits to be started.
    """

    run_id: str
    keys: KeyRange
    outcome: RunOutcome
    request: str | None
    root_run_id: str = ""
    queued: bool = False


def pack(
    keys: Sequence[str],
    wanted: Collection[str],
    busy: Sequence[KeyRange],
    *,
    batches_per_run: int,
    most: int = sys.maxsize,
) -> list[KeyRange]:
    """Few ranges that cover every wanted key that no busy range covers; the first `most`.

    `keys` are all partitions in order. A range holds at most `batches_per_run` wanted keys. It bridges any number of
    other batches, which its run leaves alone, but for those of a busy range without gaps.
    """
    whole = [run for run in busy if run.only is None]
    scattered = frozenset[str]().union(*(run.only for run in busy if run.only is not None))
    ranges: list[KeyRange] = []
    found: list[str] = []
    start = 0
    for position, key in enumerate(keys):
        at_work = any(key in run for run in whole)
        if found and (at_work or len(found) == batches_per_run):
            ranges.append(_range(keys, start, found))
            found = []
            if len(ranges) >= most:
                return ranges
        if key in wanted and not at_work and key not in scattered and len(ranges) < most:
            start = start if found else position
            found.append(key)
    if found:
        ranges.append(_range(keys, start, found))
    return ranges[:most]


def _range(keys: Sequence[str], start: int, found: Sequence[str]) -> KeyRange:
    gaps = keys[start + len(found) - 1] != found[-1]
    return KeyRange(found[0], found[-1], frozenset(found) if gaps else None)


ATTEMPTS = 3


def worth_trying(wanted: Iterable[str], own: Sequence[RangeRunRecord]) -> set[str]:
    """The wanted keys that fewer than three runs of the request failed on; a run and its retries count as one."""
    failed = {run.root_run_id or run.run_id: run.keys for run in own if run.outcome == "failed"}
    failures = Counter(key for keys in failed.values() for key in wanted if key in keys)
    return {key for key in wanted if failures[key] < ATTEMPTS}
