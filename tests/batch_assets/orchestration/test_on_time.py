"""What analysts are told of a deadline: the check `on_time` and the freshness policy of the table."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.fleet_databases import Clock
from support.sensor_dataset import KEYS, S, SensorDataset, publish_run
from support.specs import spec

from batch_assets.orchestration.asset_checks import on_time_result
from batch_assets.orchestration.freshness import freshness
from batch_assets.tags import REFRESH_TAG
from gpu_runner.fleet_database.capacity_plan import RequestSummary
from gpu_runner.fleet_database.database import FleetDatabase

SPEC: dict[str, Any] = {
    "name": "d", "source": {"path": "q.jsonl"}, "prompt": {"user": "{{ q }}"}, "model": "m",
    "schedule": "0 2 * * *", "deadline": "0 8 * * *",
}  # fmt: skip


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet_db(tmp_path: Path, clock: Clock) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db", now=clock)) as opened:
        yield opened


def test_without_a_deadline_the_check_passes_and_says_so(fleet_db: FleetDatabase) -> None:
    assert on_time_result(None).description == "There was no deadline."
    fleet_db.begin_request("d", "refresh")
    assert on_time_result(fleet_db.target("d")).passed


def test_a_table_is_on_time_when_its_last_row_was(fleet_db: FleetDatabase, clock: Clock) -> None:
    fleet_db.begin_request("d", "refresh", deadline_at=clock.now + 600)
    clock.forward(540)
    early = on_time_result(fleet_db.target("d"))
    assert early.passed and early.description == "Done 1 min 00 s before the deadline."
    clock.forward(180)
    late = on_time_result(fleet_db.target("d"))
    assert not late.passed and late.description == "Done 2 min 00 s after the deadline."
    assert late.severity == dg.AssetCheckSeverity.WARN


def test_a_request_that_the_sensor_has_ended_is_judged_by_its_story(fleet_db: FleetDatabase, clock: Clock) -> None:
    deadline = clock.now + 600
    fleet_db.begin_request("d", "refresh", deadline_at=deadline)
    clock.forward(60)
    fleet_db.end_request("d", "refresh", RequestSummary(deadline=deadline, finished_at=clock.now))
    clock.forward(3600)  # the table was published late, of rows that were there in time
    assert on_time_result(fleet_db.target("d")).description == "Done 9 min 00 s before the deadline."


def test_a_schedule_and_a_deadline_say_how_fresh_the_table_must_be() -> None:
    hours = datetime.timedelta(hours=1)
    after = freshness(spec(schedule="0 2 * * *", deadline="6h"))
    assert after == dg.FreshnessPolicy.time_window(fail_window=30 * hours)
    cron = freshness(spec(schedule="0 2 * * *", deadline="0 8 * * *"))
    assert cron == dg.FreshnessPolicy.cron(deadline_cron="0 8 * * *", lower_bound_delta=6 * hours)
    weekdays = freshness(spec(schedule="0 2 * * 1-5", deadline="6h"))
    assert weekdays == dg.FreshnessPolicy.time_window(fail_window=78 * hours)  # from Friday to Monday
    assert freshness(spec(deadline="6h")) is None
    assert freshness(spec(schedule="0 2 * * *")) is None
    assert freshness(spec(schedule="0 2 * * *", deadline="2027-01-31T06:00:00Z")) is None


def test_where_a_table_is_awaited_a_refresh_that_changed_nothing_publishes_it_again(tmp_path: Path) -> None:
    """Dagster's freshness knows when a table was last made, not that there was nothing new."""
    with contextlib.ExitStack() as stack:
        site = SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack, SPEC)
        site.snapshot()
        site.commit(*KEYS)
        refreshed(site)
        publish_run(site, S.SUCCESS)
        assert "is published" in site.reason("publisher")
        refreshed(site)
        publish_run(site, S.SUCCESS)
        assert "is published" in site.reason("publisher")


def refreshed(site: SensorDataset) -> None:
    """A refresh that ran to its end, as its worker would say."""
    run_id = site.run(S.STARTED, {REFRESH_TAG: "d"}, job_name="d_refresh")
    site.end(run_id)


@pytest.mark.parametrize("schedule", ["0 2 * * *", "0 2 * * 1-5", "0 2 * * 1", "0 */6 * * *", "@monthly"])
@pytest.mark.parametrize("deadline", ["6h", "0 8 * * *", "0 8 * * 1-5", "0 8 * * 1", "0 9 1 * *", "*/30 * * * *"])
def test_whatever_schedule_and_deadline_make_a_policy_that_dagster_takes(schedule: str, deadline: str) -> None:
    assert freshness(spec(schedule=schedule, deadline=deadline)) is not None


def test_a_deadline_more_often_than_refreshes_is_a_matter_of_time_alone() -> None:
    found = freshness(spec(schedule="0 2 * * 1", deadline="0 8 * * *"))
    assert found == dg.FreshnessPolicy.time_window(fail_window=datetime.timedelta(days=7, hours=6))
