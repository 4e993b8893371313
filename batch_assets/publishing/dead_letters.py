"""The rows without a completion, in one small table: what analysts look at and what a re-drive takes up again.

A duplicate of such a row is not listed: it gets its outcome from the row it repeats.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import ConfigDict

from batch_assets.publishing.batch_reader import CommittedRows, pieces, table_name
from batch_assets.publishing.table_files import table_schema
from gpu_runner.client.server_sentence import server_sentence
from resources.objects.object_read_ahead import read_ahead, threads_for
from resources.objects.opening import CorruptObject, temporary_folder
from resources.store.dataset_store import BatchEntry, BatchObject, DatasetStore, SnapshotManifest
from resources.store.object_integrity import Sealed, StoredFile, is_damage, read_pointer, read_sealed, sha256_of
from resources.store.outcome_columns import PART_COLUMNS, TURNS, WRITTEN_TURNS

FORMAT = 1
# Their messages may hold text of an answer.
_OF_ANSWERS = frozenset({"schema_invalid"})
_REASON = (
    "error",
    "error_message",
    "tries",
    "model",
    "engine",
    "provider",
    "instance_type",
    "run_id",
    "started_at",
)


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Dead letters of the batches that are committed so far; `path` is that of the Parquet file in the store.

    `batches` are the keys that hold them, in order: what a re-drive runs.
    """

    dataset: str
    snapshot: str
    version: str
    path: str
    rows: int
    bytes: int
    batches: tuple[str, ...]
    by_error: Mapping[str, int]
    by_instance_type: Mapping[str, int]


def dead_letters(
    store: DatasetStore, manifest: SnapshotManifest, *, workdir: Path | None = None, threads: int | None = None
) -> DeadLetters:
    """Collect the dead letters of the current objects and switch readers to the list; an unchanged one is kept.

    Reads the footer of every object, and whole only those that hold dead letters. Raises CorruptObject.
    """
    threads = threads or threads_for(store.objects)
    entries = store.entries(manifest.snapshot)
    current = store.current_objects(entries)
    committed = [entry for entry in entries if entry.key in current]
    footers = read_ahead(lambda entry: store.footer(current[entry.key]), committed, 4 * threads)
    dead = [entry for entry, footer in zip(committed, footers, strict=True) if footer.dead]
    version = dead_letters_version(manifest.snapshot, (current[entry.key] for entry in dead))
    path = dead_letters_path(store, version)
    if not _is_whole(store, version):
        with contextlib.ExitStack() as stack:
            folder = workdir or stack.enter_context(temporary_folder())
            _write(store, manifest, dead, current, folder / f"{version}.parquet", path, threads)
    _switch(store, version)
    return _summary(store, manifest.snapshot, version)


def dead_letters_version(snapshot: str, objects: Iterable[BatchObject]) -> str:
    """Version (16 hex digits) of the list that a snapshot and its objects with dead letters make."""
    digest = hashlib.sha256(f"{FORMAT} {snapshot}\n".encode())
    for name in sorted(batch.name for batch in objects):
        digest.update(f"{name}\n".encode())
    return digest.hexdigest()[:16]


def dead_letters_path(store: DatasetStore, version: str) -> str:
    """Path of one version of the list."""
    return f"{store.dataset}/dead_letters/{version}.parquet"


