"""The way to an engine behind a port-forward: what is looked at, and what becomes of the tunnel then."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.fake_kubernetes import FakeCluster, fake_cluster, pod_provider
from support.machines import ORDER, eventually, first_offer

from gpu_runner.providers.kubernetes import api as api_module
from gpu_runner.providers.kubernetes import port_forward, tunnel_health
from gpu_runner.providers.kubernetes.port_forward import Tunnel, probe_way
from gpu_runner.providers.kubernetes.provider import KubernetesProvider
from gpu_runner.providers.kubernetes.tunnel_health import Probe
from gpu_runner.reachability import Reachability

SECONDS = 20.0
POD = "/api/v1/namespaces/engines/pods/ba-1"

# Listens, says so as kubectl does, and answers each part in capitals; "hush" ends all answers, "exit" itself.
FORWARD = """
import os, socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(f"Forwarding from 127.0.0.1:{server.getsockname()[1]} -> 8000", flush=True)
kept = []
while True:
    connection, _ = server.accept()
    kept.append(connection)
    while part := connection.recv(100):
        if part == b"hush":
            server.accept()
        if part == b"exit":
            os._exit(1)
        connection.sendall(part.upper())
"""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_forward, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(port_forward, "QUIET_SECONDS", 0.3)
    monkeypatch.setattr(port_forward, "DOWN_SECONDS", 0.02)
    monkeypatch.setattr(tunnel_health, "PROBE_GAP_SECONDS", 0.02)
    monkeypatch.setattr(tunnel_health, "CALM_GAP_SECONDS", 0.05)


class Way:
    """What looks at the way come to."""

    def __init__(self) -> None:
        self.found = Probe.ANSWERED
        self.looks = 0

    def __call__(self) -> Probe:
        self.looks += 1
        return self.found


@contextmanager
def tunnel(way: Way, command: str = FORWARD) -> Iterator[Tunnel]:
    made = Tunnel([sys.executable, "-u", "-c", command], way)
    try:
        made.wait_open(SECONDS)
        yield made
    finally:
        made.close()


def connect(made: Tunnel) -> socket.socket:
    return socket.create_connection(("127.0.0.1", made.port), timeout=SECONDS)


def answers(made: Tunnel) -> bool:
    with connect(made) as connection:
        try:
            connection.sendall(b"hello")
            return connection.recv(100) == b"HELLO"
        except OSError:
            return False


def test_a_way_that_is_used_is_not_looked_at():
    way = Way()
    with tunnel(way) as made:
        assert all(answers(made) for _ in range(3))
        assert made.reachability is Reachability.OPEN
    assert way.looks == 0


def startable(flag: Path) -> str:
    """The command, which ends at once while the file is there."""
    return f"import pathlib, sys\nif pathlib.Path({str(flag)!r}).exists(): sys.exit(1)\n{FORWARD}"


def test_a_cut_off_node_ends_what_hangs_and_the_way_is_made_anew(tmp_path: Path):
    way, away = Way(), tmp_path / "away"
    with tunnel(way, startable(away)) as made, connect(made) as hanging:
        hanging.sendall(b"hush")
        eventually(lambda: way.looks > 3)
        assert made.reachability is Reachability.OPEN, "the node answers: the engine is only slow"
        way.found = Probe.SILENT
        away.touch()
        assert hanging.recv(100) == b"", "nobody waits for what never comes"
        lasting = time.monotonic() + 1.0
        while time.monotonic() < lasting:
            assert made.reachability is Reachability.LOST
            time.sleep(0.01)
        away.unlink()
        eventually(lambda: answers(made), SECONDS)
        eventually(lambda: made.reachability is Reachability.OPEN)


def test_an_api_server_that_is_away_leaves_the_engine_alone(tmp_path: Path):
    way, away = Way(), tmp_path / "away"
    way.found = Probe.AWAY
    with tunnel(way, startable(away)) as made:
        away.touch()
        with connect(made) as connection:
            connection.sendall(b"exit")
        eventually(lambda: made.reachability is Reachability.RESTORING)
        away.unlink()
        eventually(lambda: answers(made), SECONDS)
        eventually(lambda: made.reachability is Reachability.OPEN)


# one look


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    monkeypatch.setattr(api_module, "READ_SECONDS", 0.3)
    monkeypatch.setattr(port_forward, "PROBE_SECONDS", 0.3)
    with fake_cluster() as found:
        yield found


@pytest.fixture
def provider(cluster: FakeCluster, tmp_path: Path) -> KubernetesProvider:
    made = pod_provider(tmp_path, cluster)
    made.create(first_offer(made), "ba-1", ORDER)
    return made


def look(provider: KubernetesProvider) -> Probe:
    return probe_way(provider._api, POD, 8000)


def at(verb: str, fault: object) -> Callable[[str, str], object]:
    ways = {"GET": POD, "POST": f"{POD}/portforward"}
    return lambda method, path: fault if (method, path) == (verb, ways[verb]) else None


def test_a_kubelet_that_opens_a_stream_has_answered(provider: KubernetesProvider, cluster: FakeCluster):
    for _ in range(3):
        assert look(provider) is Probe.ANSWERED, "connections that became streams are used for nothing else"
    eventually(lambda: cluster.streams == 0)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (at("POST", "hang"), Probe.SILENT),
        (at("POST", 500), Probe.SILENT),  # the API server got no connection to it
        (at("POST", 400), Probe.ANSWERED),
        (at("GET", "hang"), Probe.AWAY),
        (at("GET", "cut"), Probe.AWAY),
        (at("GET", 503), Probe.AWAY),
        (at("GET", 403), Probe.ANSWERED),  # nothing is known
    ],
)
def test_what_answers_tells_what_is_away(
    provider: KubernetesProvider, cluster: FakeCluster, fault: Callable[[str, str], object], found: Probe
):
    cluster.fault = fault
    assert look(provider) is found


def test_a_pod_that_is_gone_is_for_others_to_see(provider: KubernetesProvider, cluster: FakeCluster):
    cluster.remove("ba-1")
    assert look(provider) is Probe.ANSWERED
