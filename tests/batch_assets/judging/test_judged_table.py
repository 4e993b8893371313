"""Votes to judged rows: scores, agreement, pairs, lost votes; against a plain Python reference, and byte for byte."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.snapshots import SourceRow, commit, write_snapshot

from batch_assets.asset_metadata.materialization import judged_metadata, passed_metadata
from batch_assets.exports.export import export
from batch_assets.filtering.passed_table import PassedStore, filtered
from batch_assets.judging.judged_table import JudgeReport, is_current, judged, judged_store, rows_store
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import PublishedTable
from batch_assets.spec.condition_types import judged_types, table_types
from batch_assets.spec.export_options import checked_options
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import DatasetStore
from resources.store.row_condition import BadCondition

POINTWISE = {"dataset": "answers", "rubric": "Correct and short.", "votes": 3}
PAIRWISE = {"dataset": "answers", "rubric": "Correct and short.", "compare": "pairwise", "group_by": "topic"}
PROMPT = [{"role": "user", "content": "Why?"}]
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
DEAD, UNREADABLE = "dead", "unreadable"

Vote = Mapping[str, Any] | str


def judging(judge: Mapping[str, Any], **more: Any) -> GeneratedDatasetSpec:
    return load_spec({"name": "scores", "model": "m", "judge": judge, "keep_columns": ["topic"], **more}, "defs.yaml")


@dataclass
class Judged:
    """Votes in a store, published, and what is made of them."""

    spec: GeneratedDatasetSpec
    store: DatasetStore
    workdir: Path

    def table(self, part_rows: int = 7, now: float = 2.0) -> tuple[PublishedTable, JudgeReport]:
        return judged(self.store, self.spec, now=now, workdir=self.workdir, part_rows=part_rows)

    def rows(self) -> list[dict[str, Any]]:
        table, _ = self.table()
        return pl.read_parquet(table.glob(self.store.objects)).to_dicts()


def voted(spec: GeneratedDatasetSpec, folder: Path, votes: Sequence[tuple[Any, Vote]], rows: int = 10) -> Judged:
    """`votes`: what is judged (an id, or two), and what was said. The topic is the first letter of an id."""
    store = DatasetStore(open_objects(str(folder / "store")), "scores")
    pairs = spec.judge is not None and spec.judge.pairwise
    kinds = {"judged_id": pa.string(), "judged_output": pa.string(), "judged_prompt": _MESSAGES}
    schema = {"topic": pa.string()} | {name: pa.list_(kind) if pairs else kind for name, kind in kinds.items()}
    source = []
    for number, (of, _) in enumerate(votes):
        kept = {"judged_id": of, "judged_output": f"text of {of}", "judged_prompt": PROMPT}
        if pairs:
            kept = {
                "judged_id": list(of),
                "judged_output": [f"text of {one}" for one in of],
                "judged_prompt": [PROMPT] * 2,
            }
        source.append(SourceRow(f"{number:05d}", f"Vote {number}", {"topic": of[0][0], **kept}))
    manifest = write_snapshot(store, source, batch_rows=rows, keep_schema=schema, json_schema=spec.output.json_schema)
    said = {f"{number:05d}": vote for number, (_, vote) in enumerate(votes)}
    dead = [row_id for row_id, vote in said.items() if vote == DEAD]

    def answer(row: Any, _: int) -> str:
        vote = said[row.row_id]
        return vote if isinstance(vote, str) else json.dumps(vote)

    commit(store, manifest, dead=dead, answer=answer)
    publish(store, manifest, card=Card(), now=1.0, workdir=folder, output_columns=True, part_rows=25)
    return Judged(spec, store, folder)


def score(value: float, **more: Any) -> dict[str, Any]:
    return {"reason": "so", "score": value, **more}


def test_a_row_has_the_mean_of_its_votes_and_how_far_they_agree(tmp_path: Path) -> None:
    votes = [("a1", score(5)), ("a1", score(5)), ("a1", score(2)), ("b1", score(4)), ("b1", DEAD), ("b1", "5")]
    votes += [("c1", DEAD), ("c1", "{"), ("c1", DEAD)]
    found = voted(judging(POINTWISE), tmp_path, votes)
    first, second, third = found.rows()
    assert (first["row_id"], first["topic"], first["output"], first["prompt"]) == ("a1", "a", "text of a1", PROMPT)
    assert (first["score"], first["votes"], first["lost"], first["agreement"]) == (4.0, 3, 0, pytest.approx(2 / 3))
    assert (second["score"], second["votes"], second["lost"], second["agreement"]) == (4.0, 3, 2, None)
    assert (third["score"], third["lost"], third["agreement"], third["error"]) == (None, 3, None, "no_vote")
    assert first["error"] is None and third["output"] == "text of c1"
    table, report = found.table()
    assert (table.rows, table.ok, table.dead, report.rows, report.unscored) == (3, 2, 1, 3, 1)
    assert (report.votes, report.lost, report.lost_by) == (9, 5, {"prompt_too_long": 3, "unreadable": 2})
    assert report.figures["score"] == 4.0, "a lost vote is no vote, and not a 0"


def test_judged_rows_and_those_that_pass_stand_on_their_pages_with_their_scores(tmp_path: Path) -> None:
    """As of the table itself: rows above all else, and of each column what it holds."""
    spec = judging({**POINTWISE, "accept": "score >= 4"})
    found = voted(spec, tmp_path, [("a1", score(5)), ("b1", score(2)), ("c1", DEAD)])
    table, report = found.table()
    told = judged_metadata(found.store, table, report, samples=True)
    assert list(told)[:2] == ["first_rows", "sample_rows"]
    lines = str(told["first_rows"].value).splitlines()
    assert lines[0] == "| prompt → score · output |"
    assert lines[2:] == [
        *("| Why? |", r"| → 5\.0 · text of a1 |"),
        *("| Why? |", r"| → 2\.0 · text of b1 |"),
        *("| Why? |", "| → – · text of c1 |"),
    ]
    assert "| row\\_id | topic | prompt | score | output |" in str(told["sample_rows"].value)
    meanings = {column.name: column.description for column in told["columns"].value.columns}
    assert meanings["topic"] == "column of the source" and meanings["lost"].startswith("votes that do not count")
    assert spec.rules is not None
    rows, target = rows_store(spec, found.store), PassedStore(found.store)
    passed, filtering = filtered(rows, spec.rules, base=tmp_path, now=3.0, workdir=tmp_path, target=target)
    told = passed_metadata(found.store, passed, filtering, samples=True, judged=True)
    assert next(iter(told)) == "first_rows" and str(told["first_rows"].value).count("text of") == 1
    assert "flags" in {column.name for column in told["columns"].value.columns}
    for hidden in (judged_metadata(found.store, table, report), passed_metadata(found.store, passed, filtering)):
        assert "text of" not in str(hidden)


def test_a_score_of_each_criterion_is_a_column(tmp_path: Path) -> None:
    criteria = [{"name": "clear", "description": "Is it clear?"}, {"name": "true", "description": "Is it true?"}]
    spec = judging({**POINTWISE, "rubric": criteria, "accept": "true >= 4 AND agreement >= 0.7"})
    said = [{"reason": "", "clear": 1, "true": 5}, {"reason": "", "clear": 3, "true": 5}, {"reason": "", "clear": 3}]
    (row,) = voted(spec, tmp_path, [("a1", one) for one in said]).rows()
    assert (row["clear"], row["true"], row["score"], row["lost"]) == (2.0, 5.0, 3.5, 1)
    assert row["agreement"] == 0.75


@pytest.mark.parametrize("judge", [POINTWISE, PAIRWISE, {**POINTWISE, "scale": [0.0, 1.0]}])
def test_conditions_are_held_against_the_types_of_the_judged_rows(judge: Mapping[str, Any], tmp_path: Path) -> None:
    spec = judging(judge)
    assert spec.judge is not None
    pairs, vote = spec.judge.pairwise, {"reason": "", "winner": "A"} if spec.judge.pairwise else score(1)
    found = voted(spec, tmp_path, [(("a1", "a2") if pairs else "a1", vote)])
    kinds = {"judged_id": pa.string(), "judged_output": pa.string(), "judged_prompt": _MESSAGES}
    kept = {"topic": pa.string()} | {name: pa.list_(kind) if pairs else kind for name, kind in kinds.items()}
    schema = spec.output.json_schema
    votes = table_types("chat", conversations=False, json_schema=schema, kept=kept, there=spec.table_columns)
    table, _ = found.table()
    real = pq.read_schema(next(Path(table.glob(found.store.objects)).parent.glob("*.parquet")))
    types = judged_types(spec.judge, votes, kept)
    assert {name: types[name] for name in spec.judged_columns} == {item.name: item.type for item in real}


def test_scores_that_are_no_whole_numbers_agree_by_their_deviation(tmp_path: Path) -> None:
    spec = judging({**POINTWISE, "scale": [0.0, 1.0]})
    votes = [("a1", score(0.25)), ("a1", score(0.25)), ("b1", score(0)), ("b1", score(1.0)), ("c1", score(0.1))]
    rows = voted(spec, tmp_path, votes).rows()
    assert [(row["score"], row["agreement"]) for row in rows] == [(0.25, 1.0), (0.5, 0.0), (0.1, None)]


def reference(votes: Sequence[tuple[str, Vote]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What is known of each row, as one would count it by hand."""
    by_row: dict[str, list[Vote]] = defaultdict(list)
    for row_id, vote in votes:
        by_row[row_id].append(vote)
    found = {}
    for row_id, said in by_row.items():
        usable = [one for one in said if isinstance(one, Mapping)]
        means = {name: sum(one[name] for one in usable) / len(usable) if usable else None for name in names}
        modal = [Counter(one[name] for one in usable).most_common(1)[0][1] / len(usable) for name in names if usable]
        found[row_id] = {
            "votes": len(said),
            "lost": len(said) - len(usable),
            "score": sum(means.values()) / len(names) if usable else None,
            "agreement": sum(modal) / len(names) if len(usable) > 1 else None,
            **({} if len(names) == 1 else means),
        }
    return found


