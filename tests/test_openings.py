"""What a first fleet is expected to cost before speeds are known, and which one is begun with."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runner.beliefs import Machine
from gpu_runner.capacity import Memory, decide
from gpu_runner.course import Course
from gpu_runner.cover import Kind, can_cover, cheapest_cover
from gpu_runner.openings import Opening, best_opening, opening_of
from gpu_runner.pilots import PACE, booted
from gpu_runner.planner import Held, Option, Target, Work, earliest_finish, make_plan, possible
from gpu_runner.rehearsal import DRAWS, Rehearsal

HOUR = 3600.0
WORK = Work(tokens=360e6, total_tokens=360e6, started_ago=0.0, units=1000)
KNOWN = Option("cloud/l40s", 4.0, 10_000.0, 480.0, spread=0.05, machine=Machine("L40S", 48, 1))
ONE = Option("cloud/1x a100", 1.0, 5_000.0, 240.0, spread=0.5, machine=Machine("A100", 80, 1))
EIGHT = Option("cloud/8x a100", 16.0, 40_000.0, 900.0, spread=0.5, machine=Machine("A100", 80, 8))
OTHER = Option("cloud/1x h100", 1.0, 5_000.0, 240.0, spread=0.5, machine=Machine("H100", 80, 1))


def rehearsal(
    *options: Option, target: Target | None = None, work: Work = WORK, held: tuple[Held, ...] = ()
) -> Rehearsal:
    return Rehearsal(work, options, held, target or Target(4 * HOUR), 0.0, 0.5, PACE)


def course(*options: Option, target: Target, held: tuple[Held, ...] = (), work: Work = WORK) -> Course:
    return Course(work, options, held, target, PACE)


def test_with_known_speeds_it_costs_what_the_plan_says():
    sure = replace(KNOWN, spread=1e-6)
    plan = make_plan(WORK, [sure], [], Target(4 * HOUR))
    assert plan.chosen is not None
    found = rehearsal(sure).outlook((), plan.chosen.fleet)
    assert found.usd == pytest.approx(plan.chosen.usd.p50, rel=0.03) and found.late == 0


def test_it_is_the_mean_over_speeds():
    """One instance of unknown speed that works to the end costs its boot and a lognormal time."""
    alone = rehearsal(ONE, target=Target(None, max_instances=1))
    found = alone.outlook((), [(ONE, 1)])
    z = np.random.default_rng(0).standard_normal((DRAWS // 2, 4))
    error = 0.3**0.5 * z[:, 1] + 0.5**0.5 * z[:, 2] + 0.2**0.5 * z[:, 3]
    hours = WORK.tokens / 5_000.0 / HOUR * np.exp(-0.5 * np.concatenate([error, -error]))
    assert found.usd == pytest.approx(1.0 * (240.0 / HOUR + hours.mean()), rel=0.01)
    assert hours.mean() == pytest.approx(WORK.tokens / 5_000.0 / HOUR * math.exp(0.125), rel=0.1)


def test_the_same_question_has_the_same_answer():
    assert rehearsal(ONE, KNOWN).outlook((), [(ONE, 2)]) == rehearsal(ONE, KNOWN).outlook((), [(ONE, 2)])


def test_a_card_tells_more_of_its_like_than_of_others():
    """The work is for eight-card machines: one card of that kind is the better one to try."""
    like, unlike = (replace(one, tokens_per_second=10.0, capacity=1) for one in (ONE, OTHER))
    both = rehearsal(EIGHT, like, unlike, KNOWN, target=Target(5 * HOUR))
    assert both.outlook((), [(like, 1)]).usd < 0.97 * both.outlook((), [(unlike, 1)]).usd


def test_too_little_time_or_money_is_late():
    assert rehearsal(KNOWN, target=Target(0.2 * HOUR)).outlook((), [(KNOWN, 1)]).late == 1
    assert rehearsal(KNOWN, target=Target(4 * HOUR, budget_usd=20.0)).outlook((), [(KNOWN, 4)]).late == 1
    assert rehearsal(KNOWN, target=Target(4 * HOUR, budget_usd=80.0)).outlook((), [(KNOWN, 4)]).late == 0


def test_work_that_ends_before_anything_is_known_is_paid_to_its_end():
    little = replace(WORK, tokens=600_000.0)
    found = rehearsal(replace(KNOWN, spread=1e-9), work=little).outlook((), [(KNOWN, 1)])
    assert found.usd == pytest.approx(4.0 / HOUR * (480.0 + 60.0), rel=1e-3) and found.late == 0


@pytest.mark.parametrize("turn", [1, -1])
def test_a_provider_with_a_faster_clock_keeps_it(turn):
    """The same machine, five times as fast where the provider's clock is."""
    here = replace(KNOWN, spread=1e-9)
    there = replace(here, name="sim/l40s", tokens_per_second=50_000.0)
    found = rehearsal(*[here, there][::turn], work=replace(WORK, tokens=600_000.0))
    assert found.outlook((), [(here, 1)]).usd == pytest.approx(4.0 / HOUR * (480.0 + 60.0), rel=1e-3)
    assert found.outlook((), [(there, 1)]).usd == pytest.approx(4.0 / HOUR * (480.0 + 12.0), rel=1e-3)


