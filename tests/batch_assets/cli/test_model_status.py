"""`batch-assets status api/MODEL`."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import pytest
from support.api_service import CHAT
from support.fleet_databases import ready

from batch_assets.api.database.batch_records import BatchRecord, BatchRecords
from batch_assets.api.database.service_database import Records
from batch_assets.cli import main
from gpu_runner.fleet_database.capacity_plan import CapacityPlan
from gpu_runner.fleet_database.database import FleetDatabase


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.delenv("BATCH_ASSETS_FLEET_DB", raising=False)
    monkeypatch.delenv("BATCH_ASSETS_API_DB", raising=False)
    return tmp_path


def batch(number: int, model: str, *, hours: float = 2, **more: int) -> BatchRecord:
    now = int(time.time())
    return BatchRecord(
        f"batch_{number}", "t", CHAT, "file-1", f"{hours}h", now, now + int(hours * 3600), "d",
        status="in_progress", model=model, **more,
    )  # fmt: skip


def test_it_says_batches_windows_engines_spend_and_the_reason(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(Records(f"sqlite:///{home}/api.db")) as records:
        for one in (
            batch(1, "org/m", hours=5, total=300, completed=100),
            batch(2, "org/m", total=50, failed=10),
            batch(3, "other", total=9),
        ):
            BatchRecords(records).create(one)
    with contextlib.closing(FleetDatabase(f"sqlite:///{home}/fleet.db")) as fleet_db:
        ready(fleet_db, dataset="api/org/m", ttl=600)
        assert fleet_db.try_lease("gpu-of-fleet-yaml", "run", "api/org/m", 600) is not None
        target = fleet_db.begin_request("api/org/m", "batches since batch_1", deadline_at=fleet_db.now() + 100)
        plan = CapacityPlan(kind="grow", reason="3 instances instead of 1")
        assert fleet_db.command("api/org/m", target.request, 3, (), None, target.memory, plan)
    main.app(["status", "api/org/m", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in found["batches"]] == ["batch_2", "batch_1"], "the window that ends first"
    assert [one["lines_left"] for one in found["batches"]] == [40, 200] and found["lines_left"] == 240
    assert 7100 < found["batches"][0]["window_seconds"] <= 7200
    assert (found["engines_wanted"], found["engines_held"], found["reason"]) == (3, 2, plan.reason)
    assert found["usd_spent"] >= 0
    main.app(["status", "api/org/m"], standalone_mode=False)
    page = capsys.readouterr().out
    assert all(part in page for part in ("batch_1", "240 lines are left", "3 wanted, 2 held", plan.reason))


def test_a_model_without_batches_has_a_page_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main.app(["status", "api/nobody"], standalone_mode=False)
    page = capsys.readouterr().out
    assert "no batch is open" in page and "last decision" not in page
