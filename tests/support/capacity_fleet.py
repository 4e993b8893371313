"""A dataset, a fleet.yaml and instances for tests of what decides on capacity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from gpu_runner.cost_meter import LeaseUsage
from gpu_runner.fleet_database.database import Lease
from gpu_runner.offers.offer import Offer
from support.sensor_dataset import SensorDataset

HOUR = 3600.0


ROWS = 120_000  # as the snapshot says; a thousand of its batches are not needed to plan for them


SPEC = {
    "name": "d",
    "source": {"path": "questions.jsonl"},
    "prompt": {"user": "{{ question }}"},
    "model": "Qwen/Qwen3-8B",
    "sampling": {"max_tokens": 512},
    "deadline": "6h",
}


def fleet_yaml(folder: Path, *, clock: float = 1.0, most: int = 20, price: float = 0.8, **more: Any) -> None:
    """Two providers of one instance type each; the second is dearer."""
    offers = [
        {"instance_type": f"{name}.l40s", "gpu": "L40S", "price_per_hour": dollars, "capacity": capacity}
        for name, dollars, capacity in (("one", price, 3), ("two", 1.5 * price, 8))
    ]
    providers = [
        {"name": f"sim-{name}", "boot_seconds": 120, "offers": [offer]}
        for name, offer in zip(("one", "two"), offers, strict=True)
    ]
    config = {"simulated": {"clock": clock, "providers": providers}, "max_instances": most, **more}
    (folder / "fleet.yaml").write_text(yaml.safe_dump(config))


def instance(
    site: SensorDataset, name: str, *, of: str = "sim-one", dataset: str = "d", seconds: float = 0.0, tokens: int = 0
) -> Lease:
    """A ready instance that a run of the dataset holds; it did so many tokens in so many useful seconds."""
    offered = offer(site, of)
    lease = site.fleet_db.intend(
        name, offered, clock=1.0, engine_key="key", model="Qwen/Qwen3-8B", run_id=f"run of {name}", dataset=dataset,
        ttl=600, limit=None,
    )  # fmt: skip
    assert lease is not None
    assert site.fleet_db.created(lease, name) and site.fleet_db.ready(lease, "http://127.0.0.1:1", 256)
    if tokens:
        site.fleet_db.renew(lease, 600, LeaseUsage(seconds, 0.0, tokens // 30, tokens // 3, tokens - tokens // 3))
    return lease


def offer(site: SensorDataset, name: str = "sim-one", **more: Any) -> Offer:
    """As the provider of this name offers it."""
    (found,) = site.fleet.providers(site.fleet.config())[name].offers()
    return replace(found, **more)
