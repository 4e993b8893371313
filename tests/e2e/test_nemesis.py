"""Random faults on a whole platform: every row once, nothing overwritten, no write of a zombie, a true bill."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.timing import PATIENCE, SOAK

from e2e.customer import Customer
from e2e.harness import Platform, eventually, platform
from e2e.nemesis import TTL, Nemesis
from e2e.witness import (
    check_rows,
    compare_bills,
    ended_under_lease,
    fence_broken,
    left_running,
    overdue,
    watch_fence,
)
from gpu_runner.providers.simulated.cloud import SimulatedCloud
from gpu_runner.providers.simulated.config import SimulatedCloudConfig
from gpu_runner.providers.simulated.meter import CloudMeter

pytestmark = [pytest.mark.soak("losses"), pytest.mark.timeout(2400 if SOAK else 600)]

# The same seed commits the same faults in the same order: BATCH_ASSETS_TEST_SEED=…
SEED = int(os.environ.get("BATCH_ASSETS_TEST_SEED") or random.randrange(1_000_000))
FAULTS, PAUSE, RAGE_SECONDS = (300, 3.9, 1600) if SOAK else (20, 2.2, 240 * PATIENCE)

CLOCK = 5.0
IDLE_SECONDS = 6.0
SWEEP_SECONDS = 10.0  # a sensor of 5 s that the daemon looks at every 5 s
# What a sweep may be late: daemon and code server are themselves killed and started again (15 s without a sweep), and
# a terminate that fails or has no effect waits for the next sweep. Two cores do all of this.
SLACK_SECONDS = 20.0 if SOAK else 20.0 * PATIENCE
# Between the end of a machine and the moment at which it is booked: of each machine, where few of them live for long.
WAY_SECONDS = 0.0 if SOAK else 0.5 * PATIENCE
INSTANCES = 3
BATCH_ROWS, BATCHES_PER_RUN = 25, 16
RUN_ROWS = BATCH_ROWS * BATCHES_PER_RUN

SPEC: dict[str, Any] = {
    "name": "rhymes",
    "prompt": {"user": "A rhyme on the number {{ number }}."},
    "sampling": {"temperature": 0.7, "max_tokens": 256},
    "id": "id",
    "keep_columns": ["number"],
    "batch_rows": BATCH_ROWS,
    "batches_per_run": BATCHES_PER_RUN,
    "objective": "fastest",
    "max_instances": INSTANCES,
    # A model with so large a KV cache that an L40S works on 27 rows at once: 15 of them a second at this clock.
    "hardware": {
        "spot": True,
        "model_facts": {"weights_gib": 15, "active_billions": 8, "kv_bytes_per_token": 12e6, "context": 1024},
    },
}


def provider(name: str, price: float, **more: Any) -> dict[str, Any]:
    """On demand and spot; a boot takes a real second."""
    offers = [
        {"instance_type": f"{name}.l40s", "gpu": "L40S", "price_per_hour": price},
        {"instance_type": f"{name}.spot", "gpu": "L40S", "price_per_hour": round(price * 0.8, 2), "spot": True},
    ]
    return {"name": name, "boot_seconds": CLOCK, "offers": offers, **more}


def fleet(seed: int) -> dict[str, Any]:
    """Three providers; the last one's list is a second late. Each engine writes a log of its own."""
    providers = [provider("sim-a", 1.0), provider("sim-b", 1.1), provider("sim-c", 1.2, list_lag_seconds=1.0)]
    words = ["--output-tokens", "fixed:128", "--request-log", "{home}/{name}.requests"]
    cloud = {"clock": CLOCK, "seed": seed, "arguments": words, "providers": providers}
    return {"simulated": cloud, "idle_minutes": IDLE_SECONDS / 60, "move_seconds": 10}


def published(site: Platform, rows: int) -> bool:
    """The table that readers see holds all rows."""
    version = site.store.current_published()
    snapshot = site.store.current_snapshot()
    if version is None or snapshot is None or site.store.manifest(snapshot).rows != rows:
        return False
    with contextlib.suppress(FileNotFoundError):
        return len(site.published_rows()) == rows
    return False


def test_random_faults_lose_nothing_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"\nnemesis: BATCH_ASSETS_TEST_SEED={SEED}, {FAULTS} faults", flush=True)
    monkeypatch.setattr("batch_assets.local_dagster.stack.RESTARTS", 1000)
    monkeypatch.setenv("BATCH_ASSETS_CAPACITY_SECONDS", "3")
    source = tmp_path / "source.jsonl"
    source.touch()
    spec = {**SPEC, "source": {"path": str(source)}}
    home = tmp_path / "home"
    home.mkdir()
    watch_fence(home / "fleet.db")
    config = fleet(SEED)
    cloud = SimulatedCloud(home, SimulatedCloudConfig.model_validate(config["simulated"]))
    began = time.time()
    with platform(tmp_path, monkeypatch, spec, simulator=None, fleet=config) as site:
        customer = Customer(site, source, 4 * RUN_ROWS, 3 * RUN_ROWS if SOAK else RUN_ROWS)
        demon = Nemesis(site, cloud, customer, SEED, FAULTS, PAUSE)
        with contextlib.closing(demon):
            customer.grow()
            demon.rage(RAGE_SECONDS)
            calm_at = time.time()
            demon.rest(lambda: published(site, customer.rows), 300 * PATIENCE)
            whole = time.time()
        table = site.published_rows()
        assert sorted(line["row_id"] for line in table) == sorted(f"r{number:06d}" for number in range(customer.rows))
        rows = check_rows(site.store, home)

    print(demon.table())
    print(
        f"{rows.rows} rows, {len(rows.dead)} dead, {rows.asked_again} answered again, {rows.unlogged} not in an "
        f"engine's log; {len(demon.objects.seen)} objects; {customer.requests} requests; faults over "
        f"{calm_at - began:.0f} s, complete {whole - calm_at:.0f} s later; {demon.tried} writes tried for zombies"
    )
    assert demon.objects.wrong == []
    assert rows.rows == customer.rows
    assert rows.dead == []
    ends = [fault for fault in demon.faults if "killed" in fault.kind or "spot" in fault.kind]
    assert rows.unlogged <= 20 * len(ends)  # an engine writes its log five times a second
    assert fence_broken(home / "fleet.db") == []
    assert demon.tried > 0 and demon.accepted == []

    # The stack has waited until they were done. A process is still there for a moment after its last act.
    eventually(lambda: not left_running(home), 5, "no process of a machine is left")
    bills = CloudMeter(home).bills()
    assert ended_under_lease(home, bills) == []
    late = overdue(home, bills, IDLE_SECONDS)
    worst = sorted(late, key=lambda name: -late[name])[:5]
    print("billed after its last holder and its idle time: " + ", ".join(f"{late[name]:.1f} s" for name in worst))
    assert max(late.values()) <= TTL + SWEEP_SECONDS + SLACK_SECONDS
    billed, booked, machines = compare_bills(home)
    print(f"{machines} machines: billed {billed:.5f} $, booked {booked:.5f} $, {abs(booked - billed) / billed:.3%} off")
    per_second = billed / sum(bill.seconds for bill in bills)
    assert booked == pytest.approx(billed, rel=0.01, abs=0.01 * billed + machines * WAY_SECONDS * CLOCK * per_second)
