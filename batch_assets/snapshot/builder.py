"""Source to snapshot: reads every row once, renders its prompt, and writes what changed.

Every row of the source ends in exactly one place: a batch, the duplicates, or the rejects. An unchanged source gives
the same snapshot id, and then nothing is written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batch_assets.snapshot.condition_check import check_conditions
from batch_assets.snapshot.files import Buckets, ShardWriter
from batch_assets.snapshot.ingest import Ingested, ingest, source_name
from batch_assets.snapshot.integrity import FoundSnapshot, damaged_files, find_snapshot, unlike_checksums
from batch_assets.snapshot.placement import DUPLICATE, Counts, PlacedRows, Placement, Places
from batch_assets.snapshot.prompts.files import read_text
from batch_assets.snapshot.row_index import previous_file, snapshot_rows
from batch_assets.snapshot.source.errors import Reject, SourceError
from batch_assets.snapshot.source.files import find_files
from batch_assets.snapshot.source.hub_files import is_commit, pinned
from batch_assets.spec.models import GeneratedDatasetSpec
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import BatchEntry, DatasetStore, Shard, SnapshotManifest
from resources.store.object_integrity import StoredFile
from resources.store.snapshot_manifest import REPEATS, REQUEST_FIELDS, USER_SYSTEM, USER_TURNS, RowsSoFar, WantedRows

DUPLICATE_ROWS = 500_000
JUST_CHANGED_SECONDS = 3.0  # file systems have times of up to two seconds (FAT)
_OF_REQUESTS = (REQUEST_FIELDS, USER_TURNS, USER_SYSTEM)  # columns that a dataset has where its requests need them


def build_snapshot(
    spec: GeneratedDatasetSpec,
    store: DatasetStore,
    *,
    now: float,
    workdir: Path,
    base: Path | None = None,
    so_far: RowsSoFar | None = None,
    wanted: WantedRows | None = None,
) -> SnapshotManifest:
    """Make the snapshot of the source as it is now the current one, and return its manifest.

    `workdir` is an empty folder for temporary files of about the size of the source; `base` is where relative source
    paths start (default: the current folder). `so_far`: the source holds the first rows of another dataset, in its
    order. Such a snapshot has an id of its own, and never takes the place of one of a whole source. `wanted`: no more
    of the source than this is asked. Returns the manifest there is when nothing changed. Raises SourceError; whatever
    fails, the snapshot before stays the current one.
    """
    try:
        return _build(spec, store, now, workdir, base or Path.cwd(), so_far, wanted)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            free = "set BATCH_ASSETS_WORKDIR to a folder on a larger one"
            raise SourceError(f"{workdir}: the disk is full; {free}") from error
        raise


def _build(
    spec: GeneratedDatasetSpec,
    store: DatasetStore,
    now: float,
    workdir: Path,
    base: Path,
    so_far: RowsSoFar | None,
    wanted: WantedRows | None,
) -> SnapshotManifest:
    previous = find_snapshot(store)
    if so_far is not None and previous is not None:
        _refuse_part(previous.manifest)
    spec, digest = _pinned(spec), None
    if so_far is None and wanted is None:
        digest = read_digest(spec, base, before=now - JUST_CHANGED_SECONDS)
        if previous is not None and _is_as_read(previous, digest):
            _check_conditions_again(spec, store, previous.manifest)
            if not _is_current(store, previous.manifest.snapshot):
                store.set_current_snapshot(previous.manifest.snapshot)
            return previous.manifest
    workdir.mkdir(parents=True, exist_ok=True)
    read = ingest(spec, base, workdir, published=so_far is None, wanted=wanted)
    rows_before = None
    if previous is not None:
        with_id = spec.has_ids
        path = workdir / "previous.parquet"
        rows_before = previous_file(
            path, store, previous.manifest, previous.entries, with_id=with_id, damaged=previous.damaged
        )
    with Placement(
        workdir,
        read.index,
        with_id=spec.has_ids,
        dedupe=spec.dedupe_effective,
        batch_rows=spec.batch_rows,
        number_repeats=_has_seed(spec),
    ) as placement:
        _refuse_repeated_ids(read, placement)
        counts = placement.place(rows_before)
        if (read.source_rows - read.rejects.count) * spec.samples != counts.rows + counts.duplicates:
            raise RuntimeError("snapshot: rows of the source are neither placed, nor duplicates, nor rejected")
        if not counts.rows:
            raise SourceError(f"{source_name(spec)}: expected at least one row, found none that can be used")
        unchanged = previous is not None and counts.unchanged == counts.rows and not counts.removed
        if previous is not None and unchanged:
            snapshot = _snapshot_id(spec, read, counts, previous.entries, so_far)
            if snapshot == previous.manifest.snapshot and not previous.damaged:
                if not _is_current(store, snapshot):
                    store.set_current_snapshot(snapshot)
                return _as_read_now(store, previous.manifest, _read_now(spec, so_far, read.wanted, digest))
        places = placement.places()
    marked = _has_seed(spec) and spec.has_ids
    files = _write_files(read, places, counts, workdir, marked=marked)
    snapshot = _snapshot_id(spec, read, counts, files.entries, so_far)
    manifest = _manifest(spec, store, read, counts, files, snapshot, previous, now)
    return _upload(
        store, manifest.model_copy(update=_read_now(spec, so_far, read.wanted, digest)), read, files, workdir
    )


# Keys of a spec that no row of a snapshot depends on.
_NOT_OF_ROWS = {
    *("include_prompt", "show_samples", "reuse", "batches_per_run", "checks", "gates", "filter", "exports", "hardware"),
    *("deadline", "budget_usd", "objective", "max_instances", "pilots", "schedule", "refresh", "timezone", "owners"),
    *("tags", "license", "description"),
}


def _pinned(spec: GeneratedDatasetSpec) -> GeneratedDatasetSpec:
    """The spec with the commit of the files that it reads, where they lie on the hub: all of it is of this one."""
    path = spec.source.path
    if path is None or (now := pinned(path)) == path:
        return spec
    return spec.model_copy(update={"source": spec.source.model_copy(update={"path": now})})


def read_digest(spec: GeneratedDatasetSpec, base: Path, *, before: float | None = None) -> str | None:
    """Digest of all that a snapshot is made of, without reading the source: of the spec with the commit or the versions
    of its files, and of the files of its prompt.

    None where that cannot be told: of other sources, of images and sounds, and where a file was changed after `before`
    (Unix seconds): one more write may leave it the same time.
    """
    if spec.source.path is None or spec.prompt.media or (files := _versions(spec.source.path, base, before)) is None:
        return None
    named = {"prompt.system_from": spec.prompt.system_from, "prompt.examples": spec.prompt.examples}
    seen = [
        importlib.metadata.version("batch-assets"),
        spec.model_dump(mode="json", exclude=_NOT_OF_ROWS),
        spec.generation().stated(),
        *([files] if files else []),
        [read_text(path, base, key) for key, path in named.items() if path is not None],
    ]
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def _versions(path: str, base: Path, before: float | None) -> list[tuple[str, str]] | None:
    """The files of a source and the version of each; none are needed for those of a commit. None where one has none."""
    if is_commit(path):
        return []
    try:
        files = find_files(path, base)
    except SourceError:  # reading says what is wrong
        return None
    if any(not file.version or (before is not None and file.changed_at > before) for file in files):
        return None
    return [(file.name, file.version) for file in files]


def _is_as_read(previous: FoundSnapshot, digest: str | None) -> bool:
    """Whether reading the source again would make the same snapshot, which is whole."""
    return digest is not None and previous.manifest.read_digest == digest and not previous.damaged


def _check_conditions_again(spec: GeneratedDatasetSpec, store: DatasetStore, manifest: SnapshotManifest) -> None:
    """Conditions may have changed since the source was read. Raises SourceError."""
    if not (spec.conditions or spec.filter) or not manifest.shards:
        return
    with store.objects.open(store.snapshot_path(manifest.snapshot, manifest.shards[0].path)) as file:
        there = pq.read_schema(file)
    check_conditions(spec, [there.field(name) for name in manifest.keep_columns])


def _refuse_part(current: SnapshotManifest) -> None:
    """Raise SourceError where rows that were read so far would take the place of a whole source."""
    if current.streaming is None:
        raise SourceError(
            f"source.streaming: expected no snapshot of the whole table before, found {current.snapshot}; "
            f"`batch-assets run {current.dataset}` refreshes it when the table is published"
        )


def delete_streamed(store: DatasetStore) -> None:
    """Delete the snapshots of rows so far, but the current one: for when no run is under way over their batches."""
    for snapshot in set(store.snapshots()) - {store.current_snapshot()}:
        with contextlib.suppress(CorruptObject):
            if store.manifest(snapshot).streaming is not None:
                paths = [info.path for info in store.objects.list(store.snapshot_path(snapshot, ""))]
                # The manifest goes first: a snapshot without one is nobody's.
                store.objects.delete(sorted(paths, key=lambda path: not path.endswith("/manifest.json")))


def _read_now(
    spec: GeneratedDatasetSpec, so_far: RowsSoFar | None, wanted: WantedRows | None, digest: str | None
) -> dict[str, Any]:
    """What a manifest says of what was read: the version of a table, how much of it there was, how much was wanted, and
    the digest of it."""
    found = {"source": source_name(spec), "upstream_version": spec.source.table_version, "streaming": so_far}
    if so_far is not None:
        found |= {"source": f"dataset {spec.source.dataset}, {so_far}", "upstream_version": None}
    return found | {"wanted": wanted, "read_digest": digest}


def _as_read_now(store: DatasetStore, manifest: SnapshotManifest, said: dict[str, Any]) -> SnapshotManifest:
    """The manifest of a snapshot that did not change, with what it says of what was read now."""
    if all(said[key] == getattr(manifest, key) for key in ("upstream_version", "streaming", "wanted", "read_digest")):
        return manifest
    manifest = manifest.model_copy(update=said)
    store.put_manifest(manifest)
    return manifest


def _has_seed(spec: GeneratedDatasetSpec) -> bool:
    """Whether equal requests are told apart by their seeds (see `Row.seeded`)."""
    return spec.generation().sampling.get("seed") is not None


def changed_rows(spec: GeneratedDatasetSpec, store: DatasetStore, *, workdir: Path, base: Path) -> Counts | None:
    """What a refresh would do to the rows: see `compare`. None before the first snapshot."""
    found = compare(spec, store, workdir=workdir, base=base)
    return None if found is None else found.counts


def removed_rows(spec: GeneratedDatasetSpec, counts: Counts) -> int:
    """Rows that go. Without ids a changed row is another one: the former counts as removed there, and not here."""
    return counts.removed if spec.has_ids else max(0, counts.removed - counts.added)


@dataclass(frozen=True, slots=True)
class Compared:
    """What a refresh would do to the rows, and the ids of those of the snapshot that would go, where these are asked
    for, are not too many, and are no changed rows without ids.
    """

    counts: Counts
    gone: Sequence[str] = ()


def compare(
    spec: GeneratedDatasetSpec, store: DatasetStore, *, workdir: Path, base: Path, most_named: int = 0
) -> Compared | None:
    """The file of the dataset and its source as they are now, held against the current snapshot. None before the first
    one. `most_named`: with the ids of rows that would go, where they are no more than this.

    Reads the whole source and writes nothing but temporary files into `workdir`, an empty folder. Raises SourceError.
    """
    previous = find_snapshot(store)
    if previous is None:
        return None
    spec, wanted = _pinned(spec), previous.manifest.wanted if spec.want is not None else None
    if wanted is None and _is_as_read(previous, read_digest(spec, base)):
        _check_conditions_again(spec, store, previous.manifest)
        rows = previous.manifest.rows
        return Compared(Counts(rows, previous.manifest.duplicates, 0, 0, 0, 0, rows, previous=True))
    read, with_id = ingest(spec, base, workdir, wanted=wanted), spec.has_ids
    rows_before = previous_file(
        workdir / "previous.parquet",
        store,
        previous.manifest,
        previous.entries,
        with_id=with_id,
        damaged=previous.damaged,
    )
    with Placement(
        workdir,
        read.index,
        with_id=with_id,
        dedupe=spec.dedupe_effective,
        batch_rows=spec.batch_rows,
        number_repeats=_has_seed(spec),
    ) as placement:
        _refuse_repeated_ids(read, placement)
        counts = placement.place(rows_before)
        named = 0 < counts.removed <= most_named and counts.removed == removed_rows(spec, counts)
        places = placement.gone() if named else set()
    return Compared(counts, _ids_at(places, store, previous, workdir) if places else ())


def _ids_at(places: Container[tuple[int, int]], store: DatasetStore, found: FoundSnapshot, workdir: Path) -> list[str]:
    """Ids of the rows at these places: (number of the batch, place in it)."""
    ids: list[str] = []
    for row_ids, _, *where in snapshot_rows(store, found.manifest, found.entries, workdir, found.damaged):
        at = zip(*(numbers.tolist() for numbers in where), strict=True)
        ids += [row_id for row_id, place in zip(row_ids, at, strict=True) if place in places]
    return ids


def _refuse_repeated_ids(read: Ingested, placement: Placement) -> None:
    """Rows whose id was there before become rejects: each once, however many samples it has."""
    last: tuple[int, int, int, int] | None = None
    for places in placement.repeated_ids():
        rows = [row for before, row in itertools.pairwise([last, *places]) if row is not None and row != before]
        last = places[-1]
        read.rejects.add(
            [
                Reject(read.files[file], line, f"id: the same as in {read.files[first_file]}, line {first_line}")
                for file, line, first_file, first_line in rows
            ]
        )
    read.rejects.close()


def _snapshot_id(
    spec: GeneratedDatasetSpec,
    read: Ingested,
    counts: Counts,
    entries: Sequence[BatchEntry],
    so_far: RowsSoFar | None,
) -> str:
    """Hash of all that a reader of the snapshot can see; it does not depend on the order of the source."""
    seen = [
        spec.generation().stated(),
        [(entry.key, entry.data_version) for entry in entries],
        [(item.name, str(item.type)) for item in read.keep_fields],
        [f"{half:016x}" for half in read.content],
        counts.duplicates,
        f"{read.rejects.sum:x}",
        *(["streaming"] if so_far is not None else []),
    ]
    return hashlib.sha256(orjson.dumps(seen, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


@dataclass(slots=True)
class _Files:
    """What was written into the work folder."""

    shards: list[Shard]
    entries: list[BatchEntry]
    duplicates: list[Shard]


def _write_files(read: Ingested, places: Places, counts: Counts, workdir: Path, *, marked: bool) -> _Files:
    """Shards and duplicates as local files. `marked`: shards say which rows repeat the request of another one."""
    writer = ShardWriter(workdir)
    buckets: Buckets | None = None
    duplicates = _Duplicates(workdir)
    if (last := places.last_batch_if_unsorted()) is not None:
        buckets = Buckets(workdir, last, read.stage.bytes)
    for batch in read.stage.read():
        placed = places.next(batch.num_rows)
        table = _table(read, batch, placed)
        duplicates.add(table, placed)
        table = table.append_column(REPEATS, pa.array(placed.occurrence > 0)) if marked else table
        if (placed.fate != 0).any():
            kept = np.flatnonzero(placed.fate == 0)
            table, numbers, order = table.take(kept), placed.batch[kept], placed.place[kept]
        else:
            numbers, order = placed.batch, placed.place
        if not table.num_rows:
            continue
        if buckets is None:
            writer.add(table, numbers)
        else:
            buckets.add(table, numbers, order)
    for table, numbers in buckets.read() if buckets is not None else ():
        writer.add(table, numbers)
    writer.close()
    duplicates.close()
    if (
        sum(e.rows for e in writer.entries) != counts.rows
        or sum(s.rows for s in duplicates.shards) != counts.duplicates
    ):
        raise RuntimeError("snapshot: the files hold another number of rows than were placed")
    return _Files(writer.shards, writer.entries, duplicates.shards)


def _table(read: Ingested, batch: pa.RecordBatch, placed: PlacedRows) -> pa.Table:
    """Staged rows with the columns of a shard."""
    keys = batch.column("row_key")
    if "row_id" in batch.schema.names:
        ids = batch.column("row_id")
    else:
        ids = pc.binary_join_element_wise(keys, pa.array(placed.occurrence).cast(pa.string()), "#")
    names = ["row_id", "row_key", "prompt", *(item.name for item in read.keep_fields)]
    table = pa.table([ids, keys, batch.column("prompt"), *read.kept(batch)], names=names)
    for name in _OF_REQUESTS:
        if name in batch.schema.names:
            table = table.append_column(name, batch.column(name))
    return table


class _Duplicates:
    """Rows that are not asked because another asks the same: row_id, of_row_id and the kept columns."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shards: list[Shard] = []
        self._writer: pq.ParquetWriter | None = None
        self._rows = 0

    def add(self, table: pa.Table, placed: PlacedRows) -> None:
        """Write the duplicates among these rows."""
        rows = np.flatnonzero(placed.fate == DUPLICATE)
        if not len(rows):
            return
        part = table.take(rows)
        of_ids = [placed.of_id.get(i) for i in rows.tolist()]
        if of_ids[0] is None:  # without an id column the first of equal rows is the one that is asked
            of_ids = [f"{key}#0" for key in part.column("row_key").to_pylist()]
        dropped = [name for name in ("row_key", "prompt", *_OF_REQUESTS) if name in part.schema.names]
        part = part.drop_columns(dropped).add_column(1, "of_row_id", pa.array(of_ids, pa.string()))
        if self._writer is None:
            name = f"duplicates-{len(self.shards):05d}.parquet"
            self.shards.append(Shard(path=name, rows=0))
            self._writer = pq.ParquetWriter(self._folder / name, part.schema, compression="zstd")
        self._writer.write_table(part)
        self._rows += len(rows)
        if self._rows >= DUPLICATE_ROWS:
            self.close()

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()
            self.shards[-1] = Shard(path=self.shards[-1].path, rows=self._rows)
            self._writer, self._rows = None, 0


