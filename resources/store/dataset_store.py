"""One dataset in the store: snapshots, batch objects, journal, published tables.

A batch object is data and commit in one: it exists, whole, or it does not. Everything else here can be made again
from the batch objects and the snapshot.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import BinaryIO

import dagster as dg
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from gpu_runner.rows import Outcome, Row, Task, WrittenUser, data_version
from resources.objects.opening import CorruptObject, ObjectInfo, Objects, open_for_sensor, open_objects
from resources.store.journal import Journal
from resources.store.object_integrity import is_damage, read_pointer, read_sealed
from resources.store.outcome_tables import (
    is_outcomes_table,
    outcomes_from,
    outcomes_table,
    with_all_columns,
    without_empty_columns,
)
from resources.store.snapshot_manifest import (
    REPEATS,
    REQUEST_FIELDS,
    SAMPLE_INDEX,
    USER_SYSTEM,
    USER_TURNS,
    BatchEntry,
    Shard,
    SnapshotManifest,
)

FOOTER_KEY = b"batch_assets"
_OBJECT_NAME = re.compile(r"^(?P<key>\d{5,})/(?P<version>[0-9a-f]{16})-g(?P<generation>\d+)\.parquet$")


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

    @classmethod
    def named(cls, name: str) -> BatchObject | None:
        """The object of this path below `batches/`; None for a file that is none."""
        match = _OBJECT_NAME.match(name)
        return None if match is None else cls(match["key"], match["version"], int(match["generation"]))


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
    cached_tokens: int | None = None
    answered_prompt_tokens: int | None = None
    answered_completion_tokens: int | None = None
    user_prompt_tokens: int | None = None
    user_completion_tokens: int | None = None
    seconds: float
    model: str
    engine: str
    usd: float | None = None
    reused: int = 0
    reused_from: dict[str, int] = Field(default_factory=dict)
    journaled: dict[str, int] = Field(default_factory=dict)
    marked: dict[str, int] = Field(default_factory=dict)
    looked_at: dict[str, int] = Field(default_factory=dict)
    mean_score: float | None = None
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
        journaled: Mapping[str, int] | None = None,
        cached_tokens: int | None = None,
        marked: Mapping[str, int] | None = None,
        looked_at: Mapping[str, int] | None = None,
        mean_score: float | None = None,
    ) -> BatchFooter:
        """Counts over the outcomes; `seconds` spans from the first row's start to the last row's end. `reused`: rows
        whose outcome is that of an earlier object; `reused_from` counts those of other datasets.
        `journaled`: rows by the other run that had asked for them. `usd` is what the rows cost, of those whose price is
        known; None when none is. `cached_tokens`: of the prompts' tokens, those that engines had in their caches; None:
        not counted. With them the tokens of answered rows are counted apart. `marked`: how many rows are bad, by gate;
        `looked_at`: of how many, for gates that skip some. `mean_score`: of a judge's votes.
        """
        answered = None if cached_tokens is None else [outcome for outcome in outcomes if outcome.ok]
        newest = max(outcomes, key=lambda one: one.started_at).origin
        ended = max(outcome.started_at + outcome.seconds for outcome in outcomes)
        users = [turn.user_model for one in outcomes for turn in one.turns if turn.user_model is not None]
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
            ok=sum(outcome.ok for outcome in outcomes),
            dead=sum(not outcome.ok for outcome in outcomes),
            prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
            completion_tokens=sum(outcome.completion_tokens for outcome in outcomes),
            cached_tokens=cached_tokens,
            answered_prompt_tokens=None if answered is None else sum(one.prompt_tokens for one in answered),
            answered_completion_tokens=None if answered is None else sum(one.completion_tokens for one in answered),
            user_prompt_tokens=sum(one.prompt_tokens for one in users) if users else None,
            user_completion_tokens=sum(one.completion_tokens for one in users) if users else None,
            seconds=max(0.0, ended - min(mine, default=ended)),
            model=newest.model,
            engine=newest.engine,
            usd=sum(priced) if (priced := [o.usd for o in outcomes if o.usd is not None]) else None,
            reused=reused,
            reused_from=dict(sorted(Counter(o.reused_from for o in outcomes if o.reused_from).items())),
            journaled=dict(journaled or {}),
            marked=dict(marked or {}),
            looked_at=dict(looked_at or {}),
            mean_score=mean_score,
        )


def encode_batch(path: str, footer: BatchFooter, outcomes: Sequence[Outcome], task: Task) -> bytes:
    """The bytes of a batch object. Raises CorruptObject for outcomes of other rows than the footer names."""
    found = data_version((outcome.row_id, outcome.row_key) for outcome in outcomes)
    if found != footer.data_version or len(outcomes) != footer.rows:
        raise CorruptObject(f"{path}: refused to commit outcomes of other rows (data version {found})")
    table = without_empty_columns(outcomes_table(outcomes, task))
    table = table.replace_schema_metadata({FOOTER_KEY: footer.model_dump_json()})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def decode_batch(path: str, batch: BatchObject, data: bytes) -> tuple[pa.Table, BatchFooter]:
    """Rows and footer of a whole object, page checksums verified. Raises CorruptObject."""
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            table, footer = file.read(use_threads=False), _footer(path, batch, file.metadata)
    except (pa.ArrowException, OSError) as error:
        raise _not_whole(path, error) from error
    # Page checksums cover the rows; what says how to read them, the file's own footer, has none.
    if not is_outcomes_table(table) or table.num_rows != footer.rows:
        raise CorruptObject(f"{path}: its columns or its number of rows are not as written")
    return with_all_columns(table), as_stored(footer, data)


def read_footer(path: str, batch: BatchObject, file: BinaryIO) -> BatchFooter:
    """What the object says of itself. Raises CorruptObject when it is torn or says something else than its name.

    Raises as the store where that does not give the bytes.
    """
    try:
        metadata = pq.read_metadata(file)
    except (pa.ArrowException, OSError) as error:
        if not is_damage(error):
            raise
        raise _not_whole(path, error) from error
    return _footer(path, batch, metadata)


def as_stored(footer: BatchFooter, data: bytes) -> BatchFooter:
    """The footer of an object with these bytes."""
    return footer.model_copy(update={"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})


def _not_whole(path: str, error: Exception) -> CorruptObject:
    return CorruptObject(f"{path}: not a whole batch object ({type(error).__name__}: {error})")


def _footer(path: str, batch: BatchObject, metadata: pq.FileMetaData) -> BatchFooter:
    try:
        footer = BatchFooter.model_validate_json((metadata.metadata or {})[FOOTER_KEY])
    except (KeyError, ValueError) as error:
        raise _not_whole(path, error) from error
    if (footer.key, footer.data_version, footer.generation) != (batch.key, batch.data_version, batch.generation):
        raise CorruptObject(f"{path}: its footer names batch {footer.key} {footer.data_version} g{footer.generation}")
    if metadata.num_rows != footer.rows:
        raise CorruptObject(f"{path}: expected {footer.rows} rows, found {metadata.num_rows}")
    return footer


__all__ = [
    "FOOTER_KEY",
    "BatchEntry",
    "BatchFooter",
    "BatchObject",
    "BatchStore",
    "DatasetStore",
    "Shard",
    "SnapshotManifest",
]


class DatasetStore:
    """The objects of one dataset. Safe to use from several threads."""

    def __init__(self, objects: Objects, dataset: str) -> None:
        self.objects = objects
        self.dataset = dataset
        self.journal = Journal(objects, dataset)

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
        """A file of a snapshot is read in the body: says what to do when it is gone or damaged.

        A store that does not give its bytes now says nothing about the file: its error is raised as it is.
        """
        try:
            yield
        except (FileNotFoundError, pa.ArrowException, KeyError, OSError) as error:
            if not isinstance(error, FileNotFoundError) and not is_damage(error):
                raise
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
        sampled = (SAMPLE_INDEX,) if manifest.samples > 1 else ()
        columns = ("row_id", "row_key", "prompt", REPEATS, REQUEST_FIELDS, USER_TURNS, USER_SYSTEM, *sampled)
        asked = manifest.generation.get("user_model") or {}
        for entry, table in self.prompt_tables(manifest, entries, columns):
            ids, keys, prompts = (table.column(name).to_pylist() for name in ("row_id", "row_key", "prompt"))
            if data_version(zip(ids, keys, strict=True)) != entry.data_version:
                raise CorruptObject(
                    f"{self.dataset} snapshot {manifest.snapshot} batch {entry.key}: expected data version "
                    f"{entry.data_version}, found other rows; materialize prompts again"
                )
            repeats = table.column(REPEATS).to_pylist() if REPEATS in table.schema.names else [False] * len(ids)
            samples = table.column(SAMPLE_INDEX).to_pylist() if sampled else [0] * len(ids)
            own = (
                table.column(REQUEST_FIELDS).to_pylist() if REQUEST_FIELDS in table.schema.names else [None] * len(ids)
            )
            turns = table.column(USER_TURNS).to_pylist() if USER_TURNS in table.schema.names else [None] * len(ids)
            users = table.column(USER_SYSTEM).to_pylist() if USER_SYSTEM in table.schema.names else [None] * len(ids)
            lines = zip(ids, keys, prompts, repeats, samples, own, turns, users, strict=True)
            yield (
                entry,
                tuple(
                    Row(
                        entry.key,
                        row_id,
                        key,
                        prompt,
                        repeats=again,
                        sample=sample,
                        fields=fields or b"",
                        turns=tuple(orjson.loads(said)) if said else (),
                        user=WrittenUser(system, asked["opening"], asked["turns"]) if system else None,
                    )
                    for row_id, key, prompt, again, sample, fields, said, system in lines
                ),
            )

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
            if batch := BatchObject.named(info.path[len(prefix) :]):
                if batch.key > last:
                    break
                yield batch, info

    def batch_sizes(self, first: str, last: str) -> dict[str, int]:
        """The size of every file of the batches from `first` to `last`, by path; cheaper than `batch_infos`."""
        prefix = f"{self.dataset}/batches/"
        listed = self.objects.list(prefix, start_after=prefix + first)
        after = f"{prefix}{last}0"  # `/`, with which paths of the last batch go on, is before any digit
        return {info.path: info.size for info in takewhile(lambda info: info.path < after, listed)}

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
        path = self.batch_path(batch)
        data = encode_batch(path, footer, outcomes, task)
        if self.objects.create(path, data):
            return as_stored(footer, data), True
        return self.read_batch(batch)[1], False

    def footer(self, batch: BatchObject) -> BatchFooter:
        """What the object says of itself. Raises CorruptObject when it is torn or says something else than its name.

        Raises FileNotFoundError, and as the store where that does not answer.
        """
        path = self.batch_path(batch)
        with self.objects.open(path) as file:
            return read_footer(path, batch, file)

    def read_batch(self, batch: BatchObject) -> tuple[pa.Table, BatchFooter]:
        """The whole object and its footer in one read, page checksums verified.

        Raises CorruptObject, FileNotFoundError.
        """
        path = self.batch_path(batch)
        return decode_batch(path, batch, self.objects.get(path))

    def batch_table(self, batch: BatchObject) -> pa.Table:
        """The rows of a batch object. Raises CorruptObject, FileNotFoundError."""
        return self.read_batch(batch)[0]

    def outcomes(self, batch: BatchObject) -> list[Outcome]:
        """The outcomes of a batch object in row order."""
        return list(outcomes_from(self.batch_table(batch)))

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


class BatchStore(dg.ConfigurableResource):  # type: ignore[type-arg]  # Dagster's generic has no use here
    """The store as a Dagster resource. `root` is a folder or s3://bucket/prefix; keys come from the environment."""

    root: str

    def dataset(self, name: str) -> DatasetStore:
        """The objects of one dataset."""
        return DatasetStore(open_objects(self.root), name)

    def for_sensor(self, name: str) -> DatasetStore:
        """The same for a sensor's tick: a call of a store that does not answer ends after some 20 s."""
        return DatasetStore(open_for_sensor(self.root), name)


