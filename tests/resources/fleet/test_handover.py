"""What goes wrong between the lease on an engine and the run that gets it: nothing stays leased, and no tunnel open."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from support.fake_provider import FakeProvider
from support.fleet_databases import OFFER, Clock

from gpu_runner.fleet_database.database import FleetDatabase, FleetDatabaseError
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.providers.base import EngineAccess, ProviderUnclear
from resources.fleet.client import FleetClient
from resources.fleet.fleet_config import FleetConfig
from resources.fleet.leased_engine import LeasedEngine, StaticEngine
from resources.fleet.provisioning import Provisioner
from resources.fleet.resource import Requirement
from resources.pricing.market import Market

TTL = 10.0
NEED = Requirement("d", "tiny", "chat")
CONFIG = FleetConfig.model_validate(
    {
        "engines": [{"name": "stands", "kind": "endpoint", "url": "http://127.0.0.1:1", "models": ["another"]}],
        "local": [{"gpu": "H100", "gpu_memory_gib": 80}],
    }
)


class Broken(Exception):
    """Something that nobody expects."""


class Tunnels(FakeProvider):
    """Its engines are reached by tunnels, which are counted. `broken`: instead of one there is this error."""

    opened = closed = 0
    broken: Exception | None = None

    def access(self, name: str, endpoint: str) -> EngineAccess:
        if self.broken is not None:
            raise self.broken
        self.opened += 1
        return EngineAccess(endpoint, close=self._close)

    def _close(self) -> None:
        self.closed += 1


class Outage:
    """The database refuses the next `statements`."""

    def __init__(self, engine: sa.Engine) -> None:
        self.statements: float = 0
        sa.event.listen(engine, "before_cursor_execute", self._refuse)

    def _refuse(self, *_: Any) -> None:
        if self.statements > 0:
            self.statements -= 1
            raise sa.exc.OperationalError("SELECT", {}, Exception("server closed the connection"))


@pytest.fixture
def provider(clock: Clock) -> Tunnels:
    return Tunnels(clock, name=OFFER.provider)


@pytest.fixture
def heartbeat(fleet_db: FleetDatabase) -> Heartbeat:
    """It does not beat."""
    fleet_db.begin_run("run", "d", "00000", "00009")
    return Heartbeat(fleet_db, "run", ttl=TTL)


@pytest.fixture
def market(provider: Tunnels) -> Market:
    return Market((provider,), simulated=[provider.name], trusted=[provider.name])


@pytest.fixture
def orders(fleet_db: FleetDatabase, heartbeat: Heartbeat, provider: Tunnels, market: Market) -> Provisioner:
    return Provisioner(CONFIG, {provider.name: provider}, market, fleet_db, heartbeat)


@pytest.fixture
def client(fleet_db: FleetDatabase, heartbeat: Heartbeat, provider: Tunnels, market: Market) -> FleetClient:
    standing = StaticEngine("http://127.0.0.1:1", close=provider._close)
    return FleetClient(CONFIG, {provider.name: provider}, market, fleet_db, heartbeat, lambda *_: standing)


def rent(orders: Provisioner) -> LeasedEngine | None:
    return orders.rent(NEED, OFFER, limit=9, note=lambda _: None, pause=lambda _: None)


def when_ready(monkeypatch: pytest.MonkeyPatch, fleet_db: FleetDatabase, then: Callable[[str], None]) -> None:
    """Do this right after an instance was written down as ready."""
    write = fleet_db.ready

    def ready(lease: Any, *words: Any) -> bool:
        written = write(lease, *words)
        then(lease.instance)
        return written

    monkeypatch.setattr(fleet_db, "ready", ready)


def free(fleet_db: FleetDatabase, heartbeat: Heartbeat, provider: Tunnels) -> None:
    """Nothing is leased, nothing is renewed, no tunnel is open."""
    assert fleet_db.leases_of("d") == 0 and fleet_db.leases_of("another") == 0
    assert heartbeat.state == "waiting"
    assert provider.opened <= provider.closed


def test_a_database_error_just_after_a_boot_gives_the_instance_back_at_once_and_warm(
    fleet_db: FleetDatabase,
    heartbeat: Heartbeat,
    provider: Tunnels,
    orders: Provisioner,
    monkeypatch: pytest.MonkeyPatch,
):
    outage = Outage(fleet_db.engine)
    when_ready(monkeypatch, fleet_db, lambda _: setattr(outage, "statements", 1))
    with pytest.raises(FleetDatabaseError):
        rent(orders)
    assert provider.opened == 1
    free(fleet_db, heartbeat, provider)
    (one,) = fleet_db.warm(NEED.engine_key)
    assert (one.state, one.idle_seconds, provider.alive()) == ("ready", 0, [one.name])


def test_an_instance_that_was_to_end_meanwhile_is_ended_at_once(
    fleet_db: FleetDatabase,
    heartbeat: Heartbeat,
    provider: Tunnels,
    orders: Provisioner,
    monkeypatch: pytest.MonkeyPatch,
):
    outage = Outage(fleet_db.engine)

    def retired(name: str) -> None:
        fleet_db.retire(name, "the fleet shrinks")
        outage.statements = 1

    when_ready(monkeypatch, fleet_db, retired)
    with pytest.raises(FleetDatabaseError):
        rent(orders)
    free(fleet_db, heartbeat, provider)
    assert provider.alive() == []
    assert [one.state for one in fleet_db.fleet(ended=True)] == ["ended"]


def test_while_the_database_stays_away_the_tunnel_is_closed_and_the_lease_is_renewed_no_more(
    fleet_db: FleetDatabase,
    heartbeat: Heartbeat,
    provider: Tunnels,
    orders: Provisioner,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
):
    outage = Outage(fleet_db.engine)
    when_ready(monkeypatch, fleet_db, lambda _: setattr(outage, "statements", math.inf))
    with pytest.raises(FleetDatabaseError) as raised:
        rent(orders)
    assert re.match(r"ba-\w+-\w+ was not given back \(\w+\): its lease lapses", raised.value.__notes__[-1])
    assert (provider.opened, provider.closed, heartbeat.state) == (1, 1, "waiting")
    outage.statements = 0
    clock.forward(TTL)
    assert [text.split(" on ")[0] for text in fleet_db.end_overdue(60)] == ["the lease of run run"]
    free(fleet_db, heartbeat, provider)
    assert [one.name for one in fleet_db.warm(NEED.engine_key)] == provider.alive()


@pytest.fixture
def warm(fleet_db: FleetDatabase, orders: Provisioner) -> str:
    """An instance that waits for the next run."""
    leased = rent(orders)
    assert leased is not None
    leased.close()
    orders.heartbeat.stop_renewing(leased.lease)
    assert fleet_db.release(leased.lease)
    return leased.name


@pytest.mark.parametrize("what", ["access", "health", "word"])
def test_whatever_fails_while_a_warm_instance_is_taken_it_is_given_back_and_stays_warm(
    what: str,
    fleet_db: FleetDatabase,
    heartbeat: Heartbeat,
    provider: Tunnels,
    client: FleetClient,
    warm: str,
    monkeypatch: pytest.MonkeyPatch,
):
    def answers(_: str) -> bool:
        if what == "health":
            raise Broken
        return True

    def say(text: str) -> None:
        if text.startswith("on "):
            raise Broken

    monkeypatch.setattr("resources.fleet.client.answers", answers)
    provider.broken = Broken() if what == "access" else None
    with pytest.raises(Broken):
        client.acquire(NEED, say=say, pause=lambda _: None)
    free(fleet_db, heartbeat, provider)
    assert [one.name for one in fleet_db.warm(NEED.engine_key)] == [warm] == provider.alive()


def test_no_way_to_a_warm_instance_is_still_no_error(
    fleet_db: FleetDatabase, heartbeat: Heartbeat, provider: Tunnels, client: FleetClient, warm: str
):
    provider.broken = ProviderUnclear("the API server is away")
    assert client._warm(NEED, 9, None) is None
    free(fleet_db, heartbeat, provider)


@pytest.mark.parametrize("word", ["waiting for http", "on stands"])
def test_an_engine_of_the_configuration_is_given_back_too(
    word: str, fleet_db: FleetDatabase, heartbeat: Heartbeat, provider: Tunnels, client: FleetClient
):
    def say(text: str) -> None:
        if text.startswith(word):
            raise Broken

    need = Requirement("another", "another", "chat")
    with pytest.raises(Broken):
        client.acquire(need, say=say, pause=lambda _: None)
    free(fleet_db, heartbeat, provider)
    assert fleet_db.holder("stands") is None
    assert provider.closed == (word == "on stands")
