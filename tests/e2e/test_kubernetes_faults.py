"""Faults of a real cluster, one after the other, while a dataset is generated: seen, told apart, healed; no row lost.

Each group takes some minutes. It prints the table that docs/evidence.md shows.
`KUBERNETES_FAULTS_LOG` names a file that gets every line that the runs said after each fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes_cluster import NAMESPACE, RealCluster, provider_entry, real_cluster
from support.kubernetes_engines import (
    CLAIM,
    HARDWARE,
    ON_DEMAND,
    SPOT,
    answers,
    answers_by_row,
    asked_again_by_engine,
    events,
    logging_command,
    received,
)
from support.pod_meter import PodMeter

from e2e.harness import Platform, eventually, platform
from e2e.kubernetes_faults import GROUPS, Fault, Victim
from gpu_runner.fleet_database.reporting.reports import Instance
from gpu_runner.inference.windows.concurrency_window import WindowPolicy

pytestmark = [
    pytest.mark.soak("kubernetes"),
    pytest.mark.timeout(900),
]

ROWS_PER_FAULT = {"engines": 700, "nodes": 1200, "control plane": 900}
# Room for few rows at once (32 of the longest, some 130 of those that come), so that few are in flight at a fault.
FACTS = {**HARDWARE["model_facts"], "kv_bytes_per_token": 15_000_000}
TONES = 20
PER_SLOT = WindowPolicy().per_slot  # rows that an engine has or that wait before it
CANARIES = 10  # of a fault, at most
WARM_ROWS = 40  # answers of an engine before a fault strikes it
HUGE = {**SPOT, "name": "no-room", "gpus": 8, "price_per_hour": 0.4}
GHOST = {**SPOT, "name": "no-image", "price_per_hour": 0.2, "image": "no-such-image:1"}


@dataclass(frozen=True)
class Row:
    """A line of the table. Seconds; `recovered` from the strike, or from the healing where nothing could be rented.

    `gone`: None, where the engine was used on.
    """

    fault: str
    detected: float
    recovered: float
    gone: float | None
    said: str


@dataclass
class ClusterDataset:
    """A dataset in the making on a cluster."""

    cluster: RealCluster
    platform: Platform
    meter: PodMeter
    logs: Path
    rows: list[Row] = field(default_factory=list)

    def instances(self) -> list[Instance]:
        """Every instance there ever was, oldest first."""
        with contextlib.closing(self.platform.fleet_db()) as fleet_db:
            return fleet_db.fleet(ended=True)

    def in_use(self) -> Instance | None:
        """The instance that a run holds and that is not being left, and has answered some rows."""
        held = [one for one in self.instances() if one.lease is not None and one.state == "ready"]
        free = [one for one in held if one.notice_seconds is None and not one.retiring]
        return next((one for one in free if answers(self.logs, one.name) >= WARM_ROWS), None)

    def lines(self, since: float) -> list[tuple[float, str]]:
        """What runs over batches said since then: Unix seconds and text, with the notes of their status."""
        found = []
        for run in self.platform.rows_runs():
            for entry in self.platform.instance.all_logs(run.run_id):
                if entry.timestamp >= since and entry.user_message:
                    found.append((entry.timestamp, entry.user_message))
        return sorted(found)

    def answered_since(self, moment: float, without: str) -> float | None:
        """When another engine answered its first row after that moment."""
        times = [
            float(event["t"])
            for one in self.instances()
            if one.name != without
            for event in events(self.logs, one.name)
            if event.get("outcome") in ("stop", "length") and float(event["t"]) > moment
        ]
        return min(times, default=None)


def first(check: Callable[[], Any], seconds: float, what: str) -> Any:
    """As `eventually`, with shorter steps."""
    return eventually(check, seconds, what, every=0.1)


def strike(site: ClusterDataset, fault: Fault) -> Row:
    """One fault, from a settled state to a settled state."""
    one = first(site.in_use, 120, f"an engine at work before {fault.name}")
    node = next(life.node for life in site.meter.lives.values() if life.name == one.name)
    victim = Victim(site.cluster, one.name, int(node.removeprefix("node")))
    began = time.time()
    fault.strike(victim)
    try:
        said = first(lambda: fault.found([text for _, text in site.lines(began)]), 100, f"{fault.name}: {fault.said}")
        detected = next(at for at, text in site.lines(began) if text == said)
        if not fault.waits:
            other = first(lambda: site.answered_since(began, one.name), 120, f"another engine after {fault.name}")
        time.sleep(max(0.0, fault.lasts - (time.time() - began)))
    finally:
        fault.heal(victim)
    if fault.waits:
        began_again = time.time()
        other = first(lambda: site.answered_since(began_again, ""), 180, f"an engine after {fault.name}")
        recovered = other - began_again
    else:
        recovered = other - began
    record(site, fault, began)
    if fault.keeps:
        assert one.name in site.meter.standing() and not ended(site, one.name)
        return Row(fault.name, detected - began, recovered, None, said)
    first(lambda: one.name not in site.meter.standing(), 120, f"the end of {one.name}")
    gone = next(life.ended for life in site.meter.lives.values() if life.name == one.name) or 0.0
    first(lambda: ended(site, one.name), 120, f"the end of {one.name} in the books")
    return Row(fault.name, detected - began, recovered, gone - began, said)


def ended(site: ClusterDataset, name: str) -> bool:
    return any(one.name == name and one.state == "ended" for one in site.instances())


def record(site: ClusterDataset, fault: Fault, since: float) -> None:
    """Keep what was said, for whoever looks closer."""
    if file := os.environ.get("KUBERNETES_FAULTS_LOG"):
        with Path(file).open("a") as out:
            out.write(f"\n=== {fault.name}\n")
            out.writelines(f"{at - since:7.1f}  {text}\n" for at, text in site.lines(since))
            out.writelines(f"   books  {one.name} {one.state}: {one.reason}\n" for one in site.instances())


def boots(site: ClusterDataset) -> Iterator[Row]:
    """What the first offers came to, which cannot be had: their image does not exist, no node is so large."""
    first(site.in_use, 120, "the first engine at work")
    lines = site.lines(0.0)
    for name, kind, words in (
        ("no-image", "image that does not exist", "no-such-image:1 cannot be pulled"),
        ("no-room", "no room", "no node has room"),
    ):
        asked = next(at for at, text in lines if text.startswith("renting") and name in text)
        seen, said = next((at, text) for at, text in lines if words in text)
        leased = next(at for at, text in lines if text.startswith("leased"))
        one = next(one for one in site.instances() if one.instance_type == name)
        gone = next(life.ended for life in site.meter.lives.values() if life.name == one.name) or 0.0
        yield Row(kind, seen - asked, leased - asked, gone - asked, said)


def dataset(rows: int) -> dict[str, Any]:
    """One run over everything."""
    words = [f"word {number}" for number in range(rows // TONES)]
    return {
        "name": "rhymes",
        "source": {"grid": {"word": words, "tone": [f"tone {number}" for number in range(TONES)]}},
        "prompt": {"user": "A rhyme on {{ word }}, {{ tone }}."},
        "sampling": {"temperature": 0.7, "max_tokens": 512},
        "batch_rows": 100,
        "batches_per_run": 1000,
        "hardware": {**HARDWARE, "model_facts": FACTS},
    }


@contextlib.contextmanager
def at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> Iterator[ClusterDataset]:
    """A cluster, and a dataset of one run on it."""
    with real_cluster() as cluster:
        monkeypatch.setenv("PATH", f"{cluster.kubectl.parent}{os.pathsep}{os.environ['PATH']}")
        logs = cluster.claim(CLAIM)
        cluster.show_nodes("fleet")
        entry = provider_entry(
            cluster.account("fleet", tmp_path / "kubeconfig"),
            reach="port_forward",
            model_cache_claim=CLAIM,
            command=logging_command("--speed 0.08 --output-tokens fixed:128"),
            offers=[GHOST, HUGE, SPOT, ON_DEMAND],
        )
        fleet = {"kubernetes": [entry], "idle_minutes": 0.05, "move_seconds": 3600}
        with (
            PodMeter(cluster.admin, NAMESPACE).running() as meter,
            platform(tmp_path, monkeypatch, dataset(rows), simulator=None, fleet=fleet) as site,
        ):
            site.launch_job("rhymes_refresh")
            yield ClusterDataset(cluster, site, meter, logs)


def show(rows: Sequence[Row]) -> None:
    print("\n| fault | seen after | rows flow again after | its pod gone after | what the run says |")
    print("|---|---|---|---|---|")
    for row in rows:
        gone = "it is kept" if row.gone is None else f"{row.gone:.1f} s"
        print(f"| {row.fault} | {row.detected:.1f} s | {row.recovered:.1f} s | {gone} | {row.said} |")


@pytest.mark.parametrize("group", GROUPS)
def test_each_fault_is_told_apart_and_costs_no_row(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = GROUPS[group]
    with at_work(tmp_path, monkeypatch, ROWS_PER_FAULT[group] * (len(faults) + 1)) as site:
        try:
            site.rows += boots(site)
            for fault in faults:
                site.rows.append(strike(site, fault))
                print(f"\n{replace(site.rows[-1], said=site.rows[-1].said[:80])}", flush=True)
        finally:
            show(site.rows)
        complete(site)


def only_ended_pods(cluster: RealCluster) -> bool:
    """No pod runs or waits, and each Secret is of a pod that ended by itself, which is kept for `kubectl describe`."""
    found = json.loads(cluster.run("get", "pods,secrets", "-o", "json"))["items"]
    pods = {one["metadata"]["name"]: one["status"]["phase"] for one in found if one["kind"] == "Pod"}
    secrets = {one["metadata"]["name"] for one in found if one["kind"] == "Secret"}
    return set(pods.values()) <= {"Failed"} and secrets <= pods.keys()


def complete(site: ClusterDataset) -> None:
    """The table is whole, and nothing is left. Only rows that a fault strikes in flight are asked again."""
    eventually(site.platform.store.current_published, 240, "the published table")
    eventually(lambda: all(one.state == "ended" for one in site.instances()), 90, "books without an instance")
    eventually(lambda: only_ended_pods(site.cluster), 60, "a namespace with nothing but pods that ended by themselves")
    table = site.platform.published_rows()
    rows = len(site.platform.spec["source"]["grid"]["word"]) * TONES
    assert len(table) == len({line["row_id"] for line in table}) == rows
    assert not [line for line in table if line["error"] is not None]
    with contextlib.closing(site.platform.fleet_db()) as fleet_db:
        books = fleet_db.billed().seconds
    pods, asked, answered = site.meter.total_seconds(), received(site.logs), answers_by_row(site.logs)
    often = {times: list(asked.values()).count(times) for times in sorted(set(asked.values()))}
    print(f"\nrows {rows}; asked so often: {often}; books {books:.1f} s, pods {pods:.1f} s")
    again = asked_again_by_engine(site.logs)
    print(f"asked again by the engine that had been asked: {again}")
    assert len(asked) >= rows
    slots = max(one.max_num_seqs or 0 for one in site.instances())  # an engine that is cut off answers those to nobody
    in_flight = PER_SLOT * slots
    struck = len(site.rows) + 1
    print(f"answered again {answered.total() - len(answered)}; at most {in_flight} in flight")
    assert asked.total() - len(asked) <= in_flight * struck
    assert answered.total() - len(answered) <= slots * struck
    # A row that is asked three times was in flight at two faults, on two engines that were lost. An engine that is kept
    # while it cannot be reached is asked once more.
    kept = sum(1 for fault in site.rows if fault.gone is None)
    assert sum(again.values()) <= in_flight * kept + CANARIES * struck