def test_what_goes_on_counts_from_now():
    held = (Held("i0", ONE),)
    now = rehearsal(ONE, KNOWN, held=held).outlook(held, [])
    later = rehearsal(ONE, KNOWN).outlook((), [(ONE, 1)])
    assert now.usd < later.usd


def test_nothing_is_better_than_the_cheapest_known_offer():
    target = Target(6 * HOUR)
    plan = make_plan(WORK, [KNOWN], [], target)
    usual = opening_of(course(KNOWN, target=target), plan)
    assert best_opening(course(KNOWN, target=target), usual, 3, None) is None


def test_a_cheap_try_comes_before_a_dear_guess():
    """Three times eight cards of unknown speed, or first one of them: a dollar instead of a dear boot."""
    options = (EIGHT, ONE, KNOWN)
    here = course(*options, target=Target(5 * HOUR))
    usual = Opening((), ((EIGHT, 3),))
    found = best_opening(here, usual, 3, None)
    assert found is not None
    opening, outlook = found
    assert outlook.usd < Rehearsal(WORK, options, (), here.target, 0.0, 0.5, PACE).outlook((), usual.new).usd
    assert sum(one.usd_per_hour * number for one, number in opening.new) < 3 * 16.0


def test_an_opening_leaves_a_way_out():
    """The way out is 12 known machines. With ten minutes to spare there is no time to try anything alone."""
    way_out = replace(KNOWN, capacity=12)
    tight = Target(480.0 + 600.0 + WORK.tokens / (12 * 10_000.0), max_instances=12)
    here = course(ONE, way_out, target=tight)
    usual = Opening((), ((way_out, 12),))
    found = best_opening(here, usual, 3, None)
    begun = usual if found is None else found[0]
    assert dict(begun.new).get(way_out, 0) >= 10


def test_an_opening_keeps_to_the_limit_on_instances():
    target = Target(9 * HOUR, max_instances=2)
    here = course(EIGHT, ONE, OTHER, KNOWN, target=target)
    found = best_opening(here, Opening((), ((EIGHT, 1),)), 3, None)
    assert found is None or found[0].instances <= 2


def test_what_was_begun_is_left_to_work_while_it_boots():
    """The same decision at each tick, or the fleet would be ordered and given up in turn."""
    options, target = [EIGHT, ONE, OTHER, KNOWN], Target(5 * HOUR)
    memory, held, now = Memory(), [], 0.0
    known = {one.name: one for one in options}
    first, memory, _ = decide(WORK, options, held, target, memory, now, measured=False, pilots=3, detail=False)
    fleet = [(known[name], number) for name, number in first.offers]
    assert fleet
    for waited in range(0, 240, 30):
        booting = [replace(one, ready_in=one.ready_in - waited) for one in booted(fleet, ())]
        later = replace(target, deadline=5 * HOUR - waited)
        command, memory, _ = decide(
            WORK, options, booting, later, memory, float(waited), measured=False, pilots=3, detail=False
        )
        assert (command.offers, command.retire) == (first.offers, ())


