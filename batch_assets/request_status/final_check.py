"""What `batch-assets run` compares before it ends with 0: all that `verify` compares, by the same function.

What differs is made again for the same request where that needs no new reading of the source, twice at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from batch_assets.orchestration.repair import LOST, can_repair, repair
from batch_assets.publishing.differences import Difference
from batch_assets.publishing.verify import Verification, ledger_of_reports, verify
from batch_assets.request_status.dataset_status import DatasetObservation, Observer, unfinished

REPAIRS = 2
NAMED = 3


@dataclass(frozen=True, slots=True)
class FinalCheck:
    """`verification`: the dataset agrees. Else one of the sentences is there: `waits` for other runs of the dataset,
    `made_again` is what differed, or it `failed` and a person has to act."""

    verification: Verification | None = None
    waits: str = ""
    made_again: str = ""
    failed: str = ""


class FinalChecker:
    """Compares one dataset whenever its table is published. `seconds`: what the last comparison took."""

    def __init__(self, observer: Observer, progress: Callable[[str], None]) -> None:
        self._observer, self._progress = observer, progress
        self._repairs = 0
        self.seconds = 0.0

    def check(self, sight: DatasetObservation) -> FinalCheck:
        """Compare everything. `sight`: the look that found all batches committed and their table published."""
        began = time.monotonic()
        found = verify(self._observer.store, ledger_of_reports(self._observer.reports()), progress=self._progress)
        self.seconds = time.monotonic() - began
        if found.ok and found.snapshot == sight.snapshot:
            return FinalCheck(found)
        if self._changes(sight):
            return FinalCheck(waits="other runs of this dataset are under way: it is verified after them")
        said = _words(found.differences)
        dataset = self._observer.store.dataset
        if not can_repair(found):
            return FinalCheck(failed=f"{said}; `batch-assets run {dataset}` mends it")
        if self._repairs >= REPAIRS:
            return FinalCheck(failed=f"{said}, after it was made again; see `batch-assets verify {dataset}`")
        self._repairs += 1
        done = repair(self._observer.instance, self._observer.store, found, sight.entries, sight.current)
        return FinalCheck(made_again="; ".join([said, *done]))

    def make_lost_batches_again(self, sight: DatasetObservation) -> str:
        """Compare everything, as the table could not be published: a batch may be there that nobody can read. Has such
        batches made again, and says what differed; "" where it is not batches that keep the table from being written.
        """
        found = verify(self._observer.store, ledger_of_reports(self._observer.reports()), progress=self._progress)
        lost = any(one.kind in LOST for one in found.differences)
        if not lost or not can_repair(found) or self._repairs >= REPAIRS or self._changes(sight):
            return ""
        self._repairs += 1
        done = repair(self._observer.instance, self._observer.store, found, sight.entries, sight.current)
        return "; ".join([_words(found.differences), *done])

    def _changes(self, sight: DatasetObservation) -> bool:
        """Somebody else changes the dataset: what differs may agree in a moment."""
        now = self._observer.look()
        versions = {key: report.version for key, report in now.current.items()}
        before = {key: report.version for key, report in sight.current.items()}
        busy = unfinished(self._observer.instance, self._observer.store.dataset)
        return bool(busy) or (now.snapshot, versions) != (sight.snapshot, before)


def _words(differences: tuple[Difference, ...]) -> str:
    """The first differences in one line."""
    named = [
        f"{one.batch or 'dataset'}: {one.kind.replace('_', ' ')}: {one.expected}: {one.found}"
        for one in differences[:NAMED]
    ]
    more = len(differences) - len(named)
    return "verify finds " + "; ".join([*named, *([f"and {more:,} more"] if more else [])])
