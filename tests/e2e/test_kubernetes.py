"""A dataset on a real Kubernetes, from outside of it: by a kubeconfig and kubectl, on two node pools."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes_cluster import NAMESPACE, RealCluster, provider_entry, real_cluster
from support.kubernetes_engines import CLAIM, HARDWARE, ON_DEMAND, SPOT, answers, logging_command, received
from support.pod_meter import PodMeter

from e2e.harness import Platform, eventually, platform
from gpu_runner.fleet_database.reporting.reports import Instance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROWS, BATCHES = 4800, 16
APART_SECONDS = 3.0  # of a pod: times of Kubernetes are whole seconds, and a busy kubelet tells its end late


def dataset() -> dict[str, Any]:
    """Questions of 16 batches, one run."""
    words = [f"word {number}" for number in range(ROWS // 20)]
    return {
        "name": "rhymes",
        "source": {"grid": {"word": words, "tone": [f"tone {number}" for number in range(20)]}},
        "prompt": {"user": "A rhyme on {{ word }}, {{ tone }}."},
        "sampling": {"temperature": 0.7, "max_tokens": 512},
        "batch_rows": ROWS // BATCHES,
        "hardware": HARDWARE,
    }


def instances(site: Platform) -> list[Instance]:
    """Every instance there ever was, oldest first."""
    with contextlib.closing(site.fleet_db()) as fleet_db:
        return fleet_db.fleet(ended=True)


def billed_seconds(site: Platform) -> float:
    """What the fleet's books say that all instances were there for."""
    with contextlib.closing(site.fleet_db()) as fleet_db:
        return fleet_db.billed().seconds


def nothing_left(cluster: RealCluster) -> bool:
    """No pod, and no Secret of an engine."""
    return not cluster.run("get", "pods,secrets", "-o", "name").strip()


def engine_at_work(site: Platform, logs: Path, rows: int) -> str | None:
    """The name of an instance whose engine has answered so many rows for a run that holds it."""
    held = [one.name for one in instances(site) if one.lease is not None and one.state == "ready"]
    return next((name for name in held if answers(logs, name) >= rows), None)


def test_a_dataset_from_outside_the_cluster_moves_from_a_spot_pool_that_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with real_cluster() as cluster:
        monkeypatch.setenv("PATH", f"{cluster.kubectl.parent}{os.pathsep}{os.environ['PATH']}")
        logs = cluster.claim(CLAIM)
        entry = provider_entry(
            cluster.account("fleet", tmp_path / "kubeconfig"),
            reach="port_forward",
            model_cache_claim=CLAIM,
            command=logging_command("--speed 2 --output-tokens fixed:256"),
            offers=[SPOT, ON_DEMAND],
        )
        fleet = {"kubernetes": [entry], "idle_minutes": 0.05, "move_seconds": 600}
        with (
            PodMeter(cluster.admin, NAMESPACE).running() as meter,
            platform(tmp_path, monkeypatch, dataset(), simulator=None, fleet=fleet) as site,
        ):
            site.launch_job("rhymes_refresh")
            first = eventually(lambda: engine_at_work(site, logs, 300), 90, "300 answers of the first engine")
            cluster.run("drain", "node2", "--force", "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=50s")
            eventually(site.store.current_published, 150, "the published table")
            eventually(lambda: all(one.state == "ended" for one in instances(site)), 60, "books without an instance")
            eventually(lambda: nothing_left(cluster), 30, "an empty namespace")
            table, used = site.published_rows(), instances(site)
            books, pods, asked = billed_seconds(site), meter.total_seconds(), received(logs)
            done = {one.name: (one.instance_type, one.reason, answers(logs, one.name)) for one in used}
        print(f"\n{done}\nbooks {books:.1f} s, pods {pods:.1f} s; most often asked {max(asked.values())} times")
        assert len(table) == len({line["row_id"] for line in table}) == ROWS
        assert not [line for line in table if line["error"] is not None]
        assert (used[0].name, used[0].instance_type, used[-1].instance_type) == (first, "spot", "on-demand")
        assert min(done[used[0].name][2], done[used[-1].name][2]) >= 300 and len(asked) >= ROWS
        assert {life.name for life in meter.lives.values()} == {one.name for one in used}
        assert abs(books - pods) <= 0.01 * pods + APART_SECONDS * len(used)
        assert max(asked.values()) <= 2
