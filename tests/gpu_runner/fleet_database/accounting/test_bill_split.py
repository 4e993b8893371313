"""An instance's bill is split into booting, useful, idle and wasted seconds that add up to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.fleet_database.accounting.bill_split import (
    InstanceCost,
    LeaseSpan,
    Split,
    Timeline,
    shared_seconds,
    split_bill,
)


def span(
    acquired: float, ended: float | None, useful: float = 0, wasted: float = 0, *, renewed: float | None = None
) -> LeaseSpan:
    """A lease whose holder's last word was at its end, unless said otherwise."""
    if renewed is None:
        renewed = acquired if ended is None else ended
    return LeaseSpan(acquired, renewed, ended, useful, wasted)


def split(
    *leases: LeaseSpan, ready: float | None = 10, ended: float | None = 100, failed: bool = False, now: float = 100
) -> Split:
    return split_bill(Timeline(0, ready, ended, failed, leases), now)[0]


def test_a_boot_is_booting_until_it_failed_and_then_all_of_it_was_wasted():
    assert split(ready=None, ended=None, now=30) == Split(booting=30)
    assert split(ready=None, ended=None, now=30, failed=True) == Split(wasted=30)
    assert split(ready=None, ended=40, now=99, failed=True) == Split(wasted=40)


def test_a_lease_counts_as_its_holder_said_and_the_rest_is_idle():
    assert split(span(0, 60, useful=40, wasted=3)) == Split(booting=10, useful=40, idle=47, wasted=3)


def test_a_live_instance_is_billed_until_now():
    assert split(span(0, None, useful=40), ended=None, now=70) == Split(booting=10, useful=40, idle=20)


def test_reports_are_clipped_to_the_time_that_was_paid():
    assert split(span(0, 60, useful=1000, wasted=7)) == Split(booting=10, useful=50, idle=40)
    assert split(span(50, 500, useful=1000)) == Split(booting=10, useful=50, idle=40)
    assert split(span(0, 60, useful=20, wasted=1000)) == Split(booting=10, useful=20, wasted=30, idle=40)


def test_after_the_last_word_of_a_holder_that_died_its_time_is_wasted_until_the_lease_ends():
    assert split(span(0, 60, useful=38, renewed=50)) == Split(booting=10, useful=38, wasted=10, idle=42)


def test_an_instance_that_was_taken_away_wastes_what_followed_its_holders_last_word():
    assert split(span(0, 120, useful=80, renewed=95), now=130) == Split(booting=10, useful=80, idle=5, wasted=5)


def test_a_live_holder_has_lost_nothing_yet():
    assert split(span(0, None, useful=40, renewed=60), ended=None, now=70).wasted == 0


def test_seconds_that_a_draining_lease_shares_with_the_next_are_counted_once():
    shared = (span(0, 60, useful=50), span(50, 90, useful=40))
    line = Timeline(0, 10, 100, False, shared)
    assert split_bill(line, 100) == (Split(booting=10, useful=80, idle=10), [50, 30])


def test_a_draining_holder_that_dies_beside_the_next_one_wastes_nothing_of_it():
    leases = (span(0, 60, useful=38, renewed=50), span(48, 90, useful=42))
    assert split(*leases) == Split(booting=10, useful=80, idle=10)


def test_times_out_of_order_never_give_a_negative_part():
    assert split(ready=200, ended=5) == Split(booting=5)
    assert split(ready=-5, ended=-7).total == 0
    assert split(span(70, 20, useful=9)) == Split(booting=10, idle=90)


moments = st.floats(0, 1000, allow_nan=False)
spans = st.builds(LeaseSpan, moments, moments, st.none() | moments, moments, moments)


@given(st.none() | moments, st.none() | moments, st.booleans(), st.lists(spans, max_size=5), moments)
def test_no_part_is_negative_and_together_they_are_the_bill(
    ready: float | None, ended: float | None, failed: bool, leases: list[LeaseSpan], now: float
):
    parts, useful = split_bill(Timeline(100, ready, ended, failed, leases), now)
    assert min(parts.booting, parts.useful, parts.idle, parts.wasted, 0, *useful) == 0
    assert abs(parts.total - (max(100, now if ended is None else ended) - 100)) < 1e-6
    assert abs(sum(useful) - parts.useful) < 1e-9


def test_the_bill_in_dollars_is_price_times_clock_and_its_parts_are_its_sum():
    cost = InstanceCost(
        name="ba-1",
        provider="p",
        region="r",
        instance_type="t",
        gpu="L40S",
        gpus=1,
        spot=False,
        model="m",
        dataset="d",
        state="ended",
        price_per_hour=3.6,
        clock=60,
        seconds=Split(booting=1, useful=0.7, idle=0.1, wasted=0.2),
        rows=0,
        prompt_tokens=0,
        completion_tokens=0,
    )
    assert abs(cost.usd.total - 2.0 * 0.06) < 1e-12
    assert cost.usd.total == cost.usd.booting + cost.usd.useful + cost.usd.idle + cost.usd.wasted


def shared(*leases: LeaseSpan, now: float = 100) -> list[float]:
    return shared_seconds(Timeline(0, 0, None, False, leases), now)


def test_time_beside_a_later_lease_is_shared_until_that_lease_has_counted_it():
    assert shared(span(0, 30, useful=30), span(30, 60, useful=30)) == [0, 0]
    assert shared(span(0, 26, useful=1), span(1, None, useful=0)) == [25, 0]
    assert shared(span(0, 26, useful=1), span(1, None, useful=20)) == [5, 0]
    assert shared(span(0, 26, useful=1), span(1, None, useful=60)) == [0, 0]
    assert shared(span(0, None, useful=1), span(1, None), now=11) == [10, 0]


def test_a_chain_of_leases_shares_each_second_once():
    assert shared(span(0, 26, useful=1), span(1, 27, useful=1), span(2, None)) == [24, 1, 0]
    assert shared(span(0, 26, useful=1), span(1, 27, useful=1), span(2, None, useful=90)) == [0, 0, 0]


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0, 200)), max_size=6))
def test_shared_seconds_are_never_more_than_the_time_that_passed(spans: list[tuple[float, float, float]]):
    begins = sorted(begin for begin, _, _ in spans)
    leases = [
        span(begin, begin + length, useful=useful) for begin, (_, length, useful) in zip(begins, spans, strict=True)
    ]
    found = shared(*leases)
    assert all(seconds >= 0 for seconds in found) and sum(found) <= 100
