"""After a sweep nothing is rented that nobody needs, and nothing that somebody needs is touched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.fake_provider import FakeProvider
from support.fleet_databases import OFFER, Clock, intended, ready

from gpu_runner.fleet_database.database import FleetDatabase, Instance, Lease
from gpu_runner.fleet_database.reaper import sweep
from gpu_runner.offers.selection import FailureKind
from gpu_runner.providers.base import EndReason, EngineOrder

ORDER = EngineOrder("m", "chat")
TTL = 10.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet_db(tmp_path: Path, clock: Clock) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db", now=clock)) as fleet_db:
        yield fleet_db


@pytest.fixture
def provider(clock: Clock) -> FakeProvider:
    return FakeProvider(clock)


def swept(fleet_db: FleetDatabase, *providers: FakeProvider, idle_seconds: float = 60) -> list[str]:
    return sweep(fleet_db, providers, tag="ba-", idle_seconds=idle_seconds)


def rented(fleet_db: FleetDatabase, provider: FakeProvider, name: str = "ba-1", ttl: float = TTL) -> Lease:
    """An instance that is ready, and its machine."""
    provider.create(OFFER, name, ORDER)
    return ready(fleet_db, name, ttl=ttl)


def row(fleet_db: FleetDatabase, name: str = "ba-1") -> Instance:
    found = fleet_db.instance(name)
    assert found is not None
    return found


def test_a_leased_instance_is_left_alone(fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock):
    rented(fleet_db, provider)
    clock.forward(TTL - 1)
    assert swept(fleet_db, provider) == []
    assert (row(fleet_db).state, provider.alive()) == ("ready", ["ba-1"])


def test_an_idle_instance_stays_warm_for_a_while_and_is_then_ended(
    fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    fleet_db.release(rented(fleet_db, provider))
    clock.forward(59)
    assert swept(fleet_db, provider) == []
    clock.forward(2)
    assert swept(fleet_db, provider) == ["ba-1 ends: idle for 61 s", "ba-1: told sim-north to end it"]
    assert provider.alive() == []
    clock.forward(3)
    assert swept(fleet_db, provider) == ["ba-1 has ended: idle for 61 s"]
    assert (row(fleet_db).state, row(fleet_db).reason) == ("ended", "idle for 61 s")
    assert fleet_db.costs()[0].seconds.total == provider.billed("ba-1") == 61
    assert swept(fleet_db, provider) == []


def test_what_we_ended_keeps_our_reason_where_the_provider_only_says_that_it_was_deleted(
    fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    fleet_db.give_up(rented(fleet_db, provider), "its image cannot be pulled")
    provider.lose("ba-1", EndReason.DELETED)  # by a run: a sweep of another process sees only that it is gone
    assert swept(fleet_db, provider) == ["ba-1 has ended: its image cannot be pulled"]
    rented(fleet_db, provider, "ba-2")
    provider.lose("ba-2", EndReason.DELETED)
    assert swept(fleet_db, provider) == ["ba-2 has ended: deleted by somebody else"]


def test_a_boot_whose_run_died_is_ended_once_its_lease_expired(
    fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    assert intended(fleet_db)
    provider.create(OFFER, "ba-1", ORDER)  # its reply was lost, then the run
    clock.forward(TTL - 1)
    swept(fleet_db, provider)
    assert provider.alive() == ["ba-1"]
    clock.forward(1)
    swept(fleet_db, provider)
    assert provider.alive() == []
    swept(fleet_db, provider)
    assert (row(fleet_db).state, fleet_db.costs()[0].seconds.wasted) == ("ended", provider.billed("ba-1"))


def test_an_intent_that_was_never_ordered_is_settled_without_cost(
    fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    assert intended(fleet_db)
    clock.forward(TTL)
    swept(fleet_db, provider)
    assert row(fleet_db).state == "ending"
    clock.forward(16)
    swept(fleet_db, provider)
    assert (row(fleet_db).state, fleet_db.costs()[0].usd.total) == ("ended", 0)


def test_an_order_that_arrives_after_its_intent_was_written_off_is_ended_and_billed(
    fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    assert intended(fleet_db)
    clock.forward(TTL)
    swept(fleet_db, provider)
    clock.forward(16)
    swept(fleet_db, provider)
    clock.forward(100)
    provider.create(OFFER, "ba-1", ORDER)  # its run was stopped between intent and create, and goes on
    clock.forward(1)
    swept(fleet_db, provider)
    assert provider.alive() == []
    swept(fleet_db, provider)
    assert row(fleet_db).state == "ended"
    assert provider.billed("ba-1") == 1
    assert fleet_db.costs()[0].seconds.total >= 1


def test_a_machine_of_our_tag_that_the_book_does_not_know_is_ended_and_no_other(
    fleet_db: FleetDatabase, provider: FakeProvider
):
    provider.create(OFFER, "ba-9", ORDER)
    provider.create(OFFER, "someone-else", ORDER)
    provider.list = lambda tag: [provider._describe(one) for one in provider.machines.values()]
    assert swept(fleet_db, provider) == ["ba-9 is not in the fleet's database", "ba-9: told sim-north to end it"]
    assert provider.alive() == ["someone-else"]


def test_a_termination_without_effect_is_repeated_until_the_list_shows_the_end(
    fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    fleet_db.give_up(rented(fleet_db, provider), "engine dead")
    provider.machines["ba-1"].stubborn = 2
    for _ in range(3):
        assert row(fleet_db).state == "ending"
        swept(fleet_db, provider)
        clock.forward(1)
    assert provider.alive() == []
    swept(fleet_db, provider)
    assert (row(fleet_db).state, row(fleet_db).reason) == ("ended", "engine dead")
    assert fleet_db.costs()[0].seconds.total == provider.billed("ba-1") == 2


def test_an_end_that_the_provider_could_not_finish_is_told_at_every_sweep(
    fleet_db: FleetDatabase, provider: FakeProvider
):
    fleet_db.give_up(rented(fleet_db, provider), "done")
    swept(fleet_db, provider)
    provider.machines["ba-1"].leftover = "host h: its GPUs stay taken"
    assert swept(fleet_db, provider) == ["host h: its GPUs stay taken", "ba-1 has ended: done"]
    assert swept(fleet_db, provider) == ["host h: its GPUs stay taken"]
    provider.machines["ba-1"].leftover = ""
    assert swept(fleet_db, provider) == []


@pytest.mark.parametrize("fault", ["error", "unclear"])
def test_nothing_is_concluded_from_a_provider_that_does_not_answer(
    fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock, fault: str
):
    lease = rented(fleet_db, provider, ttl=1000)
    fleet_db.release(rented(fleet_db, provider, "ba-2"))
    provider.fault = lambda call: fault
    for _ in range(5):
        clock.forward(10)
        swept(fleet_db, provider, idle_seconds=1000)
    assert {one.name: one.state for one in fleet_db.fleet()} == {"ba-1": "ready", "ba-2": "ready"}
    assert all(call == "list" for call, _ in provider.calls[2:])
    fleet_db.give_up(lease, "engine dead")
    swept(fleet_db, provider, idle_seconds=1000)
    assert row(fleet_db).state == "ending"
    provider.fault = lambda call: fault if call == "list" else None
    swept(fleet_db, provider, idle_seconds=1000)
    assert provider.alive() == ["ba-2"]  # what is to end is ended, list or no list


def test_the_silence_of_one_provider_does_not_hold_up_another(fleet_db: FleetDatabase, clock: Clock):
    silent, other = FakeProvider(clock, name="sim-east"), FakeProvider(clock)
    silent.fault = lambda call: "unclear"
    fleet_db.give_up(rented(fleet_db, other), "engine dead")
    assert swept(fleet_db, silent, other)[0] == "sim-east does not list its machines: time-out"
    assert other.alive() == []


def test_a_machine_that_is_not_listed_counts_as_gone_only_after_a_while_and_only_when_nobody_holds_it(
    fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    lease = rented(fleet_db, provider, ttl=30)
    swept(fleet_db, provider)
    provider.list = lambda tag: []
    for _ in range(20):
        clock.forward(1)
        assert swept(fleet_db, provider) == []
    assert row(fleet_db).missing_seconds == 19
    assert fleet_db.release(lease)
    said = swept(fleet_db, provider)
    assert said == ["ba-1: told sim-north to end it", "ba-1 is gone: not listed for 19 s"]
    assert (row(fleet_db).state, row(fleet_db).reason, provider.alive()) == ("ended", "vanished", [])


def test_a_list_that_lags_hides_nothing_from_the_reaper(fleet_db: FleetDatabase, clock: Clock):
    provider = FakeProvider(clock, lag=5)
    lease = rented(fleet_db, provider)
    assert swept(fleet_db, provider) == []
    fleet_db.give_up(lease, "boot failed")
    swept(fleet_db, provider)
    assert provider.alive() == []
    assert row(fleet_db).state == "ending"
    clock.forward(6)
    swept(fleet_db, provider)
    assert (row(fleet_db).state, fleet_db.costs()[0].seconds.total) == ("ended", provider.billed("ba-1"))


def test_a_gone_machine_that_comes_back_is_ended_for_good(
    fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    fleet_db.release(rented(fleet_db, provider))
    swept(fleet_db, provider)
    listed, provider.list = provider.list, lambda tag: []
    provider.machines["ba-1"].stubborn = 1
    for _ in range(2):
        swept(fleet_db, provider)
        clock.forward(16)
    assert row(fleet_db).state == "ended"
    provider.list = listed
    swept(fleet_db, provider)
    swept(fleet_db, provider)
    assert (row(fleet_db).state, provider.alive()) == ("ended", [])
    assert fleet_db.costs()[0].seconds.total == provider.billed("ba-1") == 32


def test_a_notice_keeps_its_reason_to_the_end(fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock):
    lease = rented(fleet_db, provider)
    provider.machines["ba-1"].taken_at, provider.machines["ba-1"].taken_why = clock() + 30, "drained"
    assert swept(fleet_db, provider) == ["ba-1 is taken away in 30 s: drained"]
    assert row(fleet_db).reason == "drained"
    fleet_db.release(lease)
    assert swept(fleet_db, provider)[0] == "ba-1 ends: drained"
    swept(fleet_db, provider)
    assert (row(fleet_db).state, row(fleet_db).reason) == ("ended", "drained")


def test_what_ended_a_machine_is_put_behind_why_it_was_left(fleet_db: FleetDatabase, provider: FakeProvider):
    lease = rented(fleet_db, provider)
    fleet_db.release(lease, reason="engine lost: unreachable", retire=True)
    provider.lose("ba-1", EndReason.NODE_LOST)
    assert "ba-1 has ended: engine lost: unreachable; node lost" in swept(fleet_db, provider)
    assert row(fleet_db).reason == "engine lost: unreachable; node lost"


def test_an_instance_with_a_notice_is_leased_no_more_and_ended_when_it_is_free(
    fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    lease = rented(fleet_db, provider)
    provider.machines["ba-1"].taken_at = clock() + 30
    assert swept(fleet_db, provider) == ["ba-1 is taken away in 30 s"]
    clock.forward(5)
    assert swept(fleet_db, provider) == []
    assert row(fleet_db).notice_seconds == 25
    fleet_db.release(lease)
    assert fleet_db.warm("key") == []
    assert swept(fleet_db, provider)[0] == "ba-1 ends: the provider takes it away"
    assert provider.alive() == []


def test_a_machine_that_its_provider_recommends_to_leave_ends_with_its_lease_and_its_kind_looks_dearer(
    fleet_db: FleetDatabase, provider: FakeProvider
):
    lease = rented(fleet_db, provider)
    provider.machines["ba-1"].at_risk = True
    assert swept(fleet_db, provider) == ["ba-1 is to end: sim-north recommends to leave it"]
    assert swept(fleet_db, provider) == []
    assert row(fleet_db).retiring and provider.alive() == ["ba-1"]
    (failure,) = fleet_db.offer_failures(60)
    assert (failure.provider, failure.kind) == ("sim-north", FailureKind.LOST)
    fleet_db.release(lease)
    swept(fleet_db, provider)
    assert provider.alive() == []


def test_a_machine_that_was_taken_away_takes_its_lease_with_it(
    fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    lease = rented(fleet_db, provider)
    clock.forward(4)
    provider.lose("ba-1")
    clock.forward(1)
    assert swept(fleet_db, provider) == ["ba-1 has ended: interrupted"]
    assert not fleet_db.renew(lease, TTL)
    assert (row(fleet_db).reason, fleet_db.costs()[0].seconds.total) == ("interrupted", 4)


def test_instances_of_a_provider_that_is_not_configured_are_named(fleet_db: FleetDatabase, provider: FakeProvider):
    rented(fleet_db, provider)
    assert swept(fleet_db) == ["ba-1 may still be billed: no provider sim-north is configured"]


def test_a_sign_of_life_is_given_only_after_the_book_answered(
    fleet_db: FleetDatabase, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
):
    beats: list[int] = []
    sweep(fleet_db, [provider], tag="ba-", idle_seconds=1, alive=lambda: beats.append(1))
    assert len(beats) == 2

    def away(idle_seconds: float) -> list[str]:
        raise sa.exc.OperationalError("SELECT", {}, Exception("database is away"))

    monkeypatch.setattr(fleet_db, "end_overdue", away)
    with pytest.raises(sa.exc.OperationalError):
        sweep(fleet_db, [provider], tag="ba-", idle_seconds=1, alive=lambda: beats.append(1))
    assert len(beats) == 2


def test_a_sweep_reads_nothing_of_instances_that_are_over_and_not_listed(
    fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    """A fleet's database keeps the bills of years; a provider lists what has ended for a day at most."""
    for number in range(30):
        fleet_db.release(ready(fleet_db, f"ba-old-{number:02d}"), retire=True, reason="old")
        fleet_db.ended(f"ba-old-{number:02d}", 0.0, "old")
    fleet_db.release(rented(fleet_db, provider), retire=True, reason="done")
    swept(fleet_db, provider)
    clock.forward(3)
    assert swept(fleet_db, provider) == ["ba-1 has ended: done"]  # and the provider lists it on
    said: list[str] = []
    sa.event.listen(fleet_db.engine, "before_cursor_execute", lambda *given: said.append(given[2]))
    assert swept(fleet_db, provider) == []
    wheres = [text.rpartition("FROM instances")[2] for text in said if "FROM instances" in text]
    assert wheres and all("WHERE" in text and "WHERE 1 = 1" not in text for text in wheres)


def test_what_a_sweep_asks_does_not_grow_with_the_budgets_of_busy_datasets(fleet_db: FleetDatabase):
    def statements(datasets: int) -> int:
        for number in range(datasets):
            fleet_db.begin_request(f"d{number}", "r", budget_usd=1e6)
            if f"ba-{number}" not in {one.name for one in fleet_db.fleet()}:
                ready(fleet_db, f"ba-{number}", dataset=f"d{number}", ttl=1e6)
        said: list[str] = []
        sa.event.listen(fleet_db.engine, "before_cursor_execute", lambda *given: said.append(given[2]))
        assert fleet_db.end_overdue(60) == []
        return len(said)

    assert statements(2) == statements(12)
