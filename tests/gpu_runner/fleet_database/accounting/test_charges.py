"""Bills are cut by dataset, use and day, and nothing is lost or paid twice on the way."""

from __future__ import annotations

import contextlib
import datetime
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from support.fleet_databases import OFFER, Clock, intended, ready

from gpu_runner.fleet_database.accounting.bill_split import LeaseSpan, Split, Timeline, split_bill
from gpu_runner.fleet_database.accounting.charges import Bill, Charge, Work, by_day, charges
from gpu_runner.fleet_database.connection import INSTANCES, LEASES
from gpu_runner.fleet_database.database import FleetDatabase, Lease, LeaseUsage

NOON = datetime.datetime(2026, 3, 28, 12, tzinfo=datetime.UTC).timestamp()
HOUR = 3600.0


def bill(line: Timeline, *work: Work, price: float = 3600.0) -> Bill:
    """An instance that costs a dollar per second, unless said otherwise."""
    return Bill("ba-1", "north", "n.l40s", "L40S", 1, False, price, 1.0, "orderer", line, work)


def span(acquired: float, ended: float | None, useful: float = 0, wasted: float = 0) -> LeaseSpan:
    return LeaseSpan(acquired, acquired if ended is None else ended, ended, useful, wasted)


def work(dataset: str, rows: int = 0, tokens: int = 0) -> Work:
    return Work(dataset, rows, 0, tokens)


def paid(found: list[Charge]) -> dict[str, float]:
    """Seconds by dataset."""
    sums: dict[str, float] = {}
    for charge in found:
        sums[charge.dataset] = sums.get(charge.dataset, 0.0) + charge.seconds.total
    return sums


def test_from_the_order_to_the_next_lease_an_instance_is_its_datasets():
    line = Timeline(0, 10, 100, False, [span(0, 40, 25, 2), span(60, 90, 30)])
    first, lease, after, second, rest = charges([bill(line, work("a", 7, 70), work("b", 3, 30))], now=100)
    assert (first.dataset, first.seconds, first.rows) == ("a", Split(booting=10), 0)
    assert (lease.dataset, lease.seconds, lease.rows) == ("a", Split(useful=25, wasted=2, idle=3), 7)
    assert (after.dataset, after.seconds) == ("a", Split(idle=20))
    assert (second.dataset, second.seconds, second.completion_tokens) == ("b", Split(useful=30), 30)
    assert (rest.dataset, rest.seconds, rest.usd) == ("b", Split(idle=10), Split(idle=10))


def test_a_boot_that_failed_is_wasted_and_one_under_way_is_booting():
    failed = Timeline(0, None, 40, True, [span(0, 30)])
    assert [charge.seconds for charge in charges([bill(failed, work("a"))], now=50)] == [Split(wasted=40)]
    under_way = Timeline(0, None, None, False, [span(0, None)])
    assert [charge.seconds for charge in charges([bill(under_way, work("a"))], now=50)] == [Split(booting=50)]


def test_an_instance_that_was_never_leased_is_paid_by_who_ordered_it():
    found = charges([bill(Timeline(0, 10, 30, False, []))], now=50)
    assert [(charge.dataset, charge.seconds) for charge in found] == [
        ("orderer", Split(booting=10)),
        ("orderer", Split(idle=20)),
    ]


def test_the_next_dataset_pays_from_its_lease_on_though_the_first_still_drains():
    line = Timeline(0, 10, 100, False, [span(0, 60, 40), span(50, 90, 40)])
    assert paid(charges([bill(line, work("a"), work("b"))], now=100)) == {"a": 50, "b": 50}


def test_last_rows_of_a_draining_lease_that_end_in_the_next_ones_time_stay_useful():
    line = Timeline(0, 10, 100, False, [span(0, 60, 50), span(50, 90, 20)])
    found = charges([bill(line, work("a", 5), work("b", 2))], now=100)
    assert sum(charge.seconds.useful for charge in found) == 70
    assert {charge.dataset: charge.rows for charge in found if charge.rows} == {"a": 5, "b": 2}


def test_work_of_a_lease_without_any_time_is_not_forgotten():
    line = Timeline(0, 10, 10, False, [span(0, 10)])
    assert [(charge.rows, charge.seconds.total) for charge in charges([bill(line, work("a", 3))], now=10)] == [
        (0, 10),
        (3, 0),
    ]


def test_since_leaves_out_what_was_paid_before():
    line = Timeline(0, 10, None, False, [span(0, None, 50)])
    (rest,) = charges([bill(line, work("a", 100))], now=110, since=60)
    assert (rest.began, rest.ended, rest.seconds, rest.rows) == (60, 110, Split(useful=25, idle=25), 50)
    assert charges([bill(Timeline(0, 10, 50, False, []))], now=110, since=60) == []


