"""What `status` says after a refresh that failed, of runs that wait, and of clocks that are not ours."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.dataset_project import DatasetProject, dataset_project
from support.fleet_databases import OFFER, ready

from batch_assets.orchestration.request_summary import request_status, summary_of
from batch_assets.request_status.dataset_status import DatasetStatus, Observer, RunLine, dataset_status
from batch_assets.request_status.display import status_table
from batch_assets.tags import REFRESH_TAG

NOW = 1e9


def refreshed(site: DatasetProject) -> DatasetStatus:
    """The status after a refresh, and after the sensor that ends a request without work."""
    run = site.materialize("prompts", tags={REFRESH_TAG: "d"})
    ended = summary_of(request_status(site.fleet_db, "d"), finished_at=1.0, on_time=None, missing=0)
    assert site.fleet_db.end_request("d", run.run_id, ended)
    return dataset_status(Observer(site.instance, site.fleet_db, site.store), NOW)


def text(status: DatasetStatus) -> str:
    console = Console(file=io.StringIO(), width=300)
    console.print(status_table([status], dagster_runs=False, now=NOW))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_refresh_that_failed_is_said_until_one_succeeds(tmp_path: Path) -> None:
    with dataset_project(tmp_path) as site:
        failed = refreshed(site)
        said = text(failed)
        site.source(["a"])
        mended = refreshed(site)
    assert failed.refresh_failed is not None and "questions.jsonl" in failed.refresh_failed.reason
    assert "d: the last refresh failed, " in said and "questions.jsonl" in said
    assert "`batch-assets run d` tries again" in said
    assert "done" not in said and "0.00 $ spent in all" in said
    assert mended.refresh_failed is None and "d: done, 0.00 $ spent in all" in text(mended)
    # runs wait for Dagster only where there are any
    assert mended.runs == () and "Dagster is not running" not in said + text(mended)
    waits = replace(mended, runs=(RunLine("run", "batches 00000", "QUEUED", "", 1.0, 0),))
    assert "Dagster is not running here: these runs wait" in text(waits)


def test_a_clock_is_explained_only_where_its_provider_is_planned_or_was_rented(tmp_path: Path) -> None:
    with dataset_project(tmp_path) as site:
        fleet_db = site.fleet_db
        ready(fleet_db, dataset="other")
        fleet_db.begin_request("d", "real")
        fleet_db.command("d", "real", 1, offers=[("lab/gpu-1", 1)])
        assert request_status(fleet_db, "d").clock == ""
        fleet_db.command("d", "real", 1, offers=[(OFFER.name, 1)])
        planned = request_status(fleet_db, "d")
        assert planned.clock.startswith("simulated clock: sim-north runs 60 ×")
        fleet_db.end_request("d", "real", summary_of(planned, finished_at=1.0, on_time=None, missing=0))
        assert request_status(fleet_db, "d").clock == planned.clock
        fleet_db.begin_request("d", "next")
        assert request_status(fleet_db, "d").clock == ""
