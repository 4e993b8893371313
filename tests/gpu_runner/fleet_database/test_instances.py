"""Rented instances: ordered before they exist, leased by one, ended only when nobody holds them."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy as sa
from support.fleet_databases import OFFER, Clock, intended, ready

from gpu_runner.fleet_database.database import FleetDatabase, FleetFull, Lease, LeaseUsage, RunEnded
from gpu_runner.fleet_database.reporting.reports import MEASURED
from gpu_runner.offers.selection import FailureKind


def state(fleet_db: FleetDatabase, name: str = "ba-1") -> str:
    instance = fleet_db.instance(name)
    assert instance is not None
    return instance.state


def test_an_instance_goes_from_intent_to_ready_in_the_hands_of_its_run(fleet_db: FleetDatabase, clock: Clock):
    lease = intended(fleet_db)
    assert lease == Lease("ba-1", 1, "run", "d")
    assert (state(fleet_db), fleet_db.holder("ba-1")) == ("intent", "run")
    clock.forward(1)
    assert fleet_db.created(lease, "i-77")
    assert state(fleet_db) == "booting"
    clock.forward(3)
    assert fleet_db.ready(lease, "http://127.0.0.1:5", 128)
    (found,) = fleet_db.fleet()
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


def test_the_payer_is_who_is_charged_the_dataset_of_the_latest_lease_live_or_not(fleet_db: FleetDatabase, clock: Clock):
    def pays() -> str:
        clock.forward(1)
        (one,) = fleet_db.fleet()
        assert one.payer == fleet_db.charges()[-1].dataset
        return one.payer

    first = ready(fleet_db, dataset="d", ttl=100)
    assert pays() == "d"
    assert fleet_db.drain(first)
    second = fleet_db.try_lease("ba-1", "other", "e", 100)
    assert second is not None and pays() == "e"
    fleet_db.release(second)
    assert pays() == "e", "its own lease has ended, and the one before it still drains"
    fleet_db.release(first)
    assert pays() == "e"
    third = fleet_db.try_lease("ba-1", "third", "d", 10)
    assert third is not None and pays() == "d"
    clock.forward(10)  # it expires
    assert pays() == "d"


def test_nothing_is_ready_twice_or_after_its_end(fleet_db: FleetDatabase):
    lease = ready(fleet_db)
    assert not fleet_db.ready(lease, "http://127.0.0.1:9", None)
    assert not fleet_db.created(lease, "again")
    assert not fleet_db.refused(lease, "no")
    fleet_db.give_up(lease, "engine dead")
    assert not fleet_db.ready(lease, "http://127.0.0.1:9", None)
    assert state(fleet_db) == "ending"


def test_who_lost_the_lease_can_change_nothing_any_more_and_what_it_did_itself_counts(
    fleet_db: FleetDatabase, clock: Clock
):
    lease = intended(fleet_db)
    assert lease
    clock.forward(10)
    assert not fleet_db.renew(lease, 10, LeaseUsage(useful_seconds=5))
    assert not fleet_db.created(lease, "i-1")
    assert not fleet_db.ready(lease, "http://127.0.0.1:1", 1)
    assert not fleet_db.refused(lease, "no capacity")
    assert not fleet_db.drain(lease)
    assert not fleet_db.give_up(lease, "boot failed")
    assert not fleet_db.release(lease, LeaseUsage(rows=5), retire=True)
    assert state(fleet_db) == "intent"
    (cost,) = fleet_db.costs()
    assert (cost.rows, cost.seconds.useful) == (5, 0)


def test_an_instance_is_leased_again_only_while_it_is_ready_and_stays(fleet_db: FleetDatabase):
    lease = intended(fleet_db)
    assert lease
    assert fleet_db.try_lease("ba-1", "next", "d", 10) is None
    fleet_db.created(lease, "i-1")
    fleet_db.release(lease)
    assert fleet_db.try_lease("ba-1", "next", "d", 10) is None  # booting
    second = ready(fleet_db, "ba-2")
    fleet_db.release(second)
    assert fleet_db.try_lease("ba-2", "next", "d", 10) == Lease("ba-2", 2, "next", "d")
    third = ready(fleet_db, "ba-3")
    fleet_db.release(third)
    fleet_db.notice("ba-3", 30)
    assert fleet_db.try_lease("ba-3", "next", "d", 10) is None
    fourth = ready(fleet_db, "ba-4")
    assert fleet_db.release(fourth, retire=True)
    assert (state(fleet_db, "ba-4"), fleet_db.try_lease("ba-4", "next", "d", 10)) == ("ending", None)


def test_a_draining_lease_lets_the_next_run_in_and_still_protects_the_instance(fleet_db: FleetDatabase, clock: Clock):
    first = ready(fleet_db)
    assert fleet_db.try_lease("ba-1", "next", "e", 10) is None
    assert fleet_db.drain(first)
    assert (fleet_db.leases_of("d"), fleet_db.holder("ba-1")) == (0, "run")
    second = fleet_db.try_lease("ba-1", "next", "e", 10)
    assert second == Lease("ba-1", 2, "next", "e")
    assert fleet_db.try_lease("ba-1", "third", "e", 10) is None
    instance = fleet_db.instance("ba-1")
    assert instance is not None
    assert (instance.lease, instance.draining) == (second, (first,))
    clock.forward(5)
    assert fleet_db.renew(first, 10) and fleet_db.renew(second, 10)
    fleet_db.release(second)
    assert not fleet_db.begin_ending("ba-1", "fleet down")
    third = fleet_db.try_lease("ba-1", "third", "e", 10)
    assert third == Lease("ba-1", 3, "third", "e")
    assert fleet_db.release(first) and fleet_db.release(third)
    assert fleet_db.begin_ending("ba-1", "fleet down")
    assert fleet_db.begin_ending("ba-1", "fleet down")
    assert fleet_db.try_lease("ba-1", "fourth", "e", 10) is None


def test_an_instance_that_is_to_retire_ends_with_its_last_lease(fleet_db: FleetDatabase, clock: Clock):
    first = ready(fleet_db)
    fleet_db.drain(first)
    second = fleet_db.try_lease("ba-1", "next", "d", 10)
    assert second
    assert fleet_db.release(first, retire=True, reason="a cheaper one is there")
    assert state(fleet_db) == "ready"
    assert fleet_db.warm("key") == []
    fleet_db.drain(second)
    assert fleet_db.try_lease("ba-1", "third", "d", 10) is None
    assert fleet_db.release(second)
    instance = fleet_db.instance("ba-1")
    assert instance is not None
    assert (instance.state, instance.reason) == ("ending", "a cheaper one is there")


def test_a_retired_instance_whose_last_holder_died_ends_when_that_lease_expires(fleet_db: FleetDatabase, clock: Clock):
    first = ready(fleet_db)
    fleet_db.drain(first)
    assert fleet_db.try_lease("ba-1", "next", "d", 10)
    fleet_db.give_up(first, "engine dead")
    assert state(fleet_db) == "ready"
    clock.forward(9)
    fleet_db.end_overdue(60)
    assert state(fleet_db) == "ready"
    clock.forward(1)
    fleet_db.end_overdue(60)
    assert state(fleet_db) == "ending"


def test_warm_instances_are_those_that_a_run_may_lease_at_once_cheapest_first(fleet_db: FleetDatabase):
    for name, price in (("ba-1", 3.0), ("ba-2", 2.0), ("ba-3", 1.0), ("ba-4", 0.5)):
        lease = intended(fleet_db, name, offer=replace(OFFER, price_per_hour=price))
        assert lease and fleet_db.ready(lease, "http://127.0.0.1:1", 1)
        if name == "ba-1":
            fleet_db.drain(lease)
        elif name in ("ba-2", "ba-4"):
            fleet_db.release(lease)
    fleet_db.notice("ba-4", 60)
    assert [one.name for one in fleet_db.warm("key")] == ["ba-2", "ba-1"]
    assert fleet_db.warm("another key") == []


def test_orders_beyond_the_datasets_limit_or_the_fleets_cap_are_not_written_down(fleet_db: FleetDatabase, clock: Clock):
    first = intended(fleet_db, "ba-1", limit=1, cap=2)
    assert first
    assert intended(fleet_db, "ba-2", limit=1, cap=2) is None
    second = intended(fleet_db, "ba-2", limit=1, cap=2, replaces=first)
    assert second
    assert intended(fleet_db, "ba-3", limit=1, cap=9, replaces=first) is None  # a lease is replaced by one, not by two
    with pytest.raises(FleetFull, match="all 2 instances"):
        intended(fleet_db, "ba-3", dataset="e", limit=1, cap=2)
    assert [one.name for one in fleet_db.fleet()] == ["ba-1", "ba-2"]
    fleet_db.give_up(first, "boot failed")
    with pytest.raises(FleetFull):
        intended(fleet_db, "ba-3", dataset="e", limit=1, cap=2)  # what is ending still costs
    fleet_db.ended("ba-1", 0.0)
    assert intended(fleet_db, "ba-3", dataset="e", limit=1, cap=2)


def test_a_run_that_was_declared_dead_orders_nothing(fleet_db: FleetDatabase):
    fleet_db.begin_run("zombie", "d", "00000", "00099")
    fleet_db.end_run("zombie")
    with pytest.raises(RunEnded):
        intended(fleet_db, run_id="zombie")
    assert fleet_db.fleet() == []


def test_a_refused_order_costs_nothing_and_leaves_nothing_to_end(fleet_db: FleetDatabase, clock: Clock):
    lease = intended(fleet_db, limit=1, cap=1)
    assert lease
    clock.forward(3)
    assert fleet_db.refused(lease, "no capacity")
    assert (state(fleet_db), fleet_db.fleet(), fleet_db.leases_of("d")) == ("ended", [], 0)
    (cost,) = fleet_db.costs()
    assert cost.usd.total == 0
    assert intended(fleet_db, "ba-2", limit=1, cap=1)


def test_overdue_instances_are_ended_and_only_those(fleet_db: FleetDatabase, clock: Clock):
    leases = {name: ready(fleet_db, name, ttl=100) for name in ("held", "idle", "noticed", "draining")}
    assert intended(fleet_db, "booting", ttl=100)
    assert intended(fleet_db, "lost", ttl=5)
    fleet_db.drain(leases["draining"])
    fleet_db.release(leases["noticed"])
    fleet_db.notice("noticed", 30)
    fleet_db.release(leases["idle"])
    clock.forward(20)
    said = fleet_db.end_overdue(idle_seconds=20.5)
    assert {one.name for one in fleet_db.fleet() if one.state == "ending"} == {"lost", "noticed"}
    assert said == [
        "the lease of run run on lost expired",
        "lost ends: its run is gone, and it is not ready",
        "noticed ends: the provider takes it away",
    ]
    clock.forward(1)
    assert fleet_db.end_overdue(idle_seconds=20.5) == ["idle ends: idle for 21 s"]
    assert fleet_db.end_overdue(idle_seconds=20.5) == []
    assert {one.name for one in fleet_db.fleet() if one.leased} == {"held", "booting", "draining"}


def test_idleness_counts_from_the_end_of_the_last_lease_even_one_that_expired(fleet_db: FleetDatabase, clock: Clock):
    ready(fleet_db, ttl=10)
    clock.forward(25)
    (instance,) = fleet_db.fleet()
    assert instance.idle_seconds == 15
    fleet_db.end_overdue(20)
    (instance,) = fleet_db.fleet()
    assert (instance.idle_seconds, instance.state) == (15, "ready")


def test_a_machine_that_the_provider_calls_ended_takes_its_leases_with_it(fleet_db: FleetDatabase, clock: Clock):
    lease = ready(fleet_db)
    clock.forward(8)
    fleet_db.ended("ba-1", 3.0, "interrupted")
    assert not fleet_db.renew(lease, 10)
    (found,) = fleet_db.fleet(ended=True)
    assert (found.state, found.reason, found.ended_age, found.age) == ("ended", "interrupted", 3, 8)
    clock.forward(100)
    fleet_db.ended("ba-1", 50.0, "another word")  # the first proof stands
    (found,) = fleet_db.fleet(ended=True)
    assert (found.ended_age, found.reason) == (103, "interrupted")
    assert fleet_db.costs()[0].seconds.total == 5


@pytest.mark.slow
def test_a_machine_taken_for_gone_that_is_alive_is_to_end_and_billed_again(fleet_db: FleetDatabase, clock: Clock):
    lease = ready(fleet_db)
    fleet_db.seen("ba-1")
    fleet_db.release(lease)
    clock.forward(10)
    assert fleet_db.missing("ba-1") == 0
    clock.forward(20)
    assert fleet_db.missing("ba-1") == 20
    assert fleet_db.begin_ending("ba-1", "vanished")
    fleet_db.ended("ba-1", None)
    assert fleet_db.costs()[0].seconds.total == 10  # until it was first missing
    fleet_db.seen("ba-1")
    assert (state(fleet_db), fleet_db.missing("ba-1")) == ("ending", 0)
    assert fleet_db.costs()[0].seconds.total == 30
    clock.forward(5)
    fleet_db.ended("ba-1", 2.0)
    assert fleet_db.costs()[0].seconds.total == 33


def test_an_order_that_nothing_ever_came_of_costs_nothing_until_a_machine_is_seen(
    fleet_db: FleetDatabase, clock: Clock
):
    assert intended(fleet_db)
    clock.forward(60)
    fleet_db.end_overdue(60)
    fleet_db.missing("ba-1")
    assert fleet_db.costs()[0].seconds.total == 60  # it may exist
    fleet_db.ended("ba-1", None)
    assert fleet_db.costs()[0].seconds.total == 0
    clock.forward(40)
    fleet_db.seen("ba-1")  # its run was stopped for a minute and then ordered it
    clock.forward(5)
    assert state(fleet_db) == "ending"
    assert fleet_db.costs()[0].seconds.total == 45
    fleet_db.ended("ba-1", 0)
    assert fleet_db.costs()[0].seconds.total == 45


def test_what_a_lease_reports_only_grows_and_is_booked_to_its_instance(fleet_db: FleetDatabase, clock: Clock):
    lease = ready(fleet_db)
    clock.forward(5)
    assert fleet_db.renew(lease, 10, LeaseUsage(4.0, 0.5, 10, 100, 50))
    assert fleet_db.renew(lease, 10)
    clock.forward(5)
    assert fleet_db.release(lease, LeaseUsage(8.0, 0.5, 20, 200, 100))
    clock.forward(2)
    (cost,) = fleet_db.costs()
    assert (cost.rows, cost.prompt_tokens, cost.completion_tokens) == (20, 200, 100)
    assert (cost.seconds.booting, cost.seconds.useful, cost.seconds.wasted, cost.seconds.idle) == (0, 8, 0.5, 3.5)
    assert cost.usd.total == pytest.approx(12 * 60 * 3.6 / 3600)
    assert sum((cost.usd.booting, cost.usd.useful, cost.usd.wasted, cost.usd.idle)) == pytest.approx(cost.usd.total)
    (measured,) = fleet_db.measurements()
    assert (measured.model, measured.gpu, measured.memory_gib, measured.gpus) == ("m", "L40S", 48, 1)
    assert (measured.tokens, measured.seconds, measured.mix.prompt_tokens, measured.mix.output_tokens) == (
        300,
        8 * 60,
        10,
        5,
    )


def test_the_speed_of_rows_that_ended_beside_the_next_run_is_not_that_of_the_time_before_it(
    fleet_db: FleetDatabase, clock: Clock
):
    """A run that sends all its rows at once hands its instance on after a second; they are answered 25 s later."""
    first = ready(fleet_db)
    clock.forward(1)
    assert fleet_db.drain(first)
    second = fleet_db.try_lease("ba-1", "run-2", first.dataset, 100)
    assert second is not None
    for _ in range(5):
        clock.forward(5)
        assert fleet_db.renew(first, 10) and fleet_db.renew(second, 10)
    assert fleet_db.release(first, LeaseUsage(1.0, 0.0, 100, 10_000, 1_000))
    (measured,) = fleet_db.measurements()
    assert measured.tokens / measured.seconds == pytest.approx(11_000 / (26 * 60))
    clock.forward(5)
    assert fleet_db.release(second, LeaseUsage(30.0, 0.0, 100, 10_000, 1_000))
    (measured,) = fleet_db.measurements()
    assert (measured.tokens, measured.seconds) == (22_000, pytest.approx(31 * 60))


def test_failures_of_an_offer_are_remembered_with_their_age(fleet_db: FleetDatabase, clock: Clock):
    fleet_db.offer_failed("sim-north", OFFER.name, FailureKind.NO_CAPACITY)
    clock.forward(30)
    fleet_db.offer_failed("sim-east", "sim-east/gpu-2", FailureKind.FAILED, "boot failed")
    assert [(one.provider, one.age, one.kind, one.text) for one in fleet_db.offer_failures(60)] == [
        ("sim-east", 0, FailureKind.FAILED, "boot failed"),
        ("sim-north", 30, FailureKind.NO_CAPACITY, "no capacity"),
    ]
    assert [one.provider for one in fleet_db.offer_failures(20)] == ["sim-east"]


def test_an_instance_that_is_taken_from_its_holder_counts_against_its_offer_once(fleet_db: FleetDatabase, clock: Clock):
    lease = ready(fleet_db)
    clock.forward(1)
    fleet_db.ended("ba-1", 0.5, "taken away")
    assert [(one.provider, one.offer, one.kind) for one in fleet_db.offer_failures(60)] == [
        (OFFER.provider, OFFER.name, FailureKind.LOST)
    ]
    fleet_db.ended("ba-1", 0.5, "taken away")
    assert not fleet_db.release(lease, retire=True)
    assert len(fleet_db.offer_failures(60)) == 1


def test_an_instance_that_ends_as_we_asked_or_idle_counts_against_nobody(fleet_db: FleetDatabase, clock: Clock):
    asked = ready(fleet_db)
    assert fleet_db.release(asked, retire=True)
    fleet_db.ended("ba-1", 0.5)
    idle = ready(fleet_db, "ba-2")
    assert fleet_db.release(idle)
    fleet_db.ended("ba-2", 0.5)
    assert fleet_db.offer_failures(60) == []


def test_a_fleets_tag_is_made_once_and_names_never_repeat(url: str):
    with contextlib.closing(FleetDatabase(url)) as first, contextlib.closing(FleetDatabase(url)) as second:
        assert first.tag() == second.tag()
        names = {first.new_name() for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith(first.tag()) and len(name) == len(first.tag()) + 8 for name in names)


def test_an_instance_that_drains_and_stays_counts_until_it_is_left(fleet_db: FleetDatabase, clock: Clock):
    first = ready(fleet_db)
    assert fleet_db.drain(first)
    assert intended(fleet_db, "ba-2", limit=1) is None
    assert intended(fleet_db, "ba-2", dataset="e", limit=1)  # of another dataset
    beside = fleet_db.try_lease("ba-1", "next", "d", 100, limit=1)
    assert beside is not None
    assert intended(fleet_db, "ba-3", limit=2)  # one instance, however many leases
    assert intended(fleet_db, "ba-4", limit=2) is None
    assert intended(fleet_db, "ba-4", limit=2, replaces=beside)


@pytest.mark.parametrize("leave", ["notice", "retire", "another dataset", "lapse"])
def test_an_instance_that_drains_and_goes_makes_room(fleet_db: FleetDatabase, clock: Clock, leave: str):
    assert fleet_db.drain(first := ready(fleet_db))
    assert intended(fleet_db, "ba-2", limit=1) is None
    if leave == "notice":
        fleet_db.notice("ba-1", 30)
    elif leave == "retire":
        assert fleet_db.retire("ba-1", "not wanted")
    elif leave == "another dataset":
        assert fleet_db.drain(fleet_db.try_lease("ba-1", "other", "e", 100) or first)
    else:
        clock.forward(11)
    assert intended(fleet_db, "ba-2", limit=1)


def test_however_many_race_a_dataset_orders_no_more_than_its_limit_and_the_fleet_no_more_than_its_cap(url: str):
    racers = 12
    start = Barrier(racers)

    def race(number: int) -> Lease | None:
        with contextlib.closing(FleetDatabase(url)) as own:  # opened by all at once, too
            start.wait()
            with contextlib.suppress(FleetFull):
                return intended(own, f"ba-{number}", run_id=f"run-{number}", dataset=f"d{number % 2}", limit=3, cap=5)
            return None

    with ThreadPoolExecutor(racers) as pool:
        won = [lease for lease in pool.map(race, range(racers)) if lease is not None]
    assert len(won) == 5
    assert max(sum(lease.dataset == dataset for lease in won) for dataset in ("d0", "d1")) == 3


def test_of_those_who_lease_and_those_who_end_an_instance_at_once_one_side_wins(url: str):
    rounds, racers = 10, 4
    start = Barrier(racers)

    def race(number: int) -> list[Any]:
        found: list[Any] = []
        with contextlib.closing(FleetDatabase(url)) as own:
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
        with contextlib.closing(FleetDatabase(url, now=clock)) as fleet_db:
            assert fleet_db.renew(Lease("gpu", 3, "run", "d"), 10, LeaseUsage(rows=1))
    with contextlib.closing(FleetDatabase(url, now=clock)) as fleet_db:
        assert (fleet_db.holder("gpu"), fleet_db.leases_of("d")) == ("run", 1)


@pytest.mark.parametrize("answered", [True, False])
def test_the_bill_begins_when_the_provider_says(fleet_db: FleetDatabase, clock: Clock, answered: bool):
    """The answer to the order was late, or lost: the provider has billed the machine for 2 s of the last 5."""
    lease = intended(fleet_db)
    assert lease
    clock.forward(5)
    if answered:
        assert fleet_db.created(lease, "i-1", just_now=True)
        assert fleet_db.costs()[0].seconds.total == 0
    fleet_db.seen("ba-1", 2.0)
    assert fleet_db.costs()[0].seconds.total == 2
    clock.forward(1)
    assert fleet_db.created(lease, "i-1", just_now=True)  # the list was quicker than the answer
    fleet_db.seen("ba-1", 1.0)  # what it said at first stands
    assert fleet_db.costs()[0].seconds.total == 3
    clock.forward(4)
    fleet_db.ended("ba-1", 1.0, "interrupted", 6.0)
    assert fleet_db.costs()[0].seconds.total == 6


@pytest.mark.parametrize(("said", "billed"), [(1.0, 3.0), (4.0, 4.0), (500.0, 5.0)])
def test_an_answered_order_is_billed_from_its_answer_at_the_latest(
    fleet_db: FleetDatabase, clock: Clock, said: float, billed: float
):
    """Ordered 5 s ago, answered 3 s ago. The provider's clock may be behind or ahead."""
    lease = intended(fleet_db)
    assert lease
    clock.forward(2)
    assert fleet_db.created(lease, "i-1", just_now=True)
    clock.forward(3)
    fleet_db.seen("ba-1", said)
    assert fleet_db.costs()[0].seconds.total == billed


