"""Calls of Postgres end, whatever the server does."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.fleet_databases import postgres_url
from support.timing import PATIENCE

from batch_assets.api.records import bounded_postgres, database
from batch_assets.api.records.bounded_postgres import BoundedConnection, CallDeadlines
from batch_assets.api.records.database import Records, is_records_trouble


@pytest.fixture
def postgres(server: str) -> Iterator[str]:
    with postgres_url(server) as url:
        yield url


@pytest.fixture
def records(postgres: str) -> Iterator[Records]:
    with contextlib.closing(Records(postgres)) as opened:
        yield opened


def test_connections_and_statements_have_time_outs(records: Records) -> None:
    with records.reading() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, BoundedConnection)
        assert driver.get_dsn_parameters()["connect_timeout"] == "5"
        assert connection.scalar(sa.text("SHOW statement_timeout")) == "15s"


def test_what_the_address_says_itself_stays(postgres: str) -> None:
    with contextlib.closing(Records(f"{postgres}?connect_timeout=7")) as records, records.reading() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None and driver.get_dsn_parameters()["connect_timeout"] == "7"


def test_a_statement_that_waits_for_a_lock_ends(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_postgres, "STATEMENT_SECONDS", 0.1)
    Records(postgres).close()
    with contextlib.closing(Records(postgres)) as records, records.writing() as holder:
        holder.exec_driver_sql("LOCK TABLE api_files")
        with pytest.raises(sa.exc.OperationalError) as refused, records.reading() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM api_files")
        assert is_records_trouble(refused.value)


def test_a_change_of_the_tables_has_no_time_out(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    upgrade = database.upgrade

    def upgraded(connection: sa.Connection) -> None:
        said.append(str(connection.scalar(sa.text("SHOW statement_timeout"))))
        assert not isinstance(connection.connection.driver_connection, BoundedConnection)
        upgrade(connection)

    monkeypatch.setattr(database, "upgrade", upgraded)
    Records(postgres).close()
    assert said == ["0"]


@pytest.mark.parametrize("call", ["SELECT 1", "COMMIT"])
def test_a_server_that_is_stopped_holds_no_caller(records: Records, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Nothing bounds this in libpq: the socket is open, and nobody answers."""
    with records.engine.connect() as connection:
        backend = connection.scalar(sa.text("SELECT pg_backend_pid()"))
        assert isinstance(backend, int) and Path(f"/proc/{backend}").owner() in ("postgres", own_user())
        monkeypatch.setattr(BoundedConnection, "deadlines", CallDeadlines(0.2))
        os.kill(backend, signal.SIGSTOP)
        try:
            with pytest.raises(sa.exc.DBAPIError) as refused:
                connection.commit() if call == "COMMIT" else connection.exec_driver_sql(call)
        finally:
            os.kill(backend, signal.SIGCONT)
    assert is_records_trouble(refused.value)
    assert records.answers(), "the next caller has a connection of its own"


def own_user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def test_a_connection_that_is_gone_when_its_time_is_over_ends_the_watch_of_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watch goes on, also in a process that may open no more files."""
    monkeypatch.setattr(os, "dup", refused)
    deadlines, gone = CallDeadlines(0.05), socket.socket()
    number = gone.fileno()
    gone.close()
    ours, other = socket.socketpair()
    before = set(threading.enumerate())  # other tests' watches among them
    with ours, other, deadlines.call(number), deadlines.call(-1):
        (watching,) = [one for one in set(threading.enumerate()) - before if one.name == "records-deadlines"]
        ours.settimeout(30 * PATIENCE)
        for _ in range(2):
            with deadlines.call(ours.fileno()):
                assert ours.recv(1) == b"", "its end is seen here"
        assert watching.is_alive() and ours.fileno() >= 0


def refused(descriptor: int) -> int:
    raise OSError(errno.EMFILE, "Too many open files")
