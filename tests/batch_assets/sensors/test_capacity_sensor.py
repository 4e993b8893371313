"""The capacity sensor, evaluated in process: what it commands, writes down, says, and leaves alone.

Offers are those of simulated providers in fleet.yaml; instances are rows of the fleet's database. Nothing runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.execution.backfill import BulkActionStatus
from support.capacity_fleet import HOUR, SPEC, fleet_yaml, instance, offer
from support.fleet_databases import ready
from support.sensor_dataset import KEYS, S, SensorDataset, report_in_bulk
from support.snapshots import questions, write_snapshot
from support.timing import SOAK
from support.webhooks import SECRET, serving

from batch_assets.capacity_planning.capacity_question import Answer, CapacityQuestion
from batch_assets.capacity_planning.planner_input import FleetView, Markets, build_input, propose
from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.catalog import ledger
from batch_assets.orchestration.request_summary import request_status
from batch_assets.request_status.dataset_status import Observer, dataset_status
from batch_assets.request_status.display import request_lines
from batch_assets.sensors import capacity_sensor as sensor_module
from batch_assets.sensors import many_datasets
from batch_assets.sensors.capacity_sensor import capacity_sensor, slots_for
from batch_assets.spec.errors import Problem, SpecError
from batch_assets.spec.models import load_spec
from batch_assets.tags import CANCELED_TAG
from gpu_runner.cost_meter import LeaseUsage
from gpu_runner.fleet_database.capacity_plan import Assignment, CapacityMemory, CapacityPlan, ControllerState
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.wait_reason import RequestFailure, RunActivity, WaitKind, WaitReason
from gpu_runner.offers.offer import Offer
from gpu_runner.planner.types import ControlTiming, Target
from gpu_runner.providers.base import ProviderError
from gpu_runner.providers.simulated.provider import SimulatedProvider
from resources.alerts import Alert, Alerts


@contextlib.contextmanager
def opened(folder: Path, *specs: Mapping[str, Any]) -> Iterator[SensorDataset]:
    with contextlib.ExitStack() as stack:
        fleet_yaml(folder)
        yield SensorDataset.open(folder, dg.DagsterInstance.ephemeral(), stack, *(specs or (SPEC,)))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    with opened(tmp_path) as found:
        yield found


def large(site: SensorDataset, rows: int = 1200) -> None:
    """A snapshot whose batches stand for many rows each: 12 of them, registered."""
    site.snapshot(rows, keys=[f"{i:05d}" for i in range(rows // 10)])


def events(site: SensorDataset) -> list[Any]:
    """What one tick says to the catalog; a second one right after it says nothing."""
    found = list(site.tick("capacity").asset_events or ())
    assert not site.tick("capacity").asset_events
    return found


def observed(found: list[Any]) -> dict[str, Any]:
    """Metadata of the only observation."""
    (one,) = [event for event in found if isinstance(event, dg.AssetObservation)]
    assert one.asset_key == ledger.rows_key("d")
    assert one.description == one.metadata["reason"].value
    return {name: value.value for name, value in one.metadata.items()}


def pool(site: SensorDataset, name: str = "d") -> int | None:
    limits = site.instance.event_log_storage.get_pool_limits()
    return next((limit.limit for limit in limits if limit.name == name), None)


def backdated(site: SensorDataset, seconds: float) -> None:
    """The request began, and everything was rented, so long ago."""
    import sqlalchemy as sa

    from gpu_runner.fleet_database.connection import DATASETS, INSTANCES, LEASES

    with site.fleet_db.engine.begin() as connection:
        connection.execute(sa.update(DATASETS).values(since=DATASETS.c.since - seconds))
        connection.execute(sa.update(DATASETS).values(deadline_at=DATASETS.c.deadline_at - seconds))
        connection.execute(sa.update(INSTANCES).values(created_at=INSTANCES.c.created_at - seconds))
        connection.execute(sa.update(INSTANCES).values(ready_at=INSTANCES.c.ready_at - seconds))
        connection.execute(sa.update(LEASES).values(acquired_at=LEASES.c.acquired_at - seconds))


def test_without_work_it_says_so_and_writes_nothing(site: SensorDataset) -> None:
    assert site.reason("capacity") == "no dataset is being made"
    large(site)
    assert site.reason("capacity") == "no dataset is being made"
    assert site.fleet_db.target("d") is None


def test_a_request_starts_with_one_instance_and_the_reason_is_in_the_catalog(site: SensorDataset) -> None:
    large(site)
    request = site.request()
    told = observed(events(site))
    assert (told["decision"], told["request"]) == ("capacity", request)
    assert (told["instances_before"], told["instances"], told["instances_held"]) == (1, 1, 0)
    assert told["rows_left"] == 1200 and told["tokens_left"] > 1200
    assert told["deadline_hours_left"] == pytest.approx(6, abs=0.01)
    assert "sim-one" in told["offers"] and "deadline in 6.0 h" in told["reason"]
    target = site.fleet_db.target("d")
    assert target is not None
    assert (target.request, target.instances, target.offers) == (request, 1, ((offer(site).name, 1),))
    assert target.plan.rows_total == 1200 and target.plan.on_time is True
    assert pool(site) == 2


@pytest.mark.slow
def test_a_measured_pilot_that_is_too_slow_makes_it_jump_to_what_the_deadline_needs(site: SensorDataset) -> None:
    large(site, 120_000 // 100)
    site.request()
    site.tick("capacity")
    # 100 tokens a second for an hour: what is left would take it about as long again as there is time.
    instance(site, "ba-1", seconds=HOUR, tokens=360_000)
    backdated(site, 5.9 * HOUR)
    told = observed(events(site))
    assert told["kind"] in ("grow", "infeasible")
    assert told["instances"] > 2 and told["instances_held"] == 1
    assert pool(site) == told["instances"] + 1
    target = site.fleet_db.target("d")
    assert target is not None and target.instances == told["instances"]
    assert sum(count for _, count in target.offers) == told["instances"]


@pytest.mark.slow
def test_an_instance_that_every_run_hands_on_is_measured_and_counts(site: SensorDataset) -> None:
    """A range that fits into the engine's window is in flight as a whole: its lease drains from the first moment on."""
    large(site, 120_000 // 100)
    site.request()
    site.tick("capacity")
    lease = instance(site, "ba-1", seconds=HOUR, tokens=360_000)
    assert site.fleet_db.drain(lease)
    backdated(site, 5.9 * HOUR)
    told = observed(events(site))
    assert told["kind"] in ("grow", "infeasible")
    assert told["instances"] > 2 and told["instances_held"] == 1


def test_no_more_runs_may_be_under_way_than_there_are_batches(site: SensorDataset) -> None:
    from gpu_runner.planner.controller import Command

    found = type("Found", (), {"batches": 3})()
    assert slots_for(Command(10, ()), found) == 3
    assert slots_for(Command(1, ()), found) == 2
    assert slots_for(Command(0, ()), found) == 1  # one run waits, visibly


@pytest.mark.slow
def test_when_all_is_done_the_story_stays_and_the_command_goes(site: SensorDataset) -> None:
    site.snapshot()
    request = site.request()
    site.tick("capacity")
    lease = instance(site, "ba-1")
    backdated(site, HOUR)
    site.fleet_db.release(lease)
    site.commit(*KEYS)
    told = observed(events(site))
    assert (told["kind"], told["request"], told["on_time"]) == ("done", request, True)
    assert told["request_usd"] == pytest.approx(0.8, rel=0.01)
    target = site.fleet_db.target("d")
    assert target is not None
    assert (target.request, target.instances, target.budget_usd, target.deadline_at) == ("", 1, None, None)
    story = request_status(site.fleet_db, "d")
    assert story.on_time and story.usd_spent == pytest.approx(0.8, rel=0.01) and story.finished_at is not None
    status = dataset_status(Observer(site.instance, site.fleet_db, site.store), time.time())
    (line,) = request_lines(status, time.time())
    assert line.startswith("d: done ") and "before its deadline, 0.80 $ spent" in line
    assert pool(site) == 2


@pytest.mark.slow
def test_a_request_was_over_when_its_last_batch_was_there_though_no_sensor_ticked_until_its_deadline(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.snapshot()
    site.request()
    site.tick("capacity")
    site.commit(*KEYS)
    real = FleetDatabase.now
    monkeypatch.setattr(FleetDatabase, "now", lambda self: real(self) + 24 * HOUR)
    assert observed(events(site))["on_time"] is True
    monkeypatch.undo()
    (line,) = request_lines(
        dataset_status(Observer(site.instance, site.fleet_db, site.store), time.time()), time.time()
    )
    assert line.startswith("d: done ") and "before its deadline" in line


@pytest.mark.slow
def test_a_budget_that_is_spent_pauses_the_work_and_a_raised_one_resumes_it(site: SensorDataset) -> None:
    site.specs["d"] = (load_spec({**SPEC, "budget_usd": 1.0}, "defs.yaml"), site.specs["d"][1])
    large(site)
    site.request()
    site.tick("capacity")
    lease = instance(site, "ba-1")
    backdated(site, 1.24 * HOUR)
    told = observed(events(site))
    assert (told["kind"], told["instances"]) == ("paused", 0)
    assert "budget" in told["pause"] and told["spent_usd"] == pytest.approx(0.992, rel=0.01)
    assert told["retire"] == "ba-1"
    (rented,) = site.fleet_db.fleet()
    assert rented.retiring and pool(site) == 1
    lines = request_lines(dataset_status(Observer(site.instance, site.fleet_db, site.store), time.time()), time.time())
    assert any(line.startswith("paused: ") for line in lines)
    site.fleet_db.release(lease)
    site.specs["d"] = (load_spec({**SPEC, "budget_usd": 5.0}, "defs.yaml"), site.specs["d"][1])
    told = observed(events(site))
    assert told["instances"] == 1 and "pause" not in told
    target = site.fleet_db.target("d")
    assert target is not None and (target.pause, target.budget_usd) == (None, 5.0)


def pauses(found: list[Any]) -> list[tuple[bool, str | None]]:
    """What the check `not_paused` says."""
    checks = [one for one in found if isinstance(one, dg.AssetCheckEvaluation) and one.check_name == "not_paused"]
    assert all(one.asset_key == ledger.table_key("d") for one in checks)
    return [(one.passed, one.description) for one in checks]


def test_a_pause_shows_as_a_check_of_the_table_until_it_goes_on(site: SensorDataset) -> None:
    large(site)
    request = site.request()
    assert not pauses(events(site))
    site.fleet_db.trip_gate("d", "refused", "gate refused: 90 of the last 100 rows (90%) refuse the request")
    ((passed, said),) = pauses(events(site))
    assert not passed and said == (
        "paused: gate refused: 90 of the last 100 rows (90%) refuse the request; mend the prompt or the sampling and "
        "start the job `d_refresh`, or `batch-assets adjust d --accept refused` goes on as it is"
    )
    site.fleet_db.accept_gates("d", ["refused"])
    assert pauses(events(site)) == [(True, "Nothing is paused.")]
    site.fleet_db.trip_gate("d", "empty", "gate empty: all")
    assert [passed for passed, _ in pauses(events(site))] == [False]
    site.fleet_db.trip_gate("d", "cut", "gate cut: most")
    ((_, said),) = pauses(events(site))
    assert said is not None and said.endswith("`batch-assets adjust d --accept cut --accept empty` goes on as it is")
    assert not pauses(events(site))
    site.instance.add_run_tags(request, {CANCELED_TAG: "true"})
    assert pauses(events(site)) == [(True, "Nothing is paused.")], "given up, it is not paused any more"


def test_an_operators_word_counts_before_the_yaml(site: SensorDataset) -> None:
    large(site)
    site.request()
    site.tick("capacity")
    before = site.fleet_db.target("d")
    assert before is not None
    assert site.fleet_db.override("d", deadline_at=before.since + 60, budget_usd=3.0)
    site.tick("capacity")
    after = site.fleet_db.target("d")
    assert after is not None
    assert (after.deadline_at, after.budget_usd) == (before.since + 60, 3.0)
    assert after.plan.on_time is False


def test_a_deadline_that_cannot_be_met_is_said_with_the_earliest_finish_before_money_is_spent(
    site: SensorDataset,
) -> None:
    site.specs["d"] = (load_spec({**SPEC, "deadline": "60s"}, "defs.yaml"), site.specs["d"][1])
    large(site)
    site.request()
    found = events(site)
    told = observed(found)
    assert told["earliest_hours_p50"] > 0.01
    (check,) = [event for event in found if isinstance(event, dg.AssetCheckEvaluation)]
    assert (check.check_name, check.asset_key, check.passed) == ("on_time", dg.AssetKey(["d", "dataset"]), False)
    assert site.fleet_db.fleet() == []


def test_the_tags_of_a_refresh_override_the_yaml_and_a_wrong_one_is_left_out(site: SensorDataset) -> None:
    large(site)
    site.request(**{"batch/deadline": "2h", "batch/budget_usd": "9"})
    site.tick("capacity")
    target = site.fleet_db.target("d")
    assert target is not None
    assert (target.deadline_in, target.budget_usd) == (pytest.approx(2 * HOUR, abs=60), 9.0)
    site.request(**{"batch/deadline": "whenever"})
    site.fleet_db.end_request("d", target.request)
    site.tick("capacity")
    target = site.fleet_db.target("d")
    assert target is not None and target.deadline_in == pytest.approx(6 * HOUR, abs=60)


def test_a_canceled_request_is_over(site: SensorDataset) -> None:
    site.snapshot()
    request = site.request()
    site.tick("capacity")
    site.instance.add_run_tags(request, {CANCELED_TAG: "true"})
    told = observed(events(site))
    assert (told["kind"], told["missing_batches"]) == ("done", 12) and "given up" in told["reason"]
    assert told["reason"].endswith("missing: the job `d_refresh` or `batch-assets run d` goes on from there")
    target = site.fleet_db.target("d")
    assert target is not None and target.request == ""
    lines = request_lines(dataset_status(Observer(site.instance, site.fleet_db, site.store), time.time()), time.time())
    todo = "`batch-assets run d` goes on from there"
    assert lines == [f"d: given up with 12 batches missing, 0.00 $ spent in all: {todo}"]


def test_a_backfill_is_a_request_of_its_own_and_only_its_batches_count(site: SensorDataset) -> None:
    site.snapshot()
    site.backfill(BulkActionStatus.REQUESTED, KEYS[:3])
    told = observed(events(site))
    assert (told["request"], told["rows_left"]) == ("b0", 30)
    site.commit(*KEYS[:3])
    site.tick("capacity")
    target = site.fleet_db.target("d")
    assert target is not None and target.request == "b0"  # open until Dagster has closed it
    assert target.instances == 1


def test_a_partial_backfill_that_is_done_is_done_and_not_given_up(site: SensorDataset) -> None:
    site.snapshot()
    site.backfill(BulkActionStatus.REQUESTED, KEYS[:3])
    assert observed(events(site))["request"] == "b0"
    site.commit(*KEYS[:3])
    (backfill,) = site.instance.get_backfills()
    site.instance.update_backfill(backfill.with_status(BulkActionStatus.COMPLETED_SUCCESS))
    told = observed(events(site))
    assert (told["kind"], told["missing_batches"], told["on_time"]) == ("done", 0, True)


def test_a_backfill_has_no_more_instances_than_runs(site: SensorDataset) -> None:
    """Dagster cuts it by `batches_per_run`: one run holds one lease, whatever the deadline needs."""
    site.specs["d"] = (load_spec({**SPEC, "deadline": "5m"}, "defs.yaml"), site.specs["d"][1])
    large(site)
    keys = [f"{i:05d}" for i in range(120)]
    site.backfill(BulkActionStatus.REQUESTED, keys)
    site.batches(S.STARTED, keys[0], keys[-1], **{"dagster/backfill": "b0"})
    assert observed(events(site))["instances"] == 1


def test_one_batch_by_hand_is_one_batch_of_work(site: SensorDataset) -> None:
    large(site)
    run_id = site.batches(S.STARTED, "00003", "00003")
    told = observed(events(site))
    assert (told["request"], told["rows_left"]) == (f"run:{run_id}", 10)


def test_a_redrive_while_batches_are_missing_is_no_request_that_never_ends(site: SensorDataset) -> None:
    site.snapshot()
    refresh = site.request()
    site.instance.add_run_tags(refresh, {CANCELED_TAG: "true"})
    site.run(S.SUCCESS, {"batch/redrive": "d"}, job_name="d_redrive")
    site.tick("capacity")
    target = site.fleet_db.target("d")
    assert target is None or target.request == ""


@pytest.mark.slow
def test_a_request_that_a_later_refresh_did_not_replace_keeps_its_account(site: SensorDataset) -> None:
    """The later one fails to read its source: time, money and an operator's word of the first go on."""
    from batch_assets.spec.request_options import begin_unless_busy

    large(site)
    request = site.request()
    site.tick("capacity")
    instance(site, "ba-1")
    backdated(site, HOUR)
    assert site.fleet_db.override("d", budget_usd=4.0)
    begin_unless_busy(site.fleet_db, site.specs["d"][0], "a later refresh", {})
    site.tick("capacity")
    target = site.fleet_db.target("d")
    assert target is not None
    assert (target.request, target.budget_usd) == (request, 4.0) and target.age > HOUR
    assert site.fleet_db.spend("d").usd == pytest.approx(0.8, rel=0.01)


@pytest.mark.slow
def test_what_is_warm_ends_with_a_request_whose_time_or_money_was_bounded(site: SensorDataset) -> None:
    site.snapshot()
    site.request()
    site.tick("capacity")
    site.fleet_db.release(instance(site, "ba-1"))
    site.commit(*KEYS)
    site.tick("capacity")
    assert [one.state for one in site.fleet_db.fleet()] == ["ending"]


def test_an_instance_that_nobody_leases_any_more_ends_before_the_request(site: SensorDataset) -> None:
    large(site)
    site.request()
    site.tick("capacity")
    instance(site, "ba-1", seconds=HOUR, tokens=36_000_000)
    site.fleet_db.release(instance(site, "ba-2"))
    backdated(site, 120)
    import sqlalchemy as sa

    from gpu_runner.fleet_database.connection import LEASES

    with site.fleet_db.engine.begin() as connection:
        connection.execute(sa.update(LEASES).values(released_at=LEASES.c.released_at - 120))
    site.tick("capacity")
    assert {one.name: one.state for one in site.fleet_db.fleet()} == {"ba-1": "ready", "ba-2": "ending"}


def test_a_decision_that_the_catalog_did_not_hear_of_is_told_again(site: SensorDataset) -> None:
    """The sensor was killed after it had written the command and before Dagster kept its events."""
    large(site)
    site.request()
    before = site.cursors.get("capacity")
    assert observed(list(site.tick("capacity").asset_events or ()))["instances"] == 1
    site.cursors["capacity"] = before
    assert observed(events(site))["instances"] == 1


def test_a_broken_fleet_yaml_is_said_and_changes_nothing(site: SensorDataset) -> None:
    large(site)
    site.request()
    site.tick("capacity")
    before = site.fleet_db.target("d")
    (site.folder / "fleet.yaml").write_text("max_instances: many")
    with pytest.raises(dg.Failure, match="max_instances"):
        site.tick("capacity")
    after = site.fleet_db.target("d")
    assert before is not None and after is not None and after.instances == before.instances


@pytest.mark.slow
def test_engines_in_use_by_others_do_not_count(site: SensorDataset) -> None:
    fleet_yaml(site.folder, engines=[{"name": "lab", "kind": "simulated"}])
    large(site)
    site.request()
    site.fleet_db.begin_run("theirs", "e", "00000", "00001")
    assert site.fleet_db.try_lease("lab", "theirs", "e", 600) is not None
    planned = observed(events(site))["instances"]
    site.fleet_db.release_run("theirs")
    site.tick("capacity")
    target = site.fleet_db.target("d")
    assert target is not None and target.instances == planned + 1


def test_without_pressure_a_free_engine_is_enough_and_nothing_is_rented(tmp_path: Path) -> None:
    with opened(tmp_path, {**SPEC, "deadline": None}) as site:
        fleet_yaml(tmp_path, engines=[{"name": "lab", "kind": "endpoint", "url": "http://127.0.0.1:9000"}])
        large(site)
        site.request()
        told = observed(events(site))
        assert (told["instances"], told["offers"]) == (1, "none")


def test_what_is_rented_ends_at_a_gate_also_where_an_engine_without_a_price_is_planned_for(tmp_path: Path) -> None:
    with opened(tmp_path, {**SPEC, "deadline": None}) as site:
        fleet_yaml(tmp_path, engines=[{"name": "lab", "kind": "endpoint", "url": "http://127.0.0.1:9000"}])
        large(site)
        site.request()
        instance(site, "ba-1", of="sim-two", seconds=600, tokens=600_000)
        site.tick("capacity")
        site.fleet_db.trip_gate("d", "empty", "gate empty: all")
        assert observed(events(site))["retire"] == "ba-1"


@pytest.mark.parametrize("deadline", [None, "6h"])
def test_an_endpoint_without_a_price_is_done_when_plan_says_so(tmp_path: Path, deadline: str | None) -> None:
    """The sensor had no speed of it at all: it expected no end, and that no deadline would be met."""
    with opened(tmp_path, {**SPEC, "deadline": deadline}) as site:
        lab = {"name": "lab", "kind": "endpoint", "url": "http://127.0.0.1:9000"}
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"engines": [lab]}))
        large(site)
        lease = site.fleet_db.try_lease("lab", "a run", "d", 600)
        assert lease is not None and site.fleet_db.release(lease, LeaseUsage(50.0, 0.0, 100, 100_000, 100_000))
        spec = site.specs["d"][0]
        work = WorkloadEstimator(spec, site.store, site.folder).look()
        around = FleetView.look(site.fleet, site.fleet_db)
        planned = propose(around, site.fleet_db, spec, work, {}, ControlTiming.of_sensor(30)).plan.chosen
        assert planned is not None and planned.finish.p50 == pytest.approx(work.tokens / 4000, rel=1e-6)
        site.request()
        site.tick("capacity")
        found = plan_after_tick(site)
        assert found.finish_p50 is not None
        assert found.finish_p50 - found.planned_at == pytest.approx(planned.finish.p50, rel=1e-6)
        assert found.on_time is (None if deadline is None else True) and found.feasible


