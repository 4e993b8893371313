"""The `where` condition of a source: SQL over a row's columns, evaluated by Polars a block at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batch_assets.snapshot.json_types import ColumnKinds, to_arrow
from batch_assets.snapshot.source.block import Block
from batch_assets.snapshot.source.errors import SourceError, shown
from batch_assets.snapshot.source.parquet import plain
from batch_assets.snapshot.source.parquet_types import parts

if TYPE_CHECKING:
    import polars as pl


class Where:
    """A compiled condition. A null result leaves the row out, as in SQL."""

    def __init__(self, condition: str) -> None:
        import polars as pl

        self._text = condition
        self._expression = pl.sql_expr(condition)
        self.columns = sorted(set(self._expression.meta.root_names()))
        self._kinds = ColumnKinds(self.columns)
        self._worked = False

    def split(self, block: Block) -> tuple[list[int], dict[int, str]]:
        """Places of the rows that pass, and why others cannot be judged."""
        import polars as pl

        if not block.lines:
            return [], {}
        refused = {} if block.arrow is not None else self._kinds.learn(block.columns)
        judged = [i for i in range(len(block.lines)) if i not in refused]
        part = block.take(judged) if refused else block
        frame = self._fitting_frame(part)
        try:
            mask = self._mask(frame)
        except pl.exceptions.PolarsError as error:
            mask, failed = self._each(part.file, frame, error)
            refused |= {judged[i]: reason for i, reason in failed.items()}
        self._worked = True
        return [judged[i] for i, passes in enumerate(mask) if passes], refused

    def _fitting_frame(self, block: Block) -> pl.DataFrame:
        """The columns; those that have no value so far as text or, where the condition then fails, as nothing."""
        import polars as pl

        frame = self._frame(block)
        empty = [name for name in self.columns if block.arrow is None and self._kinds.kinds.get(name) is None]
        if not empty:
            return frame
        try:
            self._mask(frame)
        except pl.exceptions.PolarsError:
            return frame.with_columns(pl.lit(None, pl.Null).alias(name) for name in empty)
        return frame

    def _frame(self, block: Block) -> pl.DataFrame:
        import polars as pl

        arrays: Mapping[str, Any] = {
            name: _comparable(block, name)
            if block.arrow is not None
            else to_arrow(block.columns[name], self._kinds.kinds.get(name))
            for name in self.columns
        }
        return pl.DataFrame(pl.from_arrow(pa.table(arrays)))

    def _mask(self, frame: pl.DataFrame) -> list[bool | None]:
        import polars as pl

        result = frame.select(self._expression).to_series()
        if result.dtype not in (pl.Boolean, pl.Null):
            raise SourceError(
                f"source.where: expected a condition (true or false), found values of type {result.dtype}"
            )
        mask: list[bool | None] = result.to_list()
        return mask if len(mask) == frame.height else mask * frame.height

    def _each(self, file: str, frame: pl.DataFrame, error: Exception) -> tuple[list[bool | None], dict[int, str]]:
        """Row by row, when some value of the block makes the condition fail."""
        import polars as pl

        mask: list[bool | None] = []
        failed: dict[int, str] = {}
        for row in range(frame.height):
            try:
                mask += self._mask(frame.slice(row, 1))
            except pl.exceptions.PolarsError as reason:
                mask.append(None)
                failed[row] = f"source.where cannot be evaluated ({type(reason).__name__})"
        if len(failed) == frame.height and not self._worked:
            # The message of a failed conversion ends with the values themselves.
            reason_text = str(error).splitlines()[0].partition(" for ")[0]
            texts = [name for name, kind in frame.schema.items() if kind == pl.String]
            said = f"{file}: source.where: {self._text!r} does not fit the columns: {reason_text}."
            if texts:
                said += f" In text: {', '.join(map(shown, texts))}; for numbers write CAST({texts[0]} AS DOUBLE)."
            raise SourceError(said) from error
        return mask, failed


def _comparable(block: Block, name: str) -> pa.Array:
    """A column of Parquet as Polars takes it, UUIDs as text. Raises SourceError for numbers that it has not."""
    assert block.arrow is not None
    array = plain(block.arrow[name])
    if pa.types.is_fixed_size_binary(array.type):
        texts = any(type(value) is str for value in block.columns[name])
        return pa.array(block.columns[name], pa.string()) if texts else array
    if any(pa.types.is_decimal256(one) for one in parts(array.type)):
        raise SourceError(
            f"{block.file}: source.where: expected decimals of at most 38 digits, found {array.type} in column "
            f"{name!r}; leave it out of the condition, or write it with fewer digits or as text"
        )
    return array
