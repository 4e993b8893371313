"""`batch-assets fleet`: what everything cost, and how much of it nobody pays."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from support.fleet_databases import Clock, ready
from typer.testing import CliRunner

from batch_assets.cli.main import app
from gpu_runner.fleet_database.database import FleetDatabase


def test_dollars_of_simulated_providers_are_said_to_be_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    database = f"sqlite:///{tmp_path}/fleet.db"
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("BATCH_ASSETS_FLEET_DB", database)
    monkeypatch.setenv("BATCH_ASSETS_FLEET", str(tmp_path / "fleet.yaml"))
    (tmp_path / "fleet.yaml").write_text("engines: [{name: lab, kind: endpoint, url: 'http://127.0.0.1:9'}]\n")
    with contextlib.closing(FleetDatabase(database, now=clock)) as fleet_db:
        ready(fleet_db)
        clock.forward(10)
        fleet_db.ended("ba-1", 0)
    said = CliRunner().invoke(app, ["fleet"]).stdout
    assert "0.6000 $ of it simulated, paid by nobody" in said
    total = json.loads(CliRunner().invoke(app, ["fleet", "--json"]).stdout)["total"]
    assert total["simulated_usd"] == pytest.approx(total["usd"]) == pytest.approx(0.6)
