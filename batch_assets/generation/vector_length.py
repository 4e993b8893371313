"""The length of the vectors that a dataset has already: those that are generated or taken now must have the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice

import pyarrow as pa

from resources.objects.opening import CorruptObject
from resources.store.dataset_store import BatchObject, DatasetStore, SnapshotManifest
from resources.store.reusable_answers import ReusableAnswers

# Looked at until one has a vector: objects of earlier snapshots and batches of dead letters have none that counts.
MOST_OBJECTS = 200


def vector_length(store: DatasetStore, manifest: SnapshotManifest, reuse: bool | Sequence[str] = False) -> int | None:
    """Length of a committed vector of this snapshot; None for other tasks, and before there is one.

    Those that are taken from other datasets (`reuse`) count where none is committed yet. Ranges that run at the same
    time before the first commit may each settle on a length of their own.
    """
    generation = manifest.settings()
    if generation.task != "embedding":
        return None
    asked = generation.sampling.get("dimensions")
    if type(asked) is int and asked > 0:
        return asked
    taken = _taken(store, manifest, reuse) if reuse else iter(())
    for table in chain(islice(_committed(store, manifest), MOST_OBJECTS), islice(taken, MOST_OBJECTS)):
        try:
            column = table().column("output")
        except (CorruptObject, FileNotFoundError):
            continue
        if found := next((len(vector) for vector in column if vector.is_valid), None):
            return found
    return None


def _committed(store: DatasetStore, manifest: SnapshotManifest) -> Iterator[Callable[[], pa.Table]]:
    for batch in _current(store, manifest):
        yield partial(store.batch_table, batch)


def _taken(
    store: DatasetStore, manifest: SnapshotManifest, reuse: bool | Sequence[str]
) -> Iterator[Callable[[], pa.Table]]:
    answers = ReusableAnswers(store.objects, store.dataset, reuse)
    for batch in answers.of_snapshot(manifest.snapshot).values():
        yield partial(answers.table, batch)


def _current(store: DatasetStore, manifest: SnapshotManifest) -> Iterator[BatchObject]:
    """Committed batches of the snapshot, found by listing no further than needed."""
    versions = {entry.key: entry.data_version for entry in store.entries(manifest.snapshot)}
    for batch, _ in store.batch_infos():
        if versions.get(batch.key) == batch.data_version:
            yield batch
