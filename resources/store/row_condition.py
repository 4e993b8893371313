"""A condition on rows of batch objects: SQL over the columns of an outcome, evaluated by Polars."""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from gpu_runner.errors import ExitStatus, UserFacingError
from resources.store.outcome_tables import outcome_schema

LONGEST = 4096


class BadCondition(UserFacingError, ValueError):
    """A condition that cannot be evaluated: which column or word is wrong."""

    exit_status = ExitStatus.WRONG_REQUEST


class RowCondition:
    """A compiled condition, like `finish_reason = 'length'`. Raises BadCondition."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise BadCondition(f"where: expected at most {LONGEST:,} letters, found {len(text):,}")
        known = outcome_schema("chat").names
        try:
            self._expression = pl.sql_expr(text)
            self._columns = self._expression.meta.root_names()
        except pl.exceptions.PolarsError as error:
            raise BadCondition(f"where: expected a condition in SQL, found an error: {_first_line(error)}") from None
        if unknown := sorted(set(self._columns) - set(known)):
            raise BadCondition(
                f"where: expected columns of a row's outcome, found {', '.join(unknown)}. Known: {', '.join(known)}"
            )

    def rows(self, table: pa.Table) -> set[str]:
        """Ids of the rows that meet it. A null result is a no, as in SQL."""
        names = list(dict.fromkeys(["row_id", *self._columns]))
        frame = pl.DataFrame(pl.from_arrow(table.select(names)))
        try:
            return set(frame.filter(self._expression)["row_id"].to_list())
        except pl.exceptions.PolarsError as error:
            raise BadCondition(f"where: expected a condition (true or false): {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """The message of a failed conversion ends with the values themselves."""
    return (str(error).splitlines() or [""])[0].partition(" for ")[0][:200]
