"""Which batch each row of a new snapshot goes to (DESIGN section 2, "snapshot").

A row that the previous snapshot holds keeps its batch and its place in it; new rows fill the last batch and then new
ones. Rows are compared by 128-bit digests of their row id and row key in DuckDB, which spills to disk: memory does not
grow with the number of rows. Nothing here sees a prompt.
"""

from __future__ import annotations

import hashlib
import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from resources.store import BatchEntry, DatasetStore, SnapshotManifest

if TYPE_CHECKING:
    import duckdb

MEMORY_LIMIT = "384MB"
_INDEX_ROWS = 1 << 16
_PREVIOUS_ROWS = 1 << 13
# New rows of the last batch come after all rows that were there.
_AFTER_ALL = 1 << 40
DUPLICATE, REFUSED = 1, 2


def id_digest(row_id: str) -> bytes:
    """16 bytes that stand for a row id; ids that are equal after Unicode normalisation (NFC) have the same."""
    text = row_id if row_id.isascii() else unicodedata.normalize("NFC", row_id)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def halves(digests: bytes, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """The first 16 bytes of each digest as two columns of 64 bits."""
    words = np.frombuffer(digests, dtype=">u8").reshape(-1, stride // 8)
    return words[:, 0].astype(np.uint64), words[:, 1].astype(np.uint64)


class ColumnFile:
    """A Parquet file of narrow columns, written in large row groups from small pieces."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.rows = path, 0
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="lz4", use_dictionary=False)
        self._pieces: list[pa.RecordBatch] = []
        self._held = 0

    def add(self, **columns: Any) -> None:
        """Append rows; every column of the schema, same length."""
        arrays = [pa.array(columns[field.name], field.type) for field in self._schema]
        piece = pa.record_batch(arrays, schema=self._schema)
        self._pieces.append(piece)
        self._held += piece.num_rows
        self.rows += piece.num_rows
        if self._held >= _INDEX_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._pieces:
            self._writer.write_table(pa.Table.from_batches(self._pieces, self._schema))
            self._pieces, self._held = [], 0

    def close(self) -> None:
        """Finish the file."""
        self._flush()
        self._writer.close()


_DIGESTS = [("key_hi", pa.uint64()), ("key_lo", pa.uint64())]
_IDS = [("id_hi", pa.uint64()), ("id_lo", pa.uint64())]


def index_file(path: Path, *, with_id: bool) -> ColumnFile:
    """The new source's rows in order: seq, key digest, file number and line; with an id column also the id."""
    place = [("seq", pa.int64()), ("file", pa.int32()), ("line", pa.int64())]
    return ColumnFile(path, pa.schema(place + _DIGESTS + ([*_IDS, ("row_id", pa.string())] if with_id else [])))


def previous_index(path: Path, *, with_id: bool) -> ColumnFile:
    """The previous snapshot's rows: digests, occurrence, batch number and place in the batch."""
    place = [("occurrence", pa.int64()), ("batch", pa.int64()), ("place", pa.int64())]
    return ColumnFile(path, pa.schema(place + _DIGESTS + (_IDS if with_id else [])))


def previous_file(
    path: Path, store: DatasetStore, manifest: SnapshotManifest, entries: Sequence[BatchEntry], *, with_id: bool
) -> ColumnFile:
    """The index of a snapshot in the store."""
    out = previous_index(path, with_id=with_id)
    for ids, keys, batches, places in _previous_rows(store, manifest, entries, path.parent):
        if with_id:
            id_hi, id_lo = halves(b"".join(map(id_digest, ids)), 16)
            extra, occurrences, kept = {"id_hi": id_hi, "id_lo": id_lo}, [0] * len(ids), None
        else:
            # A snapshot made with an id column has other row ids: none of its rows can be found again.
            kept = [i for i, row_id in enumerate(ids) if row_id[:64] == keys[i] and row_id[64:65] == "#"]
            extra, occurrences = {}, [int(ids[i][65:]) for i in kept]
        key_hi, key_lo = halves(bytes.fromhex("".join([key[:32] for key in keys])), 16)
        columns = {"batch": batches, "place": places, "key_hi": key_hi, "key_lo": key_lo, **extra}
        if kept is not None and len(kept) < len(ids):
            columns = {name: values[kept] for name, values in columns.items()}
        out.add(occurrence=occurrences, **columns)
    out.close()
    return out


def _previous_rows(
    store: DatasetStore, manifest: SnapshotManifest, entries: Sequence[BatchEntry], workdir: Path
) -> Iterator[tuple[list[str], list[str], np.ndarray, np.ndarray]]:
    for number, shard in enumerate(manifest.shards):
        path = store.snapshot_path(manifest.snapshot, shard.path)
        uri, copy = store.objects.uri(path), workdir / "previous-shard.parquet"
        if uri.startswith("s3://"):  # one download instead of thousands of small ranges
            with store.objects.open(path) as remote, copy.open("wb") as local:
                shutil.copyfileobj(remote, local, 1 << 23)
            uri = str(copy)
        mine = sorted((entry for entry in entries if entry.shard == number), key=lambda entry: entry.row_group)
        with pq.ParquetFile(uri, pre_buffer=False) as file:
            for part in _chunks(mine):
                table = file.read_row_groups([entry.row_group for entry in part], columns=["row_id", "row_key"])
                batches = np.concatenate([np.full(entry.rows, int(entry.key), np.int64) for entry in part])
                places = np.concatenate([np.arange(entry.rows, dtype=np.int64) for entry in part])
                yield table.column("row_id").to_pylist(), table.column("row_key").to_pylist(), batches, places
        copy.unlink(missing_ok=True)


def _chunks(entries: Iterable[BatchEntry]) -> Iterator[list[BatchEntry]]:
    part: list[BatchEntry] = []
    rows = 0
    for entry in entries:
        part.append(entry)
        rows += entry.rows
        if rows >= _PREVIOUS_ROWS:
            yield part
            part, rows = [], 0
    if part:
        yield part


@dataclass(frozen=True, slots=True)
class Counts:
    """What a refresh did to the rows. `previous` is False when nothing of the previous snapshot survived."""

    rows: int
    duplicates: int
    refused: int
    added: int
    changed: int
    removed: int
    unchanged: int
    previous: bool


class Placement:
    """Places the rows of an index file; a context manager that holds a DuckDB database in `workdir`."""

    def __init__(self, workdir: Path, index: ColumnFile, *, with_id: bool, dedupe: bool, batch_rows: int) -> None:
        import duckdb

        self._folder = workdir
        self._rows_in, self._with_id, self._dedupe, self._batch_rows = index.rows, with_id, dedupe, batch_rows
        self._database: duckdb.DuckDBPyConnection = duckdb.connect(
            str(workdir / "placement.duckdb"),
            config={
                "memory_limit": MEMORY_LIMIT,
                "temp_directory": str(workdir / "spill"),
                "threads": 2,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            },
        )
        self._had_previous = False
        identity = "id_hi, id_lo" if with_id else "key_hi AS id_hi, key_lo AS id_lo"
        row_id = "row_id" if with_id else "NULL::VARCHAR AS row_id"
        self._run(
            f"CREATE VIEW source AS SELECT seq, file, line, key_hi, key_lo, {identity}, {row_id} "
            f"FROM read_parquet({_quoted(index.path)})"
        )
        # fate: 0 placed, DUPLICATE, REFUSED (an id that was there before).
        self._run("CREATE TABLE special (seq BIGINT, occurrence BIGINT, fate TINYINT, of_seq BIGINT)")
        self._run("CREATE TABLE placed (seq BIGINT, batch BIGINT, place BIGINT)")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    def _run(self, query: str) -> Any:
        return self._database.execute(query)

    def _numbers(self, query: str) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self._run(query).fetchone()
        return found

    def repeated_ids(self) -> Iterator[list[tuple[int, int, int, int]]]:
        """Refuse all but the first row of each id: (file number, line, first's file number, its line), in parts."""
        if not self._with_id:
            return
        self._run(
            f"INSERT INTO special SELECT seq, 0, {REFUSED}, first FROM ("
            " SELECT seq, min(seq) OVER (PARTITION BY id_hi, id_lo) AS first FROM source SEMI JOIN"
            " (SELECT id_hi, id_lo FROM source GROUP BY ALL HAVING count(*) > 1) USING (id_hi, id_lo)"
            ") WHERE seq <> first"
        )
        found = self._database.cursor().execute(
            "SELECT s.file, s.line, f.file, f.line FROM special x JOIN source s ON s.seq = x.seq"
            " JOIN source f ON f.seq = x.of_seq ORDER BY x.seq"
        )
        while part := found.fetchmany(_PREVIOUS_ROWS):
            yield part

    def place(self, previous: ColumnFile | None) -> Counts:
        """Decide for every row. Exhaust `repeated_ids` first."""
        previous = previous if previous is not None and previous.rows else None
        if previous is not None:
            identity = "" if self._with_id else ", key_hi AS id_hi, key_lo AS id_lo"
            self._run(f"CREATE VIEW previous AS SELECT *{identity} FROM read_parquet({_quoted(previous.path)})")
        (refused,) = self._numbers("SELECT count(*) FROM special")
        self._find_repeats(previous is not None)
        (duplicates,) = self._numbers(f"SELECT count(*) FROM special WHERE fate = {DUPLICATE}")
        rows = self._rows_in - refused - duplicates
        fresh = Counts(rows, duplicates, refused, rows, 0, 0, 0, False)
        if previous is None:
            return fresh
        return self._join_previous(fresh, previous.rows)

    def _find_repeats(self, previous: bool) -> None:
        """Occurrence numbers of equal row keys (without an id column), and what dedupe leaves out."""
        if self._with_id and not self._dedupe:
            return
        unrefused = " ANTI JOIN special USING (seq)" if self._with_id else ""
        repeats = (
            f"SELECT * FROM source{unrefused} SEMI JOIN (SELECT key_hi, key_lo FROM source{unrefused}"
            " GROUP BY ALL HAVING count(*) > 1) USING (key_hi, key_lo)"
        )
        if not self._with_id:
            fate = f"CASE WHEN occurrence > 0 THEN {DUPLICATE} ELSE 0 END" if self._dedupe else "0"
            self._run(
                f"INSERT INTO special SELECT seq, occurrence, {fate}, NULL FROM (SELECT seq, row_number() OVER"
                f" (PARTITION BY key_hi, key_lo ORDER BY seq) - 1 AS occurrence FROM ({repeats})) WHERE occurrence > 0"
            )
            return
        # The row that was asked before stays the one that is asked, wherever its equals appear.
        known, order = "", "seq"
        if previous:
            known = " LEFT JOIN previous p ON p.id_hi = r.id_hi AND p.id_lo = r.id_lo"
            order = "(p.key_hi = r.key_hi AND p.key_lo = r.key_lo) DESC NULLS LAST, p.batch IS NULL, r.seq"
        self._run(
            f"INSERT INTO special SELECT seq, 0, {DUPLICATE}, of_seq FROM (SELECT r.seq, first_value(r.seq) OVER"
            f" (PARTITION BY r.key_hi, r.key_lo ORDER BY {order}) AS of_seq FROM ({repeats}) r{known})"
            " WHERE seq <> of_seq"
        )

    def _join_previous(self, fresh: Counts, previous_rows: int) -> Counts:
        (special,) = self._numbers("SELECT count(*) FROM special")
        rows, occurrence = "source s", "0"
        if special:
            rows, occurrence = "source s LEFT JOIN special x ON x.seq = s.seq", "coalesce(x.occurrence, 0)"
        self._run(
            "CREATE TABLE joined AS SELECT s.seq, p.batch, p.place, p.key_hi = s.key_hi AND p.key_lo = s.key_lo AS same"
            f" FROM {rows} LEFT JOIN previous p ON p.id_hi = s.id_hi AND p.id_lo = s.id_lo"
            f" AND p.occurrence = {occurrence}" + (" WHERE coalesce(x.fate, 0) = 0" if special else "")
        )
        kept, same, last = self._numbers("SELECT count(batch), count(*) FILTER (WHERE same), max(batch) FROM joined")
        if not kept:
            return Counts(fresh.rows, fresh.duplicates, fresh.refused, fresh.rows, 0, previous_rows, 0, False)
        (in_last,) = self._numbers(f"SELECT count(*) FROM joined WHERE batch = {last}")
        room, size = max(0, self._batch_rows - in_last), self._batch_rows
        self._run(
            "INSERT INTO placed SELECT seq, batch, place FROM joined WHERE batch IS NOT NULL UNION ALL"
            f" SELECT seq, CASE WHEN n < {room} THEN {last} ELSE {last + 1} + (n - {room}) // {size} END,"
            f" {_AFTER_ALL} + n"
            " FROM (SELECT seq, row_number() OVER (ORDER BY seq) - 1 AS n FROM joined WHERE batch IS NULL) ORDER BY seq"
        )
        self._had_previous = True
        counts = (fresh.rows - kept, kept - same, previous_rows - kept, same)
        return Counts(fresh.rows, fresh.duplicates, fresh.refused, *counts, True)

    def places(self) -> Places:
        """What `place` decided. It stays readable when the database is closed and its memory is free again."""
        special = self._saved(
            "special",
            "SELECT x.seq, x.occurrence, x.fate, s.row_id AS of_id FROM special x LEFT JOIN source s"
            f" ON s.seq = x.of_seq AND x.fate = {DUPLICATE} ORDER BY x.seq",
        )
        placed = self._saved("placed", "SELECT * FROM placed ORDER BY seq") if self._had_previous else None
        return Places(special, placed, self._batch_rows)

    def _saved(self, name: str, query: str) -> Path:
        path = self._folder / f"{name}.parquet"
        self._run(f"COPY ({query}) TO {_quoted(path)} (FORMAT parquet, COMPRESSION lz4_raw)")
        return path


class _InOrder:
    """A result sorted by `seq`, handed out in ranges."""

    def __init__(self, path: Path) -> None:
        file = _in_small_reads(path)
        self._reader = file.iter_batches(_PREVIOUS_ROWS, use_threads=False)
        self._table: pa.Table = file.schema_arrow.empty_table()

    def below(self, seq: int) -> pa.Table:
        """The next rows whose seq is less than this."""
        while not self._table.num_rows or self._table.column("seq")[-1].as_py() < seq:
            try:
                batch = next(self._reader)
            except StopIteration:
                break
            self._table = pa.concat_tables([self._table, pa.Table.from_batches([batch])])
        cut = int(np.searchsorted(self._table.column("seq").to_numpy(), seq))
        part, self._table = self._table.slice(0, cut), self._table.slice(cut)
        return part


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Consecutive rows of the source: occurrence number, fate, batch and place in it, and whose duplicate it is."""

    occurrence: np.ndarray
    fate: np.ndarray
    batch: np.ndarray
    place: np.ndarray
    of_id: dict[int, str]


class Places:
    """The decisions of a Placement, read once, in the order of the source."""

    def __init__(self, special: Path, placed: Path | None, batch_rows: int) -> None:
        self._placed_path = placed
        self._special, self._placed = _InOrder(special), _InOrder(placed) if placed is not None else None
        self._batch_rows, self._seq, self._count = batch_rows, 0, 0

    def last_batch_if_unsorted(self) -> int | None:
        """None when the order of the source is the order of the batches; else the highest batch number."""
        last, highest, sorted_ = -1, 0, True
        if self._placed_path is None:
            return None
        file = _in_small_reads(self._placed_path)
        for part in file.iter_batches(1 << 16, columns=["batch", "place"], use_threads=False):
            batch = part.column("batch").to_numpy()
            order = batch * (_AFTER_ALL << 1) + part.column("place").to_numpy()
            sorted_ = sorted_ and bool(order[0] > last and (np.diff(order) > 0).all())
            last, highest = int(order[-1]), max(highest, int(batch.max()))
        return None if sorted_ else highest

    def next(self, rows: int) -> PlacedRows:
        """The decisions on the next rows."""
        first, self._seq = self._seq, self._seq + rows
        occurrence, fate = np.zeros(rows, np.int64), np.zeros(rows, np.int8)
        special = self._special.below(self._seq)
        at = _offsets(special, first, rows)
        occurrence[at] = special.column("occurrence").to_numpy()
        fate[at] = special.column("fate").to_numpy()
        of_id = {int(i): row_id for i, row_id in zip(at, special.column("of_id").to_pylist(), strict=True) if row_id}
        batch, place = np.full(rows, -1, np.int64), np.zeros(rows, np.int64)
        if self._placed is not None:
            placed = self._placed.below(self._seq)
            at = _offsets(placed, first, rows)
            batch[at], place[at] = placed.column("batch").to_numpy(), placed.column("place").to_numpy()
        else:
            free = np.flatnonzero(fate == 0)
            place[free] = self._count + np.arange(len(free))
            batch[free] = place[free] // self._batch_rows
            self._count += len(free)
        if (batch[fate == 0] < 0).any():
            raise RuntimeError("placement: a row of the source was given no batch")
        return PlacedRows(occurrence, fate, batch, place, of_id)


def _offsets(table: pa.Table, first: int, rows: int) -> np.ndarray:
    """Places of a table's rows among `rows` rows from seq `first` on; they rise, or the database broke its promise."""
    offsets: np.ndarray = table.column("seq").to_numpy() - first
    if len(offsets) and (offsets[0] < 0 or offsets[-1] >= rows or (np.diff(offsets) <= 0).any()):
        raise RuntimeError("placement: decisions came back in another order than the source")
    return offsets


def _in_small_reads(path: Path) -> pq.ParquetFile:
    """A file to stream from: pyarrow would read all of it ahead."""
    return pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"
