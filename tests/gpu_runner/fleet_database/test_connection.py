"""How the fleet's database is opened. On Postgres each of its calls ends: no daemon and no run waits for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from support.fleet_databases import postgres_url

from gpu_runner import bounded_postgres
from gpu_runner.bounded_postgres import BoundedConnection, CallDeadlines
from gpu_runner.fleet_database import connection as fleet_connection
from gpu_runner.fleet_database.database import FleetDatabase, FleetDatabaseError
from gpu_runner.fleet_database.wait_reason import RunActivity


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


def test_a_run_that_begins_while_others_write_has_several_turns(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With twenty datasets refreshed at once on two busy cores, runs failed with their first word."""
    monkeypatch.setattr(bounded_postgres, "STATEMENT_SECONDS", 0.1)
    with contextlib.closing(FleetDatabase(postgres)) as fleet_db, ThreadPoolExecutor(2) as pool:
        with fleet_db.engine.begin() as holder:
            holder.exec_driver_sql("LOCK TABLE leases IN EXCLUSIVE MODE")
            begun = [
                pool.submit(fleet_db.begin_run, "run", "dataset", "000", "001"),
                pool.submit(fleet_db.begin_request, "dataset", "request"),
            ]
            time.sleep(0.25)  # more than one turn
            assert not any(one.done() for one in begun)
        for one in begun:
            one.result(15)
        assert [run.run_id for run in fleet_db.runs()] == ["run"]


