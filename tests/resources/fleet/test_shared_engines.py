"""Engines that runs of other processes lease, as one sees them that only sends single requests there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_provider import FakeProvider
from support.fleet_databases import Clock, ready

from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.base import EngineAccess, ProviderUnclear
from resources.fleet import shared_engines as module
from resources.fleet.fleet_config import FleetConfig
from resources.fleet.shared_engines import LAPSED_SECONDS, RETRY_SECONDS, SharedEngines

URL = "http://127.0.0.1:1"
CONFIG = FleetConfig.model_validate({
    "engines": [
        {"name": "lab", "kind": "endpoint", "url": URL, "models": ["m"], "api_key_env": "LAB_KEY"},
        {"name": "own", "kind": "simulated", "models": ["m"]},
    ]
})  # fmt: skip
MODELS = {"api/m": "m"}


class Tunnels(FakeProvider):
    """A provider with a way of its own to each engine. `broken`: there is none."""

    broken = False

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.open: list[str] = []

    def access(self, name: str, endpoint: str) -> EngineAccess:
        if self.broken:
            raise ProviderUnclear("no way through")
        self.open.append(name)
        return EngineAccess(f"http://tunnel-{name}", f"key of {name}", lambda: self.open.remove(name))


@pytest.fixture
def fleet_db(url: str, clock: Clock) -> Iterator[FleetDatabase]:
    """On SQLite, then on Postgres."""
    with contextlib.closing(FleetDatabase(url, now=clock)) as found:
        yield found


@pytest.fixture
def provider(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Tunnels:
    monkeypatch.setattr(module, "answers", lambda endpoint: True)
    return Tunnels(clock)


@pytest.fixture
def shared(provider: Tunnels, clock: Clock) -> SharedEngines:
    return SharedEngines(CONFIG, {provider.name: provider}, clock)


def names(shared: SharedEngines, fleet_db: FleetDatabase) -> list[str]:
    return [one.name for one in shared.look(fleet_db, MODELS)]


def test_what_a_run_leases_is_reached_by_a_way_of_ones_own_with_its_key(
    shared: SharedEngines, fleet_db: FleetDatabase, provider: Tunnels
) -> None:
    ready(fleet_db, "ba-1", dataset="api/m")
    ready(fleet_db, "ba-2", dataset="d")
    (one,) = shared.look(fleet_db, MODELS)
    assert (one.name, one.endpoint, one.api_key) == ("ba-1", "http://tunnel-ba-1", "key of ba-1")
    assert "key of" not in repr(one)
    assert provider.open == ["ba-1"] and names(shared, fleet_db) == ["ba-1"] and provider.open == ["ba-1"]
    assert fleet_db.leases_of("api/m") == 1, "nothing is leased for it"
    shared.close()
    assert provider.open == []


def test_an_engine_whose_lease_has_just_run_out_is_shared_until_somebody_has_taken_it(
    shared: SharedEngines, fleet_db: FleetDatabase, clock: Clock
) -> None:
    ready(fleet_db, "ba-1", dataset="api/m", ttl=10)
    clock.forward(10 + LAPSED_SECONDS - 1)
    assert names(shared, fleet_db) == ["ba-1"]
    clock.forward(2)
    assert names(shared, fleet_db) == []
    assert fleet_db.try_lease("ba-1", "other", "api/m", 10) is not None
    assert names(shared, fleet_db) == ["ba-1"]


def test_an_engine_that_another_dataset_has_leased_since_is_not_shared(
    shared: SharedEngines, fleet_db: FleetDatabase
) -> None:
    lease = ready(fleet_db, "ba-1", dataset="api/m")
    assert fleet_db.release(lease) and names(shared, fleet_db) == ["ba-1"]
    assert fleet_db.try_lease("ba-1", "other", "d", 10) is not None
    assert names(shared, fleet_db) == []


def test_what_is_to_end_gets_no_further_request_and_its_way_stays_until_it_has_ended(
    shared: SharedEngines, fleet_db: FleetDatabase, provider: Tunnels
) -> None:
    leases = [ready(fleet_db, name, dataset="api/m") for name in ("ba-1", "ba-2", "ba-3")]
    assert names(shared, fleet_db) == ["ba-1", "ba-2", "ba-3"]
    fleet_db.retire("ba-1", "no batch is open")
    fleet_db.notice("ba-2", 30)
    assert names(shared, fleet_db) == ["ba-3"]
    assert sorted(provider.open) == ["ba-1", "ba-2", "ba-3"], "requests may be under way"
    fleet_db.release(leases[0])
    fleet_db.ended("ba-1", 0.0)
    names(shared, fleet_db)
    assert sorted(provider.open) == ["ba-2", "ba-3"]


@pytest.mark.parametrize("broken", ["way", "engine"])
def test_an_engine_that_cannot_be_reached_from_here_is_tried_again_later(
    shared: SharedEngines,
    fleet_db: FleetDatabase,
    provider: Tunnels,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    ready(fleet_db, "ba-1", dataset="api/m", ttl=100)
    provider.broken = broken == "way"
    monkeypatch.setattr(module, "answers", lambda endpoint: broken != "engine")
    assert names(shared, fleet_db) == [] and provider.open == []
    provider.broken = False
    monkeypatch.setattr(module, "answers", lambda endpoint: True)
    assert names(shared, fleet_db) == []
    clock.forward(RETRY_SECONDS)
    assert names(shared, fleet_db) == ["ba-1"]


def test_an_engine_of_fleet_yaml_is_shared_by_its_address_while_it_is_leased(
    shared: SharedEngines, fleet_db: FleetDatabase, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that a run has started for itself has an address that only this run knows, and ends with it."""
    monkeypatch.setenv("LAB_KEY", "secret")
    assert names(shared, fleet_db) == []
    for name in ("lab", "own"):
        assert fleet_db.try_lease(name, "run", "api/m", 10) is not None
    (one,) = shared.look(fleet_db, MODELS)
    assert (one.name, one.endpoint, one.api_key) == ("lab", URL, "secret")
    assert shared.look(fleet_db, MODELS, without={"lab"}) == []
    clock.forward(10 + LAPSED_SECONDS)
    assert names(shared, fleet_db) == []


def test_what_changes_in_fleet_yaml_counts_with_the_next_look(
    shared: SharedEngines, fleet_db: FleetDatabase, provider: Tunnels, tmp_path: Path
) -> None:
    ready(fleet_db, "ba-1", dataset="api/m")
    fleet_db.try_lease("lab", "run", "api/m", 10)
    assert names(shared, fleet_db) == ["ba-1", "lab"]
    shared.configure(FleetConfig.load(tmp_path / "none.yaml"), {provider.name: provider})
    assert names(shared, fleet_db) == ["ba-1"] and provider.open == ["ba-1"]
