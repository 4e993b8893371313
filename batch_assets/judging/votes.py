"""Votes on rows, counted by DuckDB, which uses the disk where memory ends. All sums are of whole numbers, so that they
do not depend on the order in which they are made: scores that are no whole numbers are rounded to six decimals.

Scores (`Scores`):

- score of a row: the mean of its votes; with criteria the mean of theirs.
- agreement of a row with two votes or more. Whole scores: the share of the votes that have the most frequent score.
  Others: 1 - 2 s / w, with the votes' standard deviation s (of the whole population) and the width w of the scale, so
  that 1 is unanimous and 0 one half at each end. With criteria the mean of theirs.
- agreement of all: Krippendorff's alpha for interval data. It is made for votes that are lost here and there
  (Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011). 1: unanimous, 0: as votes by chance.

Pairs (`Pairs`), as MT-Bench counts them (Zheng et al., Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena, 2023,
section 3.4): each pair is judged in both orders, each order has the winner of most of its votes, and a row wins where
it does so in both. Else the pair is a tie. A pair of which an order has no vote is not counted.

- score of a row: (wins + ties / 2) / pairs.
- consistency: share of the pairs in which both orders say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batch_assets.snapshot.placement import open_database
from batch_assets.spec.judge import FIRST, SCORE, SECOND, TIE, WINNER, JudgeSpec

if TYPE_CHECKING:
    import polars as pl


_DECIMALS = 1_000_000  # of scores that are no whole numbers
_DOLLARS = 1_000_000_000  # a billionth of a dollar counts
_AT_ONCE = 20_000
_USED = "sum(prompt_tokens)::BIGINT AS prompt_tokens, sum(completion_tokens)::BIGINT AS completion_tokens, "
_USED += "sum(dollars)::HUGEINT AS dollars"


@dataclass(frozen=True, slots=True)
class Overall:
    """What is said of all rows together. `figures`: by name; None where nothing can be said."""

    votes: int
    lost: int
    figures: dict[str, float | None]


class _Votes:
    """A table of votes in a database in `folder`; a context manager."""

    def __init__(self, folder: Path, columns: str) -> None:
        self._file = folder / "votes.duckdb"
        self._database = open_database(self._file)
        self._database.execute(
            f"CREATE TABLE votes (line BIGINT, {columns}, prompt_tokens BIGINT, completion_tokens BIGINT, "
            "dollars BIGINT)"
        )
        self._lines = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()
        self._file.unlink(missing_ok=True)

    def _insert(self, rows: pa.Table, columns: dict[str, Any], keys: dict[str, pl.Series]) -> None:
        """Votes of these lines of the table; a line that repeats another one cost nothing."""
        copied = rows.column("duplicate_of").is_valid()
        dollars = pc.round(pc.multiply(rows.column("usd"), float(_DOLLARS))).cast(pa.int64())
        used = {"prompt_tokens": rows.column("prompt_tokens"), "completion_tokens": rows.column("completion_tokens")}
        used |= {"dollars": dollars}
        count = rows.num_rows
        added = {"line": pa.array(range(self._lines, self._lines + count), pa.int64()), **columns}
        for name, ids in keys.items():
            added |= {f"{name}_a": pa.array(ids.hash(1).to_numpy()), f"{name}_b": pa.array(ids.hash(2).to_numpy())}
        added |= {name: pc.if_else(copied, pa.scalar(0, pa.int64()), column) for name, column in used.items()}
        self._lines += count
        self._database.register("added", pa.table(added))
        whole = ", ".join(f"{name}_a::UHUGEINT * 18446744073709551616::UHUGEINT + {name}_b AS {name}" for name in keys)
        named = ", ".join(columns)
        self._database.execute(
            f"INSERT INTO votes SELECT line, {whole}, {named}, prompt_tokens, completion_tokens, dollars FROM added"
        )
        self._database.unregister("added")

    def _tables(self, query: str) -> Iterator[pa.Table]:
        for batch in self._database.sql(query).to_arrow_reader(_AT_ONCE):
            yield pa.Table.from_batches([batch])

    def _numbers(self, query: str) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = self._database.execute(query).fetchall()
        return found


class Scores(_Votes):
    """Votes with a score, or one for each criterion."""

    def __init__(self, judge: JudgeSpec, folder: Path) -> None:
        self._judge, self._names = judge, judge.scores
        self._unit = 1 if judge.whole else _DECIMALS
        self.columns = ["judged_id", *self._names]
        super().__init__(folder, "judged UHUGEINT, " + ", ".join(f"s{n} BIGINT" for n in range(len(self._names))))

    def add(self, rows: pa.Table) -> Any:
        """Take lines in; for each whether it is a vote. One without a score for each criterion is none."""
        import polars as pl

        scores = [rows.column(name) for name in self._names]
        there = np.logical_and.reduce([column.is_valid().to_numpy() for column in scores])
        there &= rows.column("error").is_null().to_numpy()
        fixed = {}
        for number, column in enumerate(scores):
            scaled = pc.round(pc.multiply(column.cast(pa.float64()), float(self._unit))).cast(pa.int64())
            fixed[f"s{number}"] = pc.if_else(pa.array(there), scaled, pa.scalar(None, pa.int64()))
        self._insert(rows, fixed, {"judged": pl.Series(pl.from_arrow(rows.column("judged_id")))})
        return there

    def rows(self) -> Iterator[pa.Table]:
        """A line for each judged row, in the order of their first votes: `line` and `place` of that, and figures."""
        count = range(len(self._names))
        sums = ", ".join(f"sum(s{n})::HUGEINT AS t{n}, sum(s{n}::HUGEINT * s{n})::HUGEINT AS q{n}" for n in count)
        total = " + ".join(f"s{n}" for n in count)
        self._database.execute(
            f"CREATE TABLE judged AS SELECT judged, min(line) AS line, count(*) AS asked, count(s0) AS n, {sums}, "
            f"sum({total})::HUGEINT AS t, sum(({total})::HUGEINT * ({total}))::HUGEINT AS q, {_USED} "
            "FROM votes GROUP BY judged"
        )
        if self._judge.whole:
            joins = " ".join(
                f"LEFT JOIN (SELECT judged, max(c) AS c{n} FROM (SELECT judged, s{n}, count(*) AS c FROM votes "
                f"WHERE s{n} IS NOT NULL GROUP BY judged, s{n}) GROUP BY judged) USING (judged)"
                for n in count
            )
            spread = ", ".join(f"c{n}::DOUBLE AS x{n}" for n in count)
        else:
            joins, spread = "", ", ".join(f"(n * q{n} - t{n} * t{n})::DOUBLE AS x{n}" for n in count)
        means = ", ".join(f"t{n}::DOUBLE AS m{n}" for n in count)
        query = f"SELECT line, asked, n, t::DOUBLE AS t, {means}, {spread}, prompt_tokens, completion_tokens, "
        query += f"dollars::DOUBLE AS dollars FROM judged {joins} ORDER BY line"
        for found in self._tables(query):
            yield self._figures(found)

    def _figures(self, found: pa.Table) -> pa.Table:
        number = {name: _floats(found.column(name)) for name in found.column_names}
        n, k = number["n"], len(self._names)
        with np.errstate(divide="ignore", invalid="ignore"):
            means = {name: number[f"m{i}"] / n / self._unit for i, name in enumerate(self._names)}
            if self._judge.whole:
                agreed = sum(number[f"x{i}"] / n for i in range(k)) / k
            else:
                worst, best = self._judge.bounds
                width = (best - worst) * self._unit
                agreed = sum(1 - 2 * np.sqrt(number[f"x{i}"]) / n / width for i in range(k)) / k
            means |= {SCORE: number["t"] / n / k / self._unit}
        counted = {
            SCORE: _or_null(means.pop(SCORE), n > 0),
            **{name: _or_null(one, n > 0) for name, one in means.items()},
        }
        counted |= {
            "votes": found.column("asked"),
            "lost": pc.subtract(found.column("asked"), found.column("n")),
            "agreement": _or_null(agreed, n > 1),
        }
        return _with_use(found, pa.array(np.zeros(found.num_rows, np.int64)), counted)

    def overall(self) -> Overall:
        """After `rows`."""
        ((asked, votes),) = self._numbers("SELECT sum(asked)::BIGINT, sum(n)::BIGINT FROM judged")
        by_count = self._numbers("SELECT n, count(*), sum(t)::HUGEINT FROM judged WHERE n > 0 GROUP BY n ORDER BY n")
        k, rows = len(self._names), sum(count for _, count, _ in by_count)
        mean = sum((Fraction(total, n * k * self._unit) for n, _, total in by_count), Fraction(0))
        figures: dict[str, float | None] = {SCORE: float(mean / rows) if rows else None}
        if k > 1:
            for number, name in enumerate(self._names):
                parts = self._numbers(
                    f"SELECT n, sum(t{number})::HUGEINT FROM judged WHERE n > 0 GROUP BY n ORDER BY n"
                )
                of = sum((Fraction(total, n * self._unit) for n, total in parts), Fraction(0))
                figures[name] = float(of / rows) if rows else None
        figures["alpha"] = self._alpha()
        return Overall(asked or 0, (asked or 0) - (votes or 0), figures)

    def _alpha(self) -> float | None:
        """Krippendorff's alpha with the interval metric. The squared differences of the votes of a row, each pair
        twice, are 2 (m Q - T²), with their number m, sum T and sum of squares Q."""
        within = self._numbers("SELECT n, sum(n * q - t * t)::HUGEINT FROM judged WHERE n > 1 GROUP BY n ORDER BY n")
        ((votes, total, squares),) = self._numbers(
            "SELECT sum(n)::HUGEINT, sum(t)::HUGEINT, sum(q)::HUGEINT FROM judged WHERE n > 1"
        )
        if not votes or (expected := votes * squares - total * total) == 0:
            return None  # no two votes on a row, or all of them alike: there is nothing to disagree about
        observed = sum((Fraction(part, n - 1) for n, part in within), Fraction(0))
        return float(1 - observed * (votes - 1) / expected)


class Pairs(_Votes):
    """Votes that name a winner of two, or none."""

    def __init__(self, folder: Path) -> None:
        self.columns = ["judged_id", WINNER]
        super().__init__(folder, "first UHUGEINT, second UHUGEINT, winner TINYINT")

    def add(self, rows: pa.Table) -> Any:
        """Take lines in; for each whether it is a vote."""
        import polars as pl

        winner = rows.column(WINNER).combine_chunks()
        found = pc.index_in(winner, value_set=pa.array([FIRST, SECOND, TIE]))
        found = pc.if_else(rows.column("error").is_null().combine_chunks(), found, pa.scalar(None, pa.int32()))
        ids = rows.column("judged_id")
        keys = {
            name: pl.Series(pl.from_arrow(pc.list_element(ids, place)))
            for place, name in enumerate(("first", "second"))
        }
        self._insert(rows, {"winner": found.cast(pa.int8())}, keys)
        return found.is_valid().to_numpy(zero_copy_only=False)

    def rows(self) -> Iterator[pa.Table]:
        """A line for each judged row, as of `Scores`. Tokens and dollars of a row: of votes in which it stood first."""
        self._database.execute(
            "CREATE TABLE orders AS SELECT first, second, count(*) AS asked, count(winner) AS n, "
            "count(*) FILTER (winner = 0) AS won, count(*) FILTER (winner = 1) AS lost, "
            f"count(*) FILTER (winner = 2) AS tied, {_USED} FROM votes GROUP BY first, second"
        )
        self._database.execute(
            "CREATE TABLE pairs AS SELECT one, other, sum(asked) AS asked, sum(n) AS n, count(said) = 2 AS whole, "
            "count(said) = 2 AND min(said) = max(said) AS same, min(said) AS said FROM (SELECT asked, n, "
            "least(first, second) AS one, greatest(first, second) AS other, CASE WHEN n = 0 THEN NULL "
            "WHEN won > lost AND won > tied THEN if(first < second, 1, -1) "
            "WHEN lost > won AND lost > tied THEN if(first < second, -1, 1) ELSE 0 END AS said FROM orders) "
            "GROUP BY one, other"
        )
        query = (
            "SELECT line, place, asked, n, pairs, wins, losses, pairs - wins - losses AS ties, same, "
            "coalesce(prompt_tokens, 0) AS prompt_tokens, coalesce(completion_tokens, 0) AS completion_tokens, "
            "dollars::DOUBLE AS dollars FROM "
            "(SELECT judged, min(line * 2 + place) // 2 AS line, min(line * 2 + place) % 2 AS place FROM "
            "(SELECT first AS judged, line, 0 AS place FROM votes UNION ALL SELECT second, line, 1 FROM votes) "
            "GROUP BY judged) JOIN "
            "(SELECT judged, sum(asked)::BIGINT AS asked, sum(n)::BIGINT AS n, count(*) FILTER (whole) AS pairs, "
            "count(*) FILTER (same AND said = side) AS wins, count(*) FILTER (same AND said = -side) AS losses, "
            "count(*) FILTER (same) AS same FROM "
            "(SELECT one AS judged, 1 AS side, * FROM pairs UNION ALL SELECT other, -1, * FROM pairs) "
            "GROUP BY judged) USING (judged) LEFT JOIN "
            f"(SELECT first AS judged, {_USED} FROM orders GROUP BY first) USING (judged) ORDER BY line, place"
        )
        for found in self._tables(query):
            yield self._figures(found)

    def _figures(self, found: pa.Table) -> pa.Table:
        pairs, wins, ties, same = (_floats(found.column(name)) for name in ("pairs", "wins", "ties", "same"))
        with np.errstate(divide="ignore", invalid="ignore"):
            score, consistency = (wins + ties / 2) / pairs, same / pairs
        counted = {
            SCORE: _or_null(score, pairs > 0),
            "votes": found.column("asked"),
            "lost": pc.subtract(found.column("asked"), found.column("n")),
            **{name: found.column(name) for name in ("pairs", "wins", "losses", "ties")},
            "consistency": _or_null(consistency, pairs > 0),
        }
        return _with_use(found, found.column("place").cast(pa.int64()), counted)

    def overall(self) -> Overall:
        """After `rows`."""
        (found,) = self._numbers(
            "SELECT sum(asked)::BIGINT, sum(n)::BIGINT, sum(won)::BIGINT, sum(lost)::BIGINT, sum(tied)::BIGINT "
            "FROM orders"
        )
        asked, votes, first, second, tied = (one or 0 for one in found)
        ((pairs, same, drawn),) = self._numbers(
            "SELECT count(*) FILTER (whole), count(*) FILTER (same), "
            "count(*) FILTER (whole AND NOT (same AND said <> 0)) FROM pairs"
        )
        figures = {
            "consistency": _share(same, pairs),
            "ties": _share(drawn, pairs),
            "first_wins": _share(first, first + second),
            "tie_votes": _share(tied, votes),
        }
        return Overall(asked, asked - votes, figures)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _floats(column: pa.ChunkedArray) -> Any:
    return column.cast(pa.float64()).to_numpy()


def _or_null(values: Any, there: Any) -> pa.Array:
    return pa.array(values, pa.float64(), mask=~there)


def _with_use(found: pa.Table, place: Any, counted: dict[str, Any]) -> pa.Table:
    usd = pc.divide(found.column("dollars"), float(_DOLLARS))
    whole = {name: one.cast(pa.int64()) for name, one in counted.items() if not pa.types.is_floating(one.type)}
    used = {name: found.column(name).cast(pa.int64()) for name in ("prompt_tokens", "completion_tokens")}
    return pa.table({"line": found.column("line"), "place": place, **counted, **whole, **used, "usd": usd})
