"""The capacity sensor's command on a real Kubernetes: a plan of three instances is three engine pods, each at work."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.engine_image import engine_command
from support.kubernetes_cluster import OFFER, provider_entry, real_cluster

from batch_assets.tags import INSTANCES_TAG, OBJECTIVE_TAG
from e2e.harness import Platform, eventually, platform

pytestmark = [
    pytest.mark.soak("kubernetes"),
    pytest.mark.timeout(600),
]

ROWS, INSTANCES = 1200, 3
ENGINE = "--weights-ms 20 --max-num-seqs 8"  # some seven rows per second and engine


def dataset() -> dict[str, Any]:
    """Ranges of 200 rows: fewer than an engine's window, so each is in flight as a whole and handed on at once."""
    things = [f"thing {number}" for number in range(ROWS // 4)]
    return {
        "name": "things",
        "source": {"grid": {"thing": things, "request": ["Describe", "Sell", "Draw", "Sing"]}},
        "prompt": {"user": "{{ request }} {{ thing }}."},
        "model": "Qwen/Qwen3-0.6B",
        "sampling": {"max_tokens": 60},
        "batch_rows": 20,
        "batches_per_run": 10,
    }


def at_work(site: Platform) -> int:
    """Instances that answer, and on which a run of the dataset has rows."""
    with contextlib.closing(site.fleet_db()) as fleet_db:
        return sum(one.state == "ready" and one.works_for == "things" for one in fleet_db.fleet())


def test_a_plan_of_three_instances_is_three_engine_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_ASSETS_CAPACITY_SECONDS", "5")
    with real_cluster() as cluster:
        monkeypatch.setenv("PATH", f"{cluster.kubectl.parent}{os.pathsep}{os.environ['PATH']}")
        entry = provider_entry(
            cluster.account("fleet", tmp_path / "kubeconfig"),
            reach="port_forward",
            command=engine_command(ENGINE),
            offers=[OFFER],
        )
        fleet = {"kubernetes": [entry], "idle_minutes": 0.2, "max_instances": 8}
        with platform(tmp_path, monkeypatch, dataset(), simulator=None, fleet=fleet) as site:
            began = time.monotonic()
            site.launch_job("things_refresh", {OBJECTIVE_TAG: "fastest", INSTANCES_TAG: str(INSTANCES)})
            for number in (1, INSTANCES):
                eventually(lambda number=number: at_work(site) == number, 180, f"{number} instances at work")
                print(f"{time.monotonic() - began:6.1f} s  {number} at work", flush=True)
            pods = cluster.run("get", "pods", "-o", "jsonpath={.items[*].status.phase}").split()
            assert pods == ["Running"] * INSTANCES
            eventually(site.store.current_published, 240, "the published table")
            print(f"{time.monotonic() - began:6.1f} s  published", flush=True)
            table = site.published_rows()
            assert len(table) == len({line["row_id"] for line in table}) == ROWS
            assert not [line for line in table if line["error"] is not None]
            eventually(lambda: not cluster.run("get", "pods,secrets", "-o", "name").strip(), 90, "an empty namespace")
