"""Preference pairs out of ranked lines: the best and the worst of each group, wherever they lie in the table."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pytest
from support.snapshots import SourceRow, commit, write_snapshot

from batch_assets.exports import ranked_pairs
from batch_assets.exports.export import export
from batch_assets.exports.record import ExportRecord
from batch_assets.publishing import table_files
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import PublishedTable
from batch_assets.spec.export_options import ExportError, checked_options
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import DatasetStore


def ranked(
    objects: Objects,
    tmp_path: Path,
    ranks: Sequence[tuple[Any, Any]],
    dead: tuple[str, ...] = (),
    *,
    documents: Sequence[str] = (),
    said: Mapping[int, str] = MappingProxyType({}),
) -> PublishedTable:
    """A table of one line for each (group, rank); `documents`: a column of each; `said`: other answers, by line."""
    rows = [
        SourceRow(
            f"id-{number:06d}",
            f"What of {group}?",
            {"asked": group, "score": score} | ({"document": documents[number]} if documents else {}),
        )
        for number, (group, score) in enumerate(ranks)
    ]
    store = DatasetStore(objects, "sums")
    manifest = write_snapshot(store, rows)
    commit(store, manifest, dead=dead, answer=lambda row, number: said.get(number, f"answer {number}"))
    return publish(store, manifest, card=Card(), now=0.0, workdir=tmp_path, part_rows=50)


def pairs(objects: Objects, table: PublishedTable, to: Path, **options: Any) -> tuple[ExportRecord, list[Any]]:
    known = [column.name for column in table.columns]
    wanted = checked_options(known, "preference", group_by="asked", rank_by="score", **options)
    record = export(objects, table, open_objects(str(to)), wanted)
    lines = [line for file in record.files for line in (to / file.name).read_text().splitlines()]
    return record, [json.loads(line) for line in lines]


def answers(line: Any) -> tuple[str, str]:
    """The chosen and the rejected answer."""
    return line["chosen"][0]["content"], line["rejected"][0]["content"]


@pytest.mark.slow
def test_the_best_and_the_worst_of_each_group_are_a_pair(
    any_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_files, "_GROUP_ROWS", 10)
    monkeypatch.setattr(ranked_pairs, "PAIRS_AT_ONCE", 3)
    draw = random.Random(7)
    ranks = [(f"q{number % 20}", float(draw.randrange(6))) for number in range(200)]
    draw.shuffle(ranks)
    by_group = defaultdict(list)
    for number, (group, rank) in enumerate(ranks):
        by_group[group].append((rank, number))
    expected = {}
    for group, found in by_group.items():
        best = min(found, key=lambda one: (-one[0], one[1]))
        worst = min(found, key=lambda one: (one[0], one[1]))
        if best[0] > worst[0]:
            expected[f"What of {group}?"] = (f"answer {best[1]}", f"answer {worst[1]}")
    table = ranked(any_objects, tmp_path, ranks)
    record, lines = pairs(any_objects, table, tmp_path / "export", kept=["asked"], part_rows=5)
    made = {
        line["prompt"][0]["content"]: (line["chosen"][0]["content"], line["rejected"][0]["content"]) for line in lines
    }
    assert made == expected and len(lines) == len(expected) == record.rows["train"]
    assert record.left_out == {"unpaired": 200 - 2 * len(expected)} and record.lines == 200
    assert [line["asked"] for line in lines] == [line["prompt"][0]["content"][8:-1] for line in lines]


def test_groups_that_say_nothing_and_rows_without_an_answer_make_no_pair(
    local_objects: Objects, tmp_path: Path
) -> None:
    ranks: list[tuple[str, Any]] = [("a", 1.0), ("a", 1.0), ("b", 2.0), ("c", 1.0), ("c", float("nan")), ("d", 1.0)]
    ranks += [("d", 9.0), ("d", 5.0), ("d", None)]
    table = ranked(local_objects, tmp_path, ranks, dead=("id-000006",))
    record, lines = pairs(local_objects, table, tmp_path / "export")
    assert [(line["chosen"][0]["content"], line["rejected"][0]["content"]) for line in lines] == [
        ("answer 7", "answer 5")
    ]
    assert record.left_out == {"error": 1, "unpaired": 6}


def test_no_pair_has_answers_to_two_prompts(tmp_path: Path) -> None:
    known = ["prompt", "output", "topic", "score", "question"]

    def made(name: str, **options: Any) -> list[tuple[Any, str, str]]:
        (tmp_path / name).mkdir()
        wanted = checked_options(known, "preference", group_by="topic", rank_by="score", **options)
        found = ranked_pairs.RankedPairs(wanted, tmp_path / name)
        for score, (system, user) in enumerate([("a", "x"), ("a", "y"), ("b", "x"), ("a", "x"), ("b", "y")]):
            prompt = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            line = {"prompt": prompt, "output": str(score), "topic": "tea", "score": score, "question": user}
            found.add(pa.Table.from_pylist([line]))
        lines = [line for _, table in found.tables() for line in table.to_pylist()]
        return [(line["prompt"], line["chosen"], line["rejected"]) for line in lines]

    assert [one[1:] for one in made("whole")] == [("3", "0")]
    assert [one[1:] for one in made("no-system", system=False)] == [("3", "0"), ("4", "1")]
    assert made("question", mapping=["prompt=question"]) == [("x", "3", "0"), ("y", "4", "1")]


def test_lines_whose_group_is_nan_are_in_no_pair_as_those_without_one(local_objects: Objects, tmp_path: Path) -> None:
    nan = float("nan")
    table = ranked(local_objects, tmp_path, [(nan, 1.0), (1.5, 2.0), (nan, 3.0), (1.5, 4.0), (None, 5.0), (None, 6.0)])
    record, lines = pairs(local_objects, table, tmp_path / "export")
    assert [answers(line) for line in lines] == [("answer 3", "answer 1")] and record.left_out == {"unpaired": 4}


def test_pairs_may_carry_the_column_error_along(local_objects: Objects, tmp_path: Path) -> None:
    table = ranked(local_objects, tmp_path, [("a", 1.0), ("a", 2.0)])
    _, lines = pairs(local_objects, table, tmp_path / "export", kept=["error", "asked"])
    assert [(line["error"], line["asked"]) for line in lines] == [(None, "a")]


def test_a_rank_may_be_a_text_that_is_a_number(local_objects: Objects, tmp_path: Path) -> None:
    table = ranked(local_objects, tmp_path, [("a", " 10 "), ("a", "9.5")])
    _, lines = pairs(local_objects, table, tmp_path / "export")
    assert lines[0]["chosen"][0]["content"] == "answer 0"
    other = ranked(open_objects(str(tmp_path / "other")), tmp_path, [("a", "good"), ("a", "bad")])
    with pytest.raises(ExportError, match="--rank-by score: expected numbers") as error:
        pairs(open_objects(str(tmp_path / "other")), other, tmp_path / "export-2")
    assert "good" not in str(error.value)


def test_after_a_kill_the_pairs_are_the_same(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranked_pairs, "PAIRS_AT_ONCE", 3)
    table = ranked(local_objects, tmp_path, [(f"q{number % 15}", float(number)) for number in range(60)])
    whole, lines = pairs(local_objects, table, tmp_path / "whole", part_rows=3, validation=0.3)
    assert {line["prompt"][0]["content"] for line in lines} == {f"What of q{n}?" for n in range(15)}

    def killed(record: ExportRecord) -> None:
        if record.parts == 2:
            raise KeyboardInterrupt

    known = [column.name for column in table.columns]
    wanted = checked_options(known, "preference", group_by="asked", rank_by="score", part_rows=3, validation=0.3)
    with pytest.raises(KeyboardInterrupt):
        export(local_objects, table, open_objects(str(tmp_path / "killed")), wanted, told=killed)
    assert pairs(local_objects, table, tmp_path / "killed", part_rows=3, validation=0.3) == (whole, lines)


def test_pairs_of_large_answers_are_fetched_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_pairs, "BYTES_AT_ONCE", 1 << 20)
    known = ["prompt", "output", "asked", "score", "row_id"]
    options = checked_options(known, "preference", group_by="asked", rank_by="score", kept=["row_id"])
    found = ranked_pairs.RankedPairs(options, tmp_path)
    draw = random.Random(3)
    for part in range(20):
        rows = [
            {"asked": f"q{group}", "score": draw.random(), "row_id": f"{part}-{number}"}
            | {"prompt": [{"role": "user", "content": "p" * 10 * group}], "output": "x" * (100_000 * number)}
            for number, group in enumerate(draw.choices(range(90), k=8))
        ]
        found.add(pa.Table.from_pylist(rows))
    tables = list(found.tables())
    assert [number for number, _ in tables] == list(range(len(tables)))
    assert sum(table.num_rows for _, table in tables) == found.pairs > 30
    assert max(table.nbytes for _, table in tables) < 2 << 20 and len(tables) < found.pairs
    again = ranked_pairs.RankedPairs(options, tmp_path / "none")
    assert list(again.tables()) == [] and again.pairs == 0


def test_rows_without_a_group_are_in_no_pair(local_objects: Objects, tmp_path: Path) -> None:
    ranks: list[tuple[Any, Any]] = [("a", 1.0), (None, 1.0), ("a", 2.0), (None, 5.0)]
    table = ranked(local_objects, tmp_path, ranks)
    record, lines = pairs(local_objects, table, tmp_path / "export")
    assert [answers(line) for line in lines] == [("answer 2", "answer 0")]
    assert record.left_out == {"unpaired": 2}


def test_a_pair_has_both_of_its_answers_on_one_side(local_objects: Objects, tmp_path: Path) -> None:
    ranks = [(f"q{number % 8}", float(number)) for number in range(64)]
    documents = {f"answer {number}": f"doc {number % 11}" for number in range(64)}
    table = ranked(local_objects, tmp_path, ranks, documents=list(documents.values()))
    record, lines = pairs(local_objects, table, tmp_path / "export", validation=0.4, split_by="document")
    train, validation = (
        {
            documents[answer]
            for file in record.files
            if file.name.startswith(side)
            for line in (tmp_path / "export" / file.name).read_text().splitlines()
            for answer in answers(json.loads(line))
        }
        for side in ("train", "validation")
    )
    assert train and validation and not train & validation
    assert len(lines) > 8  # a group that lies on both sides has a pair on each


def test_what_is_left_out_of_pairs_is_counted_in_lines(local_objects: Objects, tmp_path: Path) -> None:
    ranks: list[tuple[str, Any]] = [("a", 1.0), ("a", 2.0), ("b", 1.0), ("b", 2.0), ("b", 3.0)]
    table = ranked(local_objects, tmp_path, ranks, said={0: "the same", 1: "the same"})
    record, lines = pairs(local_objects, table, tmp_path / "export")
    assert record.left_out == {"equal": 2, "unpaired": 1} and len(lines) == 1
    assert 2 * record.rows["train"] + sum(record.left_out.values()) == record.lines == table.rows
