"""One dataset in the store: snapshots, batch objects, journal, published tables (DESIGN section 6).

A batch object is data and commit in one: it exists, whole, or it does not. Everything else here can be made again
from the batch objects and the snapshot.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from gpu_runner.rows import Generation, Outcome, Row, Task, data_version
from resources.checked import Sealed, StoredFile, read_pointer, read_sealed
from resources.objects import CorruptObject, ObjectInfo, Objects, open_for_sensor, open_objects
from resources.tables import is_outcomes_table, outcomes_from, outcomes_table, with_parts, without_empty_parts

FOOTER_KEY = b"batch_assets"
_CHECKSUM_BYTES = 8
_OBJECT_NAME = re.compile(r"^(?P<key>\d{5,})/(?P<version>[0-9a-f]{16})-g(?P<generation>\d+)\.parquet$")


class Shard(BaseModel):
    """One Parquet file of a snapshot: path below the snapshot's folder, and its rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str
    rows: int


class SnapshotManifest(Sealed):
    """The source as read once. Written last of a snapshot: its presence means that the snapshot is complete.

    `files`: all its other files with size and checksum; empty in a snapshot made before there were checksums.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: int = 1
    dataset: str
    snapshot: str
    previous: str | None
    created_at: float
    source: str
    rows: int
    batches: int
    batch_rows: int
    source_rows: int
    rejected: int
    duplicates: int
    added: int
    changed: int
    removed: int
    unchanged: int
    keep_columns: list[str]
    shards: list[Shard]
    duplicate_shards: list[Shard] = Field(default_factory=list)
    files: list[StoredFile] = Field(default_factory=list)
    generation: dict[str, Any]

    def settings(self) -> Generation:
        """What all rows of the snapshot share."""
        return Generation(**self.generation)


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One batch of a snapshot: where its rows lie, and the data version that a current object must have."""

    key: str
    rows: int
    data_version: str
    shard: int
    row_group: int


@dataclass(frozen=True, slots=True, order=True)
class BatchObject:
    """A committed batch object, as named in the store."""

    key: str
    data_version: str
    generation: int

    @property
    def name(self) -> str:
        """Path below the dataset's `batches/` folder."""
        return f"{self.key}/{self.data_version}-g{self.generation}.parquet"


class BatchFooter(BaseModel):
    """What a batch object says of itself in its Parquet footer; the ledger event is made from it alone.

    `bytes` and `sha256` are those of the object: not part of what it says, but known to whoever wrote or read it whole.
    """

    model_config = ConfigDict(frozen=True)
    format: int = 1
    dataset: str
    key: str
    snapshot: str
    data_version: str
    generation: int
    epoch: int
    run_id: str
    root_run_id: str
    rows: int
    ok: int
    dead: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    model: str
    engine: str
    usd: float | None = None
    reused: int = 0
    bytes: int | None = Field(default=None, exclude=True)
    sha256: str | None = Field(default=None, exclude=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchFooter) and self.model_dump() == other.model_dump()

    @classmethod
    def of(
        cls,
        dataset: str,
        entry: BatchEntry,
        outcomes: Sequence[Outcome],
        *,
        snapshot: str,
        generation: int,
        epoch: int,
        run_id: str,
        root_run_id: str,
        reused: int = 0,
    ) -> BatchFooter:
        """Counts over the outcomes; `seconds` spans from the first row's start to the last row's end.

        `reused`: rows whose outcome is that of an earlier object. `usd` is what the rows cost, of those whose price is
        known; None when none is.
        """
        dead = sum(not outcome.ok for outcome in outcomes)
        newest = max(outcomes, key=lambda outcome: outcome.started_at)
        ended = max(outcome.started_at + outcome.seconds for outcome in outcomes)
        mine = [outcome.started_at for outcome in outcomes if outcome.origin.run_id == run_id]
        return cls(
            dataset=dataset,
            key=entry.key,
            snapshot=snapshot,
            data_version=entry.data_version,
            generation=generation,
            epoch=epoch,
            run_id=run_id,
            root_run_id=root_run_id,
            rows=len(outcomes),
            ok=len(outcomes) - dead,
            dead=dead,
            prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
            completion_tokens=sum(outcome.completion_tokens for outcome in outcomes),
            seconds=max(0.0, ended - min(mine, default=ended)),
            model=newest.origin.model,
            engine=newest.origin.engine,
            usd=sum(priced) if (priced := [o.usd for o in outcomes if o.usd is not None]) else None,
            reused=reused,
        )


