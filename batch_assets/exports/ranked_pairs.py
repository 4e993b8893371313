"""Pairs for preference training out of ranked lines: of each group the best and the worst answer.

Lines of a group may lie anywhere in the table. Only numbers of lines are grouped, in DuckDB, which uses the disk where
memory ends; texts are fetched for the lines that were chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batch_assets.exports.options import ExportError, ExportOptions

PAIRS_AT_ONCE = 2000
_MEMORY = "1GB"
_LINE, _GROUP, _RANK = "line", "ranked_group", "rank"
# Equal ranks: the earlier line. A group whose ranks are all equal says nothing.
_PAIRS = f"""
CREATE TABLE pairs AS
SELECT max_by({_LINE}, best) AS chosen, min_by({_LINE}, worst) AS rejected
FROM (
    SELECT {_LINE}, {_GROUP}, {_RANK}, struct_pack(r := {_RANK}, l := -{_LINE}) AS best,
           struct_pack(r := {_RANK}, l := {_LINE}) AS worst
    FROM read_parquet(?) WHERE {_RANK} IS NOT NULL
)
GROUP BY {_GROUP} HAVING max({_RANK}) > min({_RANK})
"""
_TEXTS = f"""
SELECT better.* EXCLUDE ({_LINE}, {_GROUP}, {_RANK}, answer), better.answer AS chosen, worse.answer AS rejected
FROM pairs JOIN read_parquet(?) better ON better.{_LINE} = pairs.chosen
JOIN read_parquet(?) worse ON worse.{_LINE} = pairs.rejected
ORDER BY pairs.chosen
"""


class RankedPairs:
    """Collects lines, then yields pairs. `folder` holds the lines meanwhile."""

    def __init__(self, options: ExportOptions, folder: Path) -> None:
        assert options.group_by is not None and options.rank_by is not None
        self._options, self._folder = options, folder
        self._file = folder / "ranked_lines.parquet"
        self._writer: pq.ParquetWriter | None = None
        self.lines = self.pairs = 0

    def add(self, lines: pa.Table) -> None:
        """Keep what pairs are made of. Raises ExportError for a rank that is no number."""
        options = self._options
        groups = [repr(value) for value in lines.column(options.group_by).to_pylist()]
        columns = {
            _LINE: pa.array(range(self.lines, self.lines + lines.num_rows), pa.int64()),
            _GROUP: pa.array(groups, pa.string()),
            _RANK: _numbers(lines.column(options.rank_by), str(options.rank_by)),
            "answer": lines.column(options.columns["completion"]),
            "prompt": lines.column(options.columns["prompt"]),
        }
        others = [*options.kept, *([options.split_by] if options.split_by is not None else [])]
        columns |= {f"kept_{name}": lines.column(name) for name in dict.fromkeys(others)}
        table = pa.table(columns)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, table.schema, compression="zstd")
        self._writer.write_table(table)
        self.lines += lines.num_rows

    def tables(self) -> Iterator[pa.Table]:
        """Pairs in the order of their better lines: `prompt`, `chosen`, `rejected` and the columns that are kept."""
        if self._writer is None:
            return
        self._writer.close()
        file = str(self._file)
        with duckdb.connect(
            config={"memory_limit": _MEMORY, "temp_directory": str(self._folder / "duckdb")}
        ) as connection:
            connection.execute(_PAIRS, [file]).fetchall()
            ((self.pairs,),) = connection.execute("SELECT count(*) FROM pairs").fetchall()
            yield from _of_one_size(connection.sql(_TEXTS, params=[file, file]).to_arrow_reader(PAIRS_AT_ONCE))


def _numbers(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Ranks as numbers; a text may be one. What is not finite is no rank."""
    try:
        numbers = pc.cast(pc.utf8_trim_whitespace(column) if pa.types.is_string(column.type) else column, pa.float64())
    except (pa.ArrowException, NotImplementedError):
        raise ExportError(f"--rank-by {name}: expected numbers, found values of another kind ({column.type})") from None
    return pc.if_else(pc.is_finite(numbers), numbers, None)


def _of_one_size(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The same lines in tables of PAIRS_AT_ONCE, so that a later run counts the same ones."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        while rows >= PAIRS_AT_ONCE:
            table = pa.Table.from_batches(waiting)
            yield _renamed(table.slice(0, PAIRS_AT_ONCE))
            waiting = table.slice(PAIRS_AT_ONCE).to_batches()
            rows -= PAIRS_AT_ONCE
    if rows:
        yield _renamed(pa.Table.from_batches(waiting))


def _renamed(table: pa.Table) -> pa.Table:
    names = [name.removeprefix("kept_") for name in table.column_names]
    keep = [number for number, name in enumerate(names) if name not in names[:number]]
    return table.select(keep).rename_columns([names[number] for number in keep])
