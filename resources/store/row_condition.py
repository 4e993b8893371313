"""Conditions on rows: SQL over columns that are known, evaluated by Polars."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpu_runner.errors import ExitStatus, UserFacingError

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

LONGEST = 4096


# Conditions are evaluated block by block, so what looks across rows would depend on where a block ends.
_NOT_PER_ROW = re.compile(
    r"\b(avg|sum|count|min|max|first|last|median|std\w*|var\w*|quantile\w*|corr|covar\w*|rank|dense_rank|row_number"
    r"|lag|lead|ntile|over)\s*\(",
    re.IGNORECASE,
)
SQL_TEXT = re.compile(r"'(?:[^']|'')*'")


def looks_at_many_rows(condition: str) -> str:
    """The function in an SQL condition whose value depends on other rows; empty: there is none."""
    found = _NOT_PER_ROW.search(SQL_TEXT.sub("''", condition))
    return found[1] if found else ""


class BadCondition(UserFacingError, ValueError):
    """A condition that cannot be evaluated: which column or word is wrong. It does not say where it was written."""

    exit_status = ExitStatus.WRONG_REQUEST


class SqlCondition:
    """A compiled condition. `columns`: those that it looks at, all of them among `known`. Raises BadCondition."""

    def __init__(self, text: str, known: Sequence[str]) -> None:
        if len(text) > LONGEST:
            raise BadCondition(f"expected at most {LONGEST:,} letters, found {len(text):,}")
        if found := looks_at_many_rows(text):
            raise BadCondition(f"expected a condition on one row at a time, found {found}(), which looks at many")
        import polars as pl  # it starts threads: not where a file of conditions is only read

        try:
            self._expression = pl.sql_expr(text)
            self.columns = list(dict.fromkeys(self._expression.meta.root_names()))
        except pl.exceptions.PolarsError as error:
            raise BadCondition(f"expected an SQL condition, found {text[:80]!r}: {_first_line(error)}") from None
        if unknown := [name for name in self.columns if name not in known]:
            raise BadCondition(f"no column is called {unknown[0][:80]!r}. Columns: {', '.join(known)}")

    def marks(self, columns: Mapping[str, Sequence[Any]]) -> list[bool]:
        """For each row of columns of equal length whether it meets the condition, see `mask`."""
        import polars as pl

        names = self.columns or list(columns)[:1]
        return self.mask(pl.DataFrame({name: columns[name] for name in names}, strict=False)).to_list()

    def mask(self, frame: pl.DataFrame) -> pl.Series:
        """For each row whether it meets the condition; a null result is a no, as in SQL. Raises BadCondition."""
        import polars as pl

        try:
            found = frame.select(self._expression).to_series()
        except pl.exceptions.PolarsError as error:
            # The message of a failed conversion ends with the values themselves.
            raise BadCondition(f"does not fit the columns: {_first_line(error).partition(' for ')[0]}") from None
        if found.dtype not in (pl.Boolean, pl.Null):
            raise BadCondition(f"expected a condition (true or false), found values of type {found.dtype}")
        found = found.cast(pl.Boolean).fill_null(False)
        return found if len(found) == frame.height else found.new_from_index(0, frame.height)  # the same for all rows


class RowCondition:
    """A condition on rows of batch objects, over the columns of an outcome, like `finish_reason = 'length'`.

    Raises BadCondition.
    """

    def __init__(self, text: str) -> None:
        from resources.store.outcome_tables import outcome_schema  # it needs pyarrow, slow to import

        try:
            self._condition = SqlCondition(text, outcome_schema("chat").names)
        except BadCondition as error:
            raise BadCondition(f"where: {error}") from None

    def rows(self, table: pa.Table) -> set[str]:
        """Ids of the rows that meet it."""
        import polars as pl

        frame = pl.DataFrame(pl.from_arrow(table.select(list(dict.fromkeys(["row_id", *self._condition.columns])))))
        try:
            return set(frame.filter(self._condition.mask(frame))["row_id"].to_list())
        except BadCondition as error:
            raise BadCondition(f"where: {error}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
