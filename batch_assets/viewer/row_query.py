"""What may be asked of a table's rows, and its SQL for DuckDB. Pure.

Names of columns are looked up among those of the table and quoted; everything else that a user wrote is a parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gpu_runner.errors import ExitStatus, UserFacingError
from resources.store.outcome_columns import PROVENANCE

CELL_LETTERS = 300  # of a value in a list of rows
MOST_BINS, MOST_VALUES = 24, 12
MOST_PAGE_ROWS, MOST_COLUMNS = 200, 60
_FAR = 2.0  # values more than so many times as large as 99 in 100 share one last bin
_SORT_LETTERS = 64
_LONG_TEXTS = ("row_id", "prompt", "output", "reasoning", "refusal", "error_message", "batch", "duplicate_of", "run_id")
_NOT_SEARCHED = frozenset({"finish_reason", "error", "batch", "duplicate_of", "reused_from", *PROVENANCE})

Scalar = str | int | float | bool | None


class QueryError(UserFacingError, ValueError):
    """Something is asked that the table does not have."""

    exit_status = ExitStatus.WRONG_REQUEST


class Kind(StrEnum):
    """How values of a column are compared and shown."""

    NUMBER = "number"
    TIME = "time"
    TEXT = "text"
    FLAG = "flag"
    MESSAGES = "messages"
    TAGS = "tags"
    OTHER = "other"

    @classmethod
    def of(cls, duckdb_type: str) -> Kind:
        """The kind of a column of this type, as DuckDB spells it."""
        if duckdb_type.endswith("]"):
            if re.match(r'STRUCT\("?role"? VARCHAR, "?content"? VARCHAR', duckdb_type):
                return cls.MESSAGES
            return cls.TAGS if duckdb_type == "VARCHAR[]" else cls.OTHER
        if re.match(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?$|FLOAT$|DOUBLE$|DECIMAL", duckdb_type):
            return cls.NUMBER
        if duckdb_type.startswith(("TIMESTAMP", "DATE")):
            return cls.TIME
        return {"VARCHAR": cls.TEXT, "BOOLEAN": cls.FLAG}.get(duckdb_type, cls.OTHER)


class Condition(BaseModel):
    """One condition on a column, all that are given of: one of `values` (null among them: no value), from `low` up to
    not including `high` (of times: seconds since 1970), the text `contains`, whatever its case, any value (`filled`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    column: str = Field(max_length=500)
    values: tuple[Scalar, ...] | None = Field(default=None, max_length=50)
    low: float | None = None
    high: float | None = None
    contains: str | None = Field(default=None, max_length=200)
    filled: bool | None = None


class RowQuery(BaseModel):
    """Rows that meet all conditions and hold the text `search`, sorted by a column or as the table has them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    search: str = Field(default="", max_length=200)
    conditions: tuple[Condition, ...] = Field(default=(), max_length=20)
    sort: str | None = Field(default=None, max_length=500)
    descending: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it asks for all lines as they are."""
        return not self.search and not self.conditions and self.sort is None


@dataclass(frozen=True, slots=True)
class Sql:
    """A piece of SQL with its parameters, in the order of their places."""

    text: str
    parameters: tuple[Any, ...] = ()


def quoted(name: str) -> str:
    """A name as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


def kind_of(columns: Mapping[str, Kind], name: str) -> Kind:
    """Raises QueryError for a column that the table does not have."""
    try:
        return columns[name]
    except KeyError:
        raise QueryError(f"expected a column of the table, found {name[:80]!r}") from None


def pattern(text: str) -> str:
    """A regular expression of RE2 that finds this text, whatever its case."""
    return "(?i)" + "".join(c if c.isalnum() or not c.isascii() or c in " _" else f"\\x{{{ord(c):x}}}" for c in text)


def searched_columns(columns: Mapping[str, Kind]) -> list[str]:
    """Columns in which a search looks: texts and messages, without names of models, machines and batches."""
    return [name for name, kind in columns.items() if kind in (Kind.TEXT, Kind.MESSAGES) and name not in _NOT_SEARCHED]


def search_sql(text: str, columns: Mapping[str, Kind]) -> Sql:
    """True for lines that hold the text in one of their texts."""
    found = [
        Sql("contains(row_id, ?)", (text,)) if name == "row_id" else _contains(name, columns[name], text)
        for name in searched_columns(columns)
    ]
    return _joined(found, " OR ") or Sql("FALSE")


def conditions_sql(conditions: Sequence[Condition], columns: Mapping[str, Kind]) -> Sql:
    """True for lines that meet all of them. Raises QueryError."""
    return _joined([_condition(one, kind_of(columns, one.column)) for one in conditions], " AND ") or Sql("TRUE")


def order_sql(query: RowQuery, columns: Mapping[str, Kind]) -> str:
    """The order of a query's lines. Long texts count by their beginning."""
    if query.sort is None:
        return "ORDER BY __line__"
    kind, name = kind_of(columns, query.sort), quoted(query.sort)
    if kind is Kind.MESSAGES:
        name = f"left({name}[-1].content, {_SORT_LETTERS})"
    elif kind in (Kind.TEXT, Kind.TAGS, Kind.OTHER):
        name = f"left(CAST({name} AS VARCHAR), {_SORT_LETTERS})"
    return f"ORDER BY {name} {'DESC' if query.descending else 'ASC'} NULLS LAST, __line__"


def cell_sql(name: str, kind: Kind, letters: int = CELL_LETTERS) -> str:
    """A column's value as a list of rows shows it: its beginning; of messages that of the last one."""
    if kind in (Kind.NUMBER, Kind.FLAG):
        return quoted(name)
    if kind is Kind.MESSAGES:
        return f"left({quoted(name)}[-1].content, {letters})"
    return f"left(CAST({quoted(name)} AS VARCHAR), {letters})"


def has_pictures(name: str, kind: Kind) -> bool:
    """Whether a histogram of the column can say something: numbers, flags, tags, and texts that may be categories."""
    return kind in (Kind.NUMBER, Kind.FLAG, Kind.TAGS, Kind.TIME) or (kind is Kind.TEXT and name not in _LONG_TEXTS)


@dataclass(frozen=True, slots=True)
class Bins:
    """Bins of one round width from `start` on; the last takes all that is above it when `open_end`."""

    start: float
    width: float
    count: int
    open_end: bool

    @classmethod
    def of(cls, low: float, high: float, most_of: float, *, whole: bool) -> Bins:
        """For values from `low` to `high`, of which 99 in 100 are at most `most_of`."""
        top = most_of if high > _FAR * most_of > 0 else high
        width = _round_up((top - low) / (MOST_BINS - 1))
        width = max(width, 1.0) if whole else width or max(abs(high), 1.0) / 10
        start = math.floor(low / width + 1e-9) * width
        count = math.floor((top - start) / width + 1e-9) + 1
        return cls(start, width, count + (top < high), top < high)

    def edges(self, number: int) -> tuple[float, float | None]:
        """From where to where a bin goes; None: without an end."""
        digits = max(0, 2 - math.floor(math.log10(self.width)))
        low = round(self.start + number * self.width, digits)
        last = self.open_end and number == self.count - 1
        return low, None if last else round(self.start + (number + 1) * self.width, digits)


def bins_sql(name: str, kind: Kind, bins: Bins) -> Sql:
    """Number of the bin of each line's value."""
    return Sql(
        f"least(greatest(CAST(floor(({number_sql(name, kind)} - ?) / ? + 1e-9) AS INTEGER), 0), ?)",
        (bins.start, bins.width, bins.count - 1),
    )


def number_sql(name: str, kind: Kind) -> str:
    """A number or time as a DOUBLE."""
    return f"epoch({quoted(name)})" if kind is Kind.TIME else f"CAST({quoted(name)} AS DOUBLE)"


def _condition(one: Condition, kind: Kind) -> Sql:
    parts: list[Sql] = []
    if one.values is not None:
        parts.append(_one_of(one.column, kind, one.values))
    if (one.low is not None or one.high is not None) and kind not in (Kind.NUMBER, Kind.TIME):
        raise QueryError(f"{one.column[:80]}: expected a column of numbers or times for a range")
    if one.low is not None:
        parts.append(Sql(f"{number_sql(one.column, kind)} >= ?", (one.low,)))
    if one.high is not None:
        parts.append(Sql(f"{number_sql(one.column, kind)} < ?", (one.high,)))
    if one.contains is not None:
        parts.append(_contains(one.column, kind, one.contains))
    if one.filled is not None:
        parts.append(Sql(f"{quoted(one.column)} IS {'NOT ' if one.filled else ''}NULL"))
    return _joined(parts, " AND ") or Sql("TRUE")


def _one_of(column: str, kind: Kind, values: Sequence[Scalar]) -> Sql:
    name = quoted(column)
    wanted = [value for value in values if value is not None]
    if kind in (Kind.MESSAGES, Kind.OTHER) and wanted:
        raise QueryError(f"{column[:80]}: expected a column of plain values")
    parts: list[Sql] = []
    if len(wanted) < len(values):
        parts.append(Sql(f"{name} IS NULL"))
    for value in wanted:
        if kind is Kind.TAGS:
            parts.append(Sql(f"list_contains({name}, ?)", (str(value),)))
        elif kind is Kind.NUMBER:
            if isinstance(value, str):
                raise QueryError(f"{column[:80]}: expected a number, found a text")
            parts.append(Sql(f"{number_sql(column, kind)} = ?", (float(value),)))
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            parts.append(Sql(f"CAST({name} AS VARCHAR) = ?" if kind is not Kind.TEXT else f"{name} = ?", (text,)))
    return _joined(parts, " OR ") or Sql("FALSE")


def _contains(column: str, kind: Kind, text: str) -> Sql:
    name, found = quoted(column), pattern(text)
    if kind is Kind.MESSAGES:
        return Sql(f"len(list_filter({name}, lambda m: regexp_matches(m.content, ?))) > 0", (found,))
    value = name if kind is Kind.TEXT else f"CAST({name} AS VARCHAR)"
    return Sql(f"regexp_matches({value}, ?)", (found,))


def _joined(parts: Sequence[Sql], word: str) -> Sql | None:
    if not parts:
        return None
    text = word.join(part.text for part in parts)
    return Sql(f"({text})", tuple(value for part in parts for value in part.parameters))


def _round_up(width: float) -> float:
    """The next 1, 2 or 5 times a power of ten; 0 for 0."""
    if width <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(width))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width * (1 - 1e-9))