def test_rows_that_runs_have_finished_but_not_committed_are_not_planned_again(site: SensorDataset) -> None:
    site.snapshot()
    request = site.request()
    run_id = site.batches(S.STARTED, KEYS[0], KEYS[3], request)
    site.fleet_db.begin_run(run_id, "d", KEYS[0], KEYS[3])
    site.fleet_db.beat(run_id, "leased", RunActivity(), 25)
    assert observed(events(site))["rows_left"] == 95
    site.commit(KEYS[0], KEYS[1])
    site.fleet_db.beat(run_id, "leased", RunActivity(), 25)
    site.tick("capacity")
    target = site.fleet_db.target("d")
    assert target is not None and target.plan.rows_left == 95


def test_batches_made_by_hand_are_a_request_too(site: SensorDataset) -> None:
    site.snapshot()
    run_id = site.batches(S.STARTED, KEYS[0], KEYS[0])
    assert observed(events(site))["request"] == f"run:{run_id}"


def test_while_runs_finish_what_is_not_missing_nothing_is_commanded(site: SensorDataset) -> None:
    """A regenerate: every batch is there, and new ones are being made."""
    site.snapshot()
    site.commit(*KEYS)
    site.batches(S.STARTED, KEYS[0], KEYS[3])
    assert not site.tick("capacity").asset_events
    target = site.fleet_db.target("d")
    assert target is not None and (target.request[:4], target.updated_age) == ("run:", None)
    site.fleet_db.trip_gate("d", "empty", "gate empty: all")
    ((passed, said),) = pauses(events(site))
    assert not passed and said is not None and said.startswith("paused: gate empty: all; ")
    assert not pauses(events(site)), "it is said once"
    site.fleet_db.accept_gates("d", ["empty"])
    assert pauses(events(site)) == [(True, "Nothing is paused.")]