def test_nothing_is_given_up_to_save_money_where_all_are_needed_until_the_other_has_booted():
    """Eight of eight are needed. A cheaper ninth may not be there, so one would have to go first."""
    cheap = replace(KNOWN, name="cloud/cheap", usd_per_hour=2.0)
    left = replace(WORK, tokens=8 * 10_000.0 * HOUR)
    held = [Held(f"i{i}", KNOWN) for i in range(8)]
    command, _, _ = decide(
        left, [KNOWN, cheap], held, Target(1.12 * HOUR, max_instances=8), Memory(), 0.0, measured=True, detail=False
    )
    assert command.retire == ()


offers = st.lists(
    st.builds(
        Option,
        name=st.sampled_from("abcdef"),
        usd_per_hour=st.floats(0.2, 40),
        tokens_per_second=st.floats(500, 80_000),
        boot_seconds=st.floats(30, 1200),
        capacity=st.sampled_from([None, 0, 1, 4]),
        spread=st.sampled_from([0.0, 0.2, 0.5]),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda one: one.name,
)


@settings(max_examples=200, deadline=None)
@given(offers, st.floats(600, 50_000), st.integers(1, 30), st.floats(0, 1), st.integers(0, 3))
def test_what_is_possible_is_what_a_plan_meets(options, deadline, most, caution, here):
    held = [Held(str(i), options[0], 60.0 * i) for i in range(here)]
    target = Target(deadline, max_instances=most)
    plan = make_plan(WORK, options, held, target, detail=False, caution=caution, anyway=False)
    assert possible(WORK, options, held, target, caution=caution) == plan.met
    assert earliest_finish(WORK, options, held, target, caution=caution) == plan.earliest


@given(
    st.lists(st.builds(Kind, st.integers(0, 4), st.integers(0, 30), st.floats(0, 5), st.floats(0, 1)), max_size=4),
    st.integers(0, 6),
)
def test_a_cover_is_found_where_there_is_room(kinds, most):
    assert can_cover(kinds, most, 64) == (cheapest_cover(kinds, most, 64) is not None)


def test_the_longest_decision_takes_less_than_the_time_between_two_looks():
    """13 offers of unknown speed, 50 instances: the figure for docs/evidence.md."""
    options = [
        replace(
            ONE,
            name=f"cloud/{i}{' spot' if i % 2 else ''}",
            spot=bool(i % 2),
            usd_per_hour=1.0 + 0.3 * i,
            tokens_per_second=5_000.0 + 1_500.0 * i,
            boot_seconds=(240.0, 480.0, 900.0)[i % 3],
            machine=Machine(f"card {i // 3}", 80, 1 + i % 3),
        )
        for i in range(13)
    ]
    work = replace(WORK, tokens=5e9, spread=0.15)
    before = time.process_time()
    command, _, _ = decide(
        work, options, [], Target(8 * HOUR, max_instances=50), Memory(), 0.0, measured=False, pilots=3, detail=False
    )
    took = time.process_time() - before
    print(f"first decision over 13 offers: {took:.2f} s of CPU, {command.reason[:80]}")
    assert "in the end" in command.reason and took < 5


def test_what_is_being_tried_may_be_waited_for():
    """The dollar is spent already: a dear boot waits until the one card has told what eight of them are worth."""
    one, eight = replace(ONE, tokens_per_second=10.0, capacity=0), replace(EIGHT, boot_seconds=1800.0)
    held = (Held("i0", one, 60.0),)
    here = course(eight, one, KNOWN, target=Target(8 * HOUR), held=held)
    found = best_opening(here, Opening(held, ((eight, 1),)), 1, None)
    assert found is not None and (found[0].kept, found[0].new) == (held, ())
