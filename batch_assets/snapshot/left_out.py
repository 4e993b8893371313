"""Rows of a source that a snapshot leaves out because they cannot be used (`on_bad_row: skip`)."""

from __future__ import annotations

import pyarrow.parquet as pq

from batch_assets.snapshot.source.errors import Reject
from resources.objects.store_health import is_store_trouble
from resources.store.dataset_store import DatasetStore
from resources.store.object_integrity import is_damage

REJECTS = "rejects.parquet"


def left_out(rejected: int, source_rows: int) -> str:
    """`8 of 10 rows of the source are left out (on_bad_row: skip)`"""
    verb = "is" if rejected == 1 else "are"
    return f"{rejected:,} of {source_rows:,} rows of the source {verb} left out (on_bad_row: skip)"


def rejects_path(store: DatasetStore, snapshot: str) -> str:
    """Where a snapshot lists the rows that it leaves out, below the store's root."""
    return store.snapshot_path(snapshot, REJECTS)


def first_reject(store: DatasetStore, snapshot: str) -> Reject | None:
    """The first row that a snapshot leaves out; None where its list is gone or cannot be read."""
    try:
        with store.objects.open(rejects_path(store, snapshot)) as opened, pq.ParquetFile(opened) as file:
            batch = next(file.iter_batches(batch_size=1), None)
    except Exception as error:
        if not (isinstance(error, FileNotFoundError) or is_damage(error) or is_store_trouble(error)):
            raise
        return None  # `verify` says so
    return Reject(**batch.to_pylist()[0]) if batch is not None and batch.num_rows else None
