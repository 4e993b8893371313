"""Rented instances in the book: ordered before they exist, leased by one, ended only when nobody holds them."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy as sa
from fleet_books import OFFER, Clock, intended, ready

from gpu_runner.fleet import FleetBook, Lease, RunEnded, Spent


def state(book: FleetBook, name: str = "ba-1") -> str:
    instance = book.instance(name)
    assert instance is not None
    return instance.state


def test_an_instance_goes_from_intent_to_ready_in_the_hands_of_its_run(book: FleetBook, clock: Clock):
    lease = intended(book)
    assert lease == Lease("ba-1", 1, "run", "d")
    assert (state(book), book.holder("ba-1")) == ("intent", "run")
    clock.forward(1)
    assert book.created(lease, "i-77")
    assert state(book) == "booting"
    clock.forward(3)
    assert book.ready(lease, "http://127.0.0.1:5", 128)
    (found,) = book.fleet()
    assert (found.state, found.endpoint, found.machine_id, found.max_num_seqs) == (
        "ready",
        "http://127.0.0.1:5",
        "i-77",
        128,
    )
    assert (found.provider, found.gpu, found.gpus, found.price_per_hour) == ("sim-north", "L40S", 1, 3.6)
    assert (found.age, found.ready_age, found.lease, found.lease_age) == (4, 0, lease, 4)
    assert (found.idle_seconds, found.epoch, found.draining) == (None, 1, ())
    assert found.usd == pytest.approx(4 * 60 * 3.6 / 3600)


def test_nothing_is_ready_twice_or_after_its_end(book: FleetBook):
    lease = ready(book)
    assert not book.ready(lease, "http://127.0.0.1:9", None)
    assert not book.created(lease, "again")
    assert not book.refused(lease, "no")
    book.give_up(lease, "engine dead")
    assert not book.ready(lease, "http://127.0.0.1:9", None)
    assert state(book) == "ending"


def test_who_lost_the_lease_can_change_nothing_any_more(book: FleetBook, clock: Clock):
    lease = intended(book)
    assert lease
    clock.forward(10)
    assert not book.renew(lease, 10, Spent(useful_seconds=5))
    assert not book.created(lease, "i-1")
    assert not book.ready(lease, "http://127.0.0.1:1", 1)
    assert not book.refused(lease, "no capacity")
    assert not book.drain(lease)
    assert not book.give_up(lease, "boot failed")
    assert not book.release(lease, Spent(rows=5), retire=True)
    assert state(book) == "intent"
    (cost,) = book.costs()
    assert (cost.rows, cost.seconds.useful) == (0, 0)


def test_an_instance_is_leased_again_only_while_it_is_ready_and_stays(book: FleetBook):
    lease = intended(book)
    assert lease
    assert book.try_lease("ba-1", "next", "d", 10) is None
    book.created(lease, "i-1")
    book.release(lease)
    assert book.try_lease("ba-1", "next", "d", 10) is None  # booting
    second = ready(book, "ba-2")
    book.release(second)
    assert book.try_lease("ba-2", "next", "d", 10) == Lease("ba-2", 2, "next", "d")
    third = ready(book, "ba-3")
    book.release(third)
    book.notice("ba-3", 30)
    assert book.try_lease("ba-3", "next", "d", 10) is None
    fourth = ready(book, "ba-4")
    assert book.release(fourth, retire=True)
    assert (state(book, "ba-4"), book.try_lease("ba-4", "next", "d", 10)) == ("ending", None)


def test_a_draining_lease_lets_the_next_run_in_and_still_protects_the_instance(book: FleetBook, clock: Clock):
    first = ready(book)
    assert book.try_lease("ba-1", "next", "e", 10) is None
    assert book.drain(first)
    assert (book.leases_of("d"), book.holder("ba-1")) == (0, "run")
    second = book.try_lease("ba-1", "next", "e", 10)
    assert second == Lease("ba-1", 2, "next", "e")
    assert book.try_lease("ba-1", "third", "e", 10) is None
    instance = book.instance("ba-1")
    assert instance is not None
    assert (instance.lease, instance.draining) == (second, (first,))
    clock.forward(5)
    assert book.renew(first, 10) and book.renew(second, 10)
    book.release(second)
    assert not book.begin_ending("ba-1", "fleet down")
    third = book.try_lease("ba-1", "third", "e", 10)
    assert third == Lease("ba-1", 3, "third", "e")
    assert book.release(first) and book.release(third)
    assert book.begin_ending("ba-1", "fleet down")
    assert book.begin_ending("ba-1", "fleet down")
    assert book.try_lease("ba-1", "fourth", "e", 10) is None


def test_an_instance_that_is_to_retire_ends_with_its_last_lease(book: FleetBook, clock: Clock):
    first = ready(book)
    book.drain(first)
    second = book.try_lease("ba-1", "next", "d", 10)
    assert second
    assert book.release(first, retire=True, reason="a cheaper one is there")
    assert state(book) == "ready"
    assert book.warm("key") == []
    book.drain(second)
    assert book.try_lease("ba-1", "third", "d", 10) is None
    assert book.release(second)
    instance = book.instance("ba-1")
    assert instance is not None
    assert (instance.state, instance.reason) == ("ending", "a cheaper one is there")


def test_a_retired_instance_whose_last_holder_died_ends_when_that_lease_expires(book: FleetBook, clock: Clock):
    first = ready(book)
    book.drain(first)
    assert book.try_lease("ba-1", "next", "d", 10)
    book.give_up(first, "engine dead")
    assert state(book) == "ready"
    clock.forward(9)
    book.end_overdue(60)
    assert state(book) == "ready"
    clock.forward(1)
    book.end_overdue(60)
    assert state(book) == "ending"


def test_warm_instances_are_those_that_a_run_may_lease_at_once_cheapest_first(book: FleetBook):
    for name, price in (("ba-1", 3.0), ("ba-2", 2.0), ("ba-3", 1.0), ("ba-4", 0.5)):
        lease = intended(book, name, offer=replace(OFFER, price_per_hour=price))
        assert lease and book.ready(lease, "http://127.0.0.1:1", 1)
        if name == "ba-1":
            book.drain(lease)
        elif name in ("ba-2", "ba-4"):
            book.release(lease)
    book.notice("ba-4", 60)
    assert [one.name for one in book.warm("key")] == ["ba-2", "ba-1"]
    assert book.warm("another key") == []


def test_orders_beyond_the_datasets_limit_or_the_fleets_cap_are_not_written_down(book: FleetBook, clock: Clock):
    first = intended(book, "ba-1", limit=1, cap=2)
    assert first
    assert intended(book, "ba-2", limit=1, cap=2) is None
    second = intended(book, "ba-2", limit=1, cap=2, replaces=first)
    assert second
    assert intended(book, "ba-3", limit=1, cap=9, replaces=first) is None  # a lease is replaced by one, not by two
    assert intended(book, "ba-3", dataset="e", limit=1, cap=2) is None
    assert [one.name for one in book.fleet()] == ["ba-1", "ba-2"]
    book.give_up(first, "boot failed")
    assert intended(book, "ba-3", dataset="e", limit=1, cap=2) is None  # what is ending still costs
    book.ended("ba-1", 0.0)
    assert intended(book, "ba-3", dataset="e", limit=1, cap=2)


def test_a_run_that_was_declared_dead_orders_nothing(book: FleetBook):
    book.begin_run("zombie", "d", "00000", "00099")
    book.end_run("zombie")
    with pytest.raises(RunEnded):
        intended(book, run_id="zombie")
    assert book.fleet() == []


def test_a_refused_order_costs_nothing_and_leaves_nothing_to_end(book: FleetBook, clock: Clock):
    lease = intended(book, limit=1, cap=1)
    assert lease
    clock.forward(3)
    assert book.refused(lease, "no capacity")
    assert (state(book), book.fleet(), book.leases_of("d")) == ("ended", [], 0)
    (cost,) = book.costs()
    assert cost.usd.total == 0
    assert intended(book, "ba-2", limit=1, cap=1)


def test_overdue_instances_are_ended_and_only_those(book: FleetBook, clock: Clock):
    leases = {name: ready(book, name, ttl=100) for name in ("held", "idle", "noticed", "draining")}
    assert intended(book, "booting", ttl=100)
    assert intended(book, "lost", ttl=5)
    book.drain(leases["draining"])
    book.release(leases["noticed"])
    book.notice("noticed", 30)
    book.release(leases["idle"])
    clock.forward(20)
    said = book.end_overdue(idle_seconds=20.5)
    assert {one.name for one in book.fleet() if one.state == "ending"} == {"lost", "noticed"}
    assert said == [
        "the lease of run run on lost expired",
        "lost ends: its run is gone, and it is not ready",
        "noticed ends: the provider takes it away",
    ]
    clock.forward(1)
    assert book.end_overdue(idle_seconds=20.5) == ["idle ends: idle for 21 s"]
    assert book.end_overdue(idle_seconds=20.5) == []
    assert {one.name for one in book.fleet() if one.leased} == {"held", "booting", "draining"}


def test_idleness_counts_from_the_end_of_the_last_lease_even_one_that_expired(book: FleetBook, clock: Clock):
    ready(book, ttl=10)
    clock.forward(25)
    (instance,) = book.fleet()
    assert instance.idle_seconds == 15
    book.end_overdue(20)
    (instance,) = book.fleet()
    assert (instance.idle_seconds, instance.state) == (15, "ready")


def test_a_machine_that_the_provider_calls_ended_takes_its_leases_with_it(book: FleetBook, clock: Clock):
    lease = ready(book)
    clock.forward(8)
    book.ended("ba-1", 3.0, "interrupted")
    assert not book.renew(lease, 10)
    (found,) = book.fleet(ended=True)
    assert (found.state, found.reason, found.ended_age, found.age) == ("ended", "interrupted", 3, 8)
    clock.forward(100)
    book.ended("ba-1", 50.0, "another word")  # the first proof stands
    (found,) = book.fleet(ended=True)
    assert (found.ended_age, found.reason) == (103, "interrupted")
    assert book.costs()[0].seconds.total == 5


def test_a_machine_taken_for_gone_that_is_alive_is_to_end_and_billed_again(book: FleetBook, clock: Clock):
    lease = ready(book)
    book.seen("ba-1")
    book.release(lease)
    clock.forward(10)
    assert book.missing("ba-1") == 0
    clock.forward(20)
    assert book.missing("ba-1") == 20
    assert book.begin_ending("ba-1", "vanished")
    book.ended("ba-1", None)
    assert book.costs()[0].seconds.total == 10  # until it was first missing
    book.seen("ba-1")
    assert (state(book), book.missing("ba-1")) == ("ending", 0)
    assert book.costs()[0].seconds.total == 30
    clock.forward(5)
    book.ended("ba-1", 2.0)
    assert book.costs()[0].seconds.total == 33


def test_an_order_that_nothing_ever_came_of_costs_nothing_until_a_machine_is_seen(book: FleetBook, clock: Clock):
    assert intended(book)
    clock.forward(60)
    book.end_overdue(60)
    book.missing("ba-1")
    assert book.costs()[0].seconds.total == 60  # it may exist
    book.ended("ba-1", None)
    assert book.costs()[0].seconds.total == 0
    clock.forward(40)
    book.seen("ba-1")  # its run was stopped for a minute and then ordered it
    clock.forward(5)
    assert state(book) == "ending"
    assert book.costs()[0].seconds.total == 45
    book.ended("ba-1", 0)
    assert book.costs()[0].seconds.total == 45


def test_what_a_lease_reports_only_grows_and_is_booked_to_its_instance(book: FleetBook, clock: Clock):
    lease = ready(book)
    clock.forward(5)
    assert book.renew(lease, 10, Spent(4.0, 0.5, 10, 100, 50))
    assert book.renew(lease, 10)
    clock.forward(5)
    assert book.release(lease, Spent(8.0, 0.5, 20, 200, 100))
    clock.forward(2)
    (cost,) = book.costs()
    assert (cost.rows, cost.prompt_tokens, cost.completion_tokens) == (20, 200, 100)
    assert (cost.seconds.booting, cost.seconds.useful, cost.seconds.wasted, cost.seconds.idle) == (0, 8, 0.5, 3.5)
    assert cost.usd.total == pytest.approx(12 * 60 * 3.6 / 3600)
    assert sum((cost.usd.booting, cost.usd.useful, cost.usd.wasted, cost.usd.idle)) == pytest.approx(cost.usd.total)
    (measured,) = book.measurements()
    assert (measured.model, measured.gpu, measured.memory_gib, measured.gpus) == ("m", "L40S", 48, 1)
    assert (measured.tokens, measured.seconds, measured.mix.prompt_tokens, measured.mix.output_tokens) == (
        300,
        8 * 60,
        10,
        5,
    )


def test_failures_of_an_offer_are_remembered_with_their_age(book: FleetBook, clock: Clock):
    book.offer_failed("sim-north", OFFER.name, "no capacity")
    clock.forward(30)
    book.offer_failed("sim-east", "sim-east/gpu-2", "boot failed")
    assert [(one.provider, one.age, one.reason) for one in book.offer_failures(60)] == [
        ("sim-east", 0, "boot failed"),
        ("sim-north", 30, "no capacity"),
    ]
    assert [one.provider for one in book.offer_failures(20)] == ["sim-east"]


def test_an_instance_that_is_taken_from_its_holder_counts_against_its_offer_once(book: FleetBook, clock: Clock):
    lease = ready(book)
    clock.forward(1)
    book.ended("ba-1", 0.5, "taken away")
    assert [(one.provider, one.offer, one.reason) for one in book.offer_failures(60)] == [
        (OFFER.provider, OFFER.name, "lost")
    ]
    book.ended("ba-1", 0.5, "taken away")
    assert not book.release(lease, retire=True)
    assert len(book.offer_failures(60)) == 1


def test_an_instance_that_ends_as_we_asked_or_idle_counts_against_nobody(book: FleetBook, clock: Clock):
    asked = ready(book)
    assert book.release(asked, retire=True)
    book.ended("ba-1", 0.5)
    idle = ready(book, "ba-2")
    assert book.release(idle)
    book.ended("ba-2", 0.5)
    assert book.offer_failures(60) == []


def test_a_fleets_tag_is_made_once_and_names_never_repeat(url: str):
    with contextlib.closing(FleetBook(url)) as first, contextlib.closing(FleetBook(url)) as second:
        assert first.tag() == second.tag()
        names = {first.new_name() for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith(first.tag()) and len(name) == len(first.tag()) + 8 for name in names)


def test_however_many_race_a_dataset_orders_no_more_than_its_limit_and_the_fleet_no_more_than_its_cap(url: str):
    racers = 12
    start = Barrier(racers)

    def race(number: int) -> Lease | None:
        with contextlib.closing(FleetBook(url)) as own:  # opened by all at once, too
            start.wait()
            return intended(own, f"ba-{number}", run_id=f"run-{number}", dataset=f"d{number % 2}", limit=3, cap=5)

    with ThreadPoolExecutor(racers) as pool:
        won = [lease for lease in pool.map(race, range(racers)) if lease is not None]
    assert len(won) == 5
    assert max(sum(lease.dataset == dataset for lease in won) for dataset in ("d0", "d1")) == 3


def test_of_those_who_lease_and_those_who_end_an_instance_at_once_one_side_wins(url: str):
    rounds, racers = 10, 4
    start = Barrier(racers)

    def race(number: int) -> list[Any]:
        found: list[Any] = []
        with contextlib.closing(FleetBook(url)) as own:
            for turn in range(rounds):
                if number == 0:
                    own.release(ready(own, f"ba-{turn}", ttl=60))
                start.wait()
                if number % 2:
                    found.append(own.begin_ending(f"ba-{turn}", "fleet down"))
                else:
                    found.append(own.try_lease(f"ba-{turn}", f"run-{number}", "d", 60) is not None)
                start.wait()
        return found

    with ThreadPoolExecutor(racers) as pool:
        found = list(pool.map(race, range(racers)))
    for lease, end, second_lease, second_end in zip(*found, strict=True):
        assert end == second_end
        assert lease + second_lease == (0 if end else 1)


def test_a_database_of_an_earlier_version_gets_the_columns_that_it_lacks(url: str, clock: Clock):
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE leases (instance VARCHAR(200), epoch INTEGER, run_id VARCHAR(64) NOT NULL, "
            "dataset VARCHAR(128) NOT NULL, acquired_at FLOAT NOT NULL, expires_at FLOAT NOT NULL, "
            "released_at FLOAT, PRIMARY KEY (instance, epoch))"
        )
        connection.exec_driver_sql("INSERT INTO leases VALUES ('gpu', 3, 'run', 'd', 999990, 1000010, NULL)")
    engine.dispose()
    for _ in range(2):
        with contextlib.closing(FleetBook(url, now=clock)) as book:
            assert book.renew(Lease("gpu", 3, "run", "d"), 10, Spent(rows=1))
    with contextlib.closing(FleetBook(url, now=clock)) as book:
        assert (book.holder("gpu"), book.leases_of("d")) == ("run", 1)
