"""Which batch each row of a new snapshot goes to.

A row that the previous snapshot holds keeps its batch and its place in it; new rows fill the last batch and then new
ones. Rows are compared by 128-bit digests of their row id and row key in DuckDB, which spills to disk: memory does not
grow with the number of rows. Nothing here sees a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batch_assets.snapshot.row_index import PART_ROWS, ColumnFile

if TYPE_CHECKING:
    import duckdb

MEMORY_LIMIT = "256MB"
# New rows of the last batch come after all rows that were there.
_AFTER_ALL = 1 << 40
DUPLICATE, REFUSED = 1, 2


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

    @property
    def to_ask(self) -> int:
        """Rows that are new or changed."""
        return self.rows - self.unchanged


def open_database(file: Path) -> duckdb.DuckDBPyConnection:
    """A DuckDB database in a file of its own, which spills beside it and never fetches an extension."""
    import duckdb

    return duckdb.connect(
        str(file),
        config={
            "memory_limit": MEMORY_LIMIT,
            "temp_directory": str(file.parent / "spill"),
            "threads": 2,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )


class Placement:
    """Places the rows of an index file; a context manager that holds a DuckDB database in `workdir`."""

    def __init__(
        self,
        workdir: Path,
        index: ColumnFile,
        *,
        with_id: bool,
        dedupe: bool,
        batch_rows: int,
        number_repeats: bool = False,
    ) -> None:
        """`number_repeats`: with an id column, too, rows that repeat another one have an occurrence number, 1."""
        self._folder = workdir
        self._number_repeats = number_repeats and with_id and not dedupe
        self._rows_in, self._with_id, self._dedupe, self._batch_rows = index.rows, with_id, dedupe, batch_rows
        self._database = open_database(workdir / "placement.duckdb")
        self._had_previous = False
        identity = "id_hi, id_lo" if with_id else "key_hi AS id_hi, key_lo AS id_lo"
        row_id = "row_id" if with_id else "NULL::VARCHAR AS row_id"
        self._run(
            f"CREATE VIEW source AS SELECT seq, file, line, key_hi, key_lo, {identity}, {row_id} "
            f"FROM read_parquet({quoted(index.path)})"
        )
        # fate: 0 placed, DUPLICATE, REFUSED (an id that was there before).
        self._run("CREATE TABLE special (seq BIGINT, occurrence BIGINT, fate TINYINT, of_id VARCHAR)")
        self._run("CREATE TABLE placed (seq BIGINT, batch BIGINT, place BIGINT)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
            "CREATE TABLE refused AS SELECT * FROM (SELECT seq, file, line, first_value(file) OVER same AS first_file,"
            " first_value(line) OVER same AS first_line, row_number() OVER same AS number FROM source SEMI JOIN"
            " (SELECT id_hi, id_lo FROM source GROUP BY ALL HAVING count(*) > 1) USING (id_hi, id_lo)"
            " WINDOW same AS (PARTITION BY id_hi, id_lo ORDER BY seq)) WHERE number > 1"
        )
        self._run(f"INSERT INTO special SELECT seq, 0, {REFUSED}, NULL FROM refused")
        found = self._database.cursor().execute("SELECT file, line, first_file, first_line FROM refused ORDER BY seq")
        while part := found.fetchmany(PART_ROWS):
            yield part

    def place(self, previous: ColumnFile | None) -> Counts:
        """Decide for every row. Exhaust `repeated_ids` first."""
        previous = previous if previous is not None and previous.rows else None
        if previous is not None:
            identity = "" if self._with_id else ", key_hi AS id_hi, key_lo AS id_lo"
            self._run(f"CREATE VIEW previous AS SELECT *{identity} FROM read_parquet({quoted(previous.path)})")
        (refused,) = self._numbers("SELECT count(*) FROM special")
        self._find_repeats(previous is not None)
        (duplicates,) = self._numbers(f"SELECT count(*) FROM special WHERE fate = {DUPLICATE}")
        rows = self._rows_in - refused - duplicates
        fresh = Counts(rows, duplicates, refused, rows, 0, 0, 0, False)
        counts = fresh if previous is None else self._join_previous(fresh, previous.rows)
        if self._number_repeats:
            self._mark_repeats()
        return counts

    def _mark_repeats(self) -> None:
        """Of placed rows with one key, all but the first in the order of the batches: new rows come after old ones."""
        rows, order = "source ANTI JOIN special USING (seq)", "seq"
        if self._had_previous:
            rows, order = "source JOIN placed USING (seq)", "batch, place"
        shared = "SELECT key_hi, key_lo FROM source GROUP BY ALL HAVING count(*) > 1"
        self._run(
            "INSERT INTO special SELECT seq, 1, 0, NULL FROM (SELECT seq, row_number() OVER"
            f" (PARTITION BY key_hi, key_lo ORDER BY {order}) AS number"
            f" FROM {rows} SEMI JOIN ({shared}) USING (key_hi, key_lo)) WHERE number > 1"
        )

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
        known, order = "", "r.seq"
        if previous:
            known = " LEFT JOIN previous p ON p.id_hi = r.id_hi AND p.id_lo = r.id_lo"
            order = "(p.key_hi = r.key_hi AND p.key_lo = r.key_lo) DESC NULLS LAST, p.batch IS NULL, r.seq"
        self._run(
            f"INSERT INTO special SELECT seq, 0, {DUPLICATE}, of_id FROM (SELECT r.seq, first_value(r.row_id) OVER same"
            f" AS of_id, row_number() OVER same AS number FROM ({repeats}) r{known}"
            f" WINDOW same AS (PARTITION BY r.key_hi, r.key_lo ORDER BY {order})) WHERE number > 1"
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

    def gone(self) -> set[tuple[int, int]]:
        """Rows of the previous snapshot that the source does not have any more: number of the batch, place in it."""
        kept = "SELECT batch, place FROM joined WHERE batch IS NOT NULL"
        query = f"SELECT batch, place FROM previous ANTI JOIN ({kept}) USING (batch, place)"
        return set(self._run(query).fetchall())

    def places(self) -> Places:
        """What `place` decided. It stays readable when the database is closed and its memory is free again."""
        special = self._saved("special", "SELECT * FROM special ORDER BY seq")
        placed = self._saved("placed", "SELECT * FROM placed ORDER BY seq") if self._had_previous else None
        return Places(special, placed, self._batch_rows)

    def _saved(self, name: str, query: str) -> Path:
        path = self._folder / f"{name}.parquet"
        self._run(f"COPY ({query}) TO {quoted(path)} (FORMAT parquet, COMPRESSION lz4_raw)")
        return path


class _InOrder:
    """A result sorted by `seq`, handed out in ranges."""

    def __init__(self, path: Path) -> None:
        file = _in_small_reads(path)
        self._reader = file.iter_batches(PART_ROWS, use_threads=False)
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


def quoted(path: Path) -> str:
    """A path as a text of SQL."""
    return "'" + str(path).replace("'", "''") + "'"
