"""`batch-assets plan`: what to rent, by when it is done, for how much; and the same in the metadata of `prompts`."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.test_utils import create_run_for_test
from support.capacity_fleet import SPEC, fleet_yaml, instance
from support.sensor_dataset import KEYS, SensorDataset
from typer.testing import CliRunner

from batch_assets.capacity_planning.planner_input import FleetView, propose, wanted_of
from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.cli.dataset_commands.plan import report, wanted_words
from batch_assets.cli.main import app
from batch_assets.orchestration.active_request import request_under_way
from batch_assets.request_status.dataset_status import observing
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.discovery import declared
from batch_assets.spec.models import load_spec
from batch_assets.tags import CANCELED_TAG, REFRESH_TAG
from gpu_runner.cost_meter import LeaseUsage
from gpu_runner.fleet_database.accounting.request_budget import Spend
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.targets import DatasetTarget
from gpu_runner.offers.selection import FailureKind
from gpu_runner.planner.types import TIMING, Target

QUESTIONS = 3000


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with two simulated providers at the speed of real ones, and a dataset of 3,000 rows."""
    declare(tmp_path)
    lines = "".join(json.dumps({"question": f"What is {i}?"}) + "\n" for i in range(QUESTIONS))
    (tmp_path / "defs" / "d" / "questions.jsonl").write_text(lines)
    fleet_yaml(tmp_path)
    for variable, value in {
        "DAGSTER_HOME": str(tmp_path),
        "BATCH_ASSETS_DEFS": str(tmp_path / "defs"),
        "BATCH_ASSETS_STORE": str(tmp_path / "store"),
        "BATCH_ASSETS_FLEET": str(tmp_path / "fleet.yaml"),
    }.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("BATCH_ASSETS_FLEET_DB", raising=False)
    return tmp_path


def declare(folder: Path, **more: Any) -> None:
    (folder / "defs" / "d").mkdir(parents=True, exist_ok=True)
    document = {"type": "batch_assets.GeneratedDataset", "attributes": {**SPEC, **more}}
    (folder / "defs" / "d" / "defs.yaml").write_text(yaml.safe_dump(document))


