"""After a sweep nothing is rented that nobody needs, and nothing that somebody needs is touched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from fake_provider import FakeProvider
from fleet_books import OFFER, Clock, intended, ready

from gpu_runner.fleet import FleetBook, Instance, Lease
from gpu_runner.providers.base import EngineOrder
from gpu_runner.reaper import sweep

ORDER = EngineOrder("m", "chat")
TTL = 10.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(tmp_path: Path, clock: Clock) -> Iterator[FleetBook]:
    with contextlib.closing(FleetBook(f"sqlite:///{tmp_path}/fleet.db", now=clock)) as book:
        yield book


@pytest.fixture
def provider(clock: Clock) -> FakeProvider:
    return FakeProvider(clock)


def swept(book: FleetBook, *providers: FakeProvider, idle_seconds: float = 60) -> list[str]:
    return sweep(book, providers, tag="ba-", idle_seconds=idle_seconds)


def rented(book: FleetBook, provider: FakeProvider, name: str = "ba-1", ttl: float = TTL) -> Lease:
    """An instance that is ready, and its machine."""
    provider.create(OFFER, name, ORDER)
    return ready(book, name, ttl=ttl)


def row(book: FleetBook, name: str = "ba-1") -> Instance:
    found = book.instance(name)
    assert found is not None
    return found


def test_a_leased_instance_is_left_alone(book: FleetBook, provider: FakeProvider, clock: Clock):
    rented(book, provider)
    clock.forward(TTL - 1)
    assert swept(book, provider) == []
    assert (row(book).state, provider.alive()) == ("ready", ["ba-1"])


def test_an_idle_instance_stays_warm_for_a_while_and_is_then_ended(
    book: FleetBook, provider: FakeProvider, clock: Clock
):
    book.release(rented(book, provider))
    clock.forward(59)
    assert swept(book, provider) == []
    clock.forward(2)
    assert swept(book, provider) == ["ba-1 ends: idle for 61 s", "ba-1: told sim-north to end it"]
    assert provider.alive() == []
    clock.forward(3)
    assert swept(book, provider) == ["ba-1 has ended: idle for 61 s"]
    assert (row(book).state, row(book).reason) == ("ended", "idle for 61 s")
    assert book.costs()[0].seconds.total == provider.billed("ba-1") == 61
    assert swept(book, provider) == []


def test_a_boot_whose_run_died_is_ended_once_its_lease_expired(book: FleetBook, provider: FakeProvider, clock: Clock):
    assert intended(book)
    provider.create(OFFER, "ba-1", ORDER)  # its reply was lost, then the run
    clock.forward(TTL - 1)
    swept(book, provider)
    assert provider.alive() == ["ba-1"]
    clock.forward(1)
    swept(book, provider)
    assert provider.alive() == []
    swept(book, provider)
    assert (row(book).state, book.costs()[0].seconds.wasted) == ("ended", provider.billed("ba-1"))


def test_an_intent_that_was_never_ordered_is_settled_without_cost(
    book: FleetBook, provider: FakeProvider, clock: Clock
):
    assert intended(book)
    clock.forward(TTL)
    swept(book, provider)
    assert row(book).state == "ending"
    clock.forward(16)
    swept(book, provider)
    assert (row(book).state, book.costs()[0].usd.total) == ("ended", 0)


def test_an_order_that_arrives_after_its_intent_was_written_off_is_ended_and_billed(
    book: FleetBook, provider: FakeProvider, clock: Clock
):
    assert intended(book)
    clock.forward(TTL)
    swept(book, provider)
    clock.forward(16)
    swept(book, provider)
    clock.forward(100)
    provider.create(OFFER, "ba-1", ORDER)  # its run was stopped between intent and create, and goes on
    clock.forward(1)
    swept(book, provider)
    assert provider.alive() == []
    swept(book, provider)
    assert row(book).state == "ended"
    assert provider.billed("ba-1") == 1
    assert book.costs()[0].seconds.total >= 1


def test_a_machine_of_our_tag_that_the_book_does_not_know_is_ended_and_no_other(
    book: FleetBook, provider: FakeProvider
):
    provider.create(OFFER, "ba-9", ORDER)
    provider.create(OFFER, "someone-else", ORDER)
    provider.list = lambda tag: [provider._describe(one) for one in provider.machines.values()]
    assert swept(book, provider) == ["ba-9 is not in the book", "ba-9: told sim-north to end it"]
    assert provider.alive() == ["someone-else"]


def test_a_termination_without_effect_is_repeated_until_the_list_shows_the_end(
    book: FleetBook, provider: FakeProvider, clock: Clock
):
    book.give_up(rented(book, provider), "engine dead")
    provider.machines["ba-1"].stubborn = 2
    for _ in range(3):
        assert row(book).state == "ending"
        swept(book, provider)
        clock.forward(1)
    assert provider.alive() == []
    swept(book, provider)
    assert (row(book).state, row(book).reason) == ("ended", "engine dead")
    assert book.costs()[0].seconds.total == provider.billed("ba-1") == 2


@pytest.mark.parametrize("fault", ["error", "unclear"])
def test_nothing_is_concluded_from_a_provider_that_does_not_answer(
    book: FleetBook, provider: FakeProvider, clock: Clock, fault: str
):
    lease = rented(book, provider, ttl=1000)
    book.release(rented(book, provider, "ba-2"))
    provider.fault = lambda call: fault
    for _ in range(5):
        clock.forward(10)
        swept(book, provider, idle_seconds=1000)
    assert {one.name: one.state for one in book.fleet()} == {"ba-1": "ready", "ba-2": "ready"}
    assert all(call == "list" for call, _ in provider.calls[2:])
    book.give_up(lease, "engine dead")
    swept(book, provider, idle_seconds=1000)
    assert row(book).state == "ending"
    provider.fault = lambda call: fault if call == "list" else None
    swept(book, provider, idle_seconds=1000)
    assert provider.alive() == ["ba-2"]  # what is to end is ended, list or no list


def test_the_silence_of_one_provider_does_not_hold_up_another(book: FleetBook, clock: Clock):
    silent, other = FakeProvider(clock, name="sim-east"), FakeProvider(clock)
    silent.fault = lambda call: "unclear"
    book.give_up(rented(book, other), "engine dead")
    assert swept(book, silent, other)[0] == "sim-east does not list its machines: time-out"
    assert other.alive() == []


def test_a_machine_that_is_not_listed_counts_as_gone_only_after_a_while_and_only_when_nobody_holds_it(
    book: FleetBook, provider: FakeProvider, clock: Clock
):
    lease = rented(book, provider, ttl=30)
    swept(book, provider)
    provider.list = lambda tag: []
    for _ in range(20):
        clock.forward(1)
        assert swept(book, provider) == []
    assert row(book).missing_seconds == 19
    assert book.release(lease)
    said = swept(book, provider)
    assert said == ["ba-1: told sim-north to end it", "ba-1 is gone: not listed for 19 s"]
    assert (row(book).state, row(book).reason, provider.alive()) == ("ended", "vanished", [])


def test_a_list_that_lags_hides_nothing_from_the_reaper(book: FleetBook, clock: Clock):
    provider = FakeProvider(clock, lag=5)
    lease = rented(book, provider)
    assert swept(book, provider) == []
    book.give_up(lease, "boot failed")
    swept(book, provider)
    assert provider.alive() == []
    assert row(book).state == "ending"
    clock.forward(6)
    swept(book, provider)
    assert (row(book).state, book.costs()[0].seconds.total) == ("ended", provider.billed("ba-1"))


def test_a_gone_machine_that_comes_back_is_ended_for_good(book: FleetBook, provider: FakeProvider, clock: Clock):
    book.release(rented(book, provider))
    swept(book, provider)
    listed, provider.list = provider.list, lambda tag: []
    provider.machines["ba-1"].stubborn = 1
    for _ in range(2):
        swept(book, provider)
        clock.forward(16)
    assert row(book).state == "ended"
    provider.list = listed
    swept(book, provider)
    swept(book, provider)
    assert (row(book).state, provider.alive()) == ("ended", [])
    assert book.costs()[0].seconds.total == provider.billed("ba-1") == 32


def test_an_instance_with_a_notice_is_leased_no_more_and_ended_when_it_is_free(
    book: FleetBook, provider: FakeProvider, clock: Clock
):
    lease = rented(book, provider)
    provider.machines["ba-1"].taken_at = clock() + 30
    assert swept(book, provider) == ["ba-1 is taken away in 30 s"]
    clock.forward(5)
    assert swept(book, provider) == []
    assert row(book).notice_seconds == 25
    book.release(lease)
    assert book.warm("key") == []
    assert swept(book, provider)[0] == "ba-1 ends: the provider takes it away"
    assert provider.alive() == []


def test_a_machine_that_was_taken_away_takes_its_lease_with_it(book: FleetBook, provider: FakeProvider, clock: Clock):
    lease = rented(book, provider)
    clock.forward(4)
    provider.lose("ba-1")
    clock.forward(1)
    assert swept(book, provider) == ["ba-1 has ended: interrupted"]
    assert not book.renew(lease, TTL)
    assert (row(book).reason, book.costs()[0].seconds.total) == ("interrupted", 4)


def test_instances_of_a_provider_that_is_not_configured_are_named(book: FleetBook, provider: FakeProvider):
    rented(book, provider)
    assert swept(book) == ["ba-1 may still be billed: no provider sim-north is configured"]


def test_a_sign_of_life_is_given_only_after_the_book_answered(
    book: FleetBook, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
):
    beats: list[int] = []
    sweep(book, [provider], tag="ba-", idle_seconds=1, alive=lambda: beats.append(1))
    assert len(beats) == 2

    def away(idle_seconds: float) -> list[str]:
        raise sa.exc.OperationalError("SELECT", {}, Exception("database is away"))

    monkeypatch.setattr(book, "end_overdue", away)
    with pytest.raises(sa.exc.OperationalError):
        sweep(book, [provider], tag="ba-", idle_seconds=1, alive=lambda: beats.append(1))
    assert len(beats) == 2
