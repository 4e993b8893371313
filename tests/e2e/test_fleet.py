"""Runs that rent: simulated providers compete, and the engines' own logs and the cloud's own bill are the witnesses."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from support.machines import processes
from support.timing import PATIENCE, SOAK

from batch_assets.catalog import ledger
from e2e.harness import Platform, eventually, platform
from gpu_runner.fleet_database.accounting.bill_split import InstanceCost
from gpu_runner.fleet_database.reporting.reports import Instance
from gpu_runner.providers.simulated.cloud import SimulatedCloud
from gpu_runner.providers.simulated.config import SimulatedCloudConfig
from resources.store.dataset_store import DatasetStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLOCK = 5.0
ROWS = 4000 if SOAK else 2560  # an L40S of an 8B model gives about 150 of these rows a second at this clock
WINDOW = 4 * 256
LATE_SECONDS = 0.5 * PATIENCE


def dataset(name: str, rows: int = ROWS, **more: Any) -> dict[str, Any]:
    """Questions of 16 batches."""
    words = [f"word {number}" for number in range(rows // 20)]
    return {
        "name": name,
        "source": {"grid": {"word": words, "tone": [f"tone {number}" for number in range(20)]}},
        "prompt": {"user": f"{name}: a rhyme on {{{{ word }}}}, {{{{ tone }}}}."},
        "sampling": {"temperature": 0.7, "max_tokens": 512},
        "keep_columns": ["word", "tone"],
        "batch_rows": rows // 16,
        **more,
    }


def rows_of(site: Platform) -> int:
    """Rows of the platform's dataset."""
    return len(site.spec["source"]["grid"]["word"]) * 20


def provider(name: str, price: float, *, boot_seconds: float = 10.0, spot: bool = False) -> dict[str, Any]:
    """A simulated provider with one kind of instance; a boot takes this many seconds of the simulated clock."""
    offer = {"instance_type": f"{name}.l40s", "gpu": "L40S", "price_per_hour": price, "spot": spot}
    return {"name": name, "boot_seconds": boot_seconds, "offers": [offer]}


def fleet(*providers: Mapping[str, Any]) -> dict[str, Any]:
    """fleet.yaml: every engine writes a log of its own, and an instance stays warm for the whole test."""
    words = ["--output-tokens", "fixed:256", "--request-log", "{home}/requests-{name}.jsonl"]
    simulated = {"clock": CLOCK, "arguments": words, "providers": list(providers)}
    return {"simulated": simulated, "idle_minutes": 10, "move_seconds": 2}


def cloud(site: Platform) -> SimulatedCloud:
    """The same cloud that the runs see."""
    config = yaml.safe_load((site.home / "fleet.yaml").read_text())["simulated"]
    return SimulatedCloud(site.home, SimulatedCloudConfig.model_validate(config))


def instances(site: Platform) -> list[Instance]:
    """Every instance there ever was, oldest first."""
    with contextlib.closing(site.fleet_db()) as fleet_db:
        return fleet_db.fleet(ended=True)


def costs(site: Platform) -> dict[str, InstanceCost]:
    """What the fleet's database says that each instance cost."""
    with contextlib.closing(site.fleet_db()) as fleet_db:
        return {cost.name: cost for cost in fleet_db.costs()}


def engine_log(site: Platform, name: str) -> list[dict[str, Any]]:
    """What the engine of an instance wrote down by itself."""
    file = site.home / f"requests-{name}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def received(site: Platform) -> Counter[str]:
    """How often each prompt arrived at any engine."""
    return Counter(
        event["prompt"]
        for one in instances(site)
        for event in engine_log(site, one.name)
        if event["event"] == "received"
    )


def answered(site: Platform, name: str) -> set[str]:
    """Prompts that the engine of an instance answered to the end."""
    return {event["prompt"] for event in engine_log(site, name) if event.get("outcome") in ("stop", "length")}


def in_the_middle(site: Platform, share: float = 0.25, seconds: float = 120) -> str:
    """Wait until a run of the dataset has answered this share of the rows; returns the run's id."""

    def far_enough() -> str | None:
        with contextlib.closing(site.fleet_db()) as fleet_db:
            beats = [beat for beat in fleet_db.runs() if beat.dataset == site.name]
        return next((beat.run_id for beat in beats if beat.rows_done > share * rows_of(site)), None)

    run_id: str = eventually(far_enough, seconds, f"{share:.0%} of the rows")
    return run_id


