"""Gates: whether the rows that come are so often bad that a request is paused, and why.

Each gate marks rows and has a bound on the rate of marked ones. Looking after every row costs no false alarms: a gate
is several sequential probability ratio tests (Wald, 1945) of the bound against higher rates, each begun anew whenever
it speaks for the bound (Page, Continuous inspection schemes, Biometrika 41, 1954). By the bound on such sums (Lorden,
1971; Shin, Ramdas and Rinaldo, E-detectors, 2024, theorem 2.4) a dataset whose rate never passes the bound has at most
one false alarm in RUN_LENGTH rows, on average. Rows of one place of a source may be alike, so a gate trips only on a
stretch of at least `least_rows` rows. A gate that takes much time looks at one row in ONE_IN, by its id, while all of
its tests stand at their beginning: which rows are looked at depends on earlier ones only, so the bound holds for them.

A mean of values between 0 and 1 is tested in the same way. The factor of a value x, x q/p + (1 - x) (1 - q)/(1 - p) for
a bound p and a higher mean q, is 1 + (x - p) (q - p) / (p (1 - p)): at most 1 on average where the mean is at most p,
whatever the distribution, and the likelihood ratio where values are 0 and 1 (Waudby-Smith and Ramdas, Estimating means
of bounded random variables by betting, 2024; as an e-detector in Shin, Ramdas and Rinaldo).
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from batch_assets.gates.refusals import is_refusal
from batch_assets.gates.similar_outputs import SimilarTextsBefore
from batch_assets.gates.text_features import check_languages, is_in_other_language
from gpu_runner.client.json_schemas.column_types import Misfit, column_types, fitted_row
from gpu_runner.client.json_schemas.schema_limits import SchemaProblem
from gpu_runner.rows import OUTPUT_INVALID, SCHEMA_INVALID, Outcome
from resources.store.row_condition import BadCondition, SqlCondition

RUN_LENGTH = 1e8  # rows of a dataset at its bound, on average, until a false alarm
ODDS = (1.5, 3.0, 10.0, 100.0)  # of the rates that the bound is tested against, as multiples of its own odds
NAMED_ROWS = 10
JUDGE_SCORE = "judge_score"
SHORT_LIMIT = 32  # tokens: a limit up to here is meant to cut
REMEMBERED, LONG_TEXT = 5_000, 80  # outputs that a repetition is looked for in; letters, below which none counts
COMPARED = 2_000  # letters of an output
LANGUAGE_LETTERS, SIMILAR_LETTERS = 400, 1_000  # from an output's beginning
ONE_IN = 4  # rows that a costly gate looks at while nothing speaks against the rows before
COUNTED_ROWS = 20_000  # of open batches
# What is known of a row only while it comes.
_COUNTED = ("invalid", "repeated", "near_repeated", "length", "wrong_language")
RULE_ROWS, RULE_PART = 64, 16  # rows that rules look at together: so many at most, and one in so many of those before
RULE_COLUMNS = ("row_id", "output", "finish_reason", "error", "prompt_tokens", "completion_tokens", "tries", "seconds")

Mark = Callable[[Outcome], float | None]  # how bad a row is, from 0 to 1; None: the gate has nothing to say of it


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows after each other of which so many are marked. Of a mean: the sum of how bad they are."""

    rows: int
    marked: float


@dataclass(frozen=True, slots=True)
class GateTrip:
    """A gate that has tripped: `stretch` has more marked rows than its bound allows. `row_ids`: the last of these.

    `scale`: the worst and the best value, where a mean is below its bound; `what` names it.
    """

    gate: str
    what: str
    stretch: Stretch
    bound: float
    row_ids: tuple[str, ...]
    scale: tuple[float, float] | None = None

    @property
    def rate_and_bound(self) -> tuple[float, float]:
        """The rate that was seen and the one that is allowed; of a mean both on its scale."""
        rate = self.stretch.marked / self.stretch.rows
        if self.scale is None:
            return rate, self.bound
        worst, best = self.scale
        return best - rate * (best - worst), best - self.bound * (best - worst)

    def describe(self) -> str:
        """In one sentence, for people, without a word of a prompt or output."""
        seen = self.stretch
        if self.scale is not None:
            mean, least = self.rate_and_bound
            return (
                f"gate {self.gate}: {self.what} of the last {seen.rows:,} rows is {mean:.3g}; its bound is {least:.3g}"
            )
        found = f"{seen.marked:,.0f} of the last {seen.rows:,} rows ({seen.marked / seen.rows:.0%}) {self.what}"
        return f"gate {self.gate}: {found}; its bound is {100 * self.bound:.3g}%"


