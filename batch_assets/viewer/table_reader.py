"""Reads rows of published tables with DuckDB: pages, counts, histograms, single rows, and what two versions differ in.

The files are read where they lie; nothing is imported. What a search, a filter or an order finds is kept as numbers of
lines, 8 bytes each, so that a page of it and histograms of it need no second look at the texts.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from batch_assets.table_access.opened_table import Table
from batch_assets.viewer.row_query import (
    CELL_LETTERS,
    MOST_VALUES,
    Bins,
    Condition,
    Kind,
    QueryError,
    RowQuery,
    Sql,
    bins_sql,
    cell_sql,
    conditions_sql,
    has_pictures,
    kind_of,
    number_sql,
    order_sql,
    quoted,
    search_sql,
)
from gpu_runner.errors import ExitStatus, UserFacingError

MEMORY = "512MB"
DISK = "8GB"
_KEPT = 8  # searches whose lines are kept
_LOOKED_AT = 10_000  # lines of which values are counted, to see whether a text is a category, and anything varies
_QUANTILE_LINES = 200_000
_CATEGORIES = 100
_SAMPLES = 64
_COMPARED = ("prompt", "output", "error")


class TooSlow(UserFacingError):
    """A query took longer than it may."""

    exit_status = ExitStatus.FAILED


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the lines that a query finds. `rows`: number of the line, then the cells; `found`: how many there are."""

    rows: list[tuple[Any, ...]]
    found: int


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a histogram: a value, or from `low` up to not including `high`, with a count of lines."""

    count: int
    value: Any = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Histogram:
    """Bars of a column; `others`: lines with other values than those of the bars."""

    column: str
    kind: Kind
    bars: list[Bar]
    others: int = 0


@dataclass(frozen=True, slots=True)
class _Numbers:
    low: float
    high: float
    most_of: float
    whole: bool


class Stop:
    """Ends what is asked in its name, from any thread: what runs, and whatever would run next, raises TooSlow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: set[duckdb.DuckDBPyConnection] = set()
        self.asked = False

    def __call__(self) -> None:
        with self._lock:
            self.asked = True
            for connection in self._connections:
                connection.interrupt()

    @contextlib.contextmanager
    def watching(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """While the body runs, a stop interrupts this connection."""
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)


class Session:
    """One query's connection."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, stop: Stop) -> None:
        self._connection, self._stop = connection, stop

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of the answer. Raises TooSlow."""
        with self._bounded():
            return self._connection.execute(sql, list(parameters)).fetchall()

    def batches(self, sql: str, parameters: Sequence[Any], rows: int) -> Iterator[pa.RecordBatch]:
        """The answer as Arrow batches of so many rows. Raises TooSlow."""
        with self._bounded():
            for batch in self._connection.sql(sql, params=list(parameters)).to_arrow_reader(rows):
                if self._stop.asked:
                    raise duckdb.InterruptException
                yield batch

    def schema(self, sql: str) -> pa.Schema:
        """The columns of an answer."""
        with self._bounded():
            return self._connection.sql(sql).to_arrow_table().schema

    def register(self, name: str, source: Any) -> None:
        """Make an Arrow dataset known by a name, on this connection."""
        self._connection.register(name, source)

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        try:
            with self._stop.watching(self._connection):
                if self._stop.asked:
                    raise duckdb.InterruptException
                yield
        except (duckdb.InterruptException, pa.ArrowCancelled):
            raise TooSlow("the query took too long, or is not wanted any more, and was stopped") from None
        except duckdb.OutOfMemoryException:
            raise TooSlow("the query needs more memory than it may have: ask for less, with a filter") from None


class Database:
    """DuckDB in this process, with bounded memory, for all tables that are opened. `folder` takes what must spill."""

    def __init__(self, folder: Path, tables: Sequence[str] = ()) -> None:
        """`tables`: folders below which it may read files."""
        self._connection = duckdb.connect(
            config={"memory_limit": MEMORY, "temp_directory": str(folder), "max_temp_directory_size": DISK}
        )
        allowed = ", ".join("'" + one.replace("'", "''") + "'" for one in tables)
        self._connection.execute(f"SET allowed_directories = [{allowed}]")
        for option in ("enable_external_access", "autoinstall_known_extensions", "autoload_known_extensions"):
            self._connection.execute(f"SET {option} = false")
        self._connection.execute("SET lock_configuration = true")
        self._number = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def session(self, stop: Stop) -> Iterator[Session]:
        """A connection for one query, which `stop` ends."""
        with contextlib.closing(self._connection.cursor()) as connection:
            yield Session(connection, stop)

    def new_name(self) -> str:
        """A name for a table that is nobody else's."""
        with self._lock:
            self._number += 1
            return f"kept_{self._number}"

    def close(self) -> None:
        self._connection.close()


