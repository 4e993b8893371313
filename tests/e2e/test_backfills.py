"""What a Dagster user does in the UI: backfill, cancel, overlap."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import dagster as dg
import psutil
import pytest
from support.processes import runs
from support.timing import PATIENCE, SOAK

from e2e.harness import Platform, eventually, platform
from e2e.test_losses import WINDOW, answered, check_table, gsm8k, leased_run, losses, published

pytestmark = [pytest.mark.soak("dagster"), pytest.mark.timeout(900)]


def test_a_ui_backfill_of_gsm8k_ends_green_and_an_overlapping_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with platform(tmp_path, monkeypatch, gsm8k() | {"batches_per_run": 10}, simulator=["--speed", "20"]) as site:
        site.take_snapshot()
        assert len(site.keys()) == 30
        first = site.launch_backfill(last="00019")
        state = site.finish_backfill(first)
        assert state["status"] == "COMPLETED_SUCCESS"
        second = site.launch_backfill()
        state = site.finish_backfill(second)
        assert state["status"] == "COMPLETED_SUCCESS"
        counts = state["assetBackfillData"]["assetBackfillStatuses"][0]
        assert (counts["numPartitionsMaterialized"], counts["numPartitionsFailed"]) == (30, 0)
        published(site, 60)
        check_table(site, 7473)
        again = sum(answered(site).values()) - 7473
        assert 0 <= again <= losses(site) * WINDOW


def cancel_once(site: Platform) -> float:
    """Cancel the run that holds the engine under full load; returns the seconds until it is CANCELED."""
    run_id, pid = eventually(lambda: leased_run(site), 60, "a run that holds the engine")
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    started = time.monotonic()
    site.terminate(run_id)
    assert site.finish(run_id, 30) == dg.DagsterRunStatus.CANCELED
    seconds = time.monotonic() - started
    eventually(lambda: not any(runs(process) for process in family), 10, "the end of the worker's processes")
    with contextlib.closing(site.fleet_db()) as fleet_db:
        assert fleet_db.history(run_id) and all(released for _, _, released in fleet_db.history(run_id))
        assert len(fleet_db.history(run_id)) == 1
        assert run_id not in [beat.run_id for beat in fleet_db.runs()]
    return seconds


def test_cancels_under_full_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with platform(tmp_path, monkeypatch, gsm8k(), simulator=["--speed", "1.5"]) as site:
        taken = []
        for _ in range(20 if SOAK else 2):
            site.launch_job("gsm8k_refresh")
            taken.append(cancel_once(site))
            eventually(lambda: all(run.is_finished for run in site.instance.get_runs()), 60, "all runs to end")
        print(f"\n{len(taken)} cancels: slowest {max(taken):.1f} s, median {sorted(taken)[len(taken) // 2]:.1f} s")
        assert max(taken) < 5 * PATIENCE