class RateDetector:
    """Whether the rate of marked rows, or the mean of values from 0 to 1, is above `bound`, which lies between them."""

    def __init__(self, bound: float, least_rows: int) -> None:
        self._least = least_rows
        self._limit = math.log(len(ODDS) * RUN_LENGTH)
        odds = bound / (1 - bound)
        higher = [factor * odds / (1 + factor * odds) for factor in ODDS]
        self._bound = bound
        self._stakes = [(rate - bound) / (bound * (1 - bound)) for rate in higher]
        self._steps = [(math.log(rate / bound), math.log((1 - rate) / (1 - bound))) for rate in higher]
        self._scores = [0.0] * len(ODDS)
        self._rows, self._marked = [0] * len(ODDS), [0.0] * len(ODDS)
        self._quiet = True  # all scores are 0

    def add(self, marked: float) -> Stretch | None:
        """Take in the next row; the stretch that passes the bound, if one does."""
        if self._quiet and not marked:
            return None
        found: Stretch | None = None
        for number, (up, down) in enumerate(self._steps):
            step = up if marked == 1 else down if marked == 0 else self._between(number, marked)
            score = self._scores[number] + step
            if score <= 0.0:
                self._scores[number], self._rows[number], self._marked[number] = 0.0, 0, 0.0
                continue
            self._scores[number] = score
            self._rows[number] += 1
            self._marked[number] += marked
            if score >= self._limit and self._rows[number] >= self._least:
                found = Stretch(self._rows[number], self._marked[number])
        self._quiet = not any(self._scores)
        return found

    @property
    def quiet(self) -> bool:
        """Nothing speaks against the bound."""
        return self._quiet

    def _between(self, number: int, value: float) -> float:
        return math.log1p(self._stakes[number] * (value - self._bound))


class _Gate:
    """`costly`: its mark takes much time. Once it has tripped, it only counts."""

    def __init__(
        self,
        name: str,
        what: str,
        bound: float,
        least_rows: int,
        scale: tuple[float, float] | None = None,
        *,
        costly: bool = False,
    ) -> None:
        self.name, self._what, self._bound, self._scale, self._costly = name, what, bound, scale, costly
        self._detector = RateDetector(bound, least_rows)
        self._marked: deque[str] = deque(maxlen=NAMED_ROWS)
        self._tripped = False

    def looks_at(self, row_id: str) -> bool:
        if not self._costly or not (self._tripped or self._detector.quiet):
            return True
        return zlib.crc32(row_id.encode()) % ONE_IN == 0

    def add(self, row_id: str, marked: float) -> GateTrip | None:
        if self._tripped:
            return None
        if marked > self._bound:
            self._marked.append(row_id)
        stretch = self._detector.add(marked)
        if stretch is None:
            return None
        self._tripped = True
        return GateTrip(self.name, self._what, stretch, self._bound, tuple(self._marked), self._scale)


