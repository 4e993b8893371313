"""What `status` says a dataset spent: all of it, and what the last request did."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from support.dataset_project import dataset_project
from support.fleet_databases import Clock, ready

from batch_assets.orchestration.assets import bill_of
from batch_assets.orchestration.request_summary import request_status, summary_of
from batch_assets.request_status.dataset_status import Observer, dataset_status
from batch_assets.request_status.display import request_lines
from gpu_runner.cost_meter import LeaseUsage
from gpu_runner.fleet_database.database import FleetDatabase


def test_what_a_dataset_spent_in_all_stays_after_a_request_without_work(tmp_path: Path) -> None:
    with dataset_project(tmp_path) as site:
        site.fleet_db.begin_request("d", "first")
        lease = site.fleet_db.try_lease("api", "run", "d", 60)
        assert lease is not None
        site.fleet_db.release(lease, LeaseUsage(1.0, 0.0, 10, 10, 10, useful_usd=0.3, wasted_usd=0.1))
        for name in ("first", "second"):
            site.fleet_db.begin_request("d", name)
            found = request_status(site.fleet_db, "d")
            ended = summary_of(found, finished_at=1.0, on_time=None, missing=0)
            site.fleet_db.end_request("d", name, ended)
        status = dataset_status(Observer(site.instance, site.fleet_db, site.store), time.time())
    assert status.request.usd_spent == 0.0
    assert request_lines(status, time.time()) == [
        "d: done, 0.40 $ spent in all, 0.00 $ by the last request, 0.10 $ of it wasted"
    ]


def test_dollars_of_simulated_providers_are_told_from_those_of_real_engines(tmp_path: Path) -> None:
    """Also when fleet.yaml does not name them any more."""
    (tmp_path / "fleet.yaml").write_text("engines: [{name: e, kind: process, command: ['false']}]\n")
    clock = Clock()
    database = FleetDatabase(f"sqlite:///{tmp_path}/fleet.db", now=clock)
    with dataset_project(tmp_path) as site, contextlib.closing(database) as fleet_db:
        fleet_db.begin_request("d", "first")
        lease = fleet_db.try_lease("api", "run", "d", 60)
        assert lease is not None
        fleet_db.release(lease, LeaseUsage(1.0, 0.0, 10, 10, 10, useful_usd=0.3))
        assert bill_of(fleet_db, "d", site.fleet.simulated_providers(fleet_db)) is None
        ready(fleet_db, ttl=1e6)
        clock.forward(10)
        fleet_db.ended("ba-1", 0)
        ended = summary_of(request_status(fleet_db, "d"), finished_at=1.0, on_time=None, missing=0)
        fleet_db.end_request("d", "first", ended)
        simulated = bill_of(fleet_db, "d", site.fleet.simulated_providers(fleet_db))
        status = dataset_status(Observer(site.instance, fleet_db, site.store), time.time())
    assert simulated is not None and simulated.total == pytest.approx(0.6)  # 10 s at 3.6 an hour and a clock of 60
    assert "0.90 $ spent in all, 0.60 $ of it simulated" in request_lines(status, time.time())[0]
