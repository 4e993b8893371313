"""What sensors share in a code server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest
import sqlalchemy as sa
from support.fleet_databases import postgres_url

from batch_assets.sensors import instance
from batch_assets.sensors.instance import fleet_database_of
from resources.fleet.resource import GpuFleet


class CodeServer:
    """The context of a tick in a code server, as far as it is asked."""

    code_location_origin = object()
    instance_ref = instance = None


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "_kept_databases", {})


def fleet_of(url: str, home: Path) -> GpuFleet:
    return GpuFleet(database=url, home=str(home), config_path=str(home / "fleet.yaml"))


def test_ticks_of_a_code_server_share_a_connection_to_postgres_and_survive_its_end(server: str, tmp_path: Path):
    context = cast(Any, CodeServer())
    with postgres_url(server) as url:
        pids = []
        for number in range(4):
            with fleet_database_of(context, fleet_of(url, tmp_path)) as fleet_db:
                assert fleet_db.targets() == []
                with fleet_db.engine.connect() as connection:
                    pids.append(connection.scalar(sa.text("SELECT pg_backend_pid()")))
            if number == 2:
                with sa.create_engine(url, poolclass=sa.NullPool).connect() as other:
                    other.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pids[-1]})
        assert pids[0] == pids[1] == pids[2] != pids[3]
        fleet_db.close()


def test_outside_of_a_code_server_and_on_sqlite_each_tick_opens_its_own(server: str, tmp_path: Path):
    with postgres_url(server) as url:
        for context, database in [(dg.build_sensor_context(), url), (CodeServer(), f"sqlite:///{tmp_path}/fleet.db")]:
            seen = []
            for _ in range(2):
                with fleet_database_of(cast(Any, context), fleet_of(database, tmp_path)) as fleet_db:
                    seen.append(fleet_db)
            assert seen[0] is not seen[1]
    assert instance._kept_databases == {}
