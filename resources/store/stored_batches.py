"""Batches that were sent to a provider's Batch API for rows of one dataset: one small object each.

They go with the journal: a run that continues another one reads both, a regenerate or a redrive has its own.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from pydantic import ValidationError

from gpu_runner.batch_api.submitted_batches import SubmittedBatch
from resources.objects.opening import Objects

log = logging.getLogger(__name__)

RANGE = "range"  # the label that names the batches of a run: `FIRST-LAST`, by their keys
LARGEST_RECORD = 64 << 20
MOST_RECORDS = 1_000
ORDINARY = "ordinary"


class StoredBatches:
    """`purpose`: as of the journal."""

    def __init__(self, objects: Objects, dataset: str, purpose: str = "") -> None:
        self._objects = objects
        self._prefix = f"{records_prefix(dataset)}{purpose or ORDINARY}/"

    def keep(self, batch: SubmittedBatch) -> None:
        """Write, or replace. Raises OSError and StoreError."""
        self._objects.put(self._path(batch.key), batch.model_dump_json().encode())

    def all(self, besides: Collection[str] = ()) -> Sequence[SubmittedBatch]:
        """Those that can be read, but for these keys. Raises OSError and StoreError."""
        found: list[SubmittedBatch] = []
        for info in self._objects.list(self._prefix):
            if info.path[len(self._prefix) :].removesuffix(".json") in besides:
                continue
            try:
                found.append(SubmittedBatch.model_validate_json(self._objects.get(info.path, LARGEST_RECORD)))
            except FileNotFoundError:
                continue
            except ValidationError:
                log.warning("%s: not a record of a submitted batch; its rows are asked for again", info.path)
            if len(found) == MOST_RECORDS:
                break
        return found

    def drop(self, keys: Sequence[str]) -> None:
        """Delete."""
        self._objects.delete([self._path(key) for key in keys])

    def _path(self, key: str) -> str:
        return f"{self._prefix}{key}.json"


def records_prefix(dataset: str) -> str:
    """Below it lie the records of a dataset, in a folder for each purpose: ORDINARY, or a run id."""
    return f"{dataset}/submitted_batches/"


def range_of(objects: Objects, path: str) -> tuple[str, str] | None:
    """The first and the last key of the batches whose rows were sent; None where the record does not say it. Raises
    CorruptObject, OSError and StoreError."""
    try:
        return range_of_record(SubmittedBatch.model_validate_json(objects.get(path, LARGEST_RECORD)))
    except (FileNotFoundError, ValidationError):
        return None


def range_of_record(record: SubmittedBatch) -> tuple[str, str] | None:
    """The same."""
    first, dash, last = record.labels.get(RANGE, "").partition("-")
    return (first, last) if dash else None
