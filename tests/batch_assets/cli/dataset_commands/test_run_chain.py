"""What the end of `run NAME --upstream` says of money."""

from __future__ import annotations

import contextlib
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test
from support.fleet_databases import Clock, intended, ready

from batch_assets.cli.dataset_commands.run_chain import final_bills, handed_on_by_others
from batch_assets.orchestration.request_summary import request_status
from batch_assets.request_status.dataset_status import Observer
from batch_assets.tags import AUTOMATIC_TAG, CHAIN_BUDGET_TAG, CHAIN_SINCE_TAG, CHAIN_TAG, REFRESH_TAG, UPSTREAM_TAG
from gpu_runner.fleet_database.database import FleetDatabase
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore


def test_the_end_of_a_chain_says_what_the_fleet_bills_for_each_step(tmp_path: Path, local_objects: Objects) -> None:
    clock = Clock()
    with (
        contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db", now=clock)) as fleet_db,
        dg.DagsterInstance.ephemeral() as instance,
    ):
        seen = Observer(instance, fleet_db, DatasetStore(local_objects, "answers"))
        ready(fleet_db, "ba-0", dataset="topics", ttl=5)
        clock.forward(10)
        fleet_db.ended("ba-0", 0)  # of before the chain
        run = create_run_for_test(instance, tags={CHAIN_SINCE_TAG: repr(clock.now)})
        fleet_db.begin_request("topics", "request")
        ready(fleet_db, "ba-1", run_id="run-1", dataset="topics", ttl=100)
        intended(fleet_db, "ba-2", run_id="run-2", dataset="topics", ttl=100)
        clock.forward(60)
        at_its_end = request_status(fleet_db, "topics").usd_spent
        done = {"topics": {"request": {"usd_spent": at_its_end}}, "answers": {"request": {"usd_spent": 0.0}}}
        fleet_db.ended("ba-1", 0)
        fleet_db.ended("ba-2", None)  # there never was a machine
        final_bills(seen, run.run_id, done)
        assert at_its_end == pytest.approx(7.2)
        assert [one["request"]["usd_spent"] for one in done.values()] == [pytest.approx(3.6), 0.0]


def test_a_chain_whose_step_somebody_else_refreshed_too_goes_on_with_its_own_tags(
    tmp_path: Path, local_objects: Objects
) -> None:
    with (
        contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db,
        dg.DagsterInstance.ephemeral() as instance,
    ):
        seen = Observer(instance, fleet_db, DatasetStore(local_objects, "answers"))

        def refreshed(**more: str) -> str:
            tags = {REFRESH_TAG: "topics", **more}
            return create_run_for_test(instance, tags=tags, status=dg.DagsterRunStatus.SUCCESS).run_id

        whole = {CHAIN_TAG: "mine", CHAIN_SINCE_TAG: "1.0", CHAIN_BUDGET_TAG: "9.0", UPSTREAM_TAG: "answers"}
        mine = refreshed(**whole)
        refreshed(**{AUTOMATIC_TAG: "true"})
        assert handed_on_by_others(seen, mine, "topics") == {}
        other = refreshed(**{CHAIN_TAG: "other", UPSTREAM_TAG: "translations"})
        assert handed_on_by_others(seen, mine, "topics") == whole
        assert handed_on_by_others(seen, other, "topics") == {}
        refreshed()
        assert handed_on_by_others(seen, mine, "topics") == whole