@pytest.mark.slow
def test_the_earliest_deadline_is_served_first_and_everybody_keeps_one_instance(tmp_path: Path) -> None:
    late = {**SPEC, "deadline": "4h", "hardware": {"max_price_per_hour": 1.0}}
    soon = {**SPEC, "name": "e", "deadline": "1h"}
    with opened(tmp_path, late, soon) as site:
        fleet_yaml(tmp_path, most=4)
        large(site)
        other = type(site.store)(site.store.objects, "e")
        write_snapshot(other, questions(1200), model=str(SPEC["model"]))
        site.instance.add_dynamic_partitions("e", [f"{i:05d}" for i in range(120)])
        site.request()
        site.run(S.SUCCESS, {"batch/refresh": "e"}, job_name="e_refresh")
        site.tick("capacity")
        instance(site, "ba-1", seconds=HOUR, tokens=150_000)
        instance(site, "ba-2", seconds=HOUR, tokens=150_000, dataset="e")
        backdated(site, 0.6 * HOUR)
        site.tick("capacity")
        first, second = site.fleet_db.target("e"), site.fleet_db.target("d")
        assert first is not None and second is not None
        assert second.instances == 1 < first.instances <= 3


@pytest.mark.slow
def test_an_instance_works_on_while_its_own_run_boots_the_successor(site: SensorDataset) -> None:
    large(site)
    site.request()
    site.tick("capacity")
    lease, cheap = instance(site, "ba-1", of="sim-two", seconds=600, tokens=600_000), offer(site)
    before = site.fleet_db.target("d")
    assert before is not None
    pair = Assignment("ba-1", cheap.name)
    memory = CapacityMemory(ControllerState(((cheap.name, 1),), assignments=(pair,)))
    assert site.fleet_db.command("d", before.request, 1, [(cheap.name, 1)], memory=memory)
    booting = site.fleet_db.intend(
        "ba-2", cheap, clock=1.0, engine_key="key", model="Qwen/Qwen3-8B", dataset="d", ttl=600, limit=None,
        run_id=lease.run_id,
    )  # fmt: skip
    assert booting is not None
    for _ in range(2):
        assert plan_after_tick(site).assignments == (pair,)
        assert not any(one.retiring for one in site.fleet_db.fleet())
    assert site.fleet_db.override("d", budget_usd=0.0001)
    assert {*plan_after_tick(site).assignments} == {Assignment("ba-1"), Assignment("ba-2")}
    assert all(one.retiring for one in site.fleet_db.fleet())


