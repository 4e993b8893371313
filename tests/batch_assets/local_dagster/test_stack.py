"""One Dagster per home, its tables made once, and no process that outlives its owner."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fake_provider import FakeProvider
from support.fleet_databases import OFFER, intended

from batch_assets import settings
from batch_assets.local_dagster.home import LOGS, StackAddress, StackError, ensure_storage, prepare_home, running_stack
from batch_assets.local_dagster.stack import Stack, _Child, port_taken
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.base import EngineOrder
from resources.fleet.resource import GpuFleet


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    return prepare_home()


def test_a_new_home_gets_our_settings_and_keeps_what_is_written_there(home: Path):
    settings = home / "dagster.yaml"
    assert "QueuedRunCoordinator" in settings.read_text()
    settings.write_text("telemetry: {enabled: false}\n")
    assert prepare_home() == home
    assert settings.read_text() == "telemetry: {enabled: false}\n"


def test_locks_that_we_have_on_other_databases_of_the_home_stay(home: Path):
    """Without them, whoever closes the database next takes itself for the last and deletes its log beside us."""
    with contextlib.closing(sqlite3.connect(home / "cloud.db", isolation_level=None)) as ours:
        ours.execute("PRAGMA journal_mode=WAL")
        ours.execute("CREATE TABLE machines (name)")
        ensure_storage(home)
        other = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM machines'); c.close()"
        subprocess.run([sys.executable, "-c", other, home / "cloud.db"], check=True)
        assert (home / "cloud.db-wal").exists()


def test_a_home_is_held_by_whoever_has_its_lock(home: Path):
    assert running_stack(home) is None
    with (home / "stack.lock").open("w") as lock:
        lock.write(json.dumps({"url": "http://127.0.0.1:1", "port": 1, "pid": 7}))
        lock.flush()
        assert running_stack(home) is None
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert running_stack(home) == StackAddress("http://127.0.0.1:1", 1, 7)
        with pytest.raises(StackError, match="already runs"), Stack(home):
            raise AssertionError("a second stack has started")
    assert running_stack(home) is None


def test_dagster_uploads_nothing_that_our_processes_write(home: Path):
    child = _Child("probe", [sys.executable, "-c", "import os; print(os.environ['DAGSTER_DISABLE_TELEMETRY'])"])
    Stack(home)._start(child)
    assert child.process is not None and child.process.stdin is not None
    child.process.wait(timeout=30)
    child.process.stdin.close()
    assert (home / LOGS / "probe.log").read_text() == "1\n"
    assert not (home / "logs").exists()


def test_a_port_is_taken_while_somebody_listens_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_taken(port)
    assert not port_taken(port)


@pytest.mark.slow
def test_a_new_home_may_be_opened_by_several_processes_at_once(home: Path):
    code = (
        "from batch_assets.local_dagster.stack import ensure_storage, prepare_home; import dagster as dg\n"
        "home = prepare_home(); ensure_storage(home)\n"
        "with dg.DagsterInstance.from_config(str(home)) as instance: print(instance.get_runs_count())\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["0\n"] * 3


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_rented_far_away_ends_with_the_stack_unless_others_share_the_fleet(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
):
    if shared:
        monkeypatch.setenv(settings.FLEET_DB, f"sqlite:///{tmp_path}/shared.db")
    far = FakeProvider(time.time, name="far")
    monkeypatch.setattr(GpuFleet, "providers", lambda *_: {far.name: far})
    prepare_home()
    with contextlib.closing(FleetDatabase(settings.fleet_database())) as fleet_db:
        name = fleet_db.new_name()
        fleet_db.begin_run("run", "d", "00000", "00009")
        lease = intended(fleet_db, name, offer=dataclasses.replace(OFFER, provider="far"))
        assert lease is not None
        fleet_db.created(lease, far.create(OFFER, name, EngineOrder("m", "chat")))
        stack = Stack(home)
        stack._end_instances()
        assert far.machines[name].alive == shared
        assert len(fleet_db.fleet()) == shared


def test_a_machine_that_does_not_end_with_the_stack_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    far = FakeProvider(time.time, name="far")
    monkeypatch.setattr(GpuFleet, "providers", lambda *_: {far.name: far})
    monkeypatch.setattr("resources.fleet.resource.DOWN_ROUNDS", 1)
    prepare_home()
    with contextlib.closing(FleetDatabase(settings.fleet_database())) as fleet_db:
        name = fleet_db.new_name()
        fleet_db.begin_run("run", "d", "00000", "00009")
        lease = intended(fleet_db, name, offer=dataclasses.replace(OFFER, provider="far"))
        assert lease is not None
        fleet_db.created(lease, far.create(OFFER, name, EngineOrder("m", "chat")))
        far.fault = lambda call: "unclear"
        monkeypatch.setattr(time, "sleep", lambda _: None)
        Stack(home)._end_instances()
    assert f"still rented, `batch-assets fleet down` ends them: {name}" in capsys.readouterr().err
