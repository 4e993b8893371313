"""Our start of Dagster's daemon: the stock daemons, and less to do for them while nothing happens."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster._core.definitions.freshness import FreshnessState
from dagster._core.loader import LoadingContextForTest
from dagster._daemon import controller
from dagster._daemon.freshness import FreshnessDaemon
from support.documents import REPOSITORY
from support.timing import PATIENCE

from batch_assets.dagster_internals.daemon import (
    ALIVE_FILE,
    READ_AGAIN_SECONDS,
    PolicyFreshnessDaemon,
    daemons_of,
    show_life,
)
from batch_assets.local_dagster.home import ensure_storage, prepare_home

WITH, WITHOUT = dg.AssetKey("with"), dg.AssetKey("without")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    return prepare_home()


@pytest.fixture
def instance(home: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.from_config(str(home)) as found:
        yield found


def test_all_daemons_of_the_instance_are_there(instance: dg.DagsterInstance):
    own = {daemon.daemon_type() for daemon in daemons_of(instance)}
    assert own == set(instance.get_required_daemon_types()) >= {"SENSOR", "MONITORING", "FRESHNESS_DAEMON"}
    assert not any(type(daemon) is FreshnessDaemon for daemon in daemons_of(instance))


class Context(LoadingContextForTest):
    """Two assets, one of them with a policy."""

    @property
    def asset_graph(self) -> object:
        policy = dg.FreshnessPolicy.time_window(fail_window=datetime.timedelta(days=1))
        specs = [dg.AssetSpec(WITH, freshness_policy=policy), dg.AssetSpec(WITHOUT)]
        return dg.Definitions(assets=specs).resolve_asset_graph()


@pytest.mark.parametrize(
    ("daemon", "states"),
    [
        (PolicyFreshnessDaemon, {WITH: FreshnessState.PASS}),
        (FreshnessDaemon, {WITH: FreshnessState.PASS, WITHOUT: FreshnessState.NOT_APPLICABLE}),
    ],
)
def test_freshness_is_evaluated_for_assets_with_a_policy(
    instance: dg.DagsterInstance, daemon: type[FreshnessDaemon], states: dict[dg.AssetKey, FreshnessState]
):
    instance.report_runless_asset_event(dg.AssetMaterialization(WITH))
    process = SimpleNamespace(create_request_context=lambda: Context(instance))
    list(daemon().run_iteration(process))  # type: ignore[arg-type]
    found = instance.get_freshness_state_records([WITH, WITHOUT])
    assert {key: record.freshness_state for key, record in found.items()} == states


def test_dagsters_pages_know_without_an_event_where_freshness_does_not_apply(instance: dg.DagsterInstance):
    from dagster._core.definitions.asset_health.asset_freshness_health import get_freshness_status_and_metadata
    from dagster._core.definitions.asset_health.asset_health import AssetHealthStatus

    found = asyncio.run(get_freshness_status_and_metadata(Context(instance), WITHOUT))  # type: ignore[arg-type]
    assert found == (AssetHealthStatus.NOT_APPLICABLE, None)


def test_the_definitions_are_read_again_seldom(monkeypatch: pytest.MonkeyPatch):
    """By the constant of Dagster's that `serve` sets."""
    monkeypatch.setattr(controller, "RELOAD_WORKSPACE_INTERVAL", READ_AGAIN_SECONDS)
    read: list[str] = []
    context = SimpleNamespace(refresh_workspace=lambda: read.append(""))
    daemon = SimpleNamespace(_grpc_server_registry=None, _workspace_process_context=context)
    look = controller.DagsterDaemonController.check_workspace_freshness
    look(daemon, time.time() - READ_AGAIN_SECONDS / 2)  # type: ignore[arg-type]
    assert read == []
    look(daemon, time.time() - READ_AGAIN_SECONDS - 1)  # type: ignore[arg-type]
    assert read == [""]


def healthy(home: Path) -> bool:
    """By the image's health check."""
    command = [sys.executable, str(REPOSITORY / "deploy" / "image" / "healthy"), "daemon"]
    return subprocess.run(command, env={"DAGSTER_HOME": str(home)}, timeout=30 * PATIENCE).returncode == 0


def test_a_daemon_whose_loop_has_not_turned_for_long_is_not_healthy(tmp_path: Path):
    file = tmp_path / ALIVE_FILE
    assert not healthy(tmp_path)
    file.touch()
    assert healthy(tmp_path)
    os.utime(file, (time.time() - 301, time.time() - 301))
    assert not healthy(tmp_path)


def test_the_loop_turns_only_while_its_threads_live(tmp_path: Path):
    file = tmp_path / ALIVE_FILE
    failing: list[Exception] = []

    def check() -> None:
        if failing:
            raise failing[0]

    running = SimpleNamespace(check_daemon_threads=check)
    show_life(running, file)  # type: ignore[arg-type]
    for error in (None, RuntimeError()):
        os.utime(file, (0, 0))
        if error is not None:
            failing.append(error)
            with pytest.raises(RuntimeError):
                running.check_daemon_threads()
        else:
            running.check_daemon_threads()
        assert (file.stat().st_mtime > 0) == (error is None)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_daemon_beats_and_ends_when_it_is_told_to(home: Path, instance: dg.DagsterInstance):
    ensure_storage(home)
    workspace = home / "workspace.yaml"
    workspace.write_text(json.dumps({"load_from": []}))
    command = [sys.executable, "-m", "batch_assets.dagster_internals.daemon", "--workspace", str(workspace)]
    with subprocess.Popen(command, env=os.environ, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as daemon:
        try:
            deadline = time.monotonic() + 30 * PATIENCE
            while set(instance.get_daemon_heartbeats()) != set(instance.get_required_daemon_types()):
                assert daemon.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert all(status.healthy for status in instance.get_daemon_statuses().values())
            assert healthy(home)
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(timeout=30 * PATIENCE) == 0
        finally:
            daemon.kill()