def plan_after_tick(site: SensorDataset) -> CapacityPlan:
    """What the sensor writes at its next tick."""
    site.tick("capacity")
    target = site.fleet_db.target("d")
    assert target is not None and target.plan is not None
    return target.plan


def test_without_offers_what_is_held_goes_on(site: SensorDataset) -> None:
    large(site)
    site.request()
    site.tick("capacity")
    instance(site, "ba-1", seconds=600, tokens=600_000)
    site.specs["d"] = (load_spec({**SPEC, "hardware": {"gpus": ["B200"]}}, "defs.yaml"), site.specs["d"][1])
    site.tick("capacity")
    target = site.fleet_db.target("d")
    assert target is not None
    assert target.instances == 1 and not any(one.retiring for one in site.fleet_db.fleet())


def test_a_provider_whose_prices_are_missing_counts_at_the_worst_that_anybody_lists(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    large(site)
    spec = site.specs["d"][0]
    work = WorkloadEstimator(spec, site.store, site.folder).look()
    markets = Markets()

    def asked() -> dict[str, float]:
        around = FleetView.look(site.fleet, site.fleet_db, markets)
        found = build_input(
            around, spec, work, Target(deadline=6 * HOUR), batches=120, spread=0.3, rows_total=work.rows
        )
        return {one.name.split("/")[0]: one.usd_per_hour for one in found.options}

    listed, silent = SimulatedProvider.offers, set[str]()

    def offers(self: SimulatedProvider) -> list[Offer]:
        if self.name in silent:
            raise ProviderError("the price feed is gone")
        return listed(self)

    monkeypatch.setattr(SimulatedProvider, "offers", offers)
    monkeypatch.setattr("resources.pricing.market.OFFERS_SECONDS", 0.0)
    assert asked() == {"sim-one": 0.8, "sim-two": pytest.approx(1.2)}
    silent.add("sim-one")
    assert asked() == {"sim-one": pytest.approx(1.2), "sim-two": pytest.approx(1.2)}
    markets = Markets()  # one that was never heard of is not reckoned with
    assert asked().keys() == {"sim-two"}


def test_engines_of_fleet_yaml_are_all_used_where_time_presses(site: SensorDataset) -> None:
    engines = [{"name": f"engine-{i}", "kind": "endpoint", "url": f"http://127.0.0.1:{9000 + i}"} for i in range(3)]
    (site.folder / "fleet.yaml").write_text(yaml.safe_dump({"engines": engines}))
    site.snapshot()
    site.request()
    told = observed(events(site))
    assert told["instances"] == 3 and "3 of 3 engines" in told["reason"]
    assert pool(site) == 4


@pytest.mark.slow
def test_operators_hear_of_a_deadline_in_danger_once_and_of_its_end(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    site.specs["d"] = (load_spec({**SPEC, "deadline": "60s"}, "defs.yaml"), site.specs["d"][1])
    large(site)
    request = site.request()
    with serving() as webhook:
        fleet_yaml(site.folder, alerts={"webhook": webhook.url, "timeout_seconds": 30})
        site.tick("capacity")
        site.tick("capacity")
        (told,) = webhook.posted
        assert (told["kind"], told["dataset"]) == ("infeasible", "d") and "d: " in told["text"]
        site.instance.add_run_tags(request, {CANCELED_TAG: "true"})
        site.tick("capacity")
        assert [one["kind"] for one in webhook.posted] == ["infeasible", "on_time"]
        fleet_yaml(site.folder, alerts={"webhook": webhook.url, "timeout_seconds": 1})
        webhook.mode = "hang"
        site.request()
        assert observed(list(site.tick("capacity").asset_events or ()))["instances"] >= 1  # the webhook never answers
    assert SECRET not in caplog.text


def test_what_operators_were_told_is_no_newer_command(site: SensorDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A webhook may take seconds. A lease that ends meanwhile was held when the command was decided."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    site.specs["d"] = (load_spec({**SPEC, "deadline": "1s"}, "defs.yaml"), site.specs["d"][1])
    large(site)
    site.request()
    lease = ready(site.fleet_db, dataset="d", ttl=600)
    tell = Alerts.tell

    def slowly(alerts: Alerts, told: Sequence[Alert]) -> None:
        tell(alerts, told)
        assert site.fleet_db.give_up(lease, "paused")

    monkeypatch.setattr(Alerts, "tell", slowly)
    with serving() as webhook:
        fleet_yaml(site.folder, alerts={"webhook": webhook.url, "timeout_seconds": 30})
        site.tick("capacity")
        assert len(webhook.posted) == 1
    target = site.fleet_db.target("d")
    assert target is not None and target.memory.alerts and target.memory.controller != ControllerState()
    assert site.fleet_db.leased_since_command("d")


def test_a_command_is_as_old_as_what_it_rests_on(site: SensorDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that ends while its sensor still plans was held when the command was decided."""
    site.snapshot()
    site.request()
    lease = ready(site.fleet_db, dataset="d", ttl=600)
    ask = sensor_module.ask_planner

    def slowly(question: CapacityQuestion) -> Answer:
        assert site.fleet_db.give_up(lease, "paused")
        return ask(question)

    monkeypatch.setattr(sensor_module, "ask_planner", slowly)
    site.tick("capacity")
    assert site.fleet_db.leased_since_command("d")
    monkeypatch.setattr(sensor_module, "ask_planner", ask)
    site.tick("capacity")
    assert not site.fleet_db.leased_since_command("d")


def test_operators_hear_of_requests_that_have_all_failed_for_a_minute_and_status_says_which_and_since_when(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    site.snapshot()
    site.request()
    run = site.batches(S.STARTED, KEYS[0], KEYS[0])
    site.fleet_db.begin_run(run, "d", KEYS[0], KEYS[0])
    met = RequestFailure("garbage_body", 200, "6 bytes of a web page (HTML), no JSON")
    with serving() as webhook:
        fleet_yaml(site.folder, alerts={"webhook": webhook.url, "timeout_seconds": 30})
        for seconds in (30.0, 75.0):
            site.fleet_db.beat(run, "leased", RunActivity("on gpu"), 0)
            wait = WaitReason(WaitKind.REQUESTS_FAIL, failure=met, seconds=seconds)
            site.fleet_db.beat(run, "leased", RunActivity("every request fails", wait), 0)
            site.tick("capacity")
        (told,) = [one for one in webhook.posted if one["kind"] == "requests_fail"]
    assert told["text"] == (
        "d: every request has failed for 1 min 15 s, the last one with garbage_body (status 200): 6 bytes of a web "
        "page (HTML), no JSON"
    )
    assert (told["figures"]["code"], told["figures"]["status"]) == ("garbage_body", 200)
    now = time.time()
    (line,) = dataset_status(Observer(site.instance, site.fleet_db, site.store), now).as_json()["runs"]
    assert line["wait"].pop("since") == pytest.approx(now - 75, abs=15)
    assert line["wait"] == {"kind": "requests_fail", "code": met.code, "status": met.status, "sentence": met.sentence}


def test_a_dataset_that_could_not_be_looked_at_is_tried_again_later_and_not_at_every_tick(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.snapshot()
    site.store.set_current_snapshot("gone")
    assert "d could not be looked at" in site.reason("capacity")
    assert "d could not be looked at" not in site.reason("capacity")
    monkeypatch.setattr(many_datasets, "RETRY_SECONDS", 0.0)
    assert "d could not be looked at" in site.reason("capacity")


def test_two_sensors_at_once_do_no_harm(site: SensorDataset) -> None:
    """The second finds what the first wrote; one whose request has been replaced writes nothing."""
    large(site)
    request = site.request()
    site.tick("capacity")
    before = site.fleet_db.target("d")
    site.tick("capacity")
    after = site.fleet_db.target("d")
    assert before is not None and after is not None
    assert (after.request, after.since, after.instances) == (request, before.since, before.instances)
    assert not site.fleet_db.command("d", "another", 9)


def test_while_a_yaml_is_broken_datasets_are_planned_as_before(site: SensorDataset) -> None:
    large(site)
    site.request()
    answers: list[Any] = [site.specs, SpecError("defs.yaml", [Problem("model", "text", "nothing")])]

    def datasets() -> Any:
        found = answers.pop(0)
        if isinstance(found, SpecError):
            raise found
        return found

    sensor = capacity_sensor(datasets, 30)
    for _ in range(2):
        with dg.build_sensor_context(site.instance, resources=site.definitions.resources) as context:
            assert "deadline in" in (sensor.evaluate_tick(context).skip_message or "")
    assert answers == []


@pytest.mark.slow
@pytest.mark.soak("deadline")
@pytest.mark.timeout(600)
def test_a_tick_at_many_batches_knows_how_many_rows_are_left(tmp_path: Path) -> None:
    """Half of the batches are in the ledger. benchmarks/scale.py measures how long a tick takes."""
    count = 80_000 if SOAK else 20_000
    (tmp_path / "home").mkdir()
    fleet_yaml(tmp_path)
    keys = [f"{i:05d}" for i in range(count)]
    with contextlib.ExitStack() as stack:
        local = dg.DagsterInstance.local_temp(str(tmp_path / "home"))
        site = SensorDataset.open(tmp_path, local, stack, {**SPEC, "batch_rows": 1})
        write_snapshot(site.store, questions(count), batch_rows=1, batches_per_shard=400)
        for start in range(0, count, 10_000):
            site.instance.add_dynamic_partitions("d", keys[start : start + 10_000])
        report_in_bulk(site, keys[::2])
        site.request()
        site.tick("capacity")
        target = site.fleet_db.target("d")
        assert target is not None and target.plan.rows_left == count // 2


def test_a_snapshot_of_another_model_is_planned_for_that_model(site: SensorDataset) -> None:
    """As `run --model` makes it."""
    seconds: list[float] = []
    for number, model in enumerate(("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B")):
        site.snapshot(1200 + number, keys=[f"{i:05d}" for i in range(121)], model=model)
        site.request()
        site.tick("capacity")
        target = site.fleet_db.target("d")
        assert target is not None and target.plan is not None and target.plan.finish_p50 is not None
        seconds.append(target.plan.finish_p50 - target.plan.planned_at - 120)  # without the boot
    assert seconds[0] < seconds[1] / 2
