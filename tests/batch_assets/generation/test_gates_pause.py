"""A gate that trips in the middle of a run: the request pauses, nothing is lost, and it goes on once it is accepted."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.dataset_project import MODEL, DatasetProject, dataset_project
from support.plain_engine import PlainEngine, plain_engine
from support.snapshots import commit, questions, write_snapshot
from support.timing import PATIENCE

from batch_assets.catalog import ledger
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from gpu_runner.fleet_database.capacity_plan import Pause, PauseKind
from resources.store.dataset_store import DatasetStore

ROWS = 800
RULE = {"where": "seconds > 600", "max_rate": 0.5}
LAST = f"{ROWS // 100 - 1:05d}"


@pytest.fixture
def engine() -> Iterator[PlainEngine]:
    with plain_engine(MODEL) as engine:
        yield engine


def project(folder: Path, **gates: Any) -> Any:
    return dataset_project(folder, batch_rows=100, gates={"least_rows": 20, **gates})


def begun(site: DatasetProject) -> None:
    site.source([f"What is {i} plus {i}?" for i in range(ROWS)])
    assert site.materialize("prompts").success


def wait_for(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE * 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Run(threading.Thread):
    """The op over all batches, in a thread of its own."""

    def __init__(self, site: DatasetProject, url: str) -> None:
        super().__init__(daemon=True)
        self.site, self.url = site, url
        self.result: dg.ExecuteInProcessResult | None = None
        self.start()

    def run(self) -> None:
        self.result = self.site.run_rows("00000", LAST, self.url)

    def done(self) -> bool:
        self.join(PATIENCE * 60)
        return self.result is not None and self.result.success


def pause_of(site: DatasetProject) -> Pause | None:
    target = site.fleet_db.target("d")
    return None if target is None else target.pause


def waits(site: DatasetProject) -> bool:
    notes = [beat.note for beat in site.fleet_db.runs()]
    return any("waiting: paused: gate" in note for note in notes)


def gate_events(site: DatasetProject) -> list[dict[str, Any]]:
    records = site.instance.fetch_observations(ledger.rows_key("d"), limit=100).records
    found = [record.asset_observation.metadata for record in records if record.asset_observation]
    return [
        {key: one.value for key, one in metadata.items()}
        for metadata in found
        if "decision" in metadata and metadata["decision"].value == "gate"
    ]


@pytest.mark.slow
def test_bad_rows_pause_the_request_and_it_goes_on_when_they_are_accepted(tmp_path: Path, engine: PlainEngine) -> None:
    with project(tmp_path) as site:
        begun(site)
        engine.text = " "
        run = Run(site, engine.url)
        wait_for(lambda: pause_of(site) is not None and waits(site))
        asked, pause = len(engine.requests), pause_of(site)
        assert pause is not None and (pause.kind, [name for name, _ in pause.gates]) == (PauseKind.QUALITY, ["empty"])
        assert "are empty; its bound is 50%" in pause.describe()
        assert asked < ROWS
        time.sleep(0.5)
        assert len(engine.requests) == asked  # nothing goes on behind it
        (event,) = gate_events(site)
        assert (event["gate"], event["bound"], event["rate"]) == ("empty", 0.5, 1.0)
        assert len(event["row_ids"]) == 10 and set(event["row_ids"]) <= {f"id-{i:04d}" for i in range(ROWS)}
        assert event["go_on"] == "batch-assets adjust d --accept empty"

        assert site.fleet_db.accept_gates("d", ["empty"])
        assert run.done()
        prompts = Counter(str(one["messages"]) for one in engine.requests)
        assert len(prompts) == ROWS and set(prompts.values()) == {1}
        assert len(site.events()) == ROWS // 100


@pytest.mark.slow
def test_each_batch_has_the_rates_of_its_gates(tmp_path: Path, engine: PlainEngine) -> None:
    with project(tmp_path, language={"allowed": ["fi"], "max_rate": 0.9}, rules={"slow": RULE}) as site:
        begun(site)
        engine.text = "This is an answer in English, which nobody has asked for, as everybody can see who reads it."
        site.fleet_db.begin_request("d", "before", accepted_gates=["wrong_language", "repeated"])
        assert Run(site, engine.url).done()
        rates = [metadata for _, _, metadata in site.events()]
        assert [one["wrong_language_rate"] for one in rates] == [1.0] * (ROWS // 100)
        assert {one["repeated_rate"] for one in rates} <= {0.99, 1.0}
        assert {one["slow_rate"] for one in rates} == {0.0} and "length_rate" not in rates[0]


@pytest.mark.slow
def test_each_batch_of_a_judge_has_the_mean_of_its_votes(tmp_path: Path, engine: PlainEngine) -> None:
    judge = {"dataset": "answers", "rubric": "Good."}
    with dataset_project(tmp_path, batch_rows=4, judge=judge, source=None, prompt=None, id=None) as site:
        answers = DatasetStore(site.store.objects, "answers")
        manifest = write_snapshot(answers, questions(8))
        commit(answers, manifest, answer=lambda _, number: f"the answer {number}")
        publish(answers, manifest, card=Card(), now=1.0, workdir=tmp_path)
        assert site.materialize("prompts").success

        def vote(body: dict[str, Any]) -> str:
            number = next(number for number in range(8) if f"the answer {number}" in str(body["messages"]))
            return json.dumps({"reason": "", "score": 1 + number % 4}) if number != 7 else "no vote"

        engine.text = vote
        assert site.run_rows("00000", "00001", engine.url).success
        assert [(one["mean_score"], one["dead"]) for _, _, one in site.events()] == [(2.5, 0), (2.0, 1)]


@pytest.mark.slow
def test_a_language_that_nobody_tells_ends_the_run_before_an_engine_is_asked(
    tmp_path: Path, engine: PlainEngine
) -> None:
    with project(tmp_path, language={"allowed": ["gr"]}) as site:
        begun(site)
        assert not site.run_rows("00000", LAST, engine.url).success and not engine.requests
        assert "d: gates: expected languages of af, " in site.reason()


@pytest.mark.slow
def test_a_gate_that_was_accepted_before_or_is_off_pauses_nothing(tmp_path: Path, engine: PlainEngine) -> None:
    with project(tmp_path, max_cut_rate=None) as site:
        begun(site)
        engine.text, engine.answer = "", {"finish_reason": "length"}
        site.fleet_db.begin_request("d", "before", accepted_gates=["empty"])
        assert Run(site, engine.url).done()
        assert pause_of(site) is None and not gate_events(site)
