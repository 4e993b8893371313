"""Private names of Dagster are there, and do what `batch_assets/dagster_internals/code_server.py` takes them for."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import dagster as dg
import pytest
from dagster._cli import job
from dagster._grpc import server as dagster_server
from dagster._grpc.constants import GrpcServerCommand

from batch_assets.dagster_internals import code_server


class Waiting:
    """A server that takes its arguments once."""

    def __init__(self) -> None:
        self.got: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
        if self.got:
            return False
        self.got.append((arguments, environment))
        return True


def test_a_waiting_server_gets_the_arguments_of_dagsters_and_later_ones_are_started_with_them(
    monkeypatch: pytest.MonkeyPatch,
):
    started: list[Sequence[str]] = []
    original = dagster_server.get_python_environment_entry_point
    monkeypatch.setattr(dagster_server, "get_python_environment_entry_point", original)
    monkeypatch.setattr(dagster_server, "open_ipc_subprocess", lambda parts, **_: started.append(parts))
    monkeypatch.setattr(dagster_server, "wait_for_grpc_server", lambda *_, **__: None)
    first = Waiting()
    code_server.serve_definitions_by("some.module", first)
    for _ in range(2):
        dagster_server.open_server_process(None, None, "/tmp/socket", GrpcServerCommand.API_GRPC)
    ((arguments, environment),) = first.got
    assert arguments[:2] == ["api", "grpc"]
    assert arguments[arguments.index("--socket") + 1] == "/tmp/socket"
    assert "PATH" in environment
    assert started == [[sys.executable, "-m", "some.module", *arguments]]


def test_the_server_starts_its_run_workers_by_the_context_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dagster_server.DagsterApiServer, "__init__", dagster_server.DagsterApiServer.__init__)
    context = multiprocessing.get_context("forkserver")
    code_server.start_workers_from(context)
    ended = threading.Event()
    executor = dagster_server.FuturesAwareThreadPoolExecutor(max_workers=1)
    log = dagster_server.logging.getLogger("test")
    server = dagster_server.DagsterApiServer(ended, log, executor, lazy_load_user_code=True)
    assert server._mp_ctx is context
    ended.set()
    server.cleanup()
    executor.shutdown()


@pytest.fixture
def dead_socket(tmp_path: Path) -> Path:
    """A socket that nobody listens at any more."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "code-server"))
    return tmp_path / "code-server"


def test_a_code_server_that_is_not_there_does_not_answer(tmp_path: Path, dead_socket: Path):
    assert not code_server.answers(tmp_path / "none")
    assert not code_server.answers(dead_socket)


def test_a_launch_says_that_the_code_server_is_not_reached(tmp_path: Path, dead_socket: Path):
    workspace = tmp_path / "workspace.yaml"
    location = {"grpc_server": {"socket": str(dead_socket), "location_name": "here"}}
    workspace.write_text(json.dumps({"load_from": [location]}))
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        with pytest.raises(code_server.NotReached, match="Could not reach user code server"):
            code_server.launch(instance, workspace, ("here", "__repository__"), "d_refresh", {}, {})
        with pytest.raises(code_server.LocationError, match="not in the workspace"):
            code_server.launch(instance, workspace, ("there", "__repository__"), "d_refresh", {}, {})


def test_a_run_is_created_as_dagsters_own_command_does_it():
    assert list(inspect.signature(job._create_run).parameters)[:6] == [
        "instance", "code_location", "remote_repo", "remote_job", "run_config", "tags",
    ]  # fmt: skip


IN_USE = (
    "import sys\n"
    "from batch_assets.dagster_internals import code_server\n"
    "from dagster.components.core import package_entry\n"
    "for _ in range(2):\n"
    "    code_server.leave_out_component_types()\n"
    "print(*(key.to_typename() for key in package_entry.discover_entry_point_package_objects()))\n"
    "assert 'dagster_aws' not in sys.modules\n"
)


@pytest.mark.slow
def test_components_in_use_have_their_names_and_no_others_are_imported():
    done = subprocess.run([sys.executable, "-c", IN_USE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "dagster.DefsFolderComponent" in done.stdout.split()