def _manifest(
    spec: GeneratedDatasetSpec,
    store: DatasetStore,
    read: Ingested,
    counts: Counts,
    files: _Files,
    snapshot: str,
    previous: FoundSnapshot | None,
    now: float,
) -> SnapshotManifest:
    return SnapshotManifest(
        dataset=store.dataset,
        snapshot=snapshot,
        previous=_former(previous, snapshot),
        created_at=now,
        source=source_name(spec),
        rows=counts.rows,
        batches=len(files.entries),
        batch_rows=spec.batch_rows,
        source_rows=read.source_rows,
        rejected=read.rejects.count,
        duplicates=counts.duplicates,
        added=counts.added,
        changed=counts.changed,
        removed=counts.removed,
        unchanged=counts.unchanged,
        keep_columns=[item.name for item in read.keep_fields],
        shards=files.shards,
        duplicate_shards=files.duplicates,
        generation=spec.generation().stated(),
        samples=spec.samples,
        upstream_version=spec.source.table_version,
        conversations=spec.prompt.makes_conversations,
        images=bool(spec.prompt.media),
        turns=spec.prompt.has_turns,
    )


def _former(previous: FoundSnapshot | None, snapshot: str) -> str | None:
    """The snapshot before this one; one that is written anew keeps its own."""
    if previous is not None and previous.manifest.snapshot == snapshot:
        return previous.manifest.previous
    return previous.manifest.snapshot if previous else None