class TableReader:
    """One version of a table. Methods may be called from several threads, each with a session of its own."""

    def __init__(self, database: Database, table: Table) -> None:
        self.table = table
        self._database = database
        self._source = f"source_{database.new_name()}"
        taken = {name.lower() for name in table.columns} & {"__line__", "file_row_number"}
        if taken:
            raise QueryError(f"{table.name}: a column is called {taken.pop()}, which is the name of a column of DuckDB")
        self._local = not any("://" in uri for uri in table.uris)
        self._found: OrderedDict[Any, tuple[str, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._facts: dict[str, _Numbers | None] | None = None
        with database.session(Stop()) as session:
            self._lines = self._make_lines(session)
            self._introduce(session)
            described = session.rows(f"DESCRIBE {self._lines}")
        self.columns: Mapping[str, Kind] = {name: Kind.of(kind) for name, kind, *_ in described if name != "__line__"}

    @contextlib.contextmanager
    def session(self, stop: Stop) -> Iterator[Session]:
        """A session that knows this table."""
        with self._database.session(stop) as session:
            self._introduce(session)
            yield session

    def page(self, session: Session, query: RowQuery, columns: Sequence[str], first: int, most: int) -> Page:
        """Lines number `first` and on of those that a query finds, with the beginnings of these columns' values.

        Raises QueryError, TooSlow.
        """
        cells = ", ".join(cell_sql(name, kind_of(self.columns, name)) for name in columns)
        if query.is_whole:
            count, wanted = self.table.rows, [*range(first, min(first + most, self.table.rows))]
        else:
            name, count = self._lines_of(session, query)
            found = session.rows(f"SELECT __line__ FROM {name} WHERE rowid >= ? AND rowid < ?", (first, first + most))
            wanted = [line for (line,) in found]
        return Page(self._cells(session, wanted, cells), count)

    def row(self, session: Session, line: int) -> dict[str, Any]:
        """All values of a line. Raises QueryError when there is none."""
        names = ", ".join(quoted(name) for name in self.columns)
        if not (found := self._cells(session, [line], names)):
            raise QueryError(f"expected a line below {self.table.rows:,}, found {line:,}")
        return dict(zip(self.columns, found[0][1:], strict=True))

    def samples(self, session: Session, line: int) -> list[int]:
        """Lines with the same prompt as this one, itself among them, 64 at most."""
        if "prompt" not in self.columns:
            return [line]
        same = f"(SELECT prompt FROM {self._lines} WHERE __line__ = ?)"
        found = session.rows(f"SELECT __line__ FROM {self._lines} WHERE prompt = {same} LIMIT {_SAMPLES}", (line,))
        return sorted({line, *(one for (one,) in found)})

    def histogram(self, session: Session, column: str, query: RowQuery) -> Histogram | None:
        """How the values of a column are distributed over what a query finds, whatever it says of this column itself.

        None where the column's values are no categories. Raises QueryError, TooSlow.
        """
        kind = kind_of(self.columns, column)
        if not has_pictures(column, kind):
            return None
        facts = self._known_facts(session)
        if column not in facts:
            return None
        conditions = tuple(one for one in query.conditions if one.column != column)
        where = self._where(session, query.search, conditions)
        if (numbers := facts[column]) is not None:
            return self._numbers_histogram(session, column, kind, numbers, where)
        return self._values_histogram(session, column, kind, where)

    def pictured(self, session: Session) -> list[str]:
        """Columns that have a histogram."""
        facts = self._known_facts(session)
        return [name for name in self.columns if name in facts]

    def differences(
        self, session: Session, newer: TableReader, change: str, first: int, most: int
    ) -> tuple[dict[str, int], list[tuple[str, int | None, int | None]]]:
        """How many rows were added, removed and changed in another version, and some of them: change, line here, line
        there. `change`: only such. Rows are compared by their ids: prompt, output and error.
        """
        key = ("differences", newer.table.version)
        compared = [name for name in _COMPARED if name in self.columns and name in newer.columns]
        newer._introduce(session)
        digest = f"hash({', '.join(compared)})"
        words = "CASE WHEN b.row_id IS NULL THEN 'removed' WHEN a.row_id IS NULL THEN 'added' ELSE 'changed' END"
        sides = [f"(SELECT __line__, row_id, {digest} AS digest FROM {one._lines})" for one in (self, newer)]
        sql = (
            f"SELECT {words} AS change, a.__line__ AS before, b.__line__ AS after "
            f"FROM {sides[0]} a FULL JOIN {sides[1]} b ON a.row_id = b.row_id "
            "WHERE a.row_id IS NULL OR b.row_id IS NULL OR a.digest <> b.digest "
            "ORDER BY change, coalesce(after, before)"
        )
        name, _ = self._keep(session, key, sql, ())
        counted = session.rows(f"SELECT change, count(*) FROM {name} GROUP BY change")
        some = f"SELECT change, before, after FROM {name} WHERE ? IN ('', change) ORDER BY rowid LIMIT ? OFFSET ?"
        listed = session.rows(some, (change, most, first))
        return dict.fromkeys(("changed", "added", "removed"), 0) | dict(counted), listed

    def selection(self, session: Session, query: RowQuery, most: int, rows: int) -> Iterator[pa.RecordBatch]:
        """Whole lines that a query finds, in its order, at most so many, in batches of `rows`."""
        names = ", ".join(quoted(name) for name in self.columns)
        if query.is_whole:
            yield from session.batches(f"SELECT {names} FROM {self._lines} LIMIT ?", (most,), rows)
            return
        name, _ = self._lines_of(session, query)
        sql = (
            f"SELECT {', '.join('l.' + quoted(one) for one in self.columns)} FROM {self._lines} l JOIN "
            f"(SELECT __line__, rowid AS place FROM {name} WHERE rowid < ?) f "
            "ON l.__line__ = f.__line__ ORDER BY f.place"
        )
        yield from session.batches(sql, (most,), rows)

    def schema(self, session: Session) -> pa.Schema:
        """The columns as Arrow has them, of what a selection is made of."""
        names = ", ".join(quoted(name) for name in self.columns)
        return session.schema(f"SELECT {names} FROM {self._lines} LIMIT 0")

    def cells_of(
        self, session: Session, lines: Sequence[int], columns: Sequence[str], letters: int = CELL_LETTERS
    ) -> dict[int, tuple[Any, ...]]:
        """The beginnings of these columns' values, by line."""
        cells = ", ".join(cell_sql(name, kind_of(self.columns, name), letters) for name in columns)
        return {line: tuple(values) for line, *values in self._cells(session, lines, cells)}

    def close(self) -> None:
        """Forget what was kept of it."""
        with self._lock, self._database.session(Stop()) as session:
            for name, _ in self._found.values():
                session.rows(f"DROP TABLE IF EXISTS {name}")
            self._found.clear()
            if self._local:
                session.rows(f"DROP VIEW IF EXISTS {self._source}")

    def _make_lines(self, session: Session) -> str:
        """What to select lines from: all columns, and `line`, their number from 0."""
        if not self._local:
            # Without DuckDB's extension for S3: Arrow reads the files, with the store's own keys.
            return f"(SELECT *, row_number() OVER () - 1 AS __line__ FROM {self._source})"
        first, parts = 0, []
        for uri in self.table.uris:
            path = "'" + uri.replace("'", "''") + "'"
            parts.append(
                f"SELECT * EXCLUDE (file_row_number), file_row_number + {first} AS __line__ "
                f"FROM read_parquet([{path}], file_row_number = true, hive_partitioning = false)"
            )
            ((rows,),) = session.rows(f"SELECT sum(num_rows) FROM parquet_file_metadata([{path}])")
            first += int(rows)
        view = self._source
        session.rows(f"CREATE VIEW {view} AS {' UNION ALL '.join(parts)}")
        return view

    def _introduce(self, session: Session) -> None:
        if not self._local:
            session.register(self._source, self.table.dataset())

    def _cells(self, session: Session, lines: Sequence[int], cells: str) -> list[tuple[Any, ...]]:
        """(line, cells …) of these lines, in their order."""
        if not lines:
            return []
        numbers = ", ".join(str(int(line)) for line in lines)
        chosen = f"__line__, {cells}" if cells else "__line__"
        found = session.rows(f"SELECT {chosen} FROM {self._lines} WHERE __line__ IN ({numbers})")
        at = {row[0]: row for row in found}
        return [at[line] for line in lines if line in at]

    def _where(self, session: Session, search: str, conditions: Sequence[Condition]) -> Sql:
        where = conditions_sql(conditions, self.columns)
        if not search:
            return where
        name, _ = self._searched(session, search)
        return Sql(f"__line__ IN (SELECT __line__ FROM {name}) AND {where.text}", where.parameters)

    def _searched(self, session: Session, text: str) -> tuple[str, int]:
        found = search_sql(text, self.columns)
        sql = f"SELECT __line__ FROM {self._lines} WHERE {found.text} ORDER BY __line__"
        return self._keep(session, ("search", text), sql, found.parameters)

    def _lines_of(self, session: Session, query: RowQuery) -> tuple[str, int]:
        if query.search and not query.conditions and query.sort is None:
            return self._searched(session, query.search)
        where = self._where(session, query.search, query.conditions)
        sql = f"SELECT __line__ FROM {self._lines} WHERE {where.text} {order_sql(query, self.columns)}"
        return self._keep(session, query, sql, where.parameters)

    def _keep(self, session: Session, key: Any, sql: str, parameters: Sequence[Any]) -> tuple[str, int]:
        """The answer of a query as a table of its own, and its rows; the one from before where it is still there."""
        with self._lock:  # two that ask the same do it once
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
            name = self._database.new_name()
            session.rows(f"CREATE TABLE {name} AS {sql}", parameters)
            ((count,),) = session.rows(f"SELECT count(*) FROM {name}")
            self._found[key] = (name, int(count))
            while len(self._found) > _KEPT:
                _, (old, _) = self._found.popitem(last=False)
                session.rows(f"DROP TABLE IF EXISTS {old}")
            return name, int(count)

    def _known_facts(self, session: Session) -> dict[str, _Numbers | None]:
        """Columns that have a histogram, with the range of numbers; found once."""
        with self._lock:
            if self._facts is None:
                self._facts = self._find_facts(session)
            return self._facts

    def _find_facts(self, session: Session) -> dict[str, _Numbers | None]:
        pictured = {name: kind for name, kind in self.columns.items() if has_pictures(name, kind)}
        distinct = self._distinct_values(session, pictured)
        found: dict[str, _Numbers | None] = {}
        for name, kind in pictured.items():
            if (
                name in ("finish_reason", "error")
                or kind is Kind.TAGS
                or (kind in (Kind.TEXT, Kind.FLAG) and 1 < distinct[name] <= _CATEGORIES)
            ):
                found[name] = None
        numbers = [name for name, kind in pictured.items() if kind in (Kind.NUMBER, Kind.TIME)]
        return found | self._find_ranges(session, {name: pictured[name] for name in numbers})

    def _distinct_values(self, session: Session, names: Collection[str]) -> dict[str, int]:
        """How many different values, null among them, the first lines have."""
        counts = ", ".join(f"count(DISTINCT {n}) + max(CAST({n} IS NULL AS INTEGER))" for n in map(quoted, names))
        chosen = ", ".join(map(quoted, names))
        first = f"(SELECT {chosen} FROM {self._lines} LIMIT {_LOOKED_AT})"
        (found,) = session.rows(f"SELECT {counts} FROM {first}") if names else ((),)
        return {name: count or 0 for name, count in zip(names, found, strict=True)}

    def _find_ranges(self, session: Session, kinds: Mapping[str, Kind]) -> dict[str, _Numbers | None]:
        if not kinds:
            return {}
        every = max(1, self.table.rows // _QUANTILE_LINES)
        parts = []
        for name, kind in kinds.items():
            value = number_sql(name, kind)
            finite = f"isfinite({value})"
            parts.append(
                f"min({value}) FILTER ({finite}), max({value}) FILTER ({finite}), "
                f"approx_quantile({value}, 0.99) FILTER ({finite} AND __line__ % {every} = 0), "
                f"coalesce(bool_and({value} = floor({value})), FALSE)"
            )
        (facts,) = session.rows(f"SELECT {', '.join(parts)} FROM {self._lines}")
        found: dict[str, _Numbers | None] = {}
        for place, name in enumerate(kinds):
            low, high, most_of, whole = facts[4 * place : 4 * place + 4]
            if low is not None and low < high:
                found[name] = _Numbers(low, high, high if most_of is None else most_of, whole)
        return found

    def _numbers_histogram(self, session: Session, column: str, kind: Kind, numbers: _Numbers, where: Sql) -> Histogram:
        bins = Bins.of(numbers.low, numbers.high, numbers.most_of, whole=numbers.whole)
        place, known = bins_sql(column, kind, bins), f"isfinite({number_sql(column, kind)})"
        sql = f"SELECT {place.text}, count(*) FROM {self._lines} WHERE {known} AND {where.text} GROUP BY 1"
        counts = dict(session.rows(sql, (*place.parameters, *where.parameters)))
        bars = []
        for number in range(bins.count):
            low, high = bins.edges(number)
            bars.append(Bar(counts.get(number, 0), low=low, high=high))
        return Histogram(column, kind, bars)

    def _values_histogram(self, session: Session, column: str, kind: Kind, where: Sql) -> Histogram:
        value = f"unnest({quoted(column)})" if kind is Kind.TAGS else quoted(column)
        inner = f"SELECT {value} AS value FROM {self._lines} WHERE {where.text}"
        sql = (
            f"SELECT value, count(*) AS lines, sum(count(*)) OVER () FROM ({inner}) GROUP BY value "
            f"ORDER BY lines DESC, value LIMIT {MOST_VALUES}"
        )
        found = session.rows(sql, where.parameters)
        bars = [Bar(count, value=shown) for shown, count, _ in found]
        return Histogram(column, kind, bars, int(found[0][2]) - sum(bar.count for bar in bars) if found else 0)