def check_object(store: DatasetStore, entry: BatchEntry, batch: BatchObject) -> BatchFooter:
    """Read one batch object whole. Raises CorruptObject when it is not exactly what its name and footer say."""
    path = store.batch_path(batch)
    table, footer = store.read_batch(batch)
    ids, keys, errors, outputs = (table.column(name) for name in ("row_id", "row_key", "error", "output"))
    if data_version(zip(ids.to_pylist(), keys.to_pylist(), strict=True)) != entry.data_version:
        raise CorruptObject(f"{path}: its rows are not those of data version {entry.data_version}")
    if len(ids) != entry.rows or len(ids.unique()) != entry.rows:
        raise CorruptObject(f"{path}: expected {entry.rows} rows of different ids, found {len(ids.unique())}")
    if pc.any(pc.equal(errors.is_null(), outputs.is_null())).as_py():
        raise CorruptObject(f"{path}: a row has both an output and an error, or neither")
    found = {
        "dataset": store.dataset,
        "ok": errors.null_count,
        "dead": len(errors) - errors.null_count,
        "prompt_tokens": pc.sum(table.column("prompt_tokens")).as_py(),
        "completion_tokens": pc.sum(table.column("completion_tokens")).as_py(),
    }
    for name, value in found.items():
        if getattr(footer, name) != value:
            raise CorruptObject(f"{path}: its footer says {name} {getattr(footer, name)}, its rows say {value}")
    return footer
