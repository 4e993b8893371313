"""Calls of Postgres end, whatever the server does."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.fleet_databases import postgres_url
from support.timing import PATIENCE

from gpu_runner import bounded_postgres
from gpu_runner.bounded_postgres import BoundedConnection, CallDeadlines, bounded_engine


@pytest.fixture
def postgres(server: str) -> Iterator[str]:
    with postgres_url(server) as url:
        yield url


@contextlib.contextmanager
def opened(url: str) -> Iterator[sa.Engine]:
    """As the databases of this project are opened."""
    engine = bounded_engine(sa.make_url(url), pool_pre_ping=True)
    try:
        yield engine
    finally:
        engine.dispose()


@pytest.mark.slow
def test_connections_and_statements_have_time_outs(postgres: str) -> None:
    with opened(postgres) as engine, engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, BoundedConnection)
        assert driver.get_dsn_parameters()["connect_timeout"] == "5"
        assert connection.scalar(sa.text("SHOW statement_timeout")) == "15s"


def test_what_the_address_says_itself_stays(postgres: str) -> None:
    with opened(f"{postgres}?connect_timeout=7") as engine, engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None and driver.get_dsn_parameters()["connect_timeout"] == "7"


def test_a_statement_that_waits_for_a_lock_ends(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_postgres, "STATEMENT_SECONDS", 0.1)
    with opened(postgres) as engine, engine.begin() as holder:
        holder.exec_driver_sql("SELECT pg_advisory_xact_lock(7)")
        with pytest.raises(sa.exc.OperationalError, match="statement timeout"), engine.connect() as connection:
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7)")


@pytest.mark.parametrize("call", ["SELECT 1", "COMMIT"])
def test_a_server_that_is_stopped_holds_no_caller(postgres: str, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Nothing bounds this in libpq: the socket is open, and nobody answers."""
    with opened(postgres) as engine:
        with engine.connect() as connection:
            backend = connection.scalar(sa.text("SELECT pg_backend_pid()"))
            assert isinstance(backend, int) and Path(f"/proc/{backend}").owner() in ("postgres", own_user())
            monkeypatch.setattr(BoundedConnection, "deadlines", CallDeadlines(0.2))
            os.kill(backend, signal.SIGSTOP)
            try:
                with pytest.raises(sa.exc.DBAPIError):
                    connection.commit() if call == "COMMIT" else connection.exec_driver_sql(call)
            finally:
                os.kill(backend, signal.SIGCONT)
        with engine.connect() as connection:
            assert connection.scalar(sa.text("SELECT 1")) == 1, "the next caller has a connection of its own"


def test_calls_of_a_child_process_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork takes no threads along, so the child has to start its own watch."""
    monkeypatch.setattr(bounded_postgres.DEADLINES, "_seconds", 0.05)
    with bounded_postgres.DEADLINES.call(-1), warnings.catch_warnings():  # a watch is under way here
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests
        child = os.fork()
        if child == 0:
            ended = 1
            with contextlib.suppress(BaseException):
                ours, _other = socket.socketpair()
                ours.settimeout(10 * PATIENCE)
                with bounded_postgres.DEADLINES.call(ours.fileno()):
                    ended = len(ours.recv(1))
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
        (watching,) = [one for one in set(threading.enumerate()) - before if one.name == "postgres-deadlines"]
        ours.settimeout(30 * PATIENCE)
        for _ in range(2):
            with deadlines.call(ours.fileno()):
                assert ours.recv(1) == b"", "its end is seen here"
        assert watching.is_alive() and ours.fileno() >= 0


def refused(descriptor: int) -> int:
    raise OSError(errno.EMFILE, "Too many open files")