def test_a_machine_that_is_first_listed_after_its_end_costs_what_the_provider_says(
    fleet_db: FleetDatabase, clock: Clock
):
    assert intended(fleet_db)
    clock.forward(20)
    fleet_db.ended("ba-1", 4.0, "boot failed", 7.5)
    (cost,) = fleet_db.costs()
    assert cost.seconds.total == 7.5


def test_a_bill_never_begins_after_the_engine_was_ready(fleet_db: FleetDatabase, clock: Clock):
    ready(fleet_db)
    clock.forward(3)
    fleet_db.seen("ba-1", 0.5)
    assert fleet_db.costs()[0].seconds.total == 3


@pytest.mark.parametrize(("said", "billed"), [(500.0, 5.0), (3.0, 3.0), (-500.0, 0.0)])
def test_a_bill_begins_neither_before_its_intent_nor_later_than_it_was_listed(
    fleet_db: FleetDatabase, clock: Clock, said: float, billed: float
):
    lease = intended(fleet_db)
    assert lease
    clock.forward(5)
    fleet_db.seen("ba-1", said)  # a provider's clock that was set, or is slow
    assert fleet_db.billed().seconds == pytest.approx(billed)
    clock.forward(1)
    assert fleet_db.created(lease, "i-1", just_now=True)
    assert fleet_db.billed().seconds == pytest.approx(billed + 1)


@pytest.mark.slow
def test_speeds_are_those_of_the_newest_instances_of_each_kind(fleet_db: FleetDatabase, clock: Clock):
    """Bills are kept for ever: what the planner reads every few seconds must not grow with them."""
    for number in range(MEASURED + 20):
        lease = ready(fleet_db, f"ba-{number:03d}", ttl=20)
        clock.forward(10)
        rows = 1000 if number < 20 else 1
        assert fleet_db.release(lease, LeaseUsage(10.0, 0.0, rows, rows, rows), retire=True)
        fleet_db.ended(lease.instance, 0.0)
    (measured,) = fleet_db.measurements()
    assert measured.tokens == 2 * MEASURED
