"""Batch objects to one table: a few large Parquet files in snapshot order, a manifest and a dataset card.

Everything of a version lies in its own folder, the manifest last; only then readers are switched to it. So nobody ever
sees half a table, and a publication that was cut off leaves the former one as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from batch_assets.publishing.batch_reader import CommittedRows, pieces
from batch_assets.publishing.dataset_card import Card, card_text
from batch_assets.publishing.duplicates import Duplicates
from batch_assets.publishing.output_columns import OutputColumns
from batch_assets.publishing.prompt_column import PROMPT
from batch_assets.publishing.published_table import (
    BrokenTable,
    PublishedTable,
    broken_files,
    published_table,
    table_version,
)
from batch_assets.publishing.table_files import Column, TableWriter, table_schema
from gpu_runner.client.answers.pooled_outputs import SCHEMAS
from resources.objects.object_read_ahead import read_ahead, threads_for
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import BatchEntry, BatchObject, DatasetStore, SnapshotManifest
from resources.store.object_integrity import StoredFile, sha256_of

PART_ROWS = 500_000
_NAMED = 20


class IncompleteSnapshot(Exception):
    """Batches without an object at their data version: `missing` holds their keys."""

    def __init__(self, dataset: str, snapshot: str, missing: list[str], batches: int) -> None:
        self.missing = missing
        named = ", ".join(missing[:_NAMED]) + (", …" if len(missing) > _NAMED else "")
        super().__init__(
            f"{dataset}: snapshot {snapshot} is not complete: {len(missing)} of {batches} batches have no object "
            f"({named}); run them, then publish again"
        )


class SupersededTable(Exception):
    """A newer table was published while this one was written; readers stay on the newer one."""


def publish(
    store: DatasetStore,
    manifest: SnapshotManifest,
    *,
    card: Card,
    now: float,
    workdir: Path,
    include_prompt: bool = True,
    output_columns: bool = False,
    part_rows: int = PART_ROWS,
    keep_versions: int = 2,
    threads: int | None = None,
) -> PublishedTable:
    """Publish the table of a complete snapshot and switch readers to it; one whose files are there, byte by byte as
    they were written, is not written again.

    Memory is bounded whatever the number of rows; `workdir` holds one part at a time and, with duplicates, the rows
    they repeat. `include_prompt`: with the column `prompt`. `output_columns`: with those that the snapshot's JSON
    schema makes, where it makes some; scores, classes and the like have theirs always.
    Raises IncompleteSnapshot, SupersededTable, CorruptObject.
    """
    entries = store.entries(manifest.snapshot)
    current = store.current_objects(entries)
    missing = [entry.key for entry in entries if entry.key not in current]
    if missing:
        raise IncompleteSnapshot(store.dataset, manifest.snapshot, missing, len(entries))
    schema = table_schema(store, manifest, prompt=include_prompt)
    output_columns = output_columns or manifest.settings().task in SCHEMAS
    columns = OutputColumns.of(manifest, schema.names) if output_columns else None
    version = table_version(manifest.snapshot, current, prompt=include_prompt, output_columns=columns is not None)
    unfinished = unfinished_versions(store)
    table = whole_table(store, version)
    if table is None or changed_files(store, table):
        many = threads or threads_for(store.objects)
        table = _write(store, manifest, entries, current, version, schema, columns, card, now, workdir, part_rows, many)
    switch_readers(store, table)
    prune_versions(store, table, keep_versions, unfinished)
    return table


def changed_files(store: DatasetStore, table: PublishedTable) -> bool:
    """Whether a file has other bytes than the manifest says: reads every byte of the table."""
    try:
        return any(sha256_of(store.objects, f"{table.path}/{file.name}") != file.sha256 for file in table.stored())
    except FileNotFoundError:
        return True


def whole_table(store: DatasetStore, version: str | None = None) -> PublishedTable | None:
    """A version (default: what readers see) whose manifest and files are all there, of their sizes; else None."""
    try:
        table = published_table(store, version)
    except CorruptObject:
        return None
    return None if table is None or broken_files(store, table) else table


def _write(
    store: DatasetStore,
    manifest: SnapshotManifest,
    entries: list[BatchEntry],
    current: Mapping[str, BatchObject],
    version: str,
    schema: pa.Schema,
    columns: OutputColumns | None,
    card: Card,
    now: float,
    workdir: Path,
    part_rows: int,
    threads: int,
) -> PublishedTable:
    written = schema if columns is None else columns.within(schema)
    with TableWriter(store, version, written, workdir, part_rows) as writer:
        _write_lines(writer, store, manifest, entries, current, schema, columns, workdir, threads)
        files = writer.finish()
    totals, descriptions = writer.totals, columns.descriptions if columns else {}
    table = PublishedTable(
        dataset=store.dataset,
        model=manifest.settings().model,
        snapshot=manifest.snapshot,
        version=version,
        created_at=now,
        batches=len(entries),
        generations=sum(batch.generation for batch in current.values()),
        rows=totals.rows,
        ok=totals.rows - totals.dead,
        dead=totals.dead,
        duplicates=totals.duplicates,
        dead_duplicates=totals.dead_duplicates,
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
        usd=totals.usd,
        unpriced=totals.unpriced,
        reused=dict(sorted(totals.reused.items())),
        bytes=sum(file.bytes for file in files),
        simulated=totals.simulated,
        output_mismatches=columns.mismatches if columns else None,
        columns=[
            Column(name=field.name, type=str(field.type), description=descriptions.get(field.name)) for field in written
        ],
        sources=totals.sources(),
        files=files,
    )
    text = card_text(table, manifest, card, totals.sample).encode()
    store.objects.put(store.published_path(version, "README.md"), text)
    said = StoredFile(name="README.md", bytes=len(text), sha256=hashlib.sha256(text).hexdigest())
    table = table.model_copy(update={"card": said})
    store.objects.put(store.published_path(version, "manifest.json"), table.to_json())
    return table


def _write_lines(
    writer: TableWriter,
    store: DatasetStore,
    manifest: SnapshotManifest,
    entries: list[BatchEntry],
    current: Mapping[str, BatchObject],
    schema: pa.Schema,
    columns: OutputColumns | None,
    workdir: Path,
    threads: int,
) -> None:
    """Rows in the order of the snapshot, then the duplicates. `schema`: without the columns of outputs."""
    committed = CommittedRows(store, manifest, current, prompt=PROMPT in schema.names)
    size = committed.bytes_of
    with Duplicates(store, manifest, schema, workdir) as duplicates:
        for rows in read_ahead(
            committed.read, pieces(entries, size), threads, lambda piece: sum(size(entry) for entry in piece)
        ):
            duplicates.note(rows)
            writer.write(columns.add(rows, count=True) if columns else rows)
        for rows in duplicates.rows():
            writer.write(columns.add(rows, count=False) if columns else rows)


def switch_readers(store: DatasetStore, table: PublishedTable) -> None:
    """Point readers at `table`, unless what they see is newer: another run may have published meanwhile."""
    seen = whole_table(store)
    if seen is not None and seen.version == table.version:
        return
    if seen is not None:
        newest = store.current_snapshot()
        newer_snapshot = seen.snapshot == newest and table.snapshot != newest
        newer_objects = seen.snapshot == table.snapshot and seen.generations > table.generations
        if newer_snapshot or newer_objects:
            raise SupersededTable(
                f"{table.path}: readers see version {seen.version}, which is newer; publish again if that is wrong"
            )
    if broken := broken_files(store, table):
        raise BrokenTable(f"{table.path}: {', '.join(broken)} gone or of another size; publish again")
    store.publish(table.version)


def _versions(store: DatasetStore) -> dict[str, list[str]]:
    """Paths of the files of every version in the store."""
    prefix = f"{store.dataset}/published/"
    found: dict[str, list[str]] = {}
    for info in store.objects.list(prefix):
        version, _, name = info.path[len(prefix) :].partition("/")
        if name:
            found.setdefault(version, []).append(info.path)
    return found


def unfinished_versions(store: DatasetStore) -> set[str]:
    return {version for version, paths in _versions(store).items() if not _has_manifest(paths)}


def _has_manifest(paths: Iterable[str]) -> bool:
    return any(path.endswith("/manifest.json") for path in paths)


def prune_versions(store: DatasetStore, table: PublishedTable, keep: int, unfinished: Collection[str]) -> None:
    """Delete all but the newest `keep` versions, and what aborted publications left before this one began."""
    versions = _versions(store)
    finished: dict[str, float] = {}
    for version, paths in versions.items():
        if _has_manifest(paths):
            found = whole_table(store, version)
            finished[version] = found.created_at if found else 0.0
    newest = sorted(finished, key=lambda version: (version == table.version, finished[version]), reverse=True)
    for version, paths in versions.items():
        old = version in finished and version not in newest[: max(keep, 1)]
        if version != table.version and (old or (version in unfinished and version not in finished)):
            # The manifest goes first: a version without one is nobody's table.
            store.objects.delete(sorted(paths, key=lambda path: not path.endswith("/manifest.json")))
