"""Pairs for preference training out of ranked lines: of each group the best and the worst answer.

Both answer one prompt: lines of a group with different prompts are groups of their own. Lines of a group may lie
anywhere in the table. Only numbers of lines are grouped, in DuckDB, which uses the disk where
memory ends; texts lie in a file beside, and are fetched for the lines that were chosen, some megabytes at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batch_assets.spec.export_options import ExportError, ExportOptions, is_validation

PAIRS_AT_ONCE, BYTES_AT_ONCE = 2000, 24 << 20
_FETCHED = 100_000
_MEMORY = "1GB"
_LINE, _GROUP, _RANK, _BYTES = "line", "ranked_group", "rank", "bytes"
# Equal ranks: the earlier line. A group whose ranks are all equal says nothing.
_PAIRS = f"""
CREATE TABLE pairs AS
SELECT max_by({_LINE}, best) AS chosen, min_by({_LINE}, worst) AS rejected,
       max_by({_BYTES}, best) + min_by({_BYTES}, worst) AS bytes
FROM (
    SELECT {_LINE}, {_GROUP}, {_RANK}, {_BYTES}, struct_pack(r := {_RANK}, l := -{_LINE}) AS best,
           struct_pack(r := {_RANK}, l := {_LINE}) AS worst
    FROM read_parquet(?) WHERE {_RANK} IS NOT NULL
)
GROUP BY {_GROUP} HAVING max({_RANK}) > min({_RANK})
"""

Pairs = Sequence[tuple[int, int]]


class RankedPairs:
    """Collects lines, then yields pairs. `folder` holds the lines meanwhile: as many bytes as they have."""

    def __init__(self, options: ExportOptions, folder: Path) -> None:
        assert options.group_by is not None and options.rank_by is not None
        self._options, self._ranks, self._texts = options, folder / "ranks.parquet", folder / "ranked_lines.arrow"
        self._spill = folder / "duckdb"
        self._writers: tuple[pq.ParquetWriter, pa.RecordBatchFileWriter] | None = None
        self._starts: list[int] = []  # number of the first line of each batch of texts
        self.lines = self.pairs = 0

    def add(self, lines: pa.Table) -> None:
        """Keep what pairs are made of. Raises ExportError for a rank that is no number."""
        options = self._options
        values = lines.column(options.group_by).to_pylist()
        sides = [False] * lines.num_rows  # a pair has both of its lines on one side
        if options.split_by is not None:
            split = lines.column(options.split_by).to_pylist()
            sides = [is_validation(value, options.validation) for value in split]
        prompts = lines.column(options.columns["prompt"])
        asked = [_said(prompt, system=options.system) for prompt in prompts.to_pylist()]
        groups = [_digest(*one) for one in zip(values, asked, sides, strict=True)]
        named = pa.array([value is not None and value == value for value in values], pa.bool_())
        ranks_of_lines = _numbers(lines.column(options.rank_by), str(options.rank_by))
        others = [*options.kept, *([options.split_by] if options.split_by is not None else [])]
        texts = pa.table(
            {"prompt": prompts, "answer": lines.column(options.columns["completion"])}
            | {f"kept_{name}": lines.column(name) for name in dict.fromkeys(others)}
        ).combine_chunks()
        ranks = pa.table(
            {
                _LINE: pa.array(range(self.lines, self.lines + lines.num_rows), pa.int64()),
                _GROUP: pa.array(groups, pa.binary()),
                _RANK: pc.if_else(named, ranks_of_lines, None),  # lines without a group are in no pair
                _BYTES: pa.array(sum(_bytes(column) for column in texts.columns), pa.int64()),
            }
        )
        if self._writers is None:
            self._writers = (
                pq.ParquetWriter(self._ranks, ranks.schema, compression="zstd"),
                pa.ipc.new_file(self._texts, texts.schema),
            )
        self._writers[0].write_table(ranks)
        for batch in texts.to_batches():
            self._starts.append(self.lines)
            self._writers[1].write_batch(batch)
            self.lines += batch.num_rows

    def tables(self, first: int = 0) -> Iterator[tuple[int, pa.Table]]:
        """Pairs in the order of their better lines: `prompt`, `chosen`, `rejected` and the columns that are kept. The
        same lines make the same tables; each with its number, from `first` on.
        """
        if self._writers is None:
            return
        for writer in self._writers:
            writer.close()
        import duckdb  # slow to import

        with (
            duckdb.connect(config={"memory_limit": _MEMORY, "temp_directory": str(self._spill)}) as connection,
            pa.memory_map(str(self._texts)) as mapped,
        ):
            connection.execute(_PAIRS, [str(self._ranks)]).fetchall()
            ((self.pairs,),) = connection.execute("SELECT count(*) FROM pairs").fetchall()
            texts = pa.ipc.open_file(mapped)
            found = connection.sql("SELECT * FROM pairs ORDER BY chosen").to_arrow_reader(_FETCHED)
            for number, pairs in enumerate(_of_one_size(found)):
                if number >= first:
                    yield number, self._table(texts, pairs)

    def _table(self, texts: pa.RecordBatchFileReader, pairs: Pairs) -> pa.Table:
        better = self._fetched(texts, [chosen for chosen, _ in pairs], texts.schema.names)
        worse = self._fetched(texts, [rejected for _, rejected in pairs], ["answer"])
        table = pa.table({"prompt": better["prompt"], "chosen": better["answer"], "rejected": worse["answer"]})
        for name in texts.schema.names[2:]:
            if (kept := name.removeprefix("kept_")) not in table.column_names:
                table = table.append_column(kept, better[name])
        return table

    def _fetched(self, texts: pa.RecordBatchFileReader, lines: Sequence[int], names: Sequence[str]) -> pa.Table:
        """These columns of lines, in their order."""
        wanted = np.array(lines, np.int64)
        order = np.argsort(wanted, kind="stable")
        batches = np.searchsorted(self._starts, wanted[order], side="right") - 1
        parts = []
        for number in np.unique(batches).tolist():
            places = wanted[order[batches == number]] - self._starts[number]
            parts.append(texts.get_batch(number).select(names).take(pa.array(places)))
        return pa.Table.from_batches(parts).take(pa.array(np.argsort(order)))


def _said(prompt: Any, *, system: bool) -> Any:
    """A prompt as the record has it: an answer to another one is no worse answer to this one."""
    if system or not isinstance(prompt, list):
        return prompt
    return [one for one in prompt if not isinstance(one, dict) or one.get("role") not in ("system", "developer")]


def _digest(value: Any, asked: Any, side: bool) -> bytes:
    """Of the value of a group, which may be a long text, the prompt, and whether the line is for validation."""
    said = f"{side:d} {value!r} {asked!r}"
    return hashlib.blake2b(said.encode(errors="surrogatepass"), digest_size=16).digest()


def _numbers(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Ranks as numbers; a text may be one. What is not finite is no rank."""
    try:
        numbers = pc.cast(pc.utf8_trim_whitespace(column) if pa.types.is_string(column.type) else column, pa.float64())
    except (pa.ArrowException, NotImplementedError):
        raise ExportError(f"--rank-by {name}: expected numbers, found values of another kind ({column.type})") from None
    return pc.if_else(pc.is_finite(numbers), numbers, None)