class DatasetStore:
    """The objects of one dataset. Safe to use from several threads."""

    def __init__(self, objects: Objects, dataset: str) -> None:
        self.objects = objects
        self.dataset = dataset

    # snapshots

    def snapshot_path(self, snapshot: str, name: str) -> str:
        """Path of a file of a snapshot."""
        return f"{self.dataset}/snapshots/{snapshot}/{name}"

    def current_snapshot(self) -> str | None:
        """Id of the newest complete snapshot, or None before the first. Raises CorruptObject."""
        return read_pointer(self.objects, f"{self.dataset}/snapshots/CURRENT", self.mended_by_run)

    @property
    def mended_by_run(self) -> str:
        """What to do about a snapshot, or a pointer, that is gone or damaged."""
        return f"`batch-assets run {self.dataset}` mends it"

    def manifest(self, snapshot: str) -> SnapshotManifest:
        """Raises CorruptObject when the snapshot was never completed, or its manifest is gone or damaged."""
        path = self.snapshot_path(snapshot, "manifest.json")
        try:
            return read_sealed(self.objects, path, SnapshotManifest, self.mended_by_run)
        except FileNotFoundError:
            raise CorruptObject(
                f"{path}: expected the manifest of a snapshot, found none; {self.mended_by_run}"
            ) from None

    def snapshots(self) -> list[str]:
        """Ids of the snapshots that have a manifest."""
        prefix = f"{self.dataset}/snapshots/"
        names = (info.path[len(prefix) :].partition("/") for info in self.objects.list(prefix))
        return [snapshot for snapshot, _, name in names if name == "manifest.json"]

    def put_manifest(self, manifest: SnapshotManifest) -> None:
        """Complete a snapshot whose other files are in place, and make it the current one."""
        path = self.snapshot_path(manifest.snapshot, "manifest.json")
        self.objects.put(path, manifest.to_json())
        self.set_current_snapshot(manifest.snapshot)

    def set_current_snapshot(self, snapshot: str) -> None:
        """Point at a snapshot that is complete (again)."""
        self.objects.put(f"{self.dataset}/snapshots/CURRENT", snapshot.encode())

    def entries(self, snapshot: str) -> list[BatchEntry]:
        """Every batch of the snapshot in key order. Raises CorruptObject."""
        path, names = (
            self.snapshot_path(snapshot, "batches.parquet"),
            ("key", "rows", "data_version", "shard", "row_group"),
        )
        with self._whole(path), pq.ParquetFile(pa.BufferReader(self.objects.get(path))) as file:
            table = file.read(use_threads=False)
            columns = [table.column(name).to_pylist() for name in names]
        return [BatchEntry(*line) for line in zip(*columns, strict=True)]

    @contextlib.contextmanager
    def _whole(self, path: str) -> Iterator[None]:
        """A file of a snapshot is read in the body: says what to do when it is gone or cannot be read."""
        try:
            yield
        except (FileNotFoundError, pa.ArrowException, KeyError, OSError) as error:
            found = (
                "none" if isinstance(error, FileNotFoundError) else f"one that cannot be read ({type(error).__name__})"
            )
            raise CorruptObject(
                f"{path}: expected a file of the snapshot, found {found}; {self.mended_by_run}"
            ) from error

    def prompt_tables(
        self, manifest: SnapshotManifest, entries: Iterable[BatchEntry], columns: Sequence[str] | None = None
    ) -> Iterator[tuple[BatchEntry, pa.Table]]:
        """The prompt rows of each batch, one row group at a time, with its shard opened once. Raises CorruptObject."""
        with contextlib.ExitStack() as stack:
            shard, reader, path = -1, None, ""
            for entry in entries:
                if entry.shard != shard:
                    stack.close()
                    path = self.snapshot_path(manifest.snapshot, manifest.shards[entry.shard].path)
                    with self._whole(path):
                        file = stack.enter_context(self.objects.open(path))
                        reader, shard = stack.enter_context(pq.ParquetFile(file)), entry.shard
                assert reader is not None
                with self._whole(path):
                    table = reader.read_row_group(entry.row_group, columns=columns)
                yield entry, table

    def rows(
        self, manifest: SnapshotManifest, entries: Iterable[BatchEntry]
    ) -> Iterator[tuple[BatchEntry, tuple[Row, ...]]]:
        """The rows of each batch. Raises CorruptObject when a batch is not what the snapshot says it is."""
        for entry, table in self.prompt_tables(manifest, entries, ("row_id", "row_key", "prompt")):
            ids, keys, prompts = (table.column(name).to_pylist() for name in ("row_id", "row_key", "prompt"))
            if data_version(zip(ids, keys, strict=True)) != entry.data_version:
                raise CorruptObject(
                    f"{self.dataset} snapshot {manifest.snapshot} batch {entry.key}: expected data version "
                    f"{entry.data_version}, found other rows; materialize prompts again"
                )
            yield entry, tuple(Row(entry.key, *line) for line in zip(ids, keys, prompts, strict=True))

    # batch objects

    def batch_path(self, batch: BatchObject) -> str:
        """Path of a batch object."""
        return f"{self.dataset}/batches/{batch.name}"

    def objects_by_batch(self, first: str = "", last: str = "~") -> dict[str, list[BatchObject]]:
        """All objects of the batches from `first` to `last`, oldest generation first within a data version."""
        found: dict[str, list[BatchObject]] = defaultdict(list)
        for batch, _ in self.batch_infos(first, last):
            found[batch.key].append(batch)
        return {key: sorted(batch) for key, batch in found.items()}

    def batch_infos(self, first: str = "", last: str = "~") -> Iterator[tuple[BatchObject, ObjectInfo]]:
        """All objects of the batches from `first` to `last` with their sizes, in the order of a listing."""
        prefix = f"{self.dataset}/batches/"
        for info in self.objects.list(prefix, start_after=prefix + first if first else ""):
            if match := _OBJECT_NAME.match(info.path[len(prefix) :]):
                if match["key"] > last:
                    break
                yield BatchObject(match["key"], match["version"], int(match["generation"])), info

    def current_objects(self, entries: Sequence[BatchEntry]) -> dict[str, BatchObject]:
        """The object with the highest generation at each entry's data version; entries without one are missing."""
        if not entries:
            return {}
        found = self.objects_by_batch(entries[0].key, entries[-1].key)
        current: dict[str, BatchObject] = {}
        for entry in entries:
            matching = [batch for batch in found.get(entry.key, ()) if batch.data_version == entry.data_version]
            if matching:
                current[entry.key] = matching[-1]
        return current

    def commit(self, footer: BatchFooter, outcomes: Sequence[Outcome], task: Task) -> tuple[BatchFooter, bool]:
        """Write a batch object, create-only.

        Returns its footer and True, or the footer of the object that was there first and False: that one holds valid
        work of the same rows and is adopted.
        """
        batch = BatchObject(footer.key, footer.data_version, footer.generation)
        found = data_version((outcome.row_id, outcome.row_key) for outcome in outcomes)
        if found != footer.data_version or len(outcomes) != footer.rows:
            raise CorruptObject(
                f"{self.batch_path(batch)}: refused to commit outcomes of other rows (data version {found})"
            )
        table = without_empty_parts(outcomes_table(outcomes, task))
        table = table.replace_schema_metadata({FOOTER_KEY: footer.model_dump_json()})
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
        data = buffer.getvalue()
        if self.objects.create(self.batch_path(batch), data):
            return _as_stored(footer, data), True
        return self.read_batch(batch)[1], False

    def footer(self, batch: BatchObject) -> BatchFooter:
        """What the object says of itself. Raises CorruptObject when it is torn or says something else than its name."""
        with self.objects.open(self.batch_path(batch)) as file:
            try:
                metadata = pq.read_metadata(file)
            except (pa.ArrowException, OSError) as error:
                raise self._not_whole(batch, error) from error
        return self._footer(batch, metadata)

    def read_batch(self, batch: BatchObject) -> tuple[pa.Table, BatchFooter]:
        """The whole object and its footer in one read, page checksums verified.

        Raises CorruptObject, FileNotFoundError.
        """
        data = self.objects.get(self.batch_path(batch))
        try:
            with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
                table, footer = file.read(use_threads=False), self._footer(batch, file.metadata)
        except (pa.ArrowException, OSError) as error:
            raise self._not_whole(batch, error) from error
        # Page checksums cover the rows; what says how to read them, the file's own footer, has none.
        if not is_outcomes_table(table) or table.num_rows != footer.rows:
            raise CorruptObject(f"{self.batch_path(batch)}: its columns or its number of rows are not as written")
        return with_parts(table), _as_stored(footer, data)

    def _not_whole(self, batch: BatchObject, error: Exception) -> CorruptObject:
        return CorruptObject(f"{self.batch_path(batch)}: not a whole batch object ({type(error).__name__}: {error})")

    def _footer(self, batch: BatchObject, metadata: pq.FileMetaData) -> BatchFooter:
        path = self.batch_path(batch)
        try:
            footer = BatchFooter.model_validate_json((metadata.metadata or {})[FOOTER_KEY])
        except (KeyError, ValueError) as error:
            raise self._not_whole(batch, error) from error
        if (footer.key, footer.data_version, footer.generation) != (batch.key, batch.data_version, batch.generation):
            raise CorruptObject(
                f"{path}: its footer names batch {footer.key} {footer.data_version} g{footer.generation}"
            )
        if metadata.num_rows != footer.rows:
            raise CorruptObject(f"{path}: expected {footer.rows} rows, found {metadata.num_rows}")
        return footer

    def batch_table(self, batch: BatchObject) -> pa.Table:
        """The rows of a batch object. Raises CorruptObject, FileNotFoundError."""
        return self.read_batch(batch)[0]

    def outcomes(self, batch: BatchObject) -> list[Outcome]:
        """The outcomes of a batch object in row order."""
        return list(outcomes_from(self.batch_table(batch)))

    # journal

    def append_journal(
        self,
        key_range: tuple[str, str],
        purpose: str,
        run_id: str,
        sequence: int,
        batches: Mapping[str, Sequence[Outcome]],
        task: Task,
    ) -> str:
        """Write one segment of finished rows of open batches; returns its path.

        `purpose` is empty for ordinary work; a regenerate or re-drive keeps a journal of its own under its root run id.
        """
        tables = []
        for key, outcomes in batches.items():
            table = outcomes_table(outcomes, task)
            tables.append(table.append_column("batch", pa.array([key] * len(outcomes), pa.string())))
        sink = io.BytesIO()
        whole = without_empty_parts(pa.concat_tables(tables))
        with pa.ipc.new_stream(sink, whole.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(whole)
        folder = "-".join((*key_range, purpose) if purpose else key_range)
        path = f"{self.dataset}/journal/{folder}/{run_id}-{sequence:06d}.arrow"
        data = sink.getvalue()
        self.objects.put(path, data + _checksum(data))
        return path

    def journal_segments(self, key_range: tuple[str, str], purpose: str = "") -> list[str]:
        """Segments of every run with this purpose whose range overlaps `key_range`."""
        prefix = f"{self.dataset}/journal/"
        segments = []
        for info in self.objects.list(prefix):
            folder = info.path[len(prefix) :].partition("/")[0]
            first, last, found = (*folder.split("-", 2), "")[:3]
            if first <= key_range[1] and last >= key_range[0] and found == purpose:
                segments.append(info.path)
        return segments

    def read_journal(self, path: str) -> dict[str, list[Outcome]]:
        """Outcomes of one segment by batch key; empty when it is torn (its rows are generated again).

        Raises FileNotFoundError when it is gone.
        """
        whole = self.objects.get(path)
        try:
            data, checksum = whole[:-_CHECKSUM_BYTES], whole[-_CHECKSUM_BYTES:]
            if _checksum(data) != checksum:
                return {}
            table = pa.ipc.open_stream(data).read_all()
        except (pa.ArrowException, OSError):
            return {}
        batches: dict[str, list[Outcome]] = defaultdict(list)
        for key, outcome in zip(table.column("batch").to_pylist(), outcomes_from(table), strict=True):
            batches[key].append(outcome)
        return dict(batches)

    def ordinary_journal(self) -> list[str]:
        """Every segment of ordinary work: garbage once all batches of the snapshot are committed."""
        prefix = f"{self.dataset}/journal/"
        folders = ((info.path, info.path[len(prefix) :].partition("/")[0]) for info in self.objects.list(prefix))
        return [path for path, folder in folders if folder.count("-") == 1]

    # published tables

    def published_path(self, version: str, name: str) -> str:
        """Path of a file of a published table."""
        return f"{self.dataset}/published/{version}/{name}"

    def current_published(self) -> str | None:
        """Version that readers see, or None before the first publication. Raises CorruptObject."""
        return read_pointer(self.objects, f"{self.dataset}/published/CURRENT", self.mended_by_run)

    def publish(self, version: str) -> None:
        """Switch readers to a version whose files are all in place."""
        self.objects.put(f"{self.dataset}/published/CURRENT", version.encode())


def _as_stored(footer: BatchFooter, data: bytes) -> BatchFooter:
    return footer.model_copy(update={"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})


def _checksum(data: bytes) -> bytes:
    """What ends a journal segment: Arrow's compressed buffers have no checksum of their own."""
    return hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]


class BatchStore(dg.ConfigurableResource):  # type: ignore[type-arg]  # Dagster's generic has no use here
    """The store as a Dagster resource. `root` is a folder or s3://bucket/prefix; keys come from the environment."""

    root: str

    def dataset(self, name: str) -> DatasetStore:
        """The objects of one dataset."""
        return DatasetStore(open_objects(self.root), name)

    def for_sensor(self, name: str) -> DatasetStore:
        """The same for a sensor's tick: a call of a store that does not answer ends after some 20 s."""
        return DatasetStore(open_for_sensor(self.root), name)
