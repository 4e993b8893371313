"""Answers that other datasets of the store have and rows of a new snapshot can take (`reuse` of a dataset's YAML).

Row keys of both are compared as a refresh compares its rows: 128-bit digests in DuckDB, which spills to disk. Then each
batch object of another dataset that has a wanted answer is read once, in order, and its answers are put beside the
snapshot by the batches that want them. Runs find them there (`resources.store.reusable_answers`) and check the whole
row key, which is the SHA-256 of the canonical request with the model's name. What cannot be read is left out.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batch_assets.snapshot.files import STAGE_BYTES, Buckets
from batch_assets.snapshot.integrity import damaged_files, unlike_checksums
from batch_assets.snapshot.placement import open_database, quoted
from batch_assets.snapshot.row_index import PART_ROWS, ColumnFile, key_halves, row_places, snapshot_rows
from batch_assets.snapshot.source.errors import SourceError
from resources.objects.object_read_ahead import read_ahead, threads_for
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import BatchEntry, BatchObject, DatasetStore, SnapshotManifest
from resources.store.outcome_columns import REUSED_FROM
from resources.store.outcome_tables import outcome_schema
from resources.store.reusable_answers import ReusableAnswers
from resources.yaml_errors import nearest

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

MOST_DATASETS = 10_000
ROW_BYTES = 2048  # of an answer: for how many files put answers into order, and how many objects are read ahead
_PLACES = 1 << 20  # more than rows of a batch


@dataclass(frozen=True, slots=True)
class ReusableRows:
    """Rows that need no engine, all and by the dataset that paid for them."""

    rows: int = 0
    datasets: Mapping[str, int] = field(default_factory=dict)


def find_reusable(
    store: DatasetStore,
    manifest: SnapshotManifest,
    reuse: bool | Sequence[str],
    *,
    workdir: Path,
    vector_length: int | None = None,
) -> ReusableRows:
    """Put answers of other datasets beside the snapshot, for rows whose batch is not committed; returns what there is.

    `reuse`: True for any dataset of the store, or their names; the first that has an answer counts. `workdir`: a folder
    for temporary files of about the size of the answers. `vector_length`: what embeddings of this dataset have; None:
    what the first one that is found has. Others are left out. Can be called again at any time. Raises StoreError.
    """
    entries = store.entries(manifest.snapshot)
    committed = store.current_objects(entries)
    wanted = [entry for entry in entries if entry.key not in committed]
    names = dataset_names(store.objects) if reuse is True else list(reuse or ())
    # One at a time: each holds the batches of a whole dataset.
    sources = (source for name in names if name != store.dataset and (source := _source(store, manifest, name)))
    first = next(sources, None) if wanted else None
    if first is None:
        return ReusableRows()
    workdir.mkdir(parents=True, exist_ok=True)
    rows = _index(workdir / "wanted.parquet", store, manifest, wanted)
    with open_database(workdir / "reuse.duckdb") as database:
        database.execute(
            f"CREATE TABLE wanted AS SELECT DISTINCT batch, key_hi, key_lo FROM read_parquet({quoted(rows.path)})"
        )
        buckets = Buckets(workdir, int(wanted[-1].key), rows.rows * ROW_BYTES)
        fits = _OneLength(vector_length)
        for number, source in enumerate(itertools.chain((first,), sources)):
            folder = workdir / str(number)
            if not _Taking(database, folder, source, buckets, fits, cut=_keeps_cut(manifest)).take():
                break
            shutil.rmtree(folder)  # the rows of a whole dataset, and there may be thousands of them
    answers = ReusableAnswers(store.objects, store.dataset, reuse)
    return _write(answers, manifest.snapshot, buckets, threads_for(store.objects))


def refuse_unknown(reuse: bool | Sequence[str], declared: Collection[str], objects: Objects) -> None:
    """Raise SourceError for a name of `reuse` that is of no dataset, neither one that is `declared` nor one of the
    store: a misspelt one would have everything paid again in silence."""
    for index, name in enumerate(reuse if not isinstance(reuse, bool) else ()):
        if name not in declared and next(objects.list(f"{name}/"), None) is None:
            hint = nearest(name, sorted({*declared, *dataset_names(objects)}))
            raise SourceError(
                f"reuse.{index}: expected a dataset that is declared or lies in the store, found {name!r}. {hint}"
            )


def dataset_names(objects: Objects) -> list[str]:
    """Folders of the store that may be datasets, in order: one short listing each."""
    found: list[str] = []
    after = ""
    for _ in range(MOST_DATASETS):
        try:
            info = next(objects.list("", start_after=after), None)
        except PermissionError as error:  # a folder of somebody else, as lost+found at the root of a disk
            inside = Path(error.filename or "").parts[len(Path(objects.root).parts) :]
            if not inside:
                raise
            after = f"{inside[0]}0"
            continue
        if info is None:
            break
        name, folder, _below = info.path.partition("/")
        if folder:
            found.append(name)
        # "0" is the character after "/": the next listing begins behind the folder. A file is of nobody.
        after = f"{name}0" if folder else name
    return found


@dataclass(frozen=True, slots=True)
class _Source:
    """Another dataset: its current snapshot, and what of it is committed."""

    store: DatasetStore
    manifest: SnapshotManifest
    committed: Mapping[str, BatchObject]
    entries: list[BatchEntry]


def _source(store: DatasetStore, manifest: SnapshotManifest, name: str) -> _Source | None:
    """None: nothing of it can be reused, as it asks another model, in another way, or cannot be read."""
    other = DatasetStore(store.objects, name)
    try:
        snapshot = other.current_snapshot()
        if snapshot is None:
            return None
        found = other.manifest(snapshot)
        if _same_for_all(found) != _same_for_all(manifest):
            return None
        entries = other.entries(snapshot)
    except CorruptObject as error:
        log.warning("dataset %s: nothing of it is reused: %s", name, type(error).__name__)
        return None
    committed = other.current_objects(entries)
    return _Source(other, found, committed, [entry for entry in entries if entry.key in committed])


def _same_for_all(manifest: SnapshotManifest) -> dict[str, Any]:
    """What of a request is the same for all rows; how often it is sent again after an answer is no part of it."""
    repeated = ("repair_tries", "on_truncated", "retry_max_tokens")
    return {name: value for name, value in manifest.generation.items() if name not in repeated}


def _keeps_cut(manifest: SnapshotManifest) -> bool:
    """Whether an answer that ends at the token limit is one as it is, and was asked for with the limit of this file."""
    settings = manifest.settings()
    return settings.on_truncated is None and not settings.max_tokens_may_grow


def _index(path: Path, store: DatasetStore, manifest: SnapshotManifest, entries: Sequence[BatchEntry]) -> ColumnFile:
    """The rows of some batches by what they ask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    out = row_places(path)
    for _, keys, batches, places in snapshot_rows(store, manifest, entries, path.parent):
        out.add(batch=batches, place=places, **key_halves(keys))
    out.close()
    return out


