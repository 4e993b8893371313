"""What is said of machines when a run is given up: which stays, until when, for how much."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC
from typing import Any

import pytest

from batch_assets.request_status.machines_left import machines_left
from gpu_runner.fleet_database.database import Instance, Lease

NOW = 1_700_000_000.0  # 22:13:20 UTC
READY = Instance(
    name="ba-1-x", provider="runpod", region="", instance_type="H100", gpu="H100", gpus=1, gpu_memory_gib=80.0,
    spot=True, price_per_hour=2.40, clock=1.0, boot_seconds=60.0, engine_key="k", model="m", max_num_seqs=None,
    state="ready", endpoint=None, machine_id=None, reason="", run_id="r", dataset="d", payer="d", seen=True,
    end_unproven=False, retiring=False, age=900.0, ready_age=800.0, ended_age=None,
    missing_seconds=None, notice_seconds=None, idle_seconds=30.0, lease=None, lease_age=None, draining=(), epoch=1,
    usd=0.6,
)  # fmt: skip


def said(*instances: Instance, ends: bool = False) -> list[str]:
    options: dict[str, Any] = {"idle_seconds": 600.0, "now": NOW, "zone": UTC}
    return machines_left(instances, "d", ends_now=lambda one: ends, **options)


def test_an_idle_machine_stays_until_a_moment_and_for_a_price() -> None:
    assert said(READY) == [
        "ba-1-x (runpod H100 spot, 2.40 $/h) stays for the next run until 22:22:50, for 9 min 30 s and 0.38 $ at most; "
        "`batch-assets fleet down` ends it now"
    ]


@pytest.mark.parametrize(
    ("changes", "ends", "end"),
    [
        ({}, True, "ends with this command"),
        ({"state": "ending"}, True, "is being ended"),
        ({"retiring": True}, False, "is ended within half a minute"),
        ({"state": "booting", "idle_seconds": None}, False, "is ended within half a minute"),
    ],
)
def test_a_machine_that_ends_is_said(changes: dict[str, Any], ends: bool, end: str) -> None:
    (line,) = said(replace(READY, **changes), ends=ends)
    assert line == f"ba-1-x (runpod H100 spot, 2.40 $/h) {end}"


def test_machines_of_others_are_not_told() -> None:
    used = replace(READY, lease=Lease("ba-1-x", 2, "other", "other"), idle_seconds=None)
    assert said(replace(READY, payer="other"), used, replace(READY, state="ended")) == []
