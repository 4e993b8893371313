"""The length of the vectors that a dataset has already: those that are generated now must have the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from resources.store import BatchObject, CorruptObject, DatasetStore, SnapshotManifest

# Looked at until one has a vector: objects of earlier snapshots and batches of dead letters have none that counts.
MOST_OBJECTS = 200


def vector_length(store: DatasetStore, manifest: SnapshotManifest) -> int | None:
    """Length of a committed vector of this snapshot; None for other tasks, and before there is one.

    Ranges that run at the same time before the first commit may each settle on a length of their own.
    """
    generation = manifest.settings()
    if generation.task != "embedding":
        return None
    asked = generation.sampling.get("dimensions")
    if type(asked) is int and asked > 0:
        return asked
    for batch in islice(_current(store, manifest), MOST_OBJECTS):
        try:
            column = store.batch_table(batch).column("output")
        except (CorruptObject, FileNotFoundError):
            continue
        if found := next((len(vector) for vector in column if vector.is_valid), None):
            return found
    return None


def _current(store: DatasetStore, manifest: SnapshotManifest) -> Iterator[BatchObject]:
    """Committed batches of the snapshot, found by listing no further than needed."""
    versions = {entry.key: entry.data_version for entry in store.entries(manifest.snapshot)}
    for batch, _ in store.batch_infos():
        if versions.get(batch.key) == batch.data_version:
            yield batch
