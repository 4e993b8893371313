"""What each step of a chain would ask, before anything is paid; chains in `status` and `new --chain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from support.defs_folders import COMPONENT, attributes, write_text
from support.snapshots import commit
from typer.testing import CliRunner

from batch_assets.cli.main import app
from batch_assets.component import Scaffolder, ScaffoldParams
from batch_assets.orchestration.source_place import at_its_place
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.chain import in_tree
from batch_assets.spec.discovery import declarations, declared, declared_specs
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "store").mkdir(mode=0o700)
    for name, place in {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store", "BATCH_ASSETS_DEFS": "defs"}.items():
        monkeypatch.setenv(name, str(tmp_path / place))
    monkeypatch.setenv("BATCH_ASSETS_FLEET", str(tmp_path / "fleet.yaml"))
    (tmp_path / "fleet.yaml").write_text("simulated: default\n")
    return tmp_path


def declare(folder: Path, words: list[str], **more: Any) -> None:
    """`answers` read `topics`."""
    topics = attributes("topics", source={"grid": {"x": words}}, id="x")
    answers = attributes("answers", source={"dataset": "topics"}, prompt={"user": "{{ output }}"}, **more)
    documents = [{"type": COMPONENT, "attributes": one} for one in (topics, answers)]
    write_text(folder / "defs" / "chain", yaml.safe_dump_all(documents))


def publish_topics(folder: Path) -> None:
    store = DatasetStore(open_objects(str(folder / "store")), "topics")
    spec, place = declared()["topics"]
    manifest = build_snapshot(spec, store, now=0.0, workdir=folder / "work", base=place)
    commit(store, manifest)
    publish(store, manifest, card=Card(), now=0.0, workdir=folder)


def asked(*words: str) -> dict[str, Any]:
    found = CliRunner().invoke(app, [*words, "--json"])
    assert found.exit_code == 0, found.output
    result: dict[str, Any] = json.loads(found.stdout)
    return result


def counts(step: dict[str, Any]) -> tuple[int, int, int, str | None]:
    return step["new"], step["changed"], step["never_asked"], step["more_from"]


def test_a_chain_that_was_never_run_asks_the_rows_of_its_source_and_then_what_comes_of_them(folder: Path):
    declare(folder, ["a", "b"])
    found = asked("plan", "answers", "--upstream")
    assert [counts(one) for one in found["steps"]] == [(0, 0, 2, None), (0, 0, 0, "topics")]
    assert (found["dataset"], found["rows"]) == ("answers", 2)
    assert found["steps"][0]["usd_p50"] > 0


def test_a_step_whose_source_has_bad_rows_says_so_before_it_is_run(folder: Path):
    declare(folder, ["a", " "])
    found = CliRunner().invoke(app, ["plan", "answers", "--upstream", "--json"])
    first, second = json.loads(found.stdout)["steps"]
    assert "1 of 2 rows of the source cannot be used: they stop a run" in first["problem"]
    assert "line 2: id: expected text or a whole number, found nothing but blanks" in first["problem"]
    assert (found.exit_code, counts(first), second["problem"]) == (1, (0, 0, 1, None), None)


@pytest.mark.slow
def test_rows_that_are_new_in_a_source_are_told_from_those_that_were_never_asked(folder: Path):
    declare(folder, ["a", "b"])
    publish_topics(folder)
    assert [counts(one) for one in asked("plan", "answers", "--upstream")["steps"]] == [
        (0, 0, 0, None),
        (0, 0, 2, None),
    ]
    declare(folder, ["a", "b", "c"])
    assert [counts(one) for one in asked("plan", "answers", "--upstream")["steps"]] == [
        (1, 0, 0, None),
        (0, 0, 2, "topics"),
    ]
    text = CliRunner().invoke(app, ["plan", "answers", "--upstream"]).stdout
    lines = text[text.index("step ") :].splitlines()
    assert lines[0].split() == ["step", "rows", "to", "ask", "new", "changed", "never", "asked", "removed", "$"]
    assert "and what comes of topics" in lines[2]


def test_dollars_of_machines_that_are_only_played_are_marked_as_plan_marks_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    declare(folder, ["a"])
    assert asked("plan", "answers", "--upstream")["problems"] == []
    monkeypatch.delenv("BATCH_ASSETS_FLEET")
    found = asked("plan", "answers", "--upstream")
    played = (
        "there are simulated providers alone: `batch-assets run answers --upstream` takes them with --simulate only"
    )
    assert found["problems"] == [played] and asked("plan", "topics")["clocks"] == found["clocks"]
    said = " ".join(CliRunner().invoke(app, ["plan", "answers", "--upstream"]).stdout.split())
    assert f"problem: {played}" in said and "simulated clock: " in said


def publish_answers(folder: Path) -> None:
    """`answers` of the published topics."""
    store = DatasetStore(open_objects(str(folder / "store")), "answers")
    spec, place = declared()["answers"]
    with dg.DagsterInstance.ephemeral() as instance:
        manifest = build_snapshot(
            at_its_place(spec, instance, store.objects), store, now=0.0, workdir=folder / "work-answers", base=place
        )
    commit(store, manifest)
    publish(store, manifest, card=Card(), now=0.0, workdir=folder)


def test_rows_that_a_source_has_no_more_go_with_what_was_made_of_them(folder: Path):
    """It was said of `plan topics` alone, and of no step below."""
    declare(folder, ["a", "b", "c"], samples=2)
    publish_topics(folder)
    publish_answers(folder)
    assert [one["removed"] for one in asked("plan", "answers", "--upstream")["steps"]] == [0, 0]
    declare(folder, ["a", "d"], samples=2)
    first, second = asked("plan", "answers", "--upstream")["steps"]
    assert counts(first) == (1, 0, 0, None) and (first["removed"], first["removed_with_upstream"]) == (2, 0)
    assert counts(second) == (0, 0, 0, "topics") and (second["removed"], second["removed_with_upstream"]) == (0, 4)
    said = " ".join(CliRunner().invoke(app, ["plan", "answers", "--upstream"]).stdout.split())
    assert "2 rows are in the table and no longer in its source" in said
    assert "and what comes of topics; 4 rows are removed with the rows of topics that go" in said


def test_options_of_one_dataset_are_refused(folder: Path):
    declare(folder, ["a"])
    found = CliRunner().invoke(app, ["plan", "answers", "--upstream", "--budget-usd", "3"])
    assert (found.exit_code, "--upstream: expected without other options" in found.output) == (2, True)
    found = CliRunner().invoke(app, ["run", "answers", "--upstream", "--rows", "3"])
    assert (found.exit_code, "--upstream: expected without --rows" in found.output) == (2, True)


@pytest.mark.slow
def test_status_shows_a_chain_as_a_tree(folder: Path):
    declare(folder, ["a"])
    lines = CliRunner().invoke(app, ["status"]).stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[1:3]] == ["topics", "└ answers"]
    assert "$" in lines[0].split()
    assert [(one["dataset"], one["upstream"]) for one in asked("status")["datasets"]] == [
        ("topics", None),
        ("answers", "topics"),
    ]


@pytest.mark.parametrize(("chain", "names"), [(True, ["quiz_questions", "quiz_answers", "quiz"]), (False, ["quiz"])])
def test_dg_scaffold_writes_a_chain_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chain: bool, names: list[str]
):
    monkeypatch.delenv("BATCH_ASSETS_DEFS", raising=False)
    (tmp_path / "quiz").mkdir()
    asked = dg.ScaffoldRequest(
        type_name=COMPONENT,
        target_path=tmp_path / "quiz",
        scaffold_format="yaml",
        project_root=tmp_path,
        params=ScaffoldParams(chain=chain),
    )
    Scaffolder().scaffold(asked)
    assert list(declarations(tmp_path).datasets) == names


def test_a_new_chain_can_be_run_as_it_is_and_its_last_dataset_has_its_name(folder: Path):
    (folder / "defs").mkdir()
    said = CliRunner().invoke(app, ["new", "quiz", "--chain"])
    assert said.exit_code == 0 and "`batch-assets run quiz --upstream`" in said.stdout
    assert in_tree(declared_specs()) == [("quiz_questions", 0), ("quiz_answers", 1), ("quiz", 2)]
    assert CliRunner().invoke(app, ["check"]).exit_code == 0
    # Texts of several lines can be read and changed, and no model spends its tokens on thinking.
    text = (folder / "defs" / "quiz" / "defs.yaml").read_text()
    assert "    user: |-\n      Which answer is best?\n      {% for one in answer %}\n" in text
    assert text.count("enable_thinking: false") == 3
    again = CliRunner().invoke(app, ["new", "quiz", "--chain"])
    assert (again.exit_code, "one that no dataset has" in again.output) == (2, True)