def test_a_beat_and_the_name_of_the_fleet_wait_for_no_other_writer(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run says every two seconds that it lives: with hundreds of runs they would all stand in one queue."""
    monkeypatch.setattr(bounded_postgres, "STATEMENT_SECONDS", 0.2)
    with contextlib.closing(FleetDatabase(postgres)) as fleet_db:
        fleet_db.begin_run("run", "dataset", "000", "001")
        tag = fleet_db.tag()
        with fleet_db.engine.begin() as holder:
            holder.exec_driver_sql("LOCK TABLE leases IN EXCLUSIVE MODE")
            assert fleet_db.beat("run", "leased", RunActivity("works"), 5)
            assert fleet_db.tag() == tag
        assert [(run.note, run.rows_done) for run in fleet_db.runs()] == [("works", 5)]
        fleet_db.declare_dead("run")
        assert not fleet_db.beat("run", "leased", RunActivity("works"), 6)


def test_renewals_wait_for_whoever_takes_or_gives_back_and_not_for_each_other(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waited for all others: ten runs on busy cores held the capacity sensor off for seconds."""
    monkeypatch.setattr(bounded_postgres, "STATEMENT_SECONDS", 0.2)
    with contextlib.closing(FleetDatabase(postgres)) as fleet_db:
        lease, another = (fleet_db.try_lease(f"engine-{number}", "run", "d", 10) for number in (1, 2))
        assert lease is not None and another is not None
        with fleet_db._beside_its_like() as (connection, _, alone):
            connection.execute(sa.text("UPDATE leases SET rows = 5 WHERE instance = 'engine-1'"))
            assert not alone
            assert fleet_db.renew(another, 10)
            with pytest.raises(FleetDatabaseError, match="statement timeout"):
                fleet_db.try_lease("engine-3", "run", "d", 10)
        with fleet_db._transaction(), pytest.raises(FleetDatabaseError, match="statement timeout"):
            fleet_db.renew(lease, 10)
        assert fleet_db.renew(lease, 10)


def test_the_moment_of_a_host_is_kept_beside_others_and_a_clock_that_is_set_is_settled_alone(postgres: str) -> None:
    wall, steady = [1_000_000.0], [5_000.0]

    def opened() -> FleetDatabase:
        return FleetDatabase(postgres, now=lambda: wall[0], steady=lambda: steady[0], host="host")

    def moment() -> list[tuple[float, float, float]]:
        with one.engine.connect() as connection:
            found = connection.execute(sa.text("SELECT wall, low, jumps FROM clocks WHERE host = 'host'")).all()
        return [(line[0], line[1], line[2]) for line in found]

    with contextlib.closing(opened()) as one, contextlib.closing(opened()) as another:
        assert moment() == []
        for fleet_db in (one, another):  # each inserts what neither of them has seen
            with fleet_db._beside_its_like() as (_, _, alone):
                assert not alone
        assert moment() == [(1_000_000.0, 5_000.0, 0.0)]
        lease = one.try_lease("engine", "run", "d", 10)
        assert lease is not None
        wall[0] += 60.0
        steady[0] += 9.0
        assert another.renew(lease, 10)  # the lease lived on, as 9 s have passed
        assert moment() == [(1_000_060.0, 5_009.0, 51.0)]
        wall[0] += 11.0
        steady[0] += 11.0
        with another._own_row():
            pass
        assert moment() == [(1_000_071.0, 5_020.0, 51.0)]
        with one._beside_its_like() as (_, now, alone):
            assert (now, alone) == (1_000_071.0, False)  # that it was set, and is settled, is in the database
        assert [round(jump.seconds) for jump in one.clock_jumps(100)] == [51]


def test_processes_of_one_host_keep_its_first_moment_at_once(postgres: str) -> None:
    def opened() -> FleetDatabase:
        return FleetDatabase(postgres, host="host")

    with contextlib.closing(opened()) as one, contextlib.closing(opened()) as another, ThreadPoolExecutor(1) as pool:
        with one._own_row():
            begins = pool.submit(another.begin_run, "run", "d", "0", "1")
            with pytest.raises(TimeoutError):
                begins.result(0.2)
        begins.result(15)
        assert [run.run_id for run in one.runs()] == ["run"]


def test_a_grant_without_a_budget_waits_for_no_other_writer(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_postgres, "STATEMENT_SECONDS", 0.2)
    with contextlib.closing(FleetDatabase(postgres)) as fleet_db:
        lease = fleet_db.try_lease("api", "run", "d", 10)
        assert lease is not None
        with fleet_db._transaction():
            assert fleet_db.grant(lease, 0.5, 0.1) is None
        fleet_db.begin_request("d", "request", budget_usd=5.0)
        with fleet_db._transaction(), pytest.raises(FleetDatabaseError, match="statement timeout"):
            fleet_db.grant(lease, 0.5, 0.1)


def test_a_request_that_is_begun_again_as_it_is_waits_for_no_other_writer(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capacity sensor says it of each open dataset at each tick."""
    monkeypatch.setattr(bounded_postgres, "STATEMENT_SECONDS", 0.2)
    with contextlib.closing(FleetDatabase(postgres)) as fleet_db:
        begun = fleet_db.begin_request("dataset", "request", deadline_at=1e10, budget_usd=5.5, objective="fastest")
        with fleet_db.engine.begin() as holder:
            holder.exec_driver_sql("LOCK TABLE leases IN EXCLUSIVE MODE")
            again = fleet_db.begin_request("dataset", "request", deadline_at=1e10, budget_usd=5.5, objective="fastest")
            with pytest.raises(FleetDatabaseError, match="statement timeout"):
                fleet_db.begin_request("dataset", "request", budget_usd=5.5, objective="fastest")
        assert (again.since, again.deadline_at, again.budget_usd) == (begun.since, 1e10, 5.5)
        assert fleet_db.begin_request("dataset", "request", objective="fastest").deadline_at is None


def test_who_moves_times_along_waits_for_a_beat_that_has_taken_the_time(postgres: str) -> None:
    """Else it would write a time by the clock as it was before over one that was moved."""
    wall, steady = [1_000_000.0], [5_000.0]

    def opened() -> FleetDatabase:
        return FleetDatabase(postgres, now=lambda: wall[0], steady=lambda: steady[0], host="host")

    with contextlib.closing(opened()) as one, contextlib.closing(opened()) as another, ThreadPoolExecutor(1) as pool:
        one.begin_run("run", "dataset", "000", "001")
        with one._own_row():
            wall[0] += 3600.0
            moves = pool.submit(another.begin_run, "later", "dataset", "002", "003")
            with pytest.raises(TimeoutError):
                moves.result(0.2)
        moves.result(15)
        assert [round(run.age) for run in one.runs()] == [0, 0]


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