def notes(site: Platform) -> str:
    """What the living runs of the dataset say that they are doing."""
    with contextlib.closing(site.fleet_db()) as fleet_db:
        return "; ".join(beat.note for beat in fleet_db.runs() if beat.dataset == site.name)


def whole_table(site: Platform, seconds: float = 240) -> list[dict[str, Any]]:
    """The published table: every row once, each with a completion."""
    eventually(site.store.current_published, seconds, "the published table")
    table = site.published_rows()
    assert len(table) == rows_of(site)
    assert len({(line["word"], line["tone"]) for line in table}) == rows_of(site)
    assert {line["error"] for line in table} == {None}
    return table


def settled(site: Platform, name: str, seconds: float = 60) -> Instance:
    """Wait until the provider has confirmed the end of an instance."""

    def ended() -> Instance | None:
        return next((one for one in instances(site) if one.name == name and one.state == "ended"), None)

    found: Instance = eventually(ended, seconds, f"the end of {name}")
    return found


def compare_bills(site: Platform, tolerance: float = 0.01) -> None:
    """The cloud's own bill against the fleet's database, for each instance and in all.

    Instances that still run are compared at two slightly different moments, and the end of one that is taken away is
    seen a moment later: so much of an instance's price is left beside the relative tolerance.
    """
    booked = {name: cost.usd.total for name, cost in costs(site).items()}
    bills = {bill.name: bill for bill in cloud(site).meter().bills()}
    assert booked.keys() == bills.keys()
    print({name: f"{abs(booked[name] - bill.usd) / bill.usd:.3%}" for name, bill in bills.items()})
    allowed = {
        name: tolerance * bill.usd + LATE_SECONDS * bill.clock * bill.price_per_hour / 3600
        for name, bill in bills.items()
    }
    assert not [name for name, bill in bills.items() if abs(booked[name] - bill.usd) > allowed[name]]
    total = sum(bill.usd for bill in bills.values())
    assert abs(sum(booked.values()) - total) < max(tolerance * total, max(allowed.values()))


def batch_usd(site: Platform) -> float:
    """Sum of what the catalog says that the batches cost."""
    records = site.instance.fetch_materializations(ledger.rows_key(site.name), limit=1000).records
    usd = {
        record.partition_key: record.asset_materialization.metadata["usd"].value
        for record in records
        if record.asset_materialization is not None
    }
    assert len(usd) == 16
    return float(sum(usd.values()))


