"""Engines as child processes: ready, not ready, and gone with all that they started, whatever became of their owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gpu_runner.providers.engine_process import EngineProcess, EngineStartError, free_port, wait_reachable
from resources.fleet.resource import FleetConfig, FleetConfigError

# An engine with a worker of its own in the same group, as vLLM has: killing the first alone would leave the second.
SERVER_CODE = """
import http.server, subprocess, sys
subprocess.Popen(["sleep", "300"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SERVER = [sys.executable, "-c", SERVER_CODE, "{port}", "{model}"]


def engine(tmp_path: Path, command: list[str]) -> EngineProcess:
    return EngineProcess(command, model="m/1", log=tmp_path / "logs" / "engine.log")


def test_an_engine_is_ready_when_it_answers_and_ends_with_its_workers(tmp_path: Path):
    process = engine(tmp_path, SERVER)
    process.wait_ready(20)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) == 3  # the inner guard, the server, its worker
    assert below[1].cmdline()[-2:] == [str(process.port), "m/1"]
    process.close()
    assert not process.alive()
    assert not [child for child in below if child.is_running()]


def test_an_engine_that_ends_or_never_answers_is_said_with_its_log(tmp_path: Path):
    ended = engine(tmp_path, ["bash", "-c", "echo out of memory; exit 3"])
    with pytest.raises(EngineStartError, match=r"ended with status 3 .*engine\.log"):
        ended.wait_ready(20)
    ended.close()
    assert "out of memory" in (tmp_path / "logs" / "engine.log").read_text()
    deaf = engine(tmp_path, ["sleep", "300"])
    with pytest.raises(EngineStartError, match=r"not ready after 0 s.*engine\.log"):
        deaf.wait_ready(0.3)
    deaf.close()
    assert not deaf.alive()


def test_an_engine_ends_with_its_killed_owner(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path; from gpu_runner.providers.engine_process import EngineProcess\n"
        f"process = EngineProcess({SERVER!r}, model='m', log=Path({str(tmp_path)!r}) / 'log')\n"
        "process.wait_ready(20); print(process.pid, flush=True); time.sleep(300)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    guard = psutil.Process(int(owner.stdout.readline()))
    family = [guard, *guard.children(recursive=True)]
    assert len(family) == 4  # the guard is two
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert not psutil.wait_procs(family, timeout=10)[1]


def test_an_address_is_waited_for_and_one_where_nobody_answers_is_named():
    port = free_port()
    with pytest.raises(EngineStartError, match=rf"nobody answers at 127\.0\.0\.1:{port} .*ConnectionRefusedError"):
        wait_reachable(f"http://127.0.0.1:{port}", 0)
    with socket.socket() as server:

        def listens_after_a_while(seconds: float) -> None:
            server.bind(("127.0.0.1", port))
            server.listen()

        wait_reachable(f"http://127.0.0.1:{port}/v1", 5, listens_after_a_while)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engines: [{name: a, kind: gpu}]", r"engines\.0\.kind: .*'endpoint' or 'batch_api', found 'gpu'"),
        ("engines: [{name: a, kind: llama_cpp, models: [m]}]", "gguf: expected a file for kind llama_cpp"),
        ("engines: [{name: a, kind: process, gguf: m.gguf}]", "gguf: expected a file for kind llama_cpp, and for no"),
        ("engines: [{name: a, kind: llama_cpp, gguf: m.gguf}]", "models: expected the name of the model in the gguf"),
        ("engines: [{name: a, kind: process, threads: 2}]", "threads, context: expected for kind llama_cpp only"),
        (
            "engines: [{name: a, kind: simulated, speeed: 3}]",
            r"speeed: expected a known key, found 'speeed'\. Did you mean 'speed'\? \(line 1\)",
        ),
        ("engines: [{name: a, kind: endpoint}]", "url: expected for kind endpoint or batch_api"),
        ("engines: [{name: a, kind: endpoint, url: 'localhost:8000'}]", "url: expected a URL like http://host:8000"),
        ("engines: [{name: a, kind: endpoint, url: 'http://me:hidden@host'}]", "found a user or password in it"),
        ("engines: [{name: a, kind: simulated}, {name: a, kind: simulated}]", "found twice: a"),
        ("engines: [{name: a, kind: process, environment: {KEY: [hidden]}}]", r"environment\.KEY: .*found list"),
        ("max_instances: many", r"max_instances: expected a whole number, found 'many' \(text\) \(line 1\)"),
        ("idle_minutes: -1", r"idle_minutes: expected at least 0.0, found -1 \(line 1\)"),
        (
            "idle_minuts: 3\nmax_instances: 0\n",
            r"2 problems\n  .*Did you mean 'idle_minutes'\? \(line 1\)\n  .*\(line 2\)",
        ),
        ("engines:\n- {kind: simulated}", r"engines\.0\.name: expected a value, found nothing \(line 2\)"),
        ("engines: [{name: a, kind: endpont}]", "Did you mean 'endpoint'"),
        ("engines: []", "engines: expected at least one of engines, simulated, local, kubernetes"),
        ("", "found NoneType"),
        ("engines: [", "expected YAML"),
    ],
)
def test_a_wrong_fleet_yaml_is_named_with_file_key_and_what_was_found(tmp_path: Path, text: str, said: str):
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    with pytest.raises(FleetConfigError, match=said) as raised:
        FleetConfig.load(file)
    assert str(raised.value).startswith(f"{file}: ")
    assert "hidden" not in str(raised.value)


@pytest.mark.slow
def test_closing_an_engine_ends_it_also_when_it_ignores_being_asked(tmp_path: Path):
    process = engine(tmp_path, ["bash", "-c", "trap '' TERM; sleep 300 & while true; do sleep 0.1; done"])
    time.sleep(0.5)
    process.close()
    assert not process.alive()
