"""Why an engine that was lost does not answer, as far as its cluster says: one sentence. Pure."""

from __future__ import annotations

from gpu_runner.providers.base import Machine, ProviderError, ProviderUnclear
from gpu_runner.providers.kubernetes.node_health import NodeState
from gpu_runner.providers.kubernetes.pod_status import PodState

LONGEST = 400


def describe_loss(pod: PodState | None, machine: Machine | None, node: NodeState | None, tunnel: str) -> str:
    """Describe the loss of a pod that could be asked for; None: there is none. `tunnel`: the last trouble of the way
    to it.
    """
    if pod is None or machine is None:
        return "there is no such pod any more"
    if machine.state == "ended":
        return f"its pod has ended: {machine.describe_end()}"[:LONGEST]
    if machine.notice_seconds is not None:
        return f"its pod ends in {machine.notice_seconds:.0f} s: {machine.detail}"[:LONGEST]
    parts = [f"its pod runs on {pod.node}" + (", not ready" if pod.unready else "")]
    if node is None:
        parts.append("of that node nothing is known (no right to read nodes)")
    else:
        parts.append(node.trouble() or "that node reports itself ready; a lost one is noticed after about 40 s")
    if tunnel:
        parts.append(f"kubectl says: {tunnel}")
    return "; ".join(parts)[:LONGEST]


def describe_silence(error: ProviderError | ProviderUnclear, *, tunnelled: bool) -> str:
    """Describe the silence of a pod that cannot be asked for. `tunnelled`: engines are reached through the API
    server.
    """
    if isinstance(error, ProviderUnclear):
        ways = ", and the way to its engines leads through it" if tunnelled else ""
        return f"{error}{ways}; what has become of the engine shows when it answers again"[:LONGEST]
    return str(error)[:LONGEST]
