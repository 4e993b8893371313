"""Engines in pods whose own logs outlive them: each writes into a volume that lies on this computer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.engine_image import engine_command

CLAIM = "models"
GPUS = 4  # of one node
SPOT: dict[str, Any] = {
    "name": "spot",
    "gpu": "H100",
    "gpus": GPUS,
    "gpu_memory_gib": 80,
    "price_per_hour": 4.0,
    "spot": True,
    "boot_seconds": 5,
    "cpu": "50m",
    "memory": "192Mi",
    "capacity_wait_seconds": 3,
    "node_selector": {"pool": "spot"},
}
ON_DEMAND = {**SPOT, "name": "on-demand", "price_per_hour": 10.0, "spot": False, "node_selector": {"pool": "on-demand"}}
HARDWARE = {"spot": True, "model_facts": {"weights_gib": 15.0, "active_billions": 8.0, "kv_bytes_per_token": 131_072}}


def logging_command(options: str) -> list[str]:
    """The simulator's command line; its log lies in the claim, under the pod's name."""
    return engine_command(f"{options} --request-log /cache/huggingface/$HOSTNAME.jsonl")


def events(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """What the engine of a pod wrote down by itself, as far as it has written."""
    file = folder / f"{name}.jsonl"
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    yield from (json.loads(line) for line in lines if line.endswith("}"))


def answers(folder: Path, name: str) -> int:
    """Rows that the engine of a pod answered to the end."""
    return sum(event.get("outcome") in ("stop", "length") for event in events(folder, name))


def received(folder: Path) -> Counter[str]:
    """How often each prompt arrived at any engine; canaries too."""
    names = [file.stem for file in folder.glob("*.jsonl")]
    return Counter(event["prompt"] for name in names for event in events(folder, name) if event["event"] == "received")


def asked_again_by_engine(folder: Path) -> dict[str, int]:
    """Engines that received a prompt more than once, with how many requests that was too much; canaries too."""
    found = {}
    for name in (file.stem for file in folder.glob("*.jsonl")):
        asked = Counter(event["prompt"] for event in events(folder, name) if event["event"] == "received")
        found[name] = sum(times - 1 for times in asked.values())
    return {name: times for name, times in found.items() if times}


def answers_by_row(folder: Path) -> Counter[str]:
    """How often each prompt was answered to the end by any engine; canaries too."""
    names = [file.stem for file in folder.glob("*.jsonl")]
    done = (event for name in names for event in events(folder, name) if event.get("outcome") in ("stop", "length"))
    return Counter(event["prompt"] for event in done)
