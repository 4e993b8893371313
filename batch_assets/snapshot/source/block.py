"""A block: consecutive rows of one file of a source, column by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batch_assets.snapshot.source.errors import Reject

if TYPE_CHECKING:
    import pyarrow as pa


BLOCK_ROWS = 1024


@dataclass(slots=True)
class Block:
    """Consecutive rows of one file.

    `columns` holds Python values by column; `lines` the 1-based line of each row (row in Parquet and
    grids, place in a JSON array).
    `arrow` holds the same columns as they were read, where the source has types (see `source_parquet.plain`).
    `rejects` are rows that could not be read at all. `ids`: the ids of rows that were made from others; None: they are
    in a column.
    """

    file: str
    lines: list[int]
    columns: dict[str, list[Any]]
    arrow: dict[str, pa.Array] | None = None
    rejects: list[Reject] = field(default_factory=list)
    ids: list[Any] | None = None

    def take(self, rows: Sequence[int]) -> Block:
        """The block with only these rows (rejects are left as they are)."""
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        arrow = self.arrow
        if arrow is not None:
            import pyarrow as pa

            places = pa.array(rows, pa.int64())
            arrow = {name: array.take(places) for name, array in arrow.items()}
        ids = self.ids and [self.ids[i] for i in rows]
        return Block(self.file, [self.lines[i] for i in rows], columns, arrow, self.rejects, ids)

    def part(self, first: int, rows: int) -> Block:
        """At most this many rows from one place on, without the rejects."""
        columns = {name: values[first : first + rows] for name, values in self.columns.items()}
        arrow = self.arrow and {name: array.slice(first, rows) for name, array in self.arrow.items()}
        ids = self.ids and self.ids[first : first + rows]
        return Block(self.file, self.lines[first : first + rows], columns, arrow, ids=ids)
