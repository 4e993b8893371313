"""Which instances that stand may be leased at once: those whose engines take rows as long as the run's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_provider import FakeProvider
from support.fleet_databases import OFFER
from support.hostile_server import HostileServer, whole

from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.offers.offer import Offer
from gpu_runner.offers.speed import LengthMix
from gpu_runner.offers.workload import Workload
from resources.fleet.fleet_config import FleetConfig
from resources.fleet.provisioning import Provisioner
from resources.fleet.resource import Requirement
from resources.fleet.warm_instances import WarmInstances
from resources.pricing.market import Market

KNOWN = "Qwen/Qwen3-8B"
CONFIG = FleetConfig.model_validate({"engines": [{"name": "e", "kind": "endpoint", "url": "http://127.0.0.1:1"}]})


def needs(longest: int, model: str = KNOWN) -> Requirement:
    work = Workload(100_000, 100_000, LengthMix(200, 200), longest, "measured", "measured")
    return Requirement("d", model, "chat", work=lambda: work)


@pytest.fixture
def fleet_db(tmp_path: Path) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as found:
        yield found


def warm(fleet_db: FleetDatabase, **market: object) -> WarmInstances:
    """As a run sees the fleet, whose only provider is sim-north."""
    providers = {OFFER.provider: FakeProvider(time.time)}
    seen = Market(tuple(providers.values()), simulated=list(providers), **market)
    orders = Provisioner(CONFIG, providers, seen, fleet_db, Heartbeat(fleet_db, "run", ttl=60))
    return WarmInstances(providers, seen, fleet_db, orders)


def stand(fleet_db: FleetDatabase, name: str, need: Requirement, endpoint: str, offer: Offer = OFFER) -> None:
    """An instance that is ready, for this engine, and that nobody holds."""
    key, run = need.engine_key, {"run_id": "run", "dataset": "d", "ttl": 60.0}
    lease = fleet_db.intend(name, offer, clock=60, engine_key=key, model=need.model, limit=None, cap=None, **run)
    assert lease is not None
    assert fleet_db.created(lease, f"machine of {name}") and fleet_db.ready(lease, endpoint, 64)
    assert fleet_db.release(lease)


def names(warm: WarmInstances, need: Requirement) -> list[str]:
    return [one.name for one in warm.usable(need)]


@contextlib.contextmanager
def engine(context: int) -> Iterator[str]:
    """An engine that says so of its context."""
    page = b'{"data":[{"id":"m","max_model_len":%d}]}' % context
    with HostileServer({"/v1/models": whole(page)}) as server:
        yield server.url


@pytest.mark.parametrize(("context", "longest", "taken"), [(4096, 4096, True), (4096, 4097, False), (8192, 4097, True)])
def test_an_engine_with_less_context_than_the_longest_row_is_left(
    fleet_db: FleetDatabase, context: int, longest: int, taken: bool
) -> None:
    with engine(context) as url:
        stand(fleet_db, "ba-1", needs(longest), url)
        assert names(warm(fleet_db), needs(longest)) == (["ba-1"] if taken else [])


def test_no_more_is_asked_of_an_engine_than_the_dataset_s_own_max_model_len(fleet_db: FleetDatabase) -> None:
    need = replace(needs(9000), max_model_len=8192)  # a new instance would take no longer rows
    with engine(8192) as url:
        stand(fleet_db, "ba-1", need, url)
        assert names(warm(fleet_db), need) == ["ba-1"]


def test_of_machines_of_ones_own_and_of_unknown_models_who_set_them_up_knows(fleet_db: FleetDatabase) -> None:
    with engine(16) as url:
        stand(fleet_db, "ba-1", needs(5000), url)
        stand(fleet_db, "ba-2", needs(5000, "nobody/knows"), url)
        assert names(warm(fleet_db, trusted=["sim-north"]), needs(5000)) == ["ba-1"]
        assert names(warm(fleet_db), needs(5000, "nobody/knows")) == ["ba-2"]


def test_the_cheapest_comes_first_and_other_providers_are_left(fleet_db: FleetDatabase) -> None:
    need = needs(2000)
    with engine(8192) as url:
        stand(fleet_db, "dear", need, url)
        stand(fleet_db, "cheap", need, url, replace(OFFER, price_per_hour=1.0))
        stand(fleet_db, "elsewhere", need, url, replace(OFFER, provider="sim-south"))
        assert names(warm(fleet_db), need) == ["cheap", "dear"]