def test_a_lease_over_midnight_is_shared_by_time_and_no_row_is_lost():
    midnight = NOON + 12 * HOUR
    line = Timeline(midnight - 90, midnight - 90, midnight + 10, False, [span(midnight - 90, midnight + 10, 50)])
    saturday, sunday = by_day(charges([bill(line, work("a", 7, 1001))], now=midnight + 99))
    assert (saturday.day, sunday.day) == (datetime.date(2026, 3, 28), datetime.date(2026, 3, 29))
    assert (saturday.useful_usd, saturday.idle_usd) == pytest.approx((45, 45))
    assert (sunday.useful_usd, sunday.idle_usd) == pytest.approx((5, 5))
    assert (saturday.rows, sunday.rows, saturday.tokens + sunday.tokens) == (6, 1, 1001)
    assert (saturday.instances, sunday.instances) == (1, 1)


def test_days_are_those_of_the_time_zone_with_23_hours_in_spring():
    line = Timeline(NOON, None, NOON + 48 * HOUR, False, [span(NOON, None)])
    found = by_day(charges([bill(line, work("a"))], now=NOON + 48 * HOUR), ZoneInfo("Europe/Berlin"))
    assert [(one.day.day, one.booting_usd) for one in found] == [(28, 11 * HOUR), (29, 23 * HOUR), (30, 14 * HOUR)]


def test_a_line_says_what_a_thousand_rows_and_a_million_tokens_cost():
    line = Timeline(0, 0, 10, False, [span(0, 10, 10)])
    (found,) = by_day(charges([bill(line, work("a", 40, 2000))], now=10))
    assert (found.usd, found.usd_per_1k_rows, found.usd_per_million_tokens) == (10, 250, 5000)
    (empty,) = by_day(charges([bill(line, work("a"))], now=10))
    assert (empty.usd_per_1k_rows, empty.usd_per_million_tokens) == (None, None)


moments = st.floats(0, 400_000, allow_nan=False)
spans = st.builds(LeaseSpan, moments, moments, st.none() | moments, moments, moments)
works = st.builds(Work, st.sampled_from("abc"), *[st.integers(0, 10**6)] * 3)
leases = st.lists(st.tuples(spans, works), max_size=5)


@given(st.none() | moments, st.none() | moments, st.booleans(), leases, moments, st.booleans())
def test_charges_and_days_add_up_to_the_bill_in_each_part(
    ready_at: float | None,
    ended: float | None,
    failed: bool,
    held: list[tuple[LeaseSpan, Work]],
    now: float,
    by_time: bool,
):
    if by_time:  # as epochs really are; the rest is what broken clocks might write
        held.sort(key=lambda lease: lease[0].acquired_at)
    line = Timeline(1000, ready_at, ended, failed, [one for one, _ in held])
    found = charges([bill(line, *(done for _, done in held))], now)
    bill_parts, _ = split_bill(line, now)
    for name in ("booting", "useful", "idle", "wasted"):
        parts = [getattr(charge.seconds, name) for charge in found]
        assert min(parts, default=0.0) >= 0
        assert sum(parts) == pytest.approx(getattr(bill_parts, name), abs=1e-6)
    for charge, following in pairwise(found):
        assert charge.ended <= following.began
    days = by_day(found)
    assert sum(day.usd for day in days) == pytest.approx(bill_parts.total, abs=1e-6)
    for count in ("rows", "prompt_tokens", "completion_tokens"):
        assert sum(getattr(day, count) for day in days) == sum(getattr(done, count) for _, done in held)


# in the fleet's database


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet_db(tmp_path: Path, clock: Clock) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db", now=clock)) as fleet_db:
        yield fleet_db


def test_the_books_charge_each_dataset_for_its_time_and_add_up_to_the_bills(fleet_db: FleetDatabase, clock: Clock):
    first = intended(fleet_db, dataset="a", ttl=100)
    assert first is not None
    assert fleet_db.created(first, "machine", just_now=True)
    clock.forward(5)
    assert fleet_db.ready(first, "http://127.0.0.1:1", 8)
    clock.forward(20)
    assert fleet_db.release(first, LeaseUsage(15, 1, 30, 100, 200))
    clock.forward(10)
    second = fleet_db.try_lease("ba-1", "run-2", "b", 100)
    assert second is not None
    clock.forward(7)
    assert fleet_db.renew(second, 100, LeaseUsage(6, 0, 4, 5, 6))
    assert intended(fleet_db, "ba-2", dataset="c", ttl=3) is not None  # never ordered: it costs nothing
    clock.forward(1)

    found = fleet_db.charges()
    assert paid(found) == {"a": 35, "b": 8, "c": 1}
    assert sum(charge.usd.total for charge in found) == pytest.approx(sum(cost.usd.total for cost in fleet_db.costs()))
    assert [(one.dataset, one.rows, one.tokens, one.useful_usd) for one in by_day(found) if one.rows] == [
        ("a", 30, 300, pytest.approx(15 * 0.06)),
        ("b", 4, 11, pytest.approx(6 * 0.06)),
    ]
    assert paid(fleet_db.charges(since=clock.now - 10)) == {"a": 2, "b": 8, "c": 1}


