"""What says of each row of a table whether a rule flags it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from batch_assets.filtering.repeated_rows import EqualTexts, RowsMark, SimilarTexts
from batch_assets.filtering.similar_vectors import SimilarVectors
from batch_assets.filtering.text_marks import (
    LanguageMark,
    LengthMark,
    OverlapMark,
    PersonalDataMark,
    RatioMark,
    RefusalsMark,
)
from batch_assets.spec.row_rules import NO_ANSWER, SURPLUS, RowRule
from resources.store.row_condition import BadCondition, SqlCondition

if TYPE_CHECKING:
    import polars as pl


REFUSAL = "refusal"  # column of the words in which an engine says that the model refused


class Mark(Protocol):
    """A rule that looks at one row at a time."""

    @property
    def columns(self) -> Sequence[str]:
        """Columns that it reads."""

    def flagged(self, rows: pl.DataFrame) -> pl.Series:
        """For each row whether it is flagged. Raises BadCondition."""


@dataclass(frozen=True)
class ConditionMark:
    """Flags rows that do not meet an SQL condition."""

    condition: SqlCondition

    @property
    def columns(self) -> Sequence[str]:
        return self.condition.columns

    def flagged(self, rows: pl.DataFrame) -> pl.Series:
        return ~self.condition.mask(rows)


@dataclass(frozen=True)
class NoAnswerMark:
    """Flags rows without a completion."""

    columns: Sequence[str] = ("error",)

    def flagged(self, rows: pl.DataFrame) -> pl.Series:
        return rows["error"].is_not_null()


def mark_of(rule: RowRule, known: Sequence[str], base: Path) -> Mark | Callable[[Path, int], RowsMark]:
    """What a rule looks for, in a table with the columns that are `known`; of a rule that compares rows what makes its
    mark, with a folder and the number of rows. Raises BadCondition.
    """
    if missing := [name for _, name in rule.columns() if name not in known]:
        raise BadCondition(f"no column is called {missing[0][:80]!r}. Columns: {', '.join(known)}")
    if (equal := rule.duplicates) is not None:
        return lambda folder, rows: EqualTexts(equal, folder)
    if (similar := rule.near_duplicates) is not None:
        return lambda folder, rows: SimilarTexts(similar, folder, rows)
    if (near := rule.semantic_duplicates) is not None:
        return lambda folder, rows: SimilarVectors(near, folder, rows)
    (kind,) = rule.kinds
    made: dict[str, Callable[[Any], Mark]] = {
        "where": lambda text: ConditionMark(SqlCondition(text, known)),
        "length": LengthMark,
        "ratio": RatioMark,
        "language": LanguageMark,
        "refusals": lambda found: RefusalsMark(
            found, REFUSAL if found.column == "output" and REFUSAL in known else None
        ),
        "personal_data": PersonalDataMark,
        "overlap": lambda found: OverlapMark(found, base),
    }
    return made[kind](getattr(rule, kind))


class Flags:
    """Which rows are flagged by which rule: one byte a row and rule. Rows without an answer are flagged `error`.
    `not_compared`: by rule that compares rows, how many had nothing to compare."""

    def __init__(self, rules: Mapping[str, RowRule], rows: int, *, wanted: bool = False) -> None:
        """`wanted`: so many rows are wanted, and those beyond are flagged `surplus`."""
        self.names = [NO_ANSWER, *rules, *([SURPLUS] if wanted else [])]
        self._removes = np.array([True, *(rule.remove for rule in rules.values()), *([True] if wanted else [])])
        self.not_compared: dict[str, int] = {}
        self._flagged = np.zeros((rows, len(self.names)), np.bool_)

    def flag(self, name: str, first: int, flagged: Any) -> None:
        """Whether rows from `first` on are flagged by a rule."""
        self._flagged[first : first + len(flagged), self.names.index(name)] = flagged

    def flag_rows(self, name: str, rows: Any) -> None:
        """These rows, by their numbers, are flagged by a rule."""
        self._flagged[rows, self.names.index(name)] = True

    def fallen(self, first: int, rows: int) -> Any:
        """Whether each of these rows falls out by a rule, of those that were applied so far."""
        return self._flagged[first : first + rows][:, self._removes].any(axis=1)

    def column(self, first: int, rows: int) -> pa.ListArray:
        """For each of these rows the names of the rules that flag it, in their order."""
        flagged = self._flagged[first : first + rows]
        ends = np.concatenate([[0], np.cumsum(flagged.sum(axis=1))])
        names = pa.array(self.names, pa.string()).take(pa.array(np.nonzero(flagged)[1]))
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), names)

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """By rule how many rows it flags, and how many fall out by it; one may fall out by several."""
        flagged = dict(zip(self.names, self._flagged.sum(axis=0).tolist(), strict=True))
        return flagged, {name: flagged[name] if out else 0 for name, out in zip(self.names, self._removes, strict=True)}
