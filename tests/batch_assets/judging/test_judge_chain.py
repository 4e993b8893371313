"""A judge over the table of another dataset: which rows are asked, and how a refresh asks only what is new."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import orjson
import polars as pl
import pytest
from support.snapshots import commit

from batch_assets.component import dataset_definitions
from batch_assets.filtering.passed_table import PassedStore, filtered
from batch_assets.judging.judged_table import judged, rows_store
from batch_assets.orchestration.source_place import at_its_place
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.grouping import pairs_of
from batch_assets.spec.models import load_spec
from gpu_runner.rows import Row
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

ANSWERS = {
    "name": "answers",
    "source": {"path": "questions.jsonl"},
    "id": "question",
    "prompt": {"user": "{{ question }}"},
    "samples": 3,
    "sampling": {"seed": 1},
    "keep_columns": ["question", "topic"],
}
SCORES = {
    "name": "scores",
    "judge": {"dataset": "answers", "rubric": "Good.", "votes": 2, "accept": "score >= 4"},
    "keep_columns": ["topic"],
}
PAIRS = {
    "name": "pairs",
    "judge": {"dataset": "answers", "rubric": "Good.", "compare": "pairwise", "group_by": "question"},
}
BEST = {"name": "best", "source": {"dataset": "scores", "passed": True}, "prompt": {"user": "{{ output }} {{ score }}"}}
ALL = {"name": "all", "source": {"dataset": "scores", "judged": True}, "prompt": {"user": "{{ output }} {{ score }}"}}


class Steps:
    """Datasets in a store, whose answers a test makes."""

    def __init__(self, folder: Path, objects: Objects, instance: dg.DagsterInstance) -> None:
        self.folder, self.objects, self.instance, self.builds = folder, objects, instance, 0

    def questions(self, *found: str) -> None:
        lines = [json.dumps({"question": one, "topic": one[0]}) for one in found]
        (self.folder / "questions.jsonl").write_text("\n".join(lines))

    def step(self, attributes: Mapping[str, Any]) -> tuple[SnapshotManifest, dict[str, str]]:
        """Build, answer and publish; returns the rows that were new, by id, as they were asked."""
        self.builds += 1
        spec = load_spec({"model": "m", "batch_rows": 4, **attributes}, "defs.yaml")
        store = DatasetStore(self.objects, spec.name)
        before = set(self._rows(store))
        manifest = build_snapshot(
            at_its_place(spec, self.instance, self.objects),
            store,
            now=float(self.builds),
            workdir=self.folder / f"work-{self.builds}",
            base=self.folder,
        )
        commit(store, manifest, answer=self._answer)
        publish(store, manifest, card=Card(), now=1.0, workdir=self.folder, output_columns=spec.output.columns)
        if spec.judge is not None:
            judged(store, spec, now=1.0, workdir=self.folder)
        if spec.rules is not None:
            rows, target = rows_store(spec, store), PassedStore(store)
            filtered(rows, spec.rules, base=self.folder, now=1.0, workdir=self.folder, target=target)
        return manifest, {row_id: text for row_id, text in self._rows(store).items() if row_id not in before}

    def _rows(self, store: DatasetStore) -> dict[str, str]:
        if (snapshot := store.current_snapshot()) is None:
            return {}
        found = store.rows(store.manifest(snapshot), store.entries(snapshot))
        return {row.row_id: str(orjson.loads(row.prompt)[-1]["content"]) for _, rows in found for row in rows}

    def _answer(self, row: Row, number: int) -> str:
        text = str(orjson.loads(row.prompt)[-1]["content"])
        if "Answer A:" in text:
            first, second = (int(one) for one in re.findall(r"^> answer \d+ (\d)", text, re.MULTILINE))
            return json.dumps({"reason": "", "winner": "A" if first > second else "B"})
        if "The answer:" in text:
            return json.dumps({"reason": "", "score": 4 if "> answer 0 2" in text else 3})
        return f"answer 0 {row.row_id.partition('~')[2] or 0}"

    def table(self, name: str) -> pl.DataFrame:
        store = DatasetStore(self.objects, name)
        return pl.read_parquet(self.objects.uri(f"{name}/published/{store.current_published()}/part-*.parquet"))


@pytest.fixture
def steps(tmp_path: Path, local_objects: Objects) -> Iterator[Steps]:
    with dg.DagsterInstance.ephemeral() as instance:
        made = Steps(tmp_path, local_objects, instance)
        made.questions("sun?", "moon?")
        yield made


@pytest.mark.slow
def test_each_answer_has_its_votes_and_a_refresh_asks_for_those_of_new_answers(steps: Steps) -> None:
    steps.step(ANSWERS)
    _, asked = steps.step(SCORES)
    assert len(asked) == 2 * 3 * 2
    assert sum("> user: sun?" in text and "> answer 0 " in text for text in asked.values()) == 6
    steps.questions("sun?", "moon?", "mars?")
    assert len(steps.step(ANSWERS)[1]) == 3
    _, more = steps.step(SCORES)
    assert len(more) == 3 * 2 and all("> user: mars?" in text for text in more.values())
    assert steps.step(SCORES)[1] == {}, "nothing new, nothing asked"
    found = steps.table("scores/judged")
    assert found["row_id"].to_list() == steps.table("answers")["row_id"].to_list()
    assert set(zip(found["votes"], found["topic"], strict=True)) == {(2, "s"), (2, "m")}


@pytest.mark.slow
def test_judged_rows_and_those_that_pass_are_read_by_other_datasets(steps: Steps) -> None:
    steps.step(ANSWERS)
    steps.step(SCORES)
    _, asked = steps.step(BEST)
    assert asked == {"sun?~2": "answer 0 2 4.0", "moon?~2": "answer 0 2 4.0"}, "named as the judged rows are"
    manifest, every = steps.step(ALL)
    assert manifest.source.startswith("dataset scores, the judged rows, version ")
    assert set(every) == set(steps.table("answers")["row_id"]) and "answer 0 1 3.0" in every.values()


@pytest.mark.slow
def test_every_pair_of_a_group_is_asked_in_both_orders(steps: Steps) -> None:
    steps.step(ANSWERS)
    _, asked = steps.step(PAIRS)
    orders = [tuple(re.findall(r"^> answer 0 (\d)", text, re.MULTILINE)) for text in asked.values()]
    assert sorted(orders) == sorted([*itertools.permutations("012", 2)] * 2)
    found = steps.table("pairs/judged")
    wins = {row_id: (wins, losses) for row_id, wins, losses in found.select("row_id", "wins", "losses").iter_rows()}
    assert wins == {
        f"{of}{sample}": counted
        for of in ("sun?", "moon?")
        for sample, counted in {"": (0, 2), "~1": (1, 1), "~2": (2, 0)}.items()
    }
    assert set(found["consistency"]) == {1.0}
    steps.questions("sun?", "moon?", "mars?")
    steps.step(ANSWERS)
    assert len(steps.step(PAIRS)[1]) == 6, "pairs that were asked stay"


def test_the_most_pairs_of_a_group_are_spread_over_its_rows(steps: Steps) -> None:
    steps.step(ANSWERS)
    _, asked = steps.step(PAIRS | {"judge": PAIRS["judge"] | {"max_pairs": 2}})  # type: ignore[operator]
    assert len(asked) == 2 * 2 * 2
    for rows in range(2, 9):
        every = list(pairs_of(rows, 1000))
        assert len({frozenset(pair) for pair in every}) == len(every) == rows * (rows - 1) // 2
        for most in range(1, len(every)):
            some = list(pairs_of(rows, most))
            counts = [sum(row in pair for pair in some) for row in range(rows)]
            assert some == every[:most] and max(counts) - min(counts) <= 2


def test_dagster_knows_the_judged_rows_between_the_table_and_those_that_pass(tmp_path: Path) -> None:
    def deps(judge: Mapping[str, Any]) -> dict[str, list[str]]:
        spec = load_spec({"name": "scores", "model": "m", "judge": judge}, "defs.yaml")
        assets = [
            one for one in dataset_definitions(spec, tmp_path).assets or () if isinstance(one, dg.AssetsDefinition)
        ]
        found = {one.key.to_user_string(): one for each in assets for one in each.specs}
        parts = {part: found.get(f"scores/{part}") for part in ("judged", "passed")}
        return {name: [dep.asset_key.path[-1] for dep in one.deps] for name, one in parts.items() if one is not None}

    plain = {"dataset": "answers", "rubric": "Good."}
    assert deps(plain) == {"judged": ["dataset"]}
    assert deps({**plain, "accept": "score > 3"}) == {"judged": ["dataset"], "passed": ["judged"]}
