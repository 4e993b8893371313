"""The service's database: each of its calls ends, and callers know that from a wrong question."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from support.fleet_databases import postgres_url

from batch_assets.api.database import service_database
from batch_assets.api.database.service_database import Records, is_records_trouble
from gpu_runner import bounded_postgres
from gpu_runner.bounded_postgres import BoundedConnection, CallDeadlines


@pytest.fixture
def postgres(server: str) -> Iterator[str]:
    with postgres_url(server) as url:
        yield url


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
    upgrade = service_database.upgrade

    def upgraded(connection: sa.Connection) -> None:
        said.append(str(connection.scalar(sa.text("SHOW statement_timeout"))))
        assert not isinstance(connection.connection.driver_connection, BoundedConnection)
        upgrade(connection)

    monkeypatch.setattr(service_database, "upgrade", upgraded)
    Records(postgres).close()
    assert said == ["0"]


def test_a_server_that_is_stopped_is_trouble_that_may_pass(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Records(postgres)) as records:
        with records.engine.connect() as connection:
            backend = connection.scalar(sa.text("SELECT pg_backend_pid()"))
            assert isinstance(backend, int)
            monkeypatch.setattr(BoundedConnection, "deadlines", CallDeadlines(0.2))
            os.kill(backend, signal.SIGSTOP)
            try:
                with pytest.raises(sa.exc.DBAPIError) as refused:
                    connection.exec_driver_sql("SELECT 1")
            finally:
                os.kill(backend, signal.SIGCONT)
        assert is_records_trouble(refused.value)
        assert records.answers(), "the next caller has a connection of its own"
