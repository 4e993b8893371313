"""A registry that another process writes to is told apart from one that cannot be written."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpu_runner.providers.machine_host.daemon import _insist, _is_locked


def test_a_file_that_another_connection_writes_to_is_locked(tmp_path: Path):
    file = tmp_path / "hosts.db"
    with closing(sqlite3.connect(file, timeout=0)) as other, closing(sqlite3.connect(file, timeout=0)) as own:
        other.execute("CREATE TABLE t (x)")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError) as busy:
            own.execute("INSERT INTO t VALUES (1)")
        assert _is_locked(busy.value)


def test_a_name_that_says_locked_is_no_lock_and_ends_the_trying(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tries = []

    def write() -> None:
        tries.append(1)
        with closing(sqlite3.connect(tmp_path / "hosts.db")) as connection:
            connection.execute("SELECT * FROM locked")

    _insist(write)
    assert len(tries) == 1
    assert "no such table: locked" in capsys.readouterr().err