def test_what_was_billed_changes_only_while_something_is_billed(fleet_db: FleetDatabase, clock: Clock):
    assert (fleet_db.billed().seconds, fleet_db.billed().standing) == (0, 0)
    lease = ready(fleet_db, ttl=100)
    clock.forward(30)
    assert (fleet_db.billed().seconds, fleet_db.billed().standing) == (30, 1)
    assert fleet_db.give_up(lease, "done")
    fleet_db.ended("ba-1", 0)
    assert intended(fleet_db, "ba-2") is not None
    clock.forward(500)
    fleet_db.ended("ba-2", None)  # it never existed
    assert (fleet_db.billed().seconds, fleet_db.billed().standing) == (30, 0)
    assert fleet_db.billed().seconds == sum(cost.seconds.total for cost in fleet_db.costs())
    assert fleet_db.billed().now == clock.now


@pytest.mark.slow
def test_four_thousand_leases_are_charged(fleet_db: FleetDatabase, clock: Clock):
    described = {name: getattr(OFFER, name) for name in ("provider", "region", "instance_type", "gpu", "gpus", "spot")}
    described |= {"gpu_memory_gib": 48.0, "price_per_hour": 3.6, "boot_seconds": 90.0, "clock": 1.0}
    described |= {"engine_key": "k", "model": "m", "run_id": "r", "dataset": "d0", "machine_id": "m"}
    with fleet_db.engine.begin() as connection:
        for i in range(400):
            began = clock.now - 40_000 + i * 100
            one = {"name": f"ba-{i}", "state": "ended", "created_at": began, "ready_at": began + 90}
            connection.execute(sa.insert(INSTANCES).values(**described, **one, ended_at=began + 20_000))
            held = [
                {
                    **{"instance": f"ba-{i}", "epoch": n + 1, "run_id": f"r{n}", "dataset": f"d{n % 7}", "rows": 1000},
                    **{"acquired_at": began + n * 1900, "renewed_at": began + n * 1900 + 1800},
                    **{"expires_at": began + n * 1900 + 1810, "released_at": began + n * 1900 + 1800},
                    **{"useful_seconds": 1600.0, "prompt_tokens": 10**6, "completion_tokens": 10**6},
                }
                for n in range(10)
            ]
            connection.execute(sa.insert(LEASES), held)
    found = by_day(fleet_db.charges())
    assert sum(line.rows for line in found) == 4_000_000
    assert sum(line.usd for line in found) == pytest.approx(400 * 20_000 * 0.001)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_budget_counts_the_same_seconds_as_the_table_of_spend(fleet_db: FleetDatabase, clock: Clock, seed: int):
    rng = random.Random(seed)
    held: list[Lease] = []
    since: dict[str, float] = {}
    for step in range(60):
        clock.forward(rng.uniform(0.1, 9))
        dataset = rng.choice("abc")
        if rng.random() < 0.3 and (lease := intended(fleet_db, f"ba-{step}", dataset=dataset, ttl=20)):
            fleet_db.created(lease, "machine", just_now=rng.random() < 0.5)
            clock.forward(rng.uniform(0, 5))
            fleet_db.ready(lease, "http://127.0.0.1:1", 8)
            held.append(lease)
        elif held and rng.random() < 0.5:
            lease = held.pop(rng.randrange(len(held)))
            rng.choice([fleet_db.drain, fleet_db.release, fleet_db.release])(lease)
            if taken := fleet_db.try_lease(lease.instance, f"run-{step}", dataset, 20):
                held.append(taken)
        elif rng.random() < 0.2 and held:
            fleet_db.ended(rng.choice(held).instance, rng.choice([None, 0.5]))
        if step == 20 + 5 * len(since) and len(since) < 3:
            dataset = "abc"[len(since)]
            fleet_db.begin_request(dataset, "request", budget_usd=1e9)
            since[dataset] = clock.now
    assert len({charge.instance for charge in fleet_db.charges()}) > 5
    for dataset, moment in since.items():
        charged = sum(one.usd.total for one in fleet_db.charges(since=moment) if one.dataset == dataset)
        assert charged == pytest.approx(fleet_db.spend(dataset).usd)
        assert charged > 0