def observed(site: Platform) -> dict[str, list[dict[str, Any]]]:
    """What the catalog says of the dataset's leases and moves, by decision, oldest first; each has its one sentence."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in reversed(site.instance.fetch_observations(ledger.rows_key(site.name), limit=1000).records):
        seen = record.asset_observation
        assert seen is not None and seen.description
        said = {key: value.value for key, value in seen.metadata.items()}
        assert str(said["reason"]) in seen.description
        found.setdefault(str(said["decision"]), []).append(said)
    return found


def command(*words: str) -> tuple[int, str, str]:
    """`batch-assets` with these words: status, output, errors."""
    done = subprocess.run(
        [sys.executable, "-m", "batch_assets.cli.main", *words], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.soak("fleet")
def test_a_price_drop_in_the_middle_moves_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three = fleet(provider("sim-north", 1.2), provider("sim-east", 1.0), provider("sim-west", 1.5))
    with platform(tmp_path, monkeypatch, dataset("rhymes", 4 * ROWS), simulator=None, fleet=three) as site:
        site.launch_job("rhymes_refresh")
        run_id = in_the_middle(site, 0.1)  # early: much is left for the second one when the first has ended
        (first,) = instances(site)
        assert first.provider == "sim-east"
        cloud(site).change("sim-north", "sim-north.l40s", price_per_hour=0.3)

        table = whole_table(site)
        assert settled(site, first.name).reason
        assert [one.provider for one in instances(site)] == ["sim-east", "sim-north"]
        second = instances(site)[1]
        assert second.price_per_hour == 0.3
        assert {line["run_id"] for line in table} == {run_id}
        assert {line["provider"] for line in table} == {"sim-east", "sim-north"}
        assert set(received(site).values()) == {1}
        assert len(received(site)) == 4 * ROWS

        # The dearer one was let go as soon as its last rows were answered, not when the run ended.
        first_end = next(bill.ended_at for bill in cloud(site).meter().bills() if bill.name == first.name)
        assert first_end is not None
        last_answer = max(event["t"] for event in engine_log(site, first.name))
        assert first_end - last_answer < 5 * PATIENCE
        assert first_end < max(event["t"] for event in engine_log(site, second.name))

        decisions = observed(site)
        (said,) = decisions["move"]
        assert said["instance"] == first.name
        assert (said["from_usd_per_hour"], said["to_usd_per_hour"]) == (1.0, 0.3)
        assert said["saved_usd"] > 0
        assert "move and save" in said["reason"]
        assert "\n" not in said["reason"]
        assert [one["instance"] for one in decisions["lease"]] == [first.name, second.name]

        compare_bills(site)
        booked = costs(site)
        useful = sum(cost.usd.useful for cost in booked.values())
        assert sum(line["usd"] for line in table) == pytest.approx(useful, rel=0.01)
        assert batch_usd(site) == pytest.approx(useful, rel=0.01)
        assert sum(one["useful_usd"] for one in decisions["give back"]) == pytest.approx(useful, rel=0.01)
        assert sum(cost.rows for cost in booked.values()) == 4 * ROWS
        print(f"saved {said['saved_usd']:.4f} $; useful {useful:.4f} $; {said['reason']}")


@pytest.mark.soak("fleet")
def test_one_boot_for_one_model_and_no_reuse_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, model in (("second", "test-model"), ("third", "other-model")):
        (tmp_path / "defs" / name).mkdir(parents=True)
        attributes = {**dataset(name), "model": model}
        document = {"type": "batch_assets.GeneratedDataset", "attributes": attributes}
        (tmp_path / "defs" / name / "defs.yaml").write_text(yaml.safe_dump(document))
    with platform(
        tmp_path,
        monkeypatch,
        dataset("first", 3 * ROWS, batches_per_run=8),
        simulator=None,
        fleet=fleet(provider("sim-a", 1.0)),
    ) as first:
        second, third = (
            replace(first, name=name, spec=dataset(name), store=DatasetStore(first.store.objects, name))
            for name in ("second", "third")
        )
        tables = []
        for site in (first, second, third):
            site.launch_job(f"{site.name}_refresh")
            if site is first:
                in_the_middle(site)
                eventually(
                    lambda: "already holds all instances" in notes(first), 30, "a spare run that says why it waits"
                )
                refused, _, why = command("fleet", "down")
                assert refused == 1
                assert re.search("[12] runs are under way", why)  # the first may have ended before the command began
            tables.append(whole_table(site))

        shared, other = instances(first)
        assert (shared.model, shared.state, shared.epoch) == ("test-model", "ready", 3)
        assert (other.model, other.state, other.epoch) == ("other-model", "ready", 1)
        assert [{line["model"] for line in table} for table in tables] == [
            {"test-model (simulated)"},
            {"test-model (simulated)"},
            {"other-model (simulated)"},
        ]
        assert len(answered(first, shared.name)) == 4 * ROWS
        assert len(answered(first, other.name)) == ROWS
        assert set(received(first).values()) == {1}
        (boot, other_boot) = (call for call in cloud(first).calls("create"))
        assert (boot.name, other_boot.name) == (shared.name, other.name)
        compare_bills(first)

        the_command_shows(shared, other)
        machines = [one.machine_id for one in (shared, other)]
        assert all(processes(machine) for machine in machines if machine)
        status, output, errors = command("fleet", "down")
        assert (status, errors) == (0, "")
        assert shared.name in output and other.name in output
        assert json.loads(command("fleet", "--json")[1])["instances"] == []
        assert all(bill.ended_at is not None for bill in cloud(first).meter().bills())
        eventually(lambda: not any(processes(machine) for machine in machines if machine), 15, "the ends of all hosts")
        compare_bills(first)


def the_command_shows(shared: Instance, other: Instance) -> None:
    """`batch-assets fleet --json` after three tables of two models."""
    status, output, _ = command("fleet", "--json")
    assert status == 0
    shown = json.loads(output)
    assert shown.keys() == {"instances", "costs", "total", "clocks"}
    assert [one["name"] for one in shown["instances"]] == [shared.name, other.name]
    assert shown["instances"][0].keys() == INSTANCE_KEYS
    assert shown["instances"][0]["state"] == "ready" and shown["instances"][0]["idle_seconds"] > 0
    (line,) = shown["costs"]
    assert line.keys() == COST_KEYS
    assert (line["provider"], line["gpu"], line["instances"], line["rows"]) == ("sim-a", "1x L40S", 2, 5 * ROWS)
    assert shown["total"]["usd"] == pytest.approx(
        sum(shown["total"][f"{part}_usd"] for part in ("useful", "booting", "idle", "wasted"))
    )


INSTANCE_KEYS = {
    *("name", "provider", "region", "instance_type", "gpu", "gpus", "spot", "model", "state", "reason", "run"),
    *("dataset", "epoch", "draining_runs", "age_seconds", "lease_seconds", "idle_seconds", "notice_seconds"),
    *("usd_per_hour", "usd"),
}
COST_KEYS = {
    *("provider", "instance_type", "gpu", "spot", "instances", "rows", "usd", "usd_per_1k_rows"),
    *("useful_usd", "booting_usd", "idle_usd", "wasted_usd"),
}


@pytest.mark.soak("fleet")
def test_a_spot_instance_taken_away_costs_the_rows_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spot = fleet(provider("sim-spot", 0.5, spot=True), provider("sim-sure", 0.8))
    with platform(
        tmp_path, monkeypatch, dataset("rhymes", 3 * ROWS, hardware={"spot": True}), simulator=None, fleet=spot
    ) as site:
        site.launch_job("rhymes_refresh")
        run_id = in_the_middle(site)
        (lost,) = instances(site)
        assert cloud(site).interrupt("sim-spot", lost.name)
        table = whole_table(site)
        assert {line["run_id"] for line in table} == {run_id}
        assert {line["tries"] for line in table} == {1}

        first, second = instances(site)
        assert second.provider == "sim-sure"  # an offer that was just lost counts for twice its price
        assert settled(site, first.name).machine_id
        again = {prompt for prompt, times in received(site).items() if times > 1}
        assert 0 < len(again) <= WINDOW
        assert max(received(site).values()) == 2
        # Answers written by the engine whose last bytes went down with it, and answers whose lines in its log did.
        assert len(again & answered(site, first.name)) < 100
        assert len(set(received(site)) - answered(site, first.name) - answered(site, second.name)) < 100
        compare_bills(site)
        print(f"asked again: {len(again)} rows")


@pytest.mark.soak("fleet")
def test_a_spot_instance_with_a_notice_is_drained_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spot = fleet(provider("sim-spot", 0.5, spot=True))
    with platform(
        tmp_path, monkeypatch, dataset("rhymes", 4 * ROWS, hardware={"spot": True}), simulator=None, fleet=spot
    ) as site:
        site.launch_job("rhymes_refresh")
        in_the_middle(site)
        (leaving,) = instances(site)
        given_at = time.time()
        assert cloud(site).interrupt("sim-spot", leaving.name, notice_seconds=40)
        whole_table(site)
        first, second = instances(site)
        assert set(received(site).values()) == {1}
        assert answered(site, first.name) and answered(site, second.name)
        end = next(bill.ended_at for bill in cloud(site).meter().bills() if bill.name == first.name)
        assert end is not None
        print(f"left after {end - given_at:.1f} s of 40 s notice")
        settled(site, first.name)
        assert costs(site)[first.name].usd.wasted == pytest.approx(0, abs=1e-6)
        compare_bills(site)


@pytest.mark.soak("fleet")
def test_a_cancel_while_an_instance_boots_ends_run_and_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = fleet(provider("sim-slow", 1.0, boot_seconds=300 * CLOCK))
    with platform(tmp_path, monkeypatch, dataset("rhymes"), simulator=None, fleet=slow) as site:
        site.launch_job("rhymes_refresh")
        booting: Instance = eventually(
            lambda: next((one for one in instances(site) if one.state == "booting"), None), 60, "an instance that boots"
        )
        assert booting.machine_id is not None and processes(booting.machine_id)
        (run,) = site.rows_runs()
        asked_at = time.monotonic()
        site.terminate(run.run_id)
        assert site.finish(run.run_id, 60) == dg.DagsterRunStatus.CANCELED
        canceled = time.monotonic() - asked_at
        settled(site, booting.name, 15)
        eventually(lambda: not processes(booting.machine_id or ""), 15, "the end of its host")
        ended = time.monotonic() - asked_at
        print(f"canceled after {canceled:.1f} s, nothing left after {ended:.1f} s")
        assert canceled < 20 * PATIENCE
        time.sleep(8)  # a launcher's tick and a sweep later
        assert len(instances(site)) == 1
        assert len(site.rows_runs()) == 1
        (bill,) = cloud(site).meter().bills()
        assert bill.ended_at is not None and bill.reason == "terminated"
        cost = costs(site)[booting.name]
        assert cost.usd.wasted == pytest.approx(cost.usd.total)
        late = LATE_SECONDS * bill.clock * bill.price_per_hour / 3600
        assert cost.usd.total == pytest.approx(bill.usd, rel=0.1, abs=late)  # it lived for some seconds only