class _Counts:
    """Which rows gates have looked at and marked, of the last COUNTED_ROWS: two bits a gate and row. Written by one
    thread, read by others."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._places: dict[str, int] = {}

    def add(self, gate: str, row_id: str, marked: bool) -> None:
        place = self._places.setdefault(gate, len(self._places))
        found = self._rows.get(row_id)
        if found is None and len(self._rows) >= COUNTED_ROWS:
            del self._rows[next(iter(self._rows))]
        self._rows[row_id] = (found or 0) | (1 + 2 * marked) << 2 * place

    def of(
        self, row_ids: Sequence[str], waiting: Mapping[str, Mapping[str, bool]]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """`waiting`: by gate, marks of some of these rows that may not have been added yet."""
        known = {row_id: self._rows.get(row_id, 0) for row_id in row_ids}
        bits = Counter(known.values())
        looked_at, marked = {}, {}
        places = dict(self._places)
        for name in dict.fromkeys([*places, *waiting]):
            place = places.get(name, len(places))  # of a gate that has added nothing: no row has its bits
            more = [mark for row_id, mark in waiting.get(name, {}).items() if not known[row_id] >> 2 * place & 1]
            if rows := len(more) + sum(count for found, count in bits.items() if found >> 2 * place & 1):
                looked_at[name] = rows
                marked[name] = sum(more) + sum(count for found, count in bits.items() if found >> 2 * place & 2)
        return marked, looked_at


@dataclass(frozen=True, slots=True)
class Rule:
    """A gate of one's own: rows that meet the condition (`SqlCondition`) are marked."""

    name: str
    where: str
    bound: float


@dataclass(frozen=True, slots=True)
class ScoreBound:
    """Least mean of the scores that a judge gives: of the fields `names` of its JSON, on a scale from worst to best."""

    names: tuple[str, ...]
    worst: float
    best: float
    least: float


@dataclass(frozen=True, slots=True)
class GateBounds:
    """Most of the rows that each gate may mark; None: it is off. `letters`: the fewest and the most of an output.

    `languages`: of outputs, by ISO 639-1. `phrases`: with which a refusal begins, besides those that are known.
    `similarity`: from which on outputs are nearly repeated. `least_rows`: of a stretch that trips a gate.
    """

    dead: float | None = None
    invalid: float | None = None
    empty: float | None = None
    cut: float | None = None
    refused: float | None = None
    repeated: float | None = None
    near_repeated: float | None = None
    length: float | None = None
    wrong_language: float | None = None
    letters: tuple[int, int | None] = (0, None)
    languages: tuple[str, ...] = ()
    similarity: float = 0.8
    phrases: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    least_rows: int = 200
    score: ScoreBound | None = None


class QualityGates:
    """The gates of one run of a dataset. For one thread.

    `max_tokens`: of the answers. `json_schema`: of the outputs, whose fields are columns for the rules.
    Raises BadCondition for a rule that cannot be evaluated, for a language that cannot be told, and where a package is
    missing.
    """

    def __init__(
        self, bounds: GateBounds, *, max_tokens: int | None = None, json_schema: Mapping[str, Any] | None = None
    ) -> None:
        short = max_tokens is not None and max_tokens <= SHORT_LIMIT
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._bounds, self._least = bounds, bounds.least_rows
        self._gates: dict[str, tuple[_Gate, Mark]] = {}
        self._add("dead", "have no answer", bounds.dead, lambda one: not one.ok)
        self._add("invalid", "do not fit what output says", bounds.invalid, _is_invalid)
        self._add("empty", "are empty", bounds.empty, _is_empty)
        self._add("cut", "are cut at the token limit", None if short else bounds.cut, _is_cut)
        self._add("refused", "refuse the request", bounds.refused, _refusing(bounds.phrases))
        self._add("repeated", "repeat another output", bounds.repeated, _of_text(self._repeats))
        if bounds.near_repeated is not None:
            before = SimilarTextsBefore(bounds.similarity, REMEMBERED)
            mark = _of_text(lambda text: len(text) >= LONG_TEXT and before.look(text[:SIMILAR_LETTERS]))
            self._add("near_repeated", "nearly repeat another output", bounds.near_repeated, mark, costly=True)
        self._add("length", "are shorter or longer than wanted", bounds.length, _of_text(self._outside))
        if bounds.wrong_language is not None:
            check_languages(bounds.languages)
            mark = _of_text(self._other_language)
            self._add("wrong_language", "are in another language", bounds.wrong_language, mark, costly=True)
        if (score := bounds.score) is not None:
            scale, bound = (score.worst, score.best), (score.best - score.least) / (score.best - score.worst)
            gate = _Gate(JUDGE_SCORE, "the mean score", bound, self._least, scale)
            self._gates[JUDGE_SCORE] = (gate, _of_score(score))
        self._counts = _Counts()
        self._rules = _Rules(bounds.rules, bounds.least_rows, json_schema, self._counts)

    def _add(self, name: str, what: str, bound: float | None, mark: Mark, costly: bool = False) -> None:
        if bound is not None:
            self._gates[name] = (_Gate(name, what, bound, self._least, costly=costly), mark)

    def note(self, outcome: Outcome) -> list[GateTrip]:
        """Take in the next outcome; the gates that trip. They do not trip again, until a request is made anew."""
        found = []
        for name, (gate, mark) in self._gates.items():
            if not gate.looks_at(outcome.row_id):
                continue
            marked = mark(outcome)
            if marked is None:
                continue
            if name in _COUNTED:
                self._counts.add(name, outcome.row_id, bool(marked))
            if (trip := gate.add(outcome.row_id, marked)) is not None:
                found.append(trip)
        return found + self._rules.note(outcome)

    def counted(self, outcomes: Sequence[Outcome]) -> tuple[dict[str, int], dict[str, int]]:
        """How many of these rows are bad, and of how many looked at, by the names of the gates that `marked_rows` does
        not know. For any thread; rows that were noted long ago are left out."""
        waiting = self._rules.waiting(outcomes)  # first: a row is among these until it is counted
        return self._counts.of([one.row_id for one in outcomes], waiting)

    @property
    def phrases(self) -> Sequence[str]:
        """With which a refusal begins, besides those that are known."""
        return self._bounds.phrases

    def _repeats(self, text: str) -> bool:
        if len(text) < LONG_TEXT:
            return False
        key = hash((len(text), " ".join(text[:COMPARED].casefold().split())))
        known = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return known

    def _other_language(self, text: str) -> bool:
        return is_in_other_language(text[:LANGUAGE_LETTERS], self._bounds.languages) is True

    def _outside(self, text: str) -> bool:
        least, most = self._bounds.letters
        return len(text) < least or (most is not None and len(text) > most)


