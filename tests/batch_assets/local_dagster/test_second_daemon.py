"""One daemon on one database: `run` and `ui` refuse to start a second, and `status` knows the first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._daemon.types import DaemonHeartbeat

from batch_assets.dagster_internals.daemon_heartbeats import INTERVAL_SECONDS, last_heartbeat
from batch_assets.local_dagster.home import (
    StackError,
    dagster_runs,
    ensure_storage,
    prepare_home,
    refuse_second_daemon,
    storage_is_shared,
)

# A storage of somebody's own: for us a database server, for the test a file.
SHARED = """
storage:
  custom: {{module: dagster._core.storage.sqlite_storage, class: DagsterSqliteStorage, config: {{base_dir: {folder}}}}}
"""


@pytest.fixture(params=["shared", "own"])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    found = prepare_home()
    if request.param == "shared":
        (found / "dagster.yaml").write_text(SHARED.format(folder=tmp_path / "shared"))
    ensure_storage(found)
    return found


@pytest.fixture
def instance(home: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.from_config(str(home)) as found:
        yield found


def beat(instance: dg.DagsterInstance, when: float) -> None:
    instance.add_daemon_heartbeat(DaemonHeartbeat(when, "SENSOR", "another computer's"))


def test_the_newest_heartbeat_of_any_daemon_counts(instance: dg.DagsterInstance):
    assert last_heartbeat(instance) is None
    beat(instance, 1000.0)
    instance.add_daemon_heartbeat(DaemonHeartbeat(1030.0, "SCHEDULER", None))
    assert last_heartbeat(instance) == 1030.0


def test_a_daemon_at_work_on_a_shared_database_is_not_given_a_second(home: Path, instance: dg.DagsterInstance):
    beat(instance, 1000.0)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 20:
            beat(instance, 1030.0)

    if storage_is_shared(home):
        with pytest.raises(StackError, match=r"expected no other Dagster on the database .* found a daemon at work"):
            refuse_second_daemon(home, sleep=sleep, now=lambda: 1010.0)
        assert len(waited) == 20
    else:  # a home of our own has one stack by its lock; a heartbeat there is an ended one's
        refuse_second_daemon(home, sleep=sleep, now=lambda: 1010.0)
        assert not waited


@pytest.mark.slow
def test_a_daemon_that_has_ended_is_no_hindrance(home: Path, instance: dg.DagsterInstance):
    waited: list[float] = []
    refuse_second_daemon(home, sleep=waited.append)
    assert not waited
    beat(instance, 1000.0)
    refuse_second_daemon(home, sleep=waited.append, now=lambda: 1010.0)  # killed a moment ago
    assert sum(waited) == (1.5 * INTERVAL_SECONDS if storage_is_shared(home) else 0)
    waited.clear()
    refuse_second_daemon(home, sleep=waited.append, now=lambda: 1200.0)
    assert not waited


def test_status_knows_a_daemon_elsewhere_by_its_heartbeats(home: Path, instance: dg.DagsterInstance):
    assert not dagster_runs(home, instance)
    beat(instance, time.time() - 4 * INTERVAL_SECONDS)
    assert not dagster_runs(home, instance)
    beat(instance, time.time())
    assert dagster_runs(home, instance) == storage_is_shared(home)


def test_a_dagster_yaml_that_cannot_be_read_is_left_to_dagster(home: Path):
    (home / "dagster.yaml").write_text("storage: [")
    assert not storage_is_shared(home)
