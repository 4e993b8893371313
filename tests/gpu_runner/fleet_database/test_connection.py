"""How the fleet's database is opened. On Postgres each of its calls ends: no daemon and no run waits for ever."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from support.fleet_databases import postgres_url

from gpu_runner import bounded_postgres
from gpu_runner.bounded_postgres import BoundedConnection, CallDeadlines
from gpu_runner.fleet_database import connection as fleet_connection
from gpu_runner.fleet_database.database import FleetDatabase, FleetDatabaseError


@pytest.fixture
def postgres(server: str) -> Iterator[str]:
    with postgres_url(server) as url:
        yield url


@pytest.fixture
def fleet_db(postgres: str) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(postgres)) as opened:
        yield opened


def test_connections_statements_and_transactions_have_time_outs(fleet_db: FleetDatabase) -> None:
    with fleet_db.engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, BoundedConnection)
        assert driver.get_dsn_parameters()["connect_timeout"] == "5"
        shown = [connection.scalar(sa.text(f"SHOW {name}")) for name in _TIME_OUTS]
        assert shown == ["15s", "10s"]


_TIME_OUTS = ("statement_timeout", "idle_in_transaction_session_timeout")


def test_a_write_that_waits_for_the_fleets_lock_ends(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_postgres, "STATEMENT_SECONDS", 0.1)
    with contextlib.closing(FleetDatabase(postgres)) as fleet_db, fleet_db.engine.begin() as holder:
        holder.exec_driver_sql("LOCK TABLE leases IN EXCLUSIVE MODE")
        with pytest.raises(FleetDatabaseError, match="statement timeout"):
            fleet_db.begin_run("run", "dataset", "000", "001")


def test_a_server_that_is_stopped_holds_no_writer(fleet_db: FleetDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet_db.engine.connect() as connection:
        backend = connection.scalar(sa.text("SELECT pg_backend_pid()"))
        assert isinstance(backend, int)
    monkeypatch.setattr(BoundedConnection, "deadlines", CallDeadlines(0.2))
    os.kill(backend, signal.SIGSTOP)
    try:
        fleet_db.begin_run("run", "dataset", "000", "001")  # its connection is found dead, another one is opened
    finally:
        os.kill(backend, signal.SIGCONT)
    assert [run.run_id for run in fleet_db.runs()] == ["run"]


def test_a_change_of_the_tables_has_no_time_out(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    upgrade = fleet_connection.upgrade

    def upgraded(connection: sa.Connection) -> None:
        said.append(str(connection.scalar(sa.text("SHOW statement_timeout"))))
        assert not isinstance(connection.connection.driver_connection, BoundedConnection)
        upgrade(connection)

    monkeypatch.setattr(fleet_connection, "upgrade", upgraded)
    FleetDatabase(postgres).close()
    assert said == ["0"]
