"""How a pod of RunPod is asked for, and what RunPod says of pods. Pure.

Field names are those of version 1 of the REST API. An answer is outside data: an entry that is no pod is left out.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from gpu_runner.providers.cloud.engine_container import ENGINE_PORT
from gpu_runner.providers.runpod.config import RunPodConfig, RunPodGpuConfig

SLOTS_VARIABLE = "ENGINE_MAX_NUM_SEQS"
_ID = re.compile(r"[a-zA-Z0-9]{1,40}")
_ADDRESS = re.compile(r"[0-9a-fA-F.:]{3,45}")


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod. `created_at`: Unix seconds, 0 where RunPod does not say. `usd_per_hour`: what it costs now."""

    name: str
    id: str
    created_at: float
    ended: bool
    address: str | None
    port: int | None
    usd_per_hour: float | None
    max_num_seqs: int | None


@functools.cache
def pod_watch_text() -> str:
    """What runs in the pod beside the engine: the dead-man's switch."""
    return resources.files("gpu_runner.providers.runpod").joinpath("pod_watch.py").read_text(encoding="utf-8")


def pod_order(
    config: RunPodConfig,
    gpu: RunPodGpuConfig,
    name: str,
    image: str,
    command: tuple[str, ...],
    environment: Mapping[str, str],
    max_num_seqs: int | None,
) -> dict[str, Any]:
    """Body of `POST /pods`. `command`: of the engine. Names repeat at RunPod: see
    `gpu_runner.providers.cloud.ordered_once`.
    """
    slots = {SLOTS_VARIABLE: str(max_num_seqs)} if max_num_seqs else {}
    order: dict[str, Any] = {
        "name": name,
        "imageName": image,
        "gpuTypeIds": [gpu.gpu_type],
        "gpuCount": gpu.gpus,
        "computeType": "GPU",
        "cloudType": config.cloud,
        "interruptible": False,
        "containerDiskInGb": config.disk_gib,
        "volumeInGb": 0,
        "ports": [f"{ENGINE_PORT}/{'http' if config.reach == 'proxy' else 'tcp'}"],
        "dockerEntrypoint": ["python3", "-c", pod_watch_text()],
        "dockerStartCmd": [f"{config.orphan_minutes * 60:g}", str(ENGINE_PORT), *command],
        "env": {**environment, **slots},
    }
    if config.data_centers:
        order["dataCenterIds"] = list(config.data_centers)
    if config.reach == "tcp":
        order["supportPublicIp"] = True
    return order


def read_pod(found: object) -> Pod | None:
    """An entry of `GET /pods`, or the answer to `POST /pods`."""
    if not isinstance(found, dict):
        return None
    name, pod_id = found.get("name"), found.get("id")
    if not (isinstance(name, str) and isinstance(pod_id, str) and _ID.fullmatch(pod_id)):
        return None
    ports, variables = found.get("portMappings"), found.get("env")
    address = found.get("publicIp")
    return Pod(
        name=name,
        id=pod_id,
        created_at=_moment(found.get("createdAt") or found.get("lastStartedAt")),
        ended=found.get("desiredStatus") == "TERMINATED",
        address=address if isinstance(address, str) and _ADDRESS.fullmatch(address) else None,
        port=_whole(ports.get(str(ENGINE_PORT)), 65_535) if isinstance(ports, dict) else None,
        usd_per_hour=_usd(found.get("costPerHr")),
        max_num_seqs=_whole(variables.get(SLOTS_VARIABLE), 100_000) if isinstance(variables, dict) else None,
    )


def _moment(text: object) -> float:
    """Unix seconds of `2026-11-22T08:00:00Z`, also as RunPod's `2026-11-22 08:00:00.000 +0000 UTC`."""
    if not isinstance(text, str):
        return 0.0
    plain = text.strip().removesuffix(" UTC").replace(" +0000", "+00:00")
    try:
        found = dt.datetime.fromisoformat(plain)
    except ValueError:
        return 0.0
    return (found if found.tzinfo else found.replace(tzinfo=dt.UTC)).timestamp()


def _whole(given: object, most: int) -> int | None:
    text = str(given) if isinstance(given, int | str) and not isinstance(given, bool) else ""
    return int(text) if re.fullmatch(r"[1-9]\d{0,6}", text) and int(text) <= most else None


def _usd(given: object) -> float | None:
    try:
        found = float(given) if isinstance(given, int | float | str) else -1.0
    except ValueError:
        return None
    return found if 0 <= found < 100_000 else None
