"""Is a snapshot in the store as it was written? By names, sizes and, where that is asked for, every byte."""

from __future__ import annotations

import contextlib
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gpu_runner.rows import data_version
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import BatchEntry, DatasetStore, Shard, SnapshotManifest
from resources.store.object_integrity import is_damage, sha256_of


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """A snapshot as far as it can be read. `damaged`: paths of its files that are gone or not as they were written."""

    manifest: SnapshotManifest
    entries: list[BatchEntry]
    damaged: frozenset[str]


def find_snapshot(store: DatasetStore) -> FoundSnapshot | None:
    """What to go on from: the snapshot that CURRENT names, or the newest complete one where that cannot be read.

    A row keeps its batch for life, so whatever is left of a damaged snapshot is used. Reads every byte of it.
    """
    named: str | None = None
    with contextlib.suppress(CorruptObject):
        named = store.current_snapshot()
    if named is not None and (found := _found(store, named)) is not None:
        return found
    made = [(at, other) for other in store.snapshots() if (at := _created_at(store, other)) is not None]
    return _found(store, max(made)[1]) if made else None


def _created_at(store: DatasetStore, snapshot: str) -> float | None:
    with contextlib.suppress(CorruptObject):
        return store.manifest(snapshot).created_at
    return None


def _found(store: DatasetStore, snapshot: str) -> FoundSnapshot | None:
    try:
        manifest = store.manifest(snapshot)
        damaged = set(damaged_files(store, manifest)) | set(unlike_checksums(store, manifest))
    except CorruptObject:
        shards = _shards(store, snapshot)
        if not shards:
            return None
        manifest = _stand_in(store, snapshot, shards)
        damaged = {store.snapshot_path(snapshot, "manifest.json")}
    index = store.snapshot_path(snapshot, "batches.parquet")
    try:
        entries = store.entries(snapshot) if index not in damaged else _entries_of_shards(store, manifest, damaged)
    except CorruptObject:
        damaged.add(index)
        entries = _entries_of_shards(store, manifest, damaged)
    return FoundSnapshot(manifest, entries, frozenset(damaged))


_COUNTS = (
    "rows",
    "batches",
    "batch_rows",
    "source_rows",
    "rejected",
    "duplicates",
    "added",
    "changed",
    "removed",
    "unchanged",
)


def _shards(store: DatasetStore, snapshot: str) -> list[Shard]:
    folder = store.snapshot_path(snapshot, "")
    names = (info.path[len(folder) :] for info in store.objects.list(folder))
    return [Shard(path=name, rows=0) for name in names if name.startswith("prompts-")]


def _stand_in(store: DatasetStore, snapshot: str, shards: list[Shard]) -> SnapshotManifest:
    """In place of a manifest that is lost: it names the shards, and is never stored."""
    counts: dict[str, Any] = dict.fromkeys(_COUNTS, 0)
    return SnapshotManifest(
        dataset=store.dataset,
        snapshot=snapshot,
        previous=None,
        created_at=0.0,
        source="",
        keep_columns=[],
        shards=shards,
        generation={},
        **counts,
    )


def _entries_of_shards(store: DatasetStore, manifest: SnapshotManifest, damaged: Container[str]) -> list[BatchEntry]:
    """The list of batches made from what else is there: a row group is a batch, and committed ones have names.

    Batches that are not committed are left out: their rows are placed as new ones.
    """
    named = {batch.data_version: key for key, found in store.objects_by_batch().items() for batch in found}
    entries: list[BatchEntry] = []
    for number, shard in enumerate(manifest.shards):
        path = store.snapshot_path(manifest.snapshot, shard.path)
        if path in damaged:
            continue
        try:
            with store.objects.open(path) as opened, pq.ParquetFile(opened) as file:
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, columns=["row_id", "row_key"])
                    ids, keys = (table.column(name).to_pylist() for name in ("row_id", "row_key"))
                    version = data_version(zip(ids, keys, strict=True))
                    if version in named:
                        entries.append(BatchEntry(named[version], len(ids), version, number, group))
        except (pa.ArrowException, OSError) as error:
            if not isinstance(error, FileNotFoundError) and not is_damage(error):
                raise
    return sorted(entries, key=lambda entry: entry.key)


def expected_files(manifest: SnapshotManifest) -> dict[str, int | None]:
    """Names of the snapshot's files, but its manifest, and their sizes; None where no size was written down."""
    if manifest.files:
        return {file.name: file.bytes for file in manifest.files}
    rejects = ["rejects.parquet"] if manifest.rejected else []
    shards = [shard.path for shard in (*manifest.shards, *manifest.duplicate_shards)]
    return dict.fromkeys([*shards, "batches.parquet", *rejects])


def damaged_files(store: DatasetStore, manifest: SnapshotManifest) -> list[str]:
    """Paths of the snapshot's files that are gone, or of another size than was written: one listing."""
    folder = store.snapshot_path(manifest.snapshot, "")
    found = {info.path[len(folder) :]: info.size for info in store.objects.list(folder)}
    return [
        folder + name
        for name, size in expected_files(manifest).items()
        if name not in found or (size is not None and found[name] != size)
    ]


def unlike_checksums(store: DatasetStore, manifest: SnapshotManifest) -> dict[str, tuple[str, str]]:
    """Path to checksum written and found ("none": it is gone), of the files that differ: reads every byte.

    A snapshot without checksums has none to differ from.
    """
    unlike = {}
    for file in manifest.files:
        path = store.snapshot_path(manifest.snapshot, file.name)
        try:
            found = sha256_of(store.objects, path)
        except FileNotFoundError:
            found = "none"
        if found != file.sha256:
            unlike[path] = (file.sha256, found)
    return unlike
