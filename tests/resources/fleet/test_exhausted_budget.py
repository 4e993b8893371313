"""A budget that pays for no row on an engine with a price by the token: what costs nothing is leased beside it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_provider import FakeProvider
from support.fleet_databases import OFFER

from gpu_runner.fleet_database.database import FleetDatabase, Lease
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.fleet_database.wait_reason import WaitKind, WaitReason
from gpu_runner.offers.speed import LengthMix
from gpu_runner.offers.workload import Workload
from gpu_runner.providers.base import Provider
from resources.fleet import client as module
from resources.fleet.client import FleetClient
from resources.fleet.fleet_config import FleetConfig
from resources.fleet.leased_engine import LeasedEngine, StaticEngine
from resources.fleet.resource import Requirement
from resources.pricing.market import Market

WORK = Workload(100_000, 100_000, LengthMix(200, 200), 2_000, "measured", "measured")
NEED = Requirement("d", "nobody/knows", "chat", work=lambda: WORK)
API: dict[str, Any] = {
    "name": "api", "kind": "endpoint", "url": "http://127.0.0.1:1", "usd_per_million_tokens": 1000.0
}  # fmt: skip
LAB: dict[str, Any] = {"name": "lab", "kind": "endpoint", "url": "http://127.0.0.1:2"}


class GaveUp(Exception):
    """The run would wait."""


@pytest.fixture
def fleet_db(tmp_path: Path) -> Iterator[FleetDatabase]:
    """Its dataset has a budget that pays for no row on `api`."""
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as found:
        found.begin_request("d", "r", budget_usd=0.01)
        yield found


def run(fleet_db: FleetDatabase, *engines: dict[str, Any], providers: Mapping[str, Provider] | None = None) -> Any:
    """What a run leases at once, or what it waits for."""
    rented = dict(providers or {})
    heartbeat = Heartbeat(fleet_db, "run", ttl=60)
    fleet_db.begin_run("run", "d", "00000", "00009")
    config = FleetConfig.model_validate({"engines": list(engines)})
    market = Market(tuple(rented.values()), simulated=list(rented))
    client = FleetClient(config, rented, market, fleet_db, heartbeat, lambda engine, *_: StaticEngine(str(engine.url)))

    def give_up(_: float) -> None:
        raise GaveUp

    try:
        return client.acquire(NEED, say=lambda _: None, pause=give_up)
    except GaveUp:
        return heartbeat.activity


def waiting_for(found: Any) -> WaitKind:
    assert not isinstance(found, LeasedEngine) and isinstance(found.wait, WaitReason)
    return found.wait.kind


@pytest.mark.parametrize("engines", [(API, LAB), (LAB, API)])
def test_a_free_engine_is_leased_wherever_it_stands(fleet_db: FleetDatabase, engines: tuple[dict[str, Any], ...]):
    assert run(fleet_db, *engines).name == "lab"


def test_only_where_every_engine_is_refused_the_run_waits_for_money(fleet_db: FleetDatabase):
    found = run(fleet_db, API, {**API, "name": "other", "url": "http://127.0.0.1:3"})
    assert waiting_for(found) is WaitKind.BUDGET and found.wait.refusal.budget_usd == 0.01


def test_where_another_run_holds_the_free_engine_it_is_waited_for(fleet_db: FleetDatabase):
    assert isinstance(fleet_db.try_lease("lab", "another", "e", 60.0), Lease)
    found = run(fleet_db, API, LAB)
    assert waiting_for(found) is WaitKind.ENGINES_HELD
    assert found.note.startswith("waiting: lab is held by run another, api: budget of 0.01 $ leaves no room")


def test_an_instance_that_stands_and_costs_nothing_is_leased(fleet_db: FleetDatabase, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "answers", lambda endpoint: True)
    free, run_of = replace(OFFER, price_per_hour=0.0), {"run_id": "before", "dataset": "d", "ttl": 60.0}
    key = {"engine_key": NEED.engine_key, "model": NEED.model}
    lease = fleet_db.intend("ba-1", free, clock=60, limit=None, cap=None, **key, **run_of)
    assert lease is not None and fleet_db.created(lease, "machine") and fleet_db.ready(lease, "http://ba-1", 64)
    assert fleet_db.release(lease)
    assert run(fleet_db, API, providers={OFFER.provider: FakeProvider(time.time)}).name == "ba-1"