def _upload(
    store: DatasetStore, manifest: SnapshotManifest, read: Ingested, files: _Files, workdir: Path
) -> SnapshotManifest:
    """All files, then the manifest, then CURRENT: a snapshot is complete or it is not there."""
    _write_entries(workdir / "batches.parquet", files.entries)
    names = [shard.path for shard in files.shards] + ["batches.parquet"] + [shard.path for shard in files.duplicates]
    if read.rejects.count:
        names.append(read.rejects.path.name)
    known = _complete(store, manifest.snapshot)
    if known is not None:
        written = {name: getattr(known, name) for name in ("shards", "duplicate_shards", "files")}
        manifest = manifest.model_copy(update=written)
    else:
        manifest = manifest.model_copy(update={"files": [StoredFile.of(workdir / name) for name in names]})
        for name in names:
            store.objects.upload(store.snapshot_path(manifest.snapshot, name), workdir / name)
    if manifest.streaming is not None and (current := store.current_snapshot()) is not None:
        _refuse_part(store.manifest(current))  # one of the whole may have been made meanwhile
    store.put_manifest(manifest)
    return manifest


def _is_current(store: DatasetStore, snapshot: str) -> bool:
    with contextlib.suppress(CorruptObject):
        return store.current_snapshot() == snapshot
    return False


def _complete(store: DatasetStore, snapshot: str) -> SnapshotManifest | None:
    """The manifest of a snapshot that is there with all its files as they were written."""
    with contextlib.suppress(CorruptObject):
        manifest = store.manifest(snapshot)
        return None if damaged_files(store, manifest) or unlike_checksums(store, manifest) else manifest
    return None


def _write_entries(path: Path, entries: Sequence[BatchEntry]) -> None:
    schema = pa.schema(
        [
            pa.field("key", pa.string(), nullable=False),
            pa.field("rows", pa.int64(), nullable=False),
            pa.field("data_version", pa.string(), nullable=False),
            pa.field("shard", pa.int32(), nullable=False),
            pa.field("row_group", pa.int32(), nullable=False),
        ]
    )
    columns = {name: [getattr(entry, name) for entry in entries] for name in schema.names}
    pq.write_table(pa.table(columns, schema=schema), path, compression="zstd")