def krippendorff(votes: Sequence[tuple[str, Vote]], names: Sequence[str]) -> float | None:
    """Alpha for interval data, from its definition over pairs of values."""
    units: dict[str, list[float]] = defaultdict(list)
    for row_id, vote in votes:
        if isinstance(vote, Mapping):
            units[row_id].append(sum(vote[name] for name in names))
    units = {row_id: values for row_id, values in units.items() if len(values) > 1}
    every = [value for values in units.values() for value in values]
    if len(every) < 2:
        return None
    observed = sum(
        sum((one - other) ** 2 for one, other in itertools.permutations(values, 2)) / (len(values) - 1)
        for values in units.values()
    ) / len(every)
    expected = sum((one - other) ** 2 for one, other in itertools.permutations(every, 2))
    expected /= len(every) * (len(every) - 1)
    return 1 - observed / expected if expected else None


def near(one: float | None, other: float | None) -> bool:
    return one is other if one is None or other is None else math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_votes_count_as_a_plain_reference_counts_them(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    names = ["score"] if seed % 2 else ["clear", "true"]
    rubric: Any = "Good." if seed % 2 else [{"name": name, "description": "Good."} for name in names]
    lost = draw.choice([0.0, 0.2, 0.7])

    def vote() -> Vote:
        if draw.random() < lost:
            return draw.choice([DEAD, "no JSON", json.dumps({"reason": "no score"})])
        return {"reason": "so", **{name: draw.randint(1, 5) for name in names}}

    votes = [(f"{draw.choice('abc')}{number}", vote()) for number in range(25) for _ in range(draw.randint(1, 4))]
    draw.shuffle(votes)  # later votes of a row come at the end of a table
    found = voted(judging({**POINTWISE, "rubric": rubric}), tmp_path, votes)
    rows, expected = found.rows(), reference(votes, names)
    assert [row["row_id"] for row in rows] == list(expected), "in the order of their first votes"
    for row in rows:
        for name, value in expected[row["row_id"]].items():
            assert near(row[name], value), (row["row_id"], name)
    _, report = found.table()
    assert near(report.figures["alpha"], krippendorff(votes, names))
    scores = [one["score"] for one in expected.values() if one["score"] is not None]
    assert near(report.figures["score"], sum(scores) / len(scores) if scores else None)
    assert report.unscored == len(expected) - len(scores)
    assert report.lost == sum(report.lost_by.values()) == sum(not isinstance(one, Mapping) for _, one in votes)


def winner(of: str) -> dict[str, Any]:
    return {"reason": "so", "winner": of}


def test_a_row_wins_a_pair_where_both_orders_say_so(tmp_path: Path) -> None:
    votes = [(("t1", "t2"), winner("A")), (("t2", "t1"), winner("B"))]  # t1 is better
    votes += [(("t2", "t3"), winner("A")), (("t3", "t2"), winner("A"))]  # whichever stands first
    votes += [(("t1", "t3"), winner("tie")), (("t3", "t1"), DEAD)]  # one order says nothing
    found = voted(judging(PAIRWISE), tmp_path, votes)
    columns = ("row_id", "score", "pairs", "wins", "losses", "ties", "consistency", "votes", "lost")
    assert [tuple(row[name] for name in columns) for row in found.rows()] == [
        ("t1", 1.0, 1, 1, 0, 0, 1.0, 4, 1),
        ("t2", 0.25, 2, 0, 1, 1, 0.5, 4, 0),
        ("t3", 0.5, 1, 0, 0, 1, 0.0, 4, 1),
    ]
    assert [(row["output"], row["topic"], row["prompt"]) for row in found.rows()][2] == ("text of t3", "t", PROMPT)
    _, report = found.table()
    assert report.figures == {"consistency": 0.5, "ties": 0.5, "first_wins": 0.75, "tie_votes": 0.2}
    assert (report.votes, report.lost, report.lost_by) == (6, 1, {"prompt_too_long": 1})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_pairs_count_as_a_plain_reference_counts_them(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    votes: list[tuple[Any, Vote]] = []
    for topic in "abcde":
        for pair in itertools.combinations([f"{topic}{i}" for i in range(draw.randint(2, 4))], 2):
            for both in itertools.permutations(pair):
                for _ in range(draw.randint(1, 3)):
                    lost = draw.random() < 0.3
                    votes.append((both, draw.choice([DEAD, "x"]) if lost else winner(draw.choice(["A", "B", "tie"]))))
    draw.shuffle(votes)
    said: dict[tuple[str, str], list[str]] = defaultdict(list)
    for both, vote in votes:
        if isinstance(vote, Mapping):
            said[both].append({"A": both[0], "B": both[1], "tie": ""}[vote["winner"]])
    figures: dict[str, Counter[str]] = defaultdict(Counter)
    for pair in {tuple(sorted(both)) for both, _ in votes}:
        orders = [Counter(said[both]).most_common(2) for both in itertools.permutations(pair)]
        if not all(orders):
            continue
        best = [one[0][0] if len(one) == 1 or one[0][1] > one[1][1] else "" for one in orders]
        won = best[0] if best[0] == best[1] else ""
        for row_id in pair:
            figures[row_id]["pairs"] += 1
            figures[row_id]["same"] += best[0] == best[1]
            figures[row_id]["wins" if won == row_id else "losses" if won else "ties"] += 1
    rows = voted(judging(PAIRWISE), tmp_path, votes).rows()
    assert [row["row_id"] for row in rows] == list(dict.fromkeys(one for both, _ in votes for one in both))
    for row in rows:
        of, pairs = figures[row["row_id"]], figures[row["row_id"]]["pairs"]
        assert [row[name] for name in ("pairs", "wins", "losses", "ties")] == [
            of[name] for name in ("pairs", "wins", "losses", "ties")
        ]
        assert near(row["score"], (of["wins"] + of["ties"] / 2) / pairs if pairs else None)
        assert near(row["consistency"], of["same"] / pairs if pairs else None)
        assert (row["error"] == "no_vote") == (not pairs)


@pytest.mark.slow
def test_the_same_votes_make_the_same_files_and_others_another_version(tmp_path: Path) -> None:
    votes = [(f"a{n % 40}", score(1 + n % 5)) for n in range(120)]
    one, other = (voted(judging(POINTWISE), tmp_path / name, votes) for name in ("one", "other"))
    (first, _), (second, _) = one.table(), other.table(now=3.0)
    assert first.files == second.files and first.version == second.version
    assert one.table(now=9.0)[0] == first, "what is there is not made again"
    assert is_current(one.store, one.spec.judge)  # type: ignore[arg-type]
    path = f"{first.path}/{first.files[0].name}"
    data = one.store.objects.get(path)
    one.store.objects.put(path, data[:-1] + b"x")
    assert one.table()[0].files == first.files and one.store.objects.get(path) == data, "a damaged file is made anew"
    more = voted(judging(POINTWISE), tmp_path / "one", [*votes, ("a3", score(5))])
    assert not is_current(more.store, one.spec.judge)  # type: ignore[arg-type]
    assert more.table()[0].version != first.version


def test_tokens_and_dollars_are_those_of_the_votes(tmp_path: Path) -> None:
    found = voted(judging(POINTWISE), tmp_path, [("a1", score(5)), ("a1", score(4)), ("b1", DEAD)])
    rows, (table, _) = found.rows(), found.table()
    assert [row["usd"] for row in rows] == [pytest.approx(0.002), None]
    assert (rows[0]["prompt_tokens"], rows[0]["completion_tokens"]) == (21, 41)
    assert (table.prompt_tokens, table.completion_tokens, table.usd) == (21, 41, 0.002)


def test_accepted_rows_pass_and_the_others_lie_beside_them(tmp_path: Path) -> None:
    spec = judging({**POINTWISE, "accept": "score >= 4 AND agreement >= 0.6"})
    votes = [("a1", score(5)), ("a1", score(4)), ("b1", score(5)), ("b1", score(5)), ("c1", score(5)), ("c1", DEAD)]
    found = voted(spec, tmp_path, votes)
    found.table()
    rules = spec.rules
    assert rules is not None
    rows, target = rows_store(spec, found.store), PassedStore(found.store)
    table, report = filtered(rows, rules, base=tmp_path, now=3.0, workdir=tmp_path, target=target)
    assert pl.read_parquet(table.glob(found.store.objects))["row_id"].to_list() == ["b1"]
    assert (table.dataset, report.passed, report.fallen, report.removed) == (
        "scores/passed",
        1,
        2,
        {"error": 0, "accept": 2},
    )


@pytest.mark.parametrize("form", ["messages", "preference"])
def test_judged_rows_are_exported_as_rows_of_their_own_table(tmp_path: Path, form: str) -> None:
    votes = [("a1", score(5)), ("a2", score(1)), ("b1", score(3)), ("b2", score(3)), ("c1", DEAD)]
    found = voted(judging(POINTWISE), tmp_path, votes)
    table, _ = found.table()
    target = open_objects(str(tmp_path / "out"))
    ranked = {"group_by": "topic", "rank_by": "score"} if form == "preference" else {}
    options = checked_options([column.name for column in table.columns], form, **ranked)
    record = export(found.store.objects, table, target, options)
    lines = [json.loads(line) for line in target.get(record.files[0].name).splitlines()]
    if form == "messages":
        assert len(lines) == 4 and lines[0]["messages"] == [*PROMPT, {"role": "assistant", "content": "text of a1"}]
    else:
        assert [(one["chosen"][-1]["content"], one["rejected"][-1]["content"]) for one in lines] == [
            ("text of a1", "text of a2")
        ]


def test_a_table_that_was_made_before_there_was_a_judge_is_an_error_that_says_what_helps(
    local_objects: Objects, tmp_path: Path
) -> None:
    store = DatasetStore(local_objects, "scores")
    with pytest.raises(
        BadCondition, match=r"judge: expected a published table of scores, found none; `batch-assets run"
    ):
        judged(store, judging(POINTWISE), now=1.0, workdir=tmp_path)
    manifest = write_snapshot(store, [SourceRow("1", "Why?", {"topic": "t"})])
    commit(store, manifest)
    publish(store, manifest, card=Card(), now=1.0, workdir=tmp_path)
    with pytest.raises(BadCondition, match=r"judge: expected the column judged_id in the table, found none"):
        judged(store, judging(POINTWISE), now=1.0, workdir=tmp_path)
    assert judged_store(store).current_published() is None