def _bytes(values: pa.Array | pa.ChunkedArray) -> Any:
    """About how many bytes each value takes, as a NumPy array."""
    if isinstance(values, pa.ChunkedArray):
        return np.concatenate([_bytes(chunk) for chunk in values.chunks] or [np.empty(0, np.int64)])
    kind = values.type
    if pa.types.is_struct(kind):
        return sum((_bytes(one) for one in values.flatten()), np.full(len(values), 8, np.int64))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ends = np.concatenate([[0], np.cumsum(_bytes(values.flatten()))])
        counts = np.asarray(pc.fill_null(pc.list_value_length(values), 0)).astype(np.int64)
        lasts = np.cumsum(counts)
        return ends[lasts] - ends[lasts - counts]
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind):
        return np.asarray(pc.fill_null(pc.binary_length(values), 0)).astype(np.int64)
    return np.full(len(values), 16, np.int64)


def _of_one_size(batches: Iterable[pa.RecordBatch]) -> Iterator[Pairs]:
    """Pairs of lines, PAIRS_AT_ONCE of them, or fewer with about BYTES_AT_ONCE of texts; one at least."""
    found: list[tuple[int, int]] = []
    held = 0
    for batch in batches:
        for chosen, rejected, size in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if found and (len(found) == PAIRS_AT_ONCE or held + size > BYTES_AT_ONCE):
                yield found
                found, held = [], 0
            found.append((chosen, rejected))
            held += size
    if found:
        yield found
