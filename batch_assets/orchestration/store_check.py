"""Is what the catalog promises in the store? By listings, sizes and small manifests: no batch and no part is read.

What `verify` finds beyond this are bytes that changed without a change of size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from batch_assets.catalog.catalog_reader import BatchReport
from batch_assets.publishing.dead_letters import current_dead_letters, dead_letters_path, list_manifest
from batch_assets.publishing.differences import Difference
from batch_assets.publishing.published_table import broken_files, published_table
from batch_assets.snapshot.integrity import damaged_files
from resources.objects.opening import CorruptObject, ObjectInfo
from resources.store.dataset_store import BatchEntry, BatchObject, DatasetStore


def listed_differences(
    store: DatasetStore,
    snapshot: str,
    entries: Sequence[BatchEntry],
    current: Mapping[str, BatchReport],
    *,
    published: bool,
) -> list[Difference]:
    """What is gone or of another size. `current`: the catalog's entries of the snapshot's batches; `published`: the
    table of these batches was published, and must be there."""
    found = list(snapshot_problems(store, snapshot))
    lost = list(batch_problems(store, entries, current))
    found += lost
    if not lost and published:
        found += table_problems(store)
    return found


def snapshot_problems(store: DatasetStore, snapshot: str) -> Iterator[Difference]:
    """Files of the snapshot that are gone or of another size."""
    try:
        paths = damaged_files(store, store.manifest(snapshot))
    except CorruptObject as error:
        yield Difference("corrupt_snapshot", None, f"manifest of {snapshot}", str(error), store.mended_by_run)
        return
    for path in paths:
        yield Difference("corrupt_snapshot", None, path, "none, or another size", store.mended_by_run)


def batch_problems(
    store: DatasetStore, entries: Sequence[BatchEntry], current: Mapping[str, BatchReport]
) -> Iterator[Difference]:
    """Batches whose object, of the generation that the catalog names, is gone or of another size."""
    sizes = store.batch_sizes(entries[0].key, entries[-1].key) if entries else {}
    for key, report in current.items():
        path = store.batch_path(BatchObject(key, report.version.data_version, report.version.generation))
        size = sizes.get(path)
        if size is None:
            yield Difference("void_catalog_entry", key, path, "none", store.mended_by_run)
        elif report.bytes not in (None, size):
            wanted = f"{path} of {report.bytes} bytes"
            yield Difference("corrupt_object", key, wanted, f"{size} bytes", store.mended_by_run)


def object_infos(store: DatasetStore, entries: Sequence[BatchEntry]) -> dict[BatchObject, ObjectInfo]:
    """Every object of these batches, in one listing. `entries` in the order of keys."""
    return dict(store.batch_infos(entries[0].key, entries[-1].key)) if entries else {}


def table_problems(store: DatasetStore) -> Iterator[Difference]:
    """The published table and the list of dead letters: pointers, manifests, names and sizes."""
    dead = 0
    try:
        table = published_table(store)
        dead = 0 if table is None else table.dead - table.dead_duplicates
        if table is None:
            yield Difference("missing_table", None, "a published table", "none", store.mended_by_run)
        else:
            for name in broken_files(store, table):
                found = "none, or another size"
                yield Difference("broken_table", None, f"{table.path}/{name}", found, store.mended_by_run)
    except CorruptObject as error:
        yield Difference("broken_table", None, "a published table", str(error), store.mended_by_run)
    yield from _dead_letter_problems(store, dead)


def _dead_letter_problems(store: DatasetStore, dead: int) -> Iterator[Difference]:
    wanted = "a list of dead letters"
    try:
        listed = current_dead_letters(store)
        if listed is None:
            if dead:
                yield Difference("stale_dead_letters", None, wanted, "none", store.mended_by_run)
            return
        said, path = list_manifest(store, listed), dead_letters_path(store, listed)
    except CorruptObject as error:
        yield Difference("stale_dead_letters", None, wanted, str(error), store.mended_by_run)
        return
    sizes = {info.path: info.size for info in store.objects.list(f"{store.dataset}/dead_letters/")}
    if path not in sizes or (said is not None and sizes[path] != said.file.bytes):
        yield Difference("stale_dead_letters", None, path, "none, or another size", store.mended_by_run)
