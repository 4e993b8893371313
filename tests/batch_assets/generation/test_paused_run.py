"""A run whose budget is reached in the middle: it drains, pays no more than it may, waits, and goes on when it may."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.machines import ended_machines
from support.snapshots import MODEL, questions, write_snapshot
from support.timing import PATIENCE

from batch_assets.generation.engine_supervisor import EngineSupervisor, StepKind
from batch_assets.generation.loop_thread import LoopThread
from batch_assets.generation.range_run import Intent, RangeRun, RunIdentity, plan_range
from gpu_runner.fleet_database.accounting.request_budget import END_SECONDS
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.fleet_database.wait_reason import WaitKind
from gpu_runner.providers.simulated.cloud import SimulatedCloud
from gpu_runner.providers.simulated.config import SimulatedCloudConfig
from resources.fleet.client import FleetClient
from resources.fleet.fleet_config import FleetConfig
from resources.fleet.leased_engine import Requirement
from resources.objects.opening import open_objects
from resources.pricing.market import Market
from resources.store.dataset_store import DatasetStore

TTL, ROWS = 6.0, 8000
# Of 256 slots, which do 300 rows a second: about 13 s of rent go by until the run drains, with half the rows done, and
# the drain ends 8 s before the budget would be reached.
OFFER = {"instance_type": "l40s", "gpu": "L40S", "price_per_hour": 3.6}
CLOCK = 3.0
PRICE = CLOCK * 3.6 / 3600  # of a real second
TO_THE_END = PRICE * (TTL + END_SECONDS)


def waits_for_the_budget(heartbeat: Heartbeat) -> bool:
    wait = heartbeat.activity.wait
    return wait is not None and wait.kind is WaitKind.BUDGET


@pytest.mark.slow
def test_a_run_drains_before_its_budget_is_reached_waits_visibly_and_goes_on_when_it_is_raised(tmp_path: Path):
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_machines(tmp_path))
        fleet_db = stack.enter_context(contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")))
        cloud = a_cloud(tmp_path)
        providers = dict(cloud.providers)
        heartbeat = Heartbeat(fleet_db, "run", ttl=TTL, interval=0.2)
        market = Market(tuple(providers.values()), simulated=list(providers))
        config = FleetConfig(simulated=cloud.config, start_seconds=600)
        client = FleetClient(config, providers, market, fleet_db, heartbeat, lambda *_: pytest.fail("nothing stands"))
        loop = stack.enter_context(LoopThread())
        run = stack.enter_context(contextlib.closing(a_run(tmp_path)))
        said: list[str] = []
        need = Requirement("d", MODEL, "chat")
        supervisor = EngineSupervisor(
            client, heartbeat, need, run, loop, say=said.append, warn=said.append, decided=lambda _: None
        )
        stack.callback(supervisor.end)
        stack.enter_context(heartbeat.beating("d", "00000", "00009"))

        budget = TO_THE_END + PRICE * 25
        fleet_db.begin_request("d", "r", budget_usd=budget)
        step_until(supervisor, lambda: waits_for_the_budget(heartbeat))
        paused = run.progress()
        assert heartbeat.activity.wait.refusal.budget_usd == pytest.approx(budget)
        assert f"paused: budget of {budget:.2f} $ leaves no room for another instance" in heartbeat.activity.note
        assert any("is nearly reached" in text for text in said)
        assert not any("lost" in text for text in said)
        assert 0 < paused.rows_done < ROWS
        assert paused.requests == paused.rows_done  # no row was asked twice
        assert fleet_db.fleet() == []
        assert fleet_db.spend("d").usd <= budget
        bill = sum(one.usd for one in cloud.meter().bills())
        assert fleet_db.spend("d").usd == pytest.approx(bill, abs=PRICE * PATIENCE)

        fleet_db.override("d", budget_usd=1000)
        step_until(supervisor, lambda: False)
        assert run.missing() == []
        assert run.progress().requests == ROWS


def a_cloud(home: Path) -> SimulatedCloud:
    provider = {"name": "sim-a", "boot_seconds": 0.0, "offers": [OFFER]}
    arguments = ["--output-tokens", "fixed:100"]
    words = {"clock": CLOCK, "seed": 0, "providers": [provider], "arguments": arguments}
    return SimulatedCloud(home, SimulatedCloudConfig.model_validate(words))


def a_run(folder: Path) -> RangeRun:
    store = DatasetStore(open_objects(str(folder / "store")), "d")
    manifest = write_snapshot(store, questions(ROWS))
    entries = store.entries(manifest.snapshot)
    identity = RunIdentity("run", Intent("run"), (entries[0].key, entries[-1].key))
    return RangeRun(store, manifest, plan_range(store, entries, Intent("run")), identity)


def step_until(supervisor: EngineSupervisor, what: Callable[[], bool], seconds: float = 60) -> None:
    """Until it is so, or nothing is left to do."""
    deadline = time.monotonic() + PATIENCE * seconds
    while not what() and (result := supervisor.step()).kind is not StepKind.DONE:
        assert result.kind is StepKind.CONTINUE, result
        assert time.monotonic() < deadline
        supervisor.wait(0.02)
