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

from batch_assets.cli.dataset_commands import plan_chain
from batch_assets.cli.main import app
from batch_assets.component import Scaffolder, ScaffoldParams
from batch_assets.orchestration import source_place
from batch_assets.orchestration.source_place import at_its_place
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.placement import Placement
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


def declare(folder: Path, words: list[str], topics_id: str | None = "x", **more: Any) -> None:
    """`answers` read `topics`."""
    named = {"id": topics_id} if topics_id is not None else {}
    topics = attributes("topics", source={"grid": {"x": words}}, keep_columns=["x"], **named)
    reads = {"source": {"dataset": "topics"}, "prompt": {"user": "{{ output }}"}}
    answers = attributes("answers", **(reads | more))
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


def steps_and_words(folder: Path) -> tuple[list[dict[str, Any]], str]:
    found = CliRunner().invoke(app, ["plan", "answers", "--upstream"]).stdout
    return asked("plan", "answers", "--upstream")["steps"], " ".join(found.split())


def test_rows_without_ids_that_go_are_counted_where_none_is_changed_and_else_not_told_below(folder: Path):
    """A changed row without an id is another one: the step below counted it as one that goes, the step itself not."""
    declare(folder, ["a", "b", "c"], None)
    publish_topics(folder)
    publish_answers(folder)
    declare(folder, ["a"], None)
    (first, second), _ = steps_and_words(folder)
    assert (first["removed"], second["removed_with_upstream"]) == (2, 2)
    declare(folder, ["a", "d"], None)
    (first, second), said = steps_and_words(folder)
    assert (first["removed"], second["removed"], second["removed_with_upstream"]) == (1, 0, None)
    why = "without ids, a row of topics that is changed is another one"
    assert f"how many go with rows of topics is not told: {why}" in said
    declare(folder, ["d", "e", "f"], None)
    (first, second), _ = steps_and_words(folder)
    assert (first["new"], first["removed"], second["removed_with_upstream"]) == (3, 0, None)


def test_ids_of_rows_that_go_are_held_for_a_step_below_alone_and_not_more_than_a_bound(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    declare(folder, ["a", "b", "c"])
    publish_topics(folder)
    publish_answers(folder)
    named: list[int] = []
    real = Placement.gone
    monkeypatch.setattr(Placement, "gone", lambda one: named.append(len(found := real(one))) or found)
    declare(folder, ["a", "d"])
    (_, second), _ = steps_and_words(folder)
    assert second["removed_with_upstream"] == 2 and set(named) == {2}
    assert len(named) == 2, "once for each command: the last step names none"
    monkeypatch.setattr(plan_chain, "NAMED_ROWS", 1)
    (first, second), said = steps_and_words(folder)
    assert (len(named), first["removed"], second["removed_with_upstream"]) == (2, 2, None)
    assert "how many go with rows of topics is not told: more than 1 rows of topics go" in said


def test_a_table_of_many_rows_is_not_copied_for_a_plan(folder: Path, monkeypatch: pytest.MonkeyPatch):
    declare(folder, ["a", "b", "c"])
    publish_topics(folder)
    publish_answers(folder)
    declare(folder, ["a", "d"])
    for name in (source_place, plan_chain):
        monkeypatch.setattr(name, "COPIED_ROWS", 2)
    (first, second), said = steps_and_words(folder)
    assert (first["removed"], second["removed_with_upstream"]) == (2, None)
    assert "how many go with rows of topics is not told: its source has more than 2 rows" in said


def test_a_condition_that_stops_a_step_whose_table_is_there_is_said_before_the_steps_above_are_paid(folder: Path):
    """Every error of such a step was taken for a table that is not made yet, and the status was 0."""
    declare(folder, ["a", "b"])
    publish_topics(folder)
    wrong = {"keep_columns": ["x"], "filter": {"low": {"where": "x > 3"}}}
    declare(folder, ["a", "b", "c"], **wrong)
    found = CliRunner().invoke(app, ["plan", "answers", "--upstream", "--json"])
    first, second = json.loads(found.stdout)["steps"]
    assert (found.exit_code, first["problem"], second["more_from"]) == (1, None, "topics")
    assert second["problem"].startswith("filter.low.where: ")


def test_a_column_that_the_table_above_is_to_get_is_no_problem_of_the_step_that_reads_it(folder: Path):
    declare(folder, ["a", "b"])
    publish_topics(folder)
    declare(folder, ["a", "b", "c"], keep_columns=["score"])
    found = CliRunner().invoke(app, ["plan", "answers", "--upstream", "--json"])
    first, second = json.loads(found.stdout)["steps"]
    assert (found.exit_code, first["problem"], second["problem"], second["more_from"]) == (0, None, None, "topics")
    assert second["removed_with_upstream"] is None
    declare(folder, ["a", "b"], keep_columns=["score"])
    found = CliRunner().invoke(app, ["plan", "answers", "--upstream", "--json"])
    assert found.exit_code == 1, "the table above stays as it is"


def test_an_engine_of_the_users_model_that_a_run_would_refuse_is_a_problem_of_its_step(folder: Path):
    told = {"system": "Ask on.", "opening": "Hello", "turns": 2, "model": "played/model", "engine": "nope"}
    declare(folder, ["a"], prompt={"user": "{{ output }}", "user_model": told})
    found = CliRunner().invoke(app, ["plan", "answers", "--upstream", "--json"])
    first, second = json.loads(found.stdout)["steps"]
    expected = "prompt.user_model.engine: expected an engine of kind endpoint in fleet.yaml (none), found 'nope'"
    assert (found.exit_code, first["problem"], second["problem"]) == (1, None, expected)


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
