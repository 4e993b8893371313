"""Faults of a cluster: how each is done to the engine in use, how it is healed, and what has to be said of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from support.engine_image import engine_command
from support.kubernetes_cluster import NAMESPACE, ROLE, RealCluster
from support.timing import PATIENCE

OUTAGE_SECONDS = 60.0
PYTHON = engine_command()[2].split()[1]  # of the engine's image
QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "gpus", "namespace": NAMESPACE},
    "spec": {"hard": {"requests.nvidia.com/gpu": "0"}},
}
READ_ONLY = {**ROLE, "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]}
NODE_SILENT = r"lost: .*its pod (runs on|ends in)"
# Many small processes: the kernel ends the largest one of the container, which is the engine.
GROW = """
import os, time
while True:
    if not os.fork():
        held = bytearray(b"1") * (4 << 20)
        time.sleep(60)
    time.sleep(0.02)
"""


@dataclass(frozen=True)
class Victim:
    """The engine in use when a fault strikes: its pod, and the number of its node."""

    cluster: RealCluster
    pod: str
    node: int

    def delete(self) -> None:
        """As somebody does who knows nothing of us."""
        self.cluster.run("delete", "pod", self.pod, "--wait=false")


Act = Callable[[Victim], object]


@dataclass(frozen=True)
class Fault:
    """`said`: what a run's events have to say, as a pattern. `waits`: nothing can be rented until it is healed.

    `keeps`: the engine is used on, once it can be reached again. `lasts`: seconds until it is healed at the earliest.
    """

    name: str
    strike: Act
    said: str
    heal: Act = lambda _: None
    waits: bool = False
    keeps: bool = False
    lasts: float = 0.0

    def found(self, lines: list[str]) -> str | None:
        """The first line that says it."""
        return next((line for line in lines if re.search(self.said, line)), None)


def _no_gpus(victim: Victim) -> None:
    victim.cluster.apply(QUOTA)
    time.sleep(1.0)  # the quota's controller counts first
    victim.delete()


def _no_rights(victim: Victim) -> None:
    victim.cluster.apply(READ_ONLY)
    deadline = time.monotonic() + 10 * PATIENCE
    while victim.cluster.allows("create", "pods") and time.monotonic() < deadline:
        time.sleep(0.2)  # the API server knows it a moment later
    victim.delete()


def _drain(victim: Victim) -> None:
    words = ("--force", "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=50s")
    victim.cluster.run("drain", f"node{victim.node}", *words)


def _tool(verb: str, part: str) -> Act:
    return lambda victim: victim.cluster.tool(verb, part.format(victim.node))


ENGINES = (
    Fault("engine pod deleted", Victim.delete, "deleted by somebody else"),
    Fault(
        "engine out of memory",
        lambda victim: victim.cluster.run("exec", victim.pod, "--", PYTHON, "-c", GROW, check=False),
        "out of memory",
    ),
    Fault(
        "a GPU gone unhealthy",
        lambda victim: victim.cluster.tool("gpu-fails", str(victim.node), "GPU-0"),
        "of its node's 4 nvidia.com/gpu 3 are healthy",
        heal=lambda victim: victim.cluster.tool("gpu-fails", str(victim.node)),
    ),
    Fault(
        "node drained",
        _drain,
        "drained",
        heal=lambda victim: victim.cluster.run("uncordon", f"node{victim.node}"),
    ),
)
NODES = (
    Fault("node powered off", _tool("stop", "node{}"), NODE_SILENT, heal=_tool("start", "node{}"), lasts=30),
    Fault("node cut off", _tool("cut", "{}"), NODE_SILENT, heal=_tool("heal", "{}"), lasts=30),
    Fault("kubelet stopped", _tool("stop", "kubelet{}"), NODE_SILENT, heal=_tool("start", "kubelet{}"), lasts=30),
)
CONTROL = (
    Fault(
        "quota reached",
        _no_gpus,
        "exceeded quota",
        heal=lambda victim: victim.cluster.run("delete", "resourcequota", "gpus"),
        waits=True,
    ),
    Fault(
        "rights taken away",
        _no_rights,
        "give its account the verb create on pods",
        heal=lambda victim: victim.cluster.apply(ROLE),
        waits=True,
    ),
    Fault(
        "API server stopped",
        _tool("stop", "apiserver"),
        "API server does not answer",
        heal=_tool("start", "apiserver"),
        waits=True,
        keeps=True,
        lasts=OUTAGE_SECONDS,
    ),
)
GROUPS = {"engines": ENGINES, "nodes": NODES, "control plane": CONTROL}