@dataclass(frozen=True, slots=True)
class _Job:
    """Lines of one batch object, and the number of the batch that wants each."""

    key: str
    places: np.ndarray
    batches: np.ndarray


class _OneLength:
    """Lets through vectors of one length, as no other ones can be compared; texts all."""

    def __init__(self, length: int | None) -> None:
        self._length = length

    def row_bytes(self) -> int:
        """About what an answer takes."""
        return max(ROW_BYTES, 4 * (self._length or 0))

    def __call__(self, table: pa.Table, batches: np.ndarray) -> tuple[pa.Table, np.ndarray]:
        output = table.column("output")
        if not pa.types.is_list(output.type):
            return table, batches
        lengths = pc.list_value_length(output)
        if self._length is None:
            self._length = next(iter(lengths.drop_null().to_pylist()), None)
        same = pc.fill_null(pc.equal(lengths, self._length), False)
        return table.filter(same), batches[same.to_numpy()]


class _Taking:
    """Takes from one dataset what is wanted, into the buckets; it is not wanted of the next one.

    `cut`: answers that end at the token limit, too, as this dataset keeps them as they are.
    """

    def __init__(
        self,
        database: duckdb.DuckDBPyConnection,
        workdir: Path,
        source: _Source,
        buckets: Buckets,
        fits: _OneLength,
        *,
        cut: bool,
    ) -> None:
        self._database, self._workdir, self._source, self._buckets = database, workdir, source, buckets
        self._cut = cut
        self._fits, self._schema = fits, outcome_schema(source.manifest.settings().task)
        self._unanswered = False  # some row that was read has no answer: one that asks the same may have

    def take(self) -> bool:
        """All of it. False: nothing more is wanted of any other dataset."""
        source = self._source
        try:
            there = _index(self._workdir / "there.parquet", source.store, source.manifest, source.entries)
        except (OSError, pa.ArrowException, ValueError, TypeError, LookupError) as error:
            if isinstance(error, OSError | MemoryError) and not _damaged(source):
                raise  # the store is away, or our disk is full
            log.warning("dataset %s: nothing of it is reused: %s", source.store.dataset, type(error).__name__)
            return True
        more = self._take(there.path, every=False)
        if more and self._unanswered:
            more = self._take(there.path, every=True)
        return more

    def _take(self, there: Path, *, every: bool) -> bool:
        """What the first of equal rows has, or with `every` the first of them that has an answer. False: nothing more
        is wanted.
        """
        source = self._source
        taken = row_places(self._workdir / f"taken-{every:d}.parquet")
        rows = {entry.key: entry.rows for entry in source.entries}
        seen: set[tuple[int, str]] = set()

        def size(job: _Job) -> int:
            return rows.get(job.key, 0) * self._fits.row_bytes()

        read = read_ahead(self._read, self._jobs(there, every=every), threads_for(source.store.objects), size)
        for table, batches in itertools.starmap(self._fits, _together(read)):
            if every:
                table, batches = _unseen(table, batches, seen)
            if not table.num_rows:
                continue
            self._buckets.add(table, batches, np.arange(table.num_rows))
            keys = table.column("row_key").to_pylist()
            taken.add(batch=batches, place=np.zeros(len(keys), np.int64), **key_halves(keys))
        taken.close()
        self._database.execute(
            "CREATE OR REPLACE TABLE wanted AS SELECT * FROM wanted ANTI JOIN"
            f" read_parquet({quoted(taken.path)}) USING (batch, key_hi, key_lo)"
        )
        return bool(self._database.sql("SELECT 1 FROM wanted LIMIT 1").fetchall())

    def _jobs(self, there: Path, *, every: bool) -> Iterator[_Job]:
        """What is wanted of each batch object, in order: of equal rows the first one, or `every` one."""
        path = self._workdir / "jobs.parquet"
        line = f"t.batch * {_PLACES} + t.place"
        found, groups = (line, "") if every else (f"min({line})", "GROUP BY w.batch, key_hi, key_lo")
        self._database.execute(
            f"COPY (SELECT {found} AS source_line, w.batch FROM wanted w"
            f" JOIN read_parquet({quoted(there)}) t USING (key_hi, key_lo) {groups}"
            f" ORDER BY source_line) TO {quoted(path)} (FORMAT parquet, COMPRESSION lz4_raw)"
        )
        rest_at, rest_batch = np.empty(0, np.int64), np.empty(0, np.int64)
        for part in pq.ParquetFile(path, pre_buffer=False).iter_batches(PART_ROWS, use_threads=False):
            at = np.concatenate([rest_at, part.column("source_line").to_numpy()])
            batch = np.concatenate([rest_batch, part.column("batch").to_numpy()])
            cuts = [0, *(np.flatnonzero(np.diff(at // _PLACES)) + 1).tolist()]
            for first, last in itertools.pairwise(cuts):
                yield _job(at[first:last], batch[first:last])
            rest_at, rest_batch = at[cuts[-1] :], batch[cuts[-1] :]
        if len(rest_at):
            yield _job(rest_at, rest_batch)

    def _read(self, job: _Job) -> tuple[pa.Table, np.ndarray]:
        """The completions among them, as this dataset's: they cost nothing, and no request was charged."""
        source = self._source
        try:
            table = source.store.batch_table(source.committed[job.key])
            table = table.replace_schema_metadata(None).cast(self._schema).take(pa.array(job.places))
        except (CorruptObject, FileNotFoundError, pa.ArrowException, ValueError, LookupError) as error:
            log.warning("dataset %s batch %s: not reused: %s", source.store.dataset, job.key, type(error).__name__)
            self._unanswered = True
            return pa.table({}), job.batches[:0]
        completed = pc.and_(table.column("error").is_null(), table.column("started_at").is_valid())
        if not self._cut:
            completed = pc.and_(completed, pc.fill_null(pc.not_equal(table.column("finish_reason"), "length"), True))
        self._unanswered = self._unanswered or not pc.all(completed).as_py()
        table, batches = table.filter(completed), job.batches[completed.to_numpy()]
        from_whom = pc.coalesce(table.column(REUSED_FROM), source.store.dataset)
        for name, values in (
            (REUSED_FROM, from_whom),
            ("usd", pa.array(np.zeros(table.num_rows))),
            ("tries", pa.array(np.zeros(table.num_rows, np.int32))),
        ):
            number = table.schema.get_field_index(name)
            table = table.set_column(number, table.schema.field(number), values)
        return table, batches


def _damaged(source: _Source) -> bool:
    return bool(damaged_files(source.store, source.manifest) or unlike_checksums(source.store, source.manifest))


def _unseen(table: pa.Table, batches: np.ndarray, seen: set[tuple[int, str]]) -> tuple[pa.Table, np.ndarray]:
    """The first of the rows that one batch wants and that ask the same."""
    first = []
    for place, wanted in enumerate(zip(batches.tolist(), table.column("row_key").to_pylist(), strict=True)):
        if wanted not in seen:
            seen.add(wanted)
            first.append(place)
    return table.take(pa.array(first, pa.int64())), batches[np.array(first, np.int64)]


def _together(parts: Iterable[tuple[pa.Table, np.ndarray]]) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """The same rows in larger parts: each is scattered over many files."""
    held: list[tuple[pa.Table, np.ndarray]] = []
    rows = size = 0
    for table, batches in parts:
        if not table.num_rows:
            continue
        held.append((table, batches))
        rows, size = rows + table.num_rows, size + table.nbytes
        if rows >= PART_ROWS or size >= STAGE_BYTES:
            yield _joined(held)
            held, rows, size = [], 0, 0
    if held:
        yield _joined(held)


def _joined(parts: Sequence[tuple[pa.Table, np.ndarray]]) -> tuple[pa.Table, np.ndarray]:
    return pa.concat_tables([table for table, _ in parts]), np.concatenate([batches for _, batches in parts])


def _job(at: np.ndarray, batches: np.ndarray) -> _Job:
    return _Job(f"{int(at[0]) // _PLACES:05d}", at % _PLACES, batches)


def _write(answers: ReusableAnswers, snapshot: str, buckets: Buckets, threads: int) -> ReusableRows:
    """One object per batch."""
    counted: Counter[str] = Counter()

    def batches() -> Iterator[tuple[str, pa.Table]]:
        for table, numbers in buckets.read():
            counted.update(table.column(REUSED_FROM).to_pylist())
            cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
            for first, last in itertools.pairwise(cuts):
                yield f"{int(numbers[first]):05d}", table.slice(first, last - first)

    def add(batch: tuple[str, pa.Table]) -> None:
        answers.add(snapshot, *batch)

    for _ in read_ahead(add, batches(), threads):
        pass
    return ReusableRows(counted.total(), dict(sorted(counted.items())))