class ListManifest(Sealed):
    """What lies beside a list: its size and checksum. A list that was written before there were any has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: int = FORMAT
    file: StoredFile


def _manifest_path(store: DatasetStore, version: str) -> str:
    return f"{store.dataset}/dead_letters/{version}.json"


def list_manifest(store: DatasetStore, version: str) -> ListManifest | None:
    """Size and checksum of a list; None when nothing is known of it. Raises CorruptObject."""
    try:
        return read_sealed(store.objects, _manifest_path(store, version), ListManifest, _mended(store))
    except FileNotFoundError:
        return None


def check_dead_letters(store: DatasetStore, version: str) -> None:
    """Compare every byte of a list with its checksum, where it has one. Raises CorruptObject, FileNotFoundError."""
    said = list_manifest(store, version)
    if said is not None and sha256_of(store.objects, path := dead_letters_path(store, version)) != said.file.sha256:
        raise CorruptObject(f"{path}: expected sha256 {said.file.sha256}, found other contents; {_mended(store)}")


def _is_whole(store: DatasetStore, version: str) -> bool:
    """The list is there as it was written. One of which no checksum is known is written anew."""
    try:
        check_dead_letters(store, version)
        return list_manifest(store, version) is not None
    except (CorruptObject, FileNotFoundError):
        return False


def current_dead_letters(store: DatasetStore) -> str | None:
    """Version of the list that readers see, or None before the first. Raises CorruptObject."""
    return read_pointer(store.objects, f"{store.dataset}/dead_letters/CURRENT", _mended(store))


def _mended(store: DatasetStore) -> str:
    return f"materialize {store.dataset}/dead_letters: it is written anew"


def dead_batches(store: DatasetStore, error: str = "") -> list[str]:
    """Keys of the batches on the current list, in order: one small read, fit for a sensor. `error`: only its rows."""
    version = current_dead_letters(store)
    if version is None:
        return []
    table = _read(store, version, ["batch", "error"] if error else ["batch"])
    if error:
        table = table.filter(pc.equal(table.column("error"), error))
    return sorted(set(table.column("batch").to_pylist()))


@dataclass(frozen=True, slots=True)
class DeadLetterExample:
    """The dead letters of one error: how many, and of one of them the id and what the server said, "" where nothing.

    The words are without what they repeat of the prompt; those of an answer that missed the schema are left out.
    """

    error: str
    rows: int
    row_id: str
    says: str


def dead_letter_examples(store: DatasetStore, manifest: SnapshotManifest, most: int = 10) -> list[DeadLetterExample]:
    """One for each error of the current list, the most frequent first; none before there is a list.

    Raises CorruptObject. Reads the list, and the prompts of the batches of the examples.
    """
    version = current_dead_letters(store)
    if version is None:
        return []
    table = _read(store, version, ["row_id", "batch", "error", "error_message"])
    found: list[DeadLetterExample] = []
    entries = {entry.key: entry for entry in store.entries(manifest.snapshot)}
    for error, rows in list(_counted(table.column("error")).items())[:most]:
        line = table.filter(pc.equal(table.column("error"), error)).slice(0, 1)
        row_id, batch, words = (
            str(line.column(name)[0].as_py() or "") for name in ("row_id", "batch", "error_message")
        )
        prompt = None
        if words and (entry := entries.get(batch)) is not None and error not in _OF_ANSWERS:
            prompt = _prompt_of(store, manifest, entry, row_id)
        says = "" if prompt is None else server_sentence(words, prompt)
        found.append(DeadLetterExample(error, rows, row_id, says))
    return found


def _prompt_of(store: DatasetStore, manifest: SnapshotManifest, entry: BatchEntry, row_id: str) -> bytes | None:
    """All that a server may repeat of what it was asked; None for a conversation, whose answers it may repeat, too."""
    if manifest.turns:
        return None
    for _, rows in store.rows(manifest, [entry]):
        for row in rows:
            if row.row_id == row_id:
                return row.prompt
    return None


def dead_letter_rows(store: DatasetStore, version: str) -> int:
    """Number of rows on one version of the list. Raises CorruptObject, FileNotFoundError."""
    return int(_read(store, version, ["batch"]).num_rows)


def _write(
    store: DatasetStore,
    manifest: SnapshotManifest,
    dead: Sequence[BatchEntry],
    current: Mapping[str, BatchObject],
    file: Path,
    path: str,
    threads: int,
) -> None:
    schema = table_schema(store, manifest)
    kept = [table_name(name) for name in manifest.keep_columns]
    columns = ["row_id", "batch", *kept, *_REASON]
    schema = pa.schema([schema.field(name) for name in columns])
    try:
        with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
            for rows in _large(_dead_rows(store, manifest, dead, current, threads)):
                writer.write_table(rows.select(columns).cast(schema))
        said = ListManifest(file=StoredFile.of(file))
        store.objects.upload(path, file)
        store.objects.put(_manifest_path(store, said.file.name.removesuffix(".parquet")), said.to_json())
    finally:
        file.unlink(missing_ok=True)


def _dead_rows(
    store: DatasetStore,
    manifest: SnapshotManifest,
    dead: Sequence[BatchEntry],
    current: Mapping[str, BatchObject],
    threads: int,
) -> Iterator[pa.Table]:
    committed = CommittedRows(store, manifest, current)
    answer_parts: tuple[str, ...] = PART_COLUMNS if manifest.settings().task != "embedding" else ()
    answer_parts += (TURNS,) if manifest.turns else ()
    answer_parts += (WRITTEN_TURNS,) if manifest.written_turns else ()

    def read(piece: list[BatchEntry]) -> pa.Table:
        rows = committed.read(piece).drop_columns(["output", *answer_parts])
        return rows.filter(rows.column("error").is_valid())

    return read_ahead(read, pieces(dead), threads)


def _large(tables: Iterable[pa.Table], rows: int = 20_000) -> Iterator[pa.Table]:
    """The same lines in tables of about `rows` lines: one row group each."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(part.num_rows for part in waiting) >= rows:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _switch(store: DatasetStore, version: str) -> None:
    """Point readers at a list and delete the ones that neither they nor their last look-up need."""
    try:
        former = current_dead_letters(store)
    except CorruptObject:
        former = None
    if former == version:
        return
    store.objects.put(f"{store.dataset}/dead_letters/CURRENT", version.encode())
    folder = f"{store.dataset}/dead_letters/"
    keep = {f"{folder}{found}{ending}" for found in (version, former) if found for ending in (".parquet", ".json")}
    listed = [info.path for info in store.objects.list(folder)]
    store.objects.delete(path for path in listed if path.endswith((".parquet", ".json")) and path not in keep)


def _summary(store: DatasetStore, snapshot: str, version: str) -> DeadLetters:
    table = _read(store, version, ["batch", "error", "instance_type"])
    path = dead_letters_path(store, version)
    size = next(info.size for info in store.objects.list(f"{store.dataset}/dead_letters/") if info.path == path)
    return DeadLetters(
        dataset=store.dataset,
        snapshot=snapshot,
        version=version,
        path=path,
        rows=table.num_rows,
        bytes=size,
        batches=tuple(sorted(set(table.column("batch").to_pylist()))),
        by_error=_counted(table.column("error")),
        by_instance_type=_counted(table.column("instance_type")),
    )


def _counted(column: pa.ChunkedArray) -> dict[str, int]:
    """How often each value occurs, the most frequent first."""
    counts = {line["values"] or "unknown": line["counts"] for line in column.value_counts().to_pylist()}
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _read(store: DatasetStore, version: str, columns: list[str]) -> pa.Table:
    path = dead_letters_path(store, version)
    try:
        file = store.objects.open(path)
    except FileNotFoundError:
        raise CorruptObject(f"{path}: expected the list of dead letters, found none; {_mended(store)}") from None
    with file as opened:
        try:
            return pq.read_table(opened, columns=columns, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            if not is_damage(error):
                raise
            raise CorruptObject(f"{path}: cannot be read ({error}); {_mended(store)}") from error
