"""One fleet, one service: another one with records of its own is refused, and replicas are not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.timing import PATIENCE

from batch_assets.api.capacity import fleet_claim as module
from batch_assets.api.capacity.fleet_claim import FleetClaim, FleetTaken
from batch_assets.api.database.service_database import Records
from batch_assets.api.service import Service
from batch_assets.api.settings import ApiSettings
from gpu_runner.fleet_database.connection import FACTS
from gpu_runner.fleet_database.database import FleetDatabase
from resources.fleet.resource import GpuFleet

ROOT = Path(__file__).parents[4]


def fleet_in(home: Path) -> GpuFleet:
    return GpuFleet(database=f"sqlite:///{home}/fleet.db", home=str(home), config_path=str(home / "fleet.yaml"))


def claim(home: Path, records: str) -> FleetClaim:
    """Of a service with records of this name."""
    with contextlib.closing(Records(f"sqlite:///{home}/{records}.db")) as found:
        return FleetClaim(fleet_in(home), found.identity, found.address)


def test_a_service_with_other_records_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    with claim(tmp_path, "one"), claim(tmp_path, "one") as replica:
        with pytest.raises(FleetTaken, match=r"one\.db.*this one: .*two\.db.*BATCH_ASSETS_API_DB"):
            claim(tmp_path, "two").__enter__()
        replica.check()
    with claim(tmp_path, "two") as second:
        second.check()


def test_a_service_that_lost_the_fleet_plans_no_more_until_it_has_it_again(tmp_path: Path) -> None:
    steady = 0.0
    first = FleetClaim(fleet_in(tmp_path), "1" * 16, "one", steady=lambda: steady)
    first.check()
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db:
        with fleet_db.engine.begin() as connection:  # it was stopped, and nobody has heard of it
            connection.execute(sa.delete(FACTS).where(FACTS.c.name.startswith("service:")))
        assert fleet_db.beat_service("other", "2" * 16, "two", module.SILENT_SECONDS) is None
        steady += module.SILENT_SECONDS + 1
        with pytest.raises(FleetTaken, match="two"):
            first.check()
        fleet_db.end_service("other")
    steady += module.SILENT_SECONDS + 1
    first.check()


def test_a_fleet_database_that_is_away_at_the_start_is_claimed_when_it_is_back(tmp_path: Path) -> None:
    home = tmp_path / "not there yet"
    fleet = fleet_in(home)
    with FleetClaim(fleet, "1" * 16, "one", steady=lambda: 0.0) as first:
        home.mkdir()
        first.check()
        with pytest.raises(FleetTaken), FleetClaim(fleet, "2" * 16, "two"):
            pass


def test_a_service_whose_fleet_is_taken_plans_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Taken(Exception):
        pass

    def taken() -> None:
        raise Taken

    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    settings = ApiSettings(tmp_path, str(tmp_path / "store"), f"sqlite:///{tmp_path}/api.db")
    service = Service(settings, check_fleet=taken)
    try:
        assert service._worker_context.capacity is not None
        with pytest.raises(Taken):
            service._worker_context.capacity([], [])
    finally:
        service.records.close()


@pytest.mark.slow
def test_a_second_command_with_other_records_ends_with_an_error_and_a_replica_serves(tmp_path: Path) -> None:
    def serve(records: str, port: str) -> subprocess.Popen[str]:
        home = {"DAGSTER_HOME": str(tmp_path / "home"), "BATCH_ASSETS_STORE": str(tmp_path / "store")}
        database = {"BATCH_ASSETS_API_DB": f"sqlite:///{tmp_path}/{records}.db"}
        command = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", port]
        return subprocess.Popen(
            command, env={**os.environ, **home, **database}, cwd=ROOT, stderr=subprocess.PIPE, text=True
        )

    def claims() -> int:
        path = tmp_path / "home" / "fleet.db"
        if not path.exists():
            return 0
        with contextlib.closing(FleetDatabase(f"sqlite:///{path}")) as fleet_db, fleet_db.engine.connect() as found:
            query = sa.select(sa.func.count()).where(FACTS.c.name.startswith("service:"))
            return int(found.execute(query).scalar_one())

    processes = [serve("one", "18471")]
    try:
        _wait(lambda: claims() == 1)
        processes.append(serve("one", "18472"))
        _wait(lambda: claims() == 2)
        second = serve("two", "18473")
        processes.append(second)
        _, said = second.communicate(timeout=60 * PATIENCE)
        assert second.returncode == 2 and "one.db" in said and "Traceback" not in said
        for process in processes[:2]:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60 * PATIENCE)
        assert claims() == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60 * PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