class _Rules:
    """Some rows at a time, because a frame costs more than its rows; fewer while few have come, so that a short run is
    looked at, too."""

    def __init__(
        self, rules: Sequence[Rule], least_rows: int, json_schema: Mapping[str, Any] | None, counts: _Counts
    ) -> None:
        self._counts = counts
        self._types = _fields(json_schema) if rules else {}
        known = rule_columns(json_schema)
        self._rules = {one.name: SqlCondition(one.where, known) for one in rules}
        self._gates = {one.name: _Gate(one.name, "meet its condition", one.bound, least_rows) for one in rules}
        self._waiting: list[Outcome] = []
        self._noted = 0

    def note(self, outcome: Outcome) -> list[GateTrip]:
        if not self._gates:
            return []
        self._waiting.append(outcome)
        self._noted += 1
        if len(self._waiting) < min(RULE_ROWS, 1 + self._noted // RULE_PART):
            return []
        rows, found = self._waiting, []
        columns = self._columns(rows)
        for name, gate in self._gates.items():
            for row, marked in zip(rows, self._marks(name, columns), strict=True):
                if marked is None:
                    continue
                self._counts.add(name, row.row_id, marked)
                if (trip := gate.add(row.row_id, marked)) is not None:
                    found.append(trip)
        self._waiting = []
        return found

    def waiting(self, outcomes: Sequence[Outcome]) -> dict[str, dict[str, bool]]:
        """By rule, the marks of those of these rows that were noted and wait for others. For any thread."""
        ids = {one.row_id for one in list(self._waiting)}
        rows = [one for one in outcomes if one.row_id in ids]
        if not rows:
            return {}
        columns = self._columns(rows)
        return {
            name: {
                row.row_id: marked
                for row, marked in zip(rows, self._marks(name, columns), strict=True)
                if marked is not None
            }
            for name in self._gates
        }

    def _marks(self, name: str, columns: Mapping[str, list[Any]]) -> Sequence[bool | None]:
        """For each row whether it meets the condition; None of one with a value that no function of the rule takes."""
        rule = self._rules[name]
        try:
            return rule.marks(columns)
        except BadCondition:
            found: list[bool | None] = []
            for place in range(len(columns["row_id"])):
                try:
                    found += rule.marks({column: values[place : place + 1] for column, values in columns.items()})
                except BadCondition:
                    found.append(None)
            return found

    def _columns(self, rows: Sequence[Outcome]) -> dict[str, list[Any]]:
        columns = {name: [getattr(row, name) for row in rows] for name in RULE_COLUMNS}
        columns["output"] = [text if isinstance(text, str) else None for text in columns["output"]]
        fitted = [self._fitted(text) for text in columns["output"]] if self._types else []
        return columns | {name: [None if row is None else row[name] for row in fitted] for name in self._types}

    def _fitted(self, text: str | None) -> Mapping[str, Any] | None:
        if text is None:
            return None
        try:
            return fitted_row(text, self._types)
        except Misfit:
            return None


def marked_rows(outcomes: Sequence[Outcome], phrases: Sequence[str] = ()) -> dict[str, int]:
    """How many of these rows are bad, by the names of the gates that need no memory; those without any are left out.
    `phrases`: with which a refusal begins, besides those that are known."""
    marks: Mapping[str, Mark] = {"empty": _is_empty, "cut": _is_cut, "refused": _refusing(phrases)}
    found = {name: sum(bool(mark(one)) for one in outcomes) for name, mark in marks.items()}
    return {name: count for name, count in found.items() if count}


def mean_score(outcomes: Sequence[Outcome], names: Sequence[str]) -> float | None:
    """The mean of a judge's scores over those of these rows that are votes; None without any. `names`: of the fields of
    its JSON that are scores, of which each vote counts by its mean."""
    votes = [vote for one in outcomes if (vote := _vote(one, names)) is not None]
    return math.fsum(votes) / len(votes) if votes else None


def rule_columns(json_schema: Mapping[str, Any] | None) -> list[str]:
    """What the conditions of rules may look at: of a row's outcome, and the fields of its JSON."""
    return [*RULE_COLUMNS, *_fields(json_schema)]


def _fields(json_schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    try:
        found = column_types(json_schema) if json_schema is not None else {}
    except SchemaProblem:
        return {}
    return {name: kind for name, kind in found.items() if name not in RULE_COLUMNS}


def _of_text(marks: Callable[[str], bool]) -> Mark:
    """Over texts: not of a dead letter, a vector, or tool calls without a text."""

    def mark(one: Outcome) -> bool | None:
        if not one.ok or not isinstance(one.output, str) or (one.parts.tool_calls and not one.output.strip()):
            return None
        return marks(one.output)

    return mark


def _is_invalid(one: Outcome) -> bool | None:
    """Rows that died of something else say nothing of their outputs."""
    return False if one.ok else True if one.error in (SCHEMA_INVALID, OUTPUT_INVALID) else None


def _is_cut(one: Outcome) -> bool | None:
    return one.finish_reason == "length" if one.ok and isinstance(one.output, str) else None


def _of_score(score: ScoreBound) -> Mark:
    """How far below the best score a vote is; what is no vote counts neither way."""

    def mark(one: Outcome) -> float | None:
        if (vote := _vote(one, score.names)) is None:
            return None
        below = (score.best - vote) / (score.best - score.worst)
        return float(min(max(below, 0.0), 1.0))

    return mark


def _vote(one: Outcome, names: Sequence[str]) -> float | None:
    """The mean of the scores that a row has under all of these names; None: it is no vote."""
    if not names or not one.ok or not isinstance(one.output, str):
        return None
    try:
        found = orjson.loads(one.output)
    except orjson.JSONDecodeError:
        return None
    values: list[Any] = [found.get(name) for name in names] if isinstance(found, dict) else [None]
    if not all(type(value) in (int, float) for value in values):
        return None
    return float(sum(values) / len(values))


_is_empty = _of_text(lambda text: not text.strip())


def _refusing(phrases: Sequence[str]) -> Mark:
    by_text = _of_text(lambda text: is_refusal(text, phrases))
    return lambda one: True if one.ok and one.parts.refusal else by_text(one)
