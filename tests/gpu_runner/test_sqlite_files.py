"""Files that others are about to use, too."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from batch_assets.api.database.service_database import Records
from batch_assets.api.online.queues.group_commit import GroupCommit
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.machine_host.registry import MachineRegistry
from gpu_runner.sqlite_files import use_write_ahead_log


@contextlib.contextmanager
def written(path: Path) -> Iterator[sqlite3.Connection]:
    """Another connection is in the middle of a write, which ends with the context."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other
        if other.in_transaction:
            other.execute("COMMIT")


def test_the_switch_waits_for_who_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with written(path) as other, contextlib.closing(sqlite3.connect(path, timeout=5.0)) as ours:
        pauses: list[float] = []

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                other.execute("COMMIT")

        use_write_ahead_log(ours.execute, 1.0, clock=lambda: sum(pauses), sleep=sleep)
        assert len(pauses) == 3
        assert ours.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_the_switch_gives_up_after_its_time(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with written(path), contextlib.closing(sqlite3.connect(path, timeout=5.0)) as ours:
        pauses: list[float] = []
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            use_write_ahead_log(ours.execute, 0.1, clock=lambda: sum(pauses), sleep=pauses.append)
        assert 0.1 <= sum(pauses) < 0.2


def test_another_trouble_is_said_at_once(tmp_path: Path) -> None:
    (path := tmp_path / "x.db").write_bytes(b"no database, but long enough to be taken for one" * 100)
    with (
        contextlib.closing(sqlite3.connect(path)) as ours,
        pytest.raises(sqlite3.DatabaseError, match="not a database"),
    ):
        use_write_ahead_log(ours.execute, 60.0, sleep=lambda _: pytest.fail("waited"))


def fleet(path: Path) -> None:
    FleetDatabase(f"sqlite:///{path}").close()


def records(path: Path) -> None:
    opened = Records(f"sqlite:///{path}")
    opened.engine.dispose()


def queue(path: Path) -> None:
    GroupCommit(path, "CREATE TABLE IF NOT EXISTS calls (x)")._open().close()


def registry(path: Path) -> None:
    MachineRegistry(path.parent).connection().close()


@pytest.mark.parametrize("opened", [fleet, records, queue, registry])
def test_whoever_opens_a_file_that_is_being_written_waits(tmp_path: Path, opened: Callable[[Path], Any]) -> None:
    path = tmp_path / "cloud.db"
    with written(path) as other:
        end = threading.Timer(0.2, other.execute, ["COMMIT"])
        end.start()
        opened(path)
        end.join()
    with contextlib.closing(sa.create_engine(f"sqlite:///{path}").connect()) as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