def plan(*words: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of the command."""
    found = CliRunner().invoke(app, ["plan", "d", *words, "--json"])
    return found.exit_code, json.loads(found.stdout) if found.stdout.startswith("{") else {"said": found.output}


def test_the_cheapest_fleet_that_makes_the_deadline_is_chosen(home: Path) -> None:
    status, found = plan()
    assert (status, found["feasible"], found["rows"], found["deadline_seconds"]) == (0, True, QUESTIONS, 6 * 3600)
    assert [one["offer"].split("/")[0] for one in found["chosen"]["fleet"]] == ["sim-one"]
    assert found["chosen"]["finish_seconds"]["p50"] <= found["chosen"]["finish_seconds"]["p95"] <= 6 * 3600
    assert found["earliest"]["finish_seconds"]["p50"] < found["chosen"]["finish_seconds"]["p50"]
    assert found["earliest"]["usd"]["p50"] > found["chosen"]["usd"]["p50"]


@pytest.mark.slow
def test_a_scaled_clock_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(plan()[1]["clocks"].values()) == {1.0} and plan()[1]["problems"] == []
    monkeypatch.delenv("BATCH_ASSETS_FLEET")
    monkeypatch.setenv("DAGSTER_HOME", str(home / "new"))  # with the simulated providers that come with the project
    status, found = plan()
    (clock,) = set(found["clocks"].values())
    # What `run` refuses without --simulate.
    played = "there are simulated providers alone: `batch-assets run d` takes them with --simulate only"
    assert (status, found["problems"]) == (0, [played])
    said = CliRunner().invoke(app, ["plan", "d"]).stdout
    words = " ".join(said.split())
    assert f"run {clock:g} × as fast as real time" in words
    assert "(in real time; the clock of its providers is scaled)" in words
    assert " 0 min" not in words and re.search(r"done in \d+ s \(P95 \d+ s\)", words)


def test_along_the_curve_time_costs_money(home: Path) -> None:
    curve = plan()[1]["curve"]
    assert len(curve) > 2
    seconds = [one["finish_seconds"]["p95"] for one in curve]
    usd = [one["usd"]["p50"] for one in curve]
    assert seconds == sorted(seconds) and usd == sorted(usd, reverse=True)


def test_options_take_the_place_of_what_the_yaml_wants(home: Path) -> None:
    _, found = plan("--deadline", "20m", "--budget-usd", "4.5", "--objective", "fastest", "--max-instances", "2")
    assert (found["deadline_seconds"], found["budget_usd"], found["objective"]) == (1200, 4.5, "fastest")
    assert found["max_instances"] == 2 and found["instances"] == 2


def test_what_cannot_be_done_is_said_with_the_earliest_finish_and_ends_with_status_1(home: Path) -> None:
    status, found = plan("--deadline", "1m")
    assert (status, found["feasible"]) == (1, False)
    assert found["earliest"]["finish_seconds"]["p50"] > 60
    assert "earliest" in found["reason"]


def test_a_budget_that_is_not_enough_is_answered_with_the_least_sum_which_is_enough(home: Path) -> None:
    status, found = plan("--budget-usd", "0.02")
    assert (status, found["feasible"], found["chosen"]) == (1, False, None)
    least = found["least_usd"]
    assert f"{least} $ do, with" in found["reason"]
    assert least < found["earliest"]["usd"]["p50"]
    status, found = plan("--budget-usd", str(least))
    assert (status, found["feasible"], found["least_usd"]) == (0, True, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--deadline", "soon"], "--deadline: expected a time after the request"),
        (["--budget-usd", "-1"], "--budget-usd: expected US dollars above 0"),
        (["--objective", "cheap"], "--objective: expected cheapest, fastest, efficient"),
        (["--max-instances", "0"], "--max-instances: expected a whole number from 1 to 999"),
    ],
)
def test_wrong_options_are_named(home: Path, words: list[str], said: str) -> None:
    found = CliRunner().invoke(app, ["plan", "d", *words])
    assert found.exit_code == 2 and said in found.output


def test_options_count_before_the_request_under_way_and_that_before_the_yaml(tmp_path: Path) -> None:
    spec = load_spec({**SPEC, "budget_usd": 10.0, "objective": "efficient", "max_instances": 5}, "defs.yaml")
    assert wanted_of(spec, {}, None, None, 20, 0.0) == Target(6 * 3600, 10.0, 5, "efficient")
    tags = {"batch/deadline": "1h", "batch/budget_usd": "8"}
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db:
        fleet_db.begin_request(
            "d", "r", deadline_at=fleet_db.now() + 600, budget_usd=4.0, objective="fastest", max_instances=2
        )
        request = fleet_db.target("d")
    assert request is not None
    under_way = wanted_of(spec, {}, request, Spend(1.5), 20, 0.0)
    assert under_way == Target(pytest.approx(600, abs=5), 2.5, 2, "fastest")
    assert wanted_of(spec, tags, request, Spend(1.5), 20, 0.0) == Target(3600, 6.5, 2, "fastest")
    assert wanted_words(Target()) == "no deadline, no budget, cheapest, at most 20 instances"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    with contextlib.ExitStack() as stack:
        fleet_yaml(tmp_path)
        yield SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack, SPEC)


def test_what_is_held_and_spent_already_is_part_of_the_plan(site: SensorDataset) -> None:
    site.snapshot(1200, keys=[f"{i:05d}" for i in range(120)])
    site.request()
    site.tick("capacity")
    instance(site, "ba-1", seconds=100, tokens=200_000)
    spec = load_spec({**SPEC, "budget_usd": 9.0}, "defs.yaml")
    work = WorkloadEstimator(spec, site.store, site.folder).look()
    request = site.fleet_db.target("d")
    found = propose(FleetView.look(site.fleet, site.fleet_db), site.fleet_db, spec, work, {}, TIMING, request)
    assert [one.instance for one in found.held] == ["ba-1"] and found.held[0].ready_in == 0
    assert found.target.deadline == pytest.approx(6 * 3600, abs=60)
    assert isinstance(found.spend, Spend) and found.request
    lines = [str(part) for part in report(found).renderables]
    assert any(line.startswith("held: 1 instances") for line in lines)


BAD = '{"question": null}\nno\n{"other": 1}\n'


def said_by_a_run(home: Path) -> str:
    """What the asset `prompts` fails with, which is what `run` says."""
    spec, folder = declared()["d"]
    with observing(["d"]) as (seen,), pytest.raises(SourceError) as caught:
        build_snapshot(spec, seen.store, now=1.0, workdir=home / "asked", base=folder)
    shutil.rmtree(home / "asked", ignore_errors=True)
    return str(caught.value)


def unfolded(shown: str) -> str:
    return " ".join(shown.split())


def test_bad_rows_that_came_since_the_snapshot_stop_a_run_and_the_plan_says_so(home: Path) -> None:
    spec, folder = declared()["d"]
    with observing(["d"]) as (seen,):
        build_snapshot(spec, seen.store, now=1.0, workdir=home / "work", base=folder)
    assert plan()[0] == 0
    questions = home / "defs" / "d" / "questions.jsonl"
    questions.write_text(questions.read_text() + BAD)
    status, found = plan()
    assert (status, found["stops"]) == (1, said_by_a_run(home)) and found["stops"].startswith("3 rows cannot be used:")
    assert found["stops"] in found["problems"] and "cannot be compared" not in str(found["assumptions"])


def test_rows_that_a_snapshot_would_refuse_are_counted_with_a_reason(home: Path) -> None:
    questions = home / "defs" / "d" / "questions.jsonl"
    questions.write_text(questions.read_text() + BAD)
    status, found = plan()
    count = "3 of 3,003 rows of the source cannot be used"
    first = f"such as questions.jsonl, line {QUESTIONS + 1}: "
    (problem,) = [text for text in found["problems"] if "cannot be used" in text]
    assert problem.startswith(f"{count}: they stop a run (on_bad_row: fail), {first}")
    assert "question" in problem
    assert (status, found["rows"], found["rejected_rows"]) == (1, QUESTIONS, 3), "as a run ends"
    shown = CliRunner().invoke(app, ["plan", "d"])
    assert f"problem: {count}" in shown.output and shown.exit_code == 1
    assert f"d: a run would stop before it asks a row: {unfolded(said_by_a_run(home))}" in unfolded(shown.output)
    assert found["stops"] == said_by_a_run(home)
    declare(home, on_bad_row="skip")
    status, found = plan()
    assert (status, found["stops"]) == (0, None)
    assert any(
        text.startswith(f"{count}: they are left out (on_bad_row: skip), {first}") for text in found["assumptions"]
    )
    assert found["rejected_rows"] == 3 and not [text for text in found["problems"] if "cannot be used" in text]


@pytest.mark.parametrize(
    ("more", "lines", "reason"),
    [
        (
            {"id": "id"},
            ['{"question": "a", "id": "1"}', '{"question": "b"}'],
            "id: expected text or a whole number, found null",
        ),
        ({"id": "id"}, ['{"question": "a", "id": "1"}'] * 2, "id: the same as in questions.jsonl, line 1"),
        ({"keep_columns": ["n"]}, ['{"question": "a", "n": 1}', '{"question": "b", "n": "x"}'], "n"),
        (
            {"source": {"path": "questions.jsonl", "where": "n > 1"}},
            ['{"question": "a", "n": 2}', '{"question": 1, "n": "x"}'],
            "n",
        ),
    ],
)
def test_what_is_asked_of_rows_is_what_a_snapshot_asks(
    home: Path, more: dict[str, Any], lines: list[str], reason: str
) -> None:
    declare(home, **more)
    (home / "defs" / "d" / "questions.jsonl").write_text("\n".join(lines))
    _, found = plan()
    (problem,) = [text for text in found["problems"] if "cannot be used" in text]
    assert "1 of 2 rows" in problem and "questions.jsonl, line 2: " in problem and reason in problem
    assert (found["rows"], found["rejected_rows"]) == (1, 1)


def test_a_key_that_helps_against_bad_rows_is_named(home: Path) -> None:
    (home / "defs" / "d" / "questions.jsonl").write_bytes('{"question": "a"}\n{"question": "ü"}\n'.encode("latin-1"))
    _, found = plan()
    (problem,) = [text for text in found["problems"] if "cannot be used" in text]
    assert "not valid UTF-8 at byte 15. A file that is not UTF-8: write source.encoding: windows-1252" in problem


def test_a_source_of_which_no_row_can_be_used_is_refused(home: Path) -> None:
    (home / "defs" / "d" / "questions.jsonl").write_text('{"question": null}\n' * 2)
    status, found = plan()
    assert status == 2 and said_by_a_run(home).splitlines()[1] in found["said"]
    declare(home, on_bad_row="skip")
    status, found = plan()
    assert status == 2 and "found none that can be used (all 2 were rejected)" in found["said"]


def test_rows_that_a_snapshot_has_left_out_are_said(home: Path) -> None:
    questions = home / "defs" / "d" / "questions.jsonl"
    questions.write_text('{"question": "a"}\n' + BAD)
    declare(home, on_bad_row="skip")
    spec, folder = declared()["d"]
    with observing(["d"]) as (seen,):
        build_snapshot(spec, seen.store, now=1.0, workdir=home / "work", base=folder)
    _, found = plan()
    said = [text for text in found["assumptions"] if "left out" in text]
    assert said[0].startswith(
        "3 of 4 rows of the source are left out (on_bad_row: skip), such as questions.jsonl, line 2: "
    )
    assert found["rejected_rows"] == 3


def test_prompts_show_the_plan_before_anything_is_rented(home: Path) -> None:
    from batch_assets.component import dataset_definitions
    from batch_assets.definitions import platform
    from batch_assets.spec.discovery import declared
    from resources.fleet.resource import GpuFleet
    from resources.store.dataset_store import BatchStore

    spec, folder = declared()["d"]
    fleet = GpuFleet(database=f"sqlite:///{home}/fleet.db", home=str(home), config_path=str(home / "fleet.yaml"))
    resources = {"store": BatchStore(root=str(home / "store")), "fleet": fleet}
    definitions = dg.Definitions.merge(
        dataset_definitions(spec, folder), dg.Definitions(resources=resources, executor=platform().executor)
    )
    with dg.DagsterInstance.ephemeral() as instance_:
        with fleet.open_database() as fleet_db:  # its Dagster is gone, and so is the capacity sensor that would end it
            fleet_db.begin_request("d", "the request before", budget_usd=0.01)
        job = definitions.resolve_job_def("d_refresh")
        result = job.execute_in_process(instance=instance_, tags={"batch/deadline": "2h", "batch/refresh": "d"})
        (event,) = result.get_asset_materialization_events()
        shown = {name: one.value for name, one in event.materialization.metadata.items()}
        with fleet.open_database() as fleet_db:
            target = fleet_db.target("d")
    assert shown["plan_feasible"] is True and shown["plan_instances"] == 1
    assert "data:image/svg+xml;base64," in shown["plan_curve"]
    assert 0 < shown["plan_usd_p50"] <= shown["plan_usd_p95"]
    assert 0 < shown["plan_hours_p50"] <= shown["plan_hours_p95"] <= 2
    assert target is not None and target.request == result.run_id
    assert target.deadline_in == pytest.approx(7200, abs=60)


def adjust(*words: str) -> tuple[int, str]:
    """Exit status and output of the command."""
    found = CliRunner().invoke(app, ["adjust", "d", *words])
    return found.exit_code, " ".join(found.output.split())


def refresh(status: dg.DagsterRunStatus) -> str:
    """A refresh in the home's Dagster."""
    with observing(["d"]) as (seen,):
        return create_run_for_test(seen.instance, job_name="d_refresh", status=status, tags={REFRESH_TAG: "d"}).run_id


@pytest.mark.slow
def test_deadline_and_budget_of_what_is_being_made_may_be_changed(home: Path) -> None:
    assert adjust("--budget-usd", "5")[0] == 2  # nothing is being made
    assert "name what is to change" in adjust()[1]
    with contextlib.closing(FleetDatabase(f"sqlite:///{home}/fleet.db")) as fleet_db:
        request = refresh(dg.DagsterRunStatus.STARTED)
        fleet_db.begin_request("d", request, deadline_at=fleet_db.now() + 5430, budget_usd=2.0)
        assert adjust("--budget-usd", "5") == (0, "d: now done in 1 h 30 min, for at most 5.00 $")
        assert adjust("--deadline", "190m") == (0, "d: now done in 3 h 10 min, for at most 5.00 $")
        target = fleet_db.target("d")
    assert target is not None and target.deadline_in == pytest.approx(190 * 60, abs=60) and target.budget_usd == 5.0


@pytest.mark.slow
def test_rows_that_gates_have_paused_may_be_accepted(home: Path) -> None:
    status, said = adjust("--accept", "cutt")
    assert status == 2
    on = "dead, empty, cut, refused, repeated"
    assert f"gates: expected gates that are on ({on}), found 'cutt'" in said
    own = {"own": {"where": "completion_tokens > 9", "max_rate": 0.1}}
    declare(home, gates={"max_dead_rate": None, "length": {"max_letters": 9}, "rules": own})
    status, said = adjust("--accept", "invalid")
    on = "empty, cut, refused, repeated, length, own"
    off = f"gates: expected gates that are on ({on}), found 'invalid', which is off: it pauses nothing"
    assert status == 2 and off in said
    with contextlib.closing(FleetDatabase(f"sqlite:///{home}/fleet.db")) as fleet_db:
        fleet_db.begin_request("d", refresh(dg.DagsterRunStatus.STARTED))
        assert fleet_db.trip_gate("d", "cut", "gate cut: all rows are cut")
        assert fleet_db.trip_gate("d", "empty", "gate empty: all rows are empty")
        left = "d: now no deadline, no budget; accepted: cut; still paused: gate empty: all rows are empty"
        assert adjust("--accept", "cut") == (0, left)
        assert adjust("--accept", "empty") == (0, "d: now no deadline, no budget; accepted: empty")
        said = f"accepted: dead (dead is off in its file; on: {on})"
        assert adjust("--accept", "dead") == (0, f"d: now no deadline, no budget; {said}")
        assert (found := fleet_db.target("d")) is not None and found.pause is None


@pytest.mark.slow
def test_a_request_that_no_sensor_has_ended_is_over_for_adjust_and_plan(home: Path) -> None:
    """The Dagster of its `run` ended with it, before the capacity sensor looked once more."""
    request = refresh(dg.DagsterRunStatus.CANCELED)
    with contextlib.closing(FleetDatabase(f"sqlite:///{home}/fleet.db")) as fleet_db:
        fleet_db.begin_request("d", request, deadline_at=fleet_db.now() - 60, budget_usd=2.0)
        status, said = adjust("--budget-usd", "5")
        assert (status, "d: no request is under way, so there is nothing to change" in said) == (2, True)
        target = fleet_db.target("d")
    assert target is not None and target.budget_usd == 2.0
    found = plan("--budget-usd", "2.6")[1]
    assert (found["request"], found["spent_usd"], found["budget_usd"]) == (None, None, 2.6)
    assert found["deadline_seconds"] == pytest.approx(6 * 3600, abs=60)  # the file's, not that of what is over


def test_a_request_is_under_way_until_its_batches_are_there_or_it_is_canceled(site: SensorDataset) -> None:
    spec, folder = site.specs["d"]

    def under_way() -> DatasetTarget | None:
        return request_under_way(site.instance, site.fleet_db, spec, site.store, folder)

    site.snapshot()
    assert under_way() is None
    request = site.request()
    site.fleet_db.begin_request("d", request, budget_usd=2.0)
    found = under_way()
    assert found is not None and found.request == request
    site.instance.add_run_tags(request, {CANCELED_TAG: "true"})
    assert under_way() is None
    site.fleet_db.begin_request("d", site.request(), budget_usd=3.0)
    assert under_way() is not None
    site.commit(*KEYS)
    assert under_way() is None


HOSTED = {
    "name": "api",
    "kind": "endpoint",
    "url": "http://127.0.0.1:9",
    "usd_per_million_tokens": {"input": 1.0, "output": 4.0},
}


@pytest.mark.slow
def test_an_engine_that_is_paid_by_the_token_is_planned_with_its_price(home: Path) -> None:
    (home / "fleet.yaml").write_text(yaml.safe_dump({"engines": [HOSTED]}))
    status, found = plan()
    assert (status, found["feasible"]) == (0, True)
    assert found["chosen"]["fleet"] == [{"offer": "api", "instances": 1}]
    prompts = found["tokens"] - QUESTIONS * 256  # half of max_tokens
    usd = (prompts + 4 * QUESTIONS * 256) / 1e6
    assert found["chosen"]["usd"]["p50"] == pytest.approx(usd, rel=1e-4)
    status, found = plan("--budget-usd", "1")
    assert (status, found["chosen"]) == (1, None)
    least = found["least_usd"]
    assert usd < least < 2 * usd
    assert plan("--budget-usd", str(least))[0] == 0


@pytest.mark.slow
def test_plan_says_why_a_batch_api_is_taken_or_not(home: Path) -> None:
    own = {"gpu": "L40S", "gpu_memory_gib": 48, "price_per_hour": 900.0}
    batch = {**HOSTED, "kind": "batch_api", "usd_per_million_tokens": 0.01}
    (home / "fleet.yaml").write_text(yaml.safe_dump({"engines": [batch], "local": [own]}))
    declare(home, deadline=None)
    _, found = plan()
    assert [one["offer"] for one in found["chosen"]["fleet"]] == ["api"]
    assert found["batch_apis"][0].startswith("api is taken: its tokens cost")
    _, found = plan("--deadline", "5h")
    assert [one["offer"] for one in found["chosen"]["fleet"]] != ["api"]
    assert found["batch_apis"][0].startswith("api is not taken: its window of 24h is longer than the 5 h that are left")
    said = CliRunner().invoke(app, ["plan", "d"]).output
    assert "batch API: api is taken" in " ".join(said.split())


def test_a_priced_engine_is_taken_before_anything_is_rented_and_offers_ranks_it(home: Path) -> None:
    own = {"gpu": "L40S", "gpu_memory_gib": 48, "price_per_hour": 0.5}
    engine = {**HOSTED, "usd_per_million_tokens": 0.01}
    (home / "fleet.yaml").write_text(yaml.safe_dump({"engines": [engine], "local": [own]}))
    declare(home, deadline=None)
    _, found = plan()
    assert [one["offer"] for one in found["chosen"]["fleet"]] == ["api"]
    said = CliRunner().invoke(app, ["offers", "d", "--json"])
    ranked = json.loads(said.stdout)["ranked"]
    assert [one["provider"] for one in ranked] == ["api", "local"]
    assert ranked[0]["usd"] == pytest.approx(found["chosen"]["usd"]["p50"])
    assert ranked[0]["usd_per_million_tokens"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("price", "said"),
    [("cheap", "--usd-per-million-tokens: expected US dollars"), ("0.1", "expected with --endpoint")],
)
def test_a_price_on_the_command_line_that_cannot_be_used_is_named(home: Path, price: str, said: str) -> None:
    found = CliRunner().invoke(app, ["run", "d", "--usd-per-million-tokens", price])
    assert found.exit_code == 2 and said in found.output


@pytest.mark.slow
def test_offers_ranks_what_plan_would_take_with_its_figures_and_leaves_out_what_plan_leaves_out(home: Path) -> None:
    declare(home, deadline=None)

    def both() -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
        found = json.loads(CliRunner().invoke(app, ["offers", "d", "--json"]).stdout)
        return plan()[1]["chosen"], found["ranked"], found

    chosen, ranked, _ = both()
    assert ranked[0]["usd"] == pytest.approx(chosen["usd"]["p50"])
    assert chosen["fleet"][0]["offer"].startswith(ranked[0]["provider"] + "/")
    name = chosen["fleet"][0]["offer"]
    with contextlib.closing(FleetDatabase(f"sqlite:///{home}/fleet.db")) as fleet_db:
        fleet_db.offer_failed(ranked[0]["provider"], name, FailureKind.FAILED, "its boot failed")
    chosen, ranked, found = both()
    assert chosen["fleet"][0]["offer"] != name
    assert chosen["fleet"][0]["offer"].startswith(ranked[0]["provider"] + "/")
    assert ranked[0]["usd"] == pytest.approx(chosen["usd"]["p50"])
    (refused,) = found["refused"]
    assert "its boot failed" in refused["reasons"][0]


LAB = {"name": "lab", "kind": "endpoint", "url": "http://127.0.0.1:9", "models": [SPEC["model"]]}


def test_an_endpoint_without_a_price_is_planned_for_as_a_run_takes_it(home: Path) -> None:
    """Before anything is rented. How fast it is nobody knows, which is said; it costs nothing here."""
    (home / "fleet.yaml").write_text(yaml.safe_dump({"engines": [LAB]}))
    status, found = plan("--budget-usd", "0.01")
    assert (status, found["feasible"], found["instances"]) == (0, True, 1)
    assert found["chosen"]["fleet"] == [{"offer": "lab", "instances": 1}]
    assert found["chosen"]["usd"] == {"p50": 0.0, "p95": 0.0} and found["chosen"]["finish_seconds"]["p50"] > 0
    assert "lab: without a price it costs nothing here" in found["assumptions"]
    assert found["speeds"] == [{"offer": "lab", "tokens_per_second": 1000.0, "basis": "assumed", "rows": 0}]
    printed = CliRunner().invoke(app, ["plan", "d"]).stdout
    assert "speed: lab: 1,000 tokens/s, assumed, as no run has measured it" in printed and "1 × lab" in printed


def used(home: Path, name: str, usage: LeaseUsage, dataset: str = "d") -> None:
    """A run had a lease on an engine of fleet.yaml."""
    with contextlib.closing(FleetDatabase(f"sqlite:///{home}/fleet.db")) as fleet_db:
        lease = fleet_db.try_lease(name, "a run", dataset, 600)
        assert lease is not None and fleet_db.release(lease, usage)


@pytest.mark.parametrize("price", [{}, {"usd_per_million_tokens": 1.0}])
def test_an_endpoint_is_planned_as_fast_as_earlier_runs_measured_it(home: Path, price: dict[str, Any]) -> None:
    """`plan` had assumed 1,000 tokens/s of an endpoint without a price, whatever its runs had seen."""
    (home / "fleet.yaml").write_text(yaml.safe_dump({"engines": [{**LAB, **price}]}))
    declare(home, deadline=None)
    used(home, "lab", LeaseUsage(50.0, 0.0, 1200, 100_000, 150_000, useful_usd=0.25 if price else 0.0))
    used(home, "lab", LeaseUsage(50.0, 0.0, 10, 900_000, 0), dataset="another")
    _, found = plan()
    assert found["speeds"] == [{"offer": "lab", "tokens_per_second": 5000.0, "basis": "measured", "rows": 1200}]
    assert found["chosen"]["finish_seconds"]["p50"] == pytest.approx(found["tokens"] / 5000, rel=1e-3)
    said = "speed: lab: 5,000 tokens/s, measured on 1,200 rows"
    assert said in CliRunner().invoke(app, ["plan", "d"]).stdout


def test_of_several_endpoints_without_a_price_a_plan_without_pressure_has_as_many_as_a_run_takes(home: Path) -> None:
    (home / "fleet.yaml").write_text(yaml.safe_dump({"engines": [LAB, {**LAB, "name": "other"}]}))
    declare(home, deadline=None)
    assert plan()[1]["chosen"]["fleet"] == [{"offer": "lab", "instances": 1}]
    assert plan("--objective", "fastest")[1]["instances"] == 2


def test_it_is_said_how_the_speed_of_what_is_rented_is_known(home: Path) -> None:
    (found,) = plan()[1]["speeds"]
    assert found["offer"].startswith("sim-one/") and (found["basis"], found["rows"]) == ("estimate", 0)
    assert "tokens/s, estimated, not measured" in CliRunner().invoke(app, ["plan", "d"]).stdout


def test_an_engine_of_the_users_model_that_a_run_would_refuse_is_a_problem(home: Path) -> None:
    """`plan` said nothing of it, and three runs failed."""
    told = {"system": "Ask on.", "opening": "Hello", "turns": 2, "model": "played/model", "engine": "nope"}
    declare(home, prompt={**SPEC["prompt"], "user_model": told})
    assert plan()[1]["problems"] == [
        "prompt.user_model.engine: expected an engine of kind endpoint in fleet.yaml (none), found 'nope'"
    ]


def test_an_endpoint_without_a_price_is_named_beside_what_a_deadline_rents(home: Path) -> None:
    document = yaml.safe_load((home / "fleet.yaml").read_text())
    played = {"name": "lab", "kind": "simulated", "models": [SPEC["model"]]}
    (home / "fleet.yaml").write_text(yaml.safe_dump({**document, "engines": [played]}))
    _, found = plan("--deadline", "6h")
    assert all(one["offer"] != "lab" for one in found["chosen"]["fleet"])
    assert any(text.startswith("lab of fleet.yaml is taken before anything is rented") for text in found["assumptions"])


@pytest.mark.slow
def test_a_budget_says_that_speeds_that_are_not_measured_may_make_the_run_pause(home: Path) -> None:
    said = "is estimated, not measured: within this budget a run may begin and pause later"
    assert not any(said in text for text in plan()[1]["assumptions"])
    (text,) = [text for text in plan("--budget-usd", "50")[1]["assumptions"] if said in text]
    assert text.startswith("the speed of sim-one/")
    assert said in CliRunner().invoke(app, ["plan", "d", "--budget-usd", "50"]).stdout
