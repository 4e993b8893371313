"""Conditions on rows: SQL over columns that are known, evaluated by Polars."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
# What is quoted, or a number with a fraction and without an exponent.
_FRACTION = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|(?<![\w.])(\d+\.\d*|\.\d+)(?![\w.])""")


def looks_at_many_rows(condition: str) -> str:
    """The function in an SQL condition whose value depends on other rows; empty: there is none."""
    found = _NOT_PER_ROW.search(SQL_TEXT.sub("''", condition))
    return found[1] if found else ""


class BadCondition(UserFacingError, ValueError):
    """A condition that cannot be evaluated: which column or word is wrong. It does not say where it was written."""

    exit_status = ExitStatus.WRONG_REQUEST


class TypeMisfit(BadCondition):
    """A condition that rows with such types cannot be held against. `columns`: what is wrong is said of these."""

    def __init__(self, message: str, columns: Sequence[str]) -> None:
        super().__init__(message)
        self.columns = list(columns)


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
            raise BadCondition(f"does not fit the columns: {_without_values(error)}") from None
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


def check_types(text: str, types: Mapping[str, pa.DataType]) -> None:
    """Hold a condition against the types of columns before there are rows, by what Polars says of none: it refuses by
    types alone. Columns that `types` lacks may be of any type, and what is said of them is left to the rows. Numbers
    with a fraction are no texts here: Polars would compare a text with them as texts, by which 10 is less than 3.5.

    Raises TypeMisfit where every table with these columns would be refused.
    """
    import polars as pl

    for written in dict.fromkeys((text, with_floats(text))):
        expression = pl.sql_expr(written)
        frame = _no_rows({name: kind for name, kind in types.items() if name in expression.meta.root_names()})
        reason, columns = _misfit(expression, frame) or ("", [])
        kinds = {name: frame.schema[name] for name in columns}
        if reason and (written == text or pl.String in kinds.values()):
            said = ", ".join(f"{name} is {_words(kind)}" for name, kind in kinds.items())
            raise TypeMisfit(f"{reason}. {said}{_remedy(kinds)}", columns)


def with_floats(text: str) -> str:
    """The condition with its numbers with a fraction as floats, which Polars never compares as texts."""
    return _FRACTION.sub(lambda found: f"{found[1]}e0" if found[1] else found[0], text)


def _no_rows(types: Mapping[str, pa.DataType]) -> pl.DataFrame:
    """A frame without rows; columns of types that Polars lacks are left out."""
    import polars as pl
    import pyarrow as pa

    columns: dict[str, pl.Series] = {}
    for name, kind in types.items():
        with contextlib.suppress(pl.exceptions.PolarsError, pl.exceptions.PanicException):
            columns[name] = pl.Series(name, pl.from_arrow(pa.array([], kind)))
    return pl.DataFrame(columns)


def _misfit(expression: pl.Expr, frame: pl.DataFrame) -> tuple[str, list[str]] | None:
    """Why no rows can be held against an expression, and the columns of the smallest part for which that is so. Raises
    TypeMisfit for one that is no condition."""
    import polars as pl

    for part in _known_parts(expression, set(frame.columns)):
        found = _evaluated(part, frame)
        if isinstance(found, str):
            return _smallest(part, found, frame)
        if part is expression and found not in (pl.Boolean, pl.Null):
            raise TypeMisfit(f"its values are {_words(found)}, and neither true nor false", _columns(part))
    return None


def _known_parts(expression: pl.Expr, known: set[str]) -> Iterator[pl.Expr]:
    """The largest parts of an expression that look at columns, all of them known."""
    waiting = [expression]
    while waiting:
        part = waiting.pop()
        if (names := part.meta.root_names()) and set(names) <= known:
            yield part
        elif names:
            waiting += part.meta.pop()


def _smallest(part: pl.Expr, reason: str, frame: pl.DataFrame) -> tuple[str, list[str]]:
    """The same of the smallest part that cannot be evaluated. Small ones are tried first: of a long chain each takes
    as long as all before it."""
    parts: list[pl.Expr] = []
    waiting = part.meta.pop()
    while waiting:
        inner = waiting.pop()
        if inner.meta.root_names():
            parts.append(inner)
            waiting += inner.meta.pop()
    parts.reverse()  # of one size the inner one
    for inner in sorted(parts, key=lambda one: len(one.meta.root_names())):
        if isinstance(found := _evaluated(inner, frame), str):
            return found, _columns(inner)
    return reason, _columns(part)


def _evaluated(part: pl.Expr, frame: pl.DataFrame) -> pl.DataType | str:
    """The type of its values, or why there can be none."""
    import polars as pl

    try:
        with warnings.catch_warnings(action="ignore"):  # of what Polars will read differently one day
            return frame.select(part).to_series().dtype
    except pl.exceptions.PolarsError as error:
        return _without_values(error)
    except pl.exceptions.PanicException:
        return pl.Null()  # a defect of Polars says nothing of types


def _columns(part: pl.Expr) -> list[str]:
    return list(dict.fromkeys(part.meta.root_names()))


def _words(kind: pl.DataType) -> str:
    """A type as people say it."""
    import polars as pl

    if kind.is_numeric():
        return "a whole number" if kind.is_integer() else "a number"
    said = {pl.String: "text", pl.Boolean: "true or false", pl.Datetime: "a time", pl.List: "a list"}
    return said.get(kind.base_type(), f"of type {kind}"[:200])


def _remedy(kinds: Mapping[str, pl.DataType]) -> str:
    """What to write where columns of these types are not what a condition takes them for."""
    import polars as pl

    hints = []
    for name, kind in kinds.items():
        if kind == pl.String:
            hints.append(f"as a number it is TRY_CAST({name} AS DOUBLE), which is null where the text is none")
        elif kind.is_numeric():
            hints.append(f"as text it is CAST({name} AS VARCHAR); numbers stand without quotes")
        elif isinstance(kind, pl.Datetime):
            hints.append("beside it write DATE '2026-01-31'")
    return "".join(f"; {hint}" for hint in hints)


def _without_values(error: Exception) -> str:
    """What Polars says, without the values at the end of what it says of a failed conversion."""
    return _first_line(error).partition(" for ")[0]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
