"""The controller: starts small where it may, jumps where it must, stays while that is good enough, keeps the budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runner.fleet_database.capacity_plan import Assignment, CapacityMemory, memory_to_json, read_memory
from gpu_runner.money import format_usd, round_up_usd
from gpu_runner.planner.command import assign
from gpu_runner.planner.controller import Command, ControllerState, decide
from gpu_runner.planner.types import TIMING, HeldInstance, Plan, PlannedOffer, Target, Work

HOUR = 3600.0
A100 = PlannedOffer("cloud/a100", 2.0, 10_000.0, 480.0, spread=0.05)
SPOT = PlannedOffer("cloud/a100 spot", 0.7, 10_000.0, 480.0, spot=True, interruptions_per_hour=0.05, spread=0.05)
GUESS = replace(A100, spread=0.5)
WORK = Work(tokens=360e6, total_tokens=360e6, started_ago=0.0, units=1000, spread=0.02)  # 10 hours of an A100

NEW = ControllerState()


def tick(
    options: list[PlannedOffer],
    held: list[HeldInstance],
    target: Target,
    *,
    work: Work = WORK,
    memory: ControllerState = NEW,
    measured: bool = True,
    pilots: int = 1,
) -> tuple[Command, ControllerState, Plan]:
    return decide(work, options, held, target, memory, measured=measured, pilots=pilots, detail=False)


def ready(number: int, option: PlannedOffer = A100) -> list[HeldInstance]:
    return [HeldInstance(f"i{i}", option) for i in range(number)]


def test_it_starts_with_one_instance_to_measure_it():
    command, _, plan = tick([GUESS], [], Target(20 * HOUR), measured=False)
    assert (command.instances, command.pilot, command.kind) == (1, True, "pilot")
    assert command.offers == (("cloud/a100", 1),)
    assert plan.chosen is not None and "measured" in command.reason


def test_while_the_pilot_boots_and_is_measured_nothing_is_added():
    booting = [HeldInstance("i0", GUESS, 200.0)]
    command, _, _ = tick([GUESS], booting, Target(20 * HOUR), measured=False)
    assert (command.instances, command.retire, command.kind) == (1, (), "pilot")


def test_where_the_wait_would_endanger_the_deadline_all_start_at_once():
    command, _, _ = tick([GUESS], [], Target(1.0 * HOUR), measured=False)
    assert command.instances >= 8 and not command.pilot


def test_after_the_pilot_it_jumps_to_the_number_that_makes_the_deadline():
    command, _, plan = tick([A100], ready(1), Target(3 * HOUR))
    assert command.kind == "grow" and plan.feasible
    assert 4 <= command.instances <= 5
    again, _, same = tick([A100], ready(command.instances), Target(3 * HOUR))
    assert (again.kind, again.instances) == ("steady", command.instances)
    assert same.chosen is not None and same.chosen.instances == command.instances
    assert same.chosen.finish.p50 == pytest.approx(10 * HOUR / command.instances)


def test_what_boots_counts():
    booting = [*ready(1), *(HeldInstance(f"b{i}", A100, 300.0) for i in range(4))]
    command, _, _ = tick([A100], booting, Target(3 * HOUR))
    assert (command.kind, command.instances) == ("steady", 5)


def test_a_saving_of_less_than_five_percent_changes_nothing():
    little, much = replace(A100, name="cloud/b", usd_per_hour=1.95), replace(A100, name="cloud/b", usd_per_hour=1.0)
    stays, _, _ = tick([A100, little], ready(1), Target(20 * HOUR))
    moves, _, _ = tick([A100, much], ready(1), Target(20 * HOUR))
    assert stays.retire == () and stays.kind == "steady" and "would save" in stays.reason
    assert dict(moves.offers)["cloud/b"] == 1 and "$" in moves.reason


def test_what_is_replaced_works_on_until_the_new_one_was_to_be_had():
    """A cheap offer of which there is none costs nothing then."""
    cheap = replace(A100, name="cloud/b", usd_per_hour=1.0)
    first, _, _ = tick([A100, cheap], ready(1), Target(20 * HOUR))
    boots, _, _ = tick([A100, cheap], [*ready(1), HeldInstance("new", cheap, 300.0)], Target(20 * HOUR))
    assert (first.instances, first.retire) == (2, ())
    assert (boots.instances, boots.retire) == (1, ("i0",))


CHEAP = replace(A100, name="cloud/b", usd_per_hour=1.0)


def test_an_instance_is_assigned_its_successor_and_left_when_that_one_answers():
    target = Target(20 * HOUR)
    first, memory, _ = tick([A100, CHEAP], ready(1), target)
    assert first.assignments == (Assignment("i0", "cloud/b", beside=True),) == memory.assignments
    again, memory, _ = tick([A100, CHEAP], ready(1), target, memory=memory)
    assert again == first

    boots = HeldInstance("new", CHEAP, 300.0, replaces="i0")
    for _ in range(3):  # its own run boots the successor: it works on
        command, memory, _ = tick([A100, CHEAP], [*ready(1), boots], target, memory=memory)
        assert (command.instances, dict(command.offers), command.retire) == (1, {"cloud/b": 1}, ("i0",))
        assert command.assignments == (Assignment("i0", "cloud/b"),) == memory.assignments
    gone, _, _ = tick([A100], ready(1), target, memory=memory)  # the boot failed, and there is none of it now
    assert (gone.retire, gone.assignments) == ((), ())
    after, memory, _ = tick([A100, CHEAP], [HeldInstance("new", CHEAP)], target, memory=memory)
    assert (after.retire, after.assignments, memory.assignments) == ((), (), ())


def test_what_boots_for_another_run_takes_the_place_at_once():
    _, memory, _ = tick([A100, CHEAP], ready(1), Target(20 * HOUR))
    held = [*ready(1), HeldInstance("new", CHEAP, 300.0)]
    command, _, _ = tick([A100, CHEAP], held, Target(20 * HOUR), memory=memory)
    assert command.assignments == (Assignment("i0"),)


def test_nothing_works_on_when_the_budget_is_spent():
    _, memory, _ = tick([A100, CHEAP], ready(1), Target(20 * HOUR))
    held = [*ready(1), HeldInstance("new", CHEAP, 300.0, replaces="i0")]
    command, memory, _ = tick([A100, CHEAP], held, Target(20 * HOUR, budget_usd=0.001), memory=memory)
    assert command.pause and {*command.retire} == {"i0", "new"}
    assert {*command.assignments} == {Assignment("i0"), Assignment("new")}
    assert memory.assignments == ()


def test_pairs_stay_the_same_and_each_place_has_one_taker():
    before = (Assignment("i2", "b"), Assignment("i1", "gone"))
    switch = Command(3, (("b", 2), ("c", 1)), ("i0", "i1", "i2"), new=(("b", 2), ("c", 1)))
    assert assign(switch, 3, None, before).assignments == (
        Assignment("i0", "b"),
        Assignment("i1", "c"),
        Assignment("i2", "b"),
    )
    crowded = assign(switch, 3, 1, before).assignments  # room for one beside what there is
    assert crowded == (Assignment("i0"), Assignment("i1"), Assignment("i2", "b"))
    shrinks = assign(replace(switch, instances=2, new=(("b", 2),)), 3, None, ()).assignments
    assert [one.successor for one in shrinks] == [None, "b", "b"]


def test_at_the_limit_only_a_few_are_given_up_at_once_to_save_money():
    cheap = replace(A100, name="cloud/b", usd_per_hour=1.0)
    command, _, _ = tick([A100, cheap], ready(10), Target(20 * HOUR, max_instances=10))
    assert command.instances == 10 and len(command.retire) == 1
    more, _, _ = tick(
        [A100, cheap], [*ready(9), HeldInstance("new", cheap, 300.0)], Target(2.5 * HOUR, max_instances=10)
    )
    assert more.instances == 10 and 1 < len(more.retire) <= 2


def test_the_fastest_and_the_efficient_take_more_instances_than_the_cheapest():
    numbers = {
        objective: tick([A100], ready(1), Target(20 * HOUR, None, 10, objective))[0].instances
        for objective in ("cheapest", "efficient", "fastest")
    }
    assert numbers["cheapest"] == 1 and numbers["fastest"] == 10
    assert 1 < numbers["efficient"] <= 10


def test_instances_of_one_price_are_not_given_up_while_there_is_work_for_them():
    command, _, _ = tick([A100], ready(6), Target(20 * HOUR))
    assert (command.instances, command.retire) == (6, ())


def test_instances_without_a_batch_are_given_up():
    command, _, _ = tick([A100], ready(6), Target(20 * HOUR), work=replace(WORK, units=2))
    assert command.instances == 2 and len(command.retire) == 4


def test_with_time_in_hand_spot_does_the_work():
    command, _, _ = tick([A100, SPOT], [], Target(6 * HOUR))
    assert dict(command.offers).keys() == {"cloud/a100 spot"}


def test_behind_the_line_reliable_instances_take_over_and_held_spot_helps_on():
    """An hour of work for 40 instances is left in 1.3 h: spot that boots for a quarter of an hour and is lost then
    would leave too little time for all others."""
    late = replace(WORK, tokens=40 * 10_000.0 * HOUR)
    slow = replace(SPOT, boot_seconds=900.0)
    command, _, _ = tick([A100, slow], ready(2, slow), Target(1.3 * HOUR, max_instances=40), work=late)
    fleet = dict(command.offers)
    assert fleet["cloud/a100"] >= 36
    assert command.retire == () and fleet["cloud/a100 spot"] == 2


def test_the_last_stretch_is_not_entrusted_to_spot_alone():
    """What is left needs two hours of one instance, and the deadline is in two hours and a reliable boot."""
    rest = replace(WORK, tokens=10_000.0 * 2 * HOUR)
    command, _, _ = tick([A100, SPOT], ready(1, SPOT), Target(2 * HOUR + 500.0), work=rest)
    assert command.instances > 1


def test_what_is_done_before_another_could_boot_is_left_alone():
    rest = replace(WORK, tokens=10_000.0 * 120.0)
    command, _, _ = tick([A100, SPOT], ready(1, SPOT), Target(300.0), work=rest)
    assert (command.kind, command.instances) == ("steady", 1)


def test_a_deadline_that_cannot_be_met_is_said_with_the_earliest_finish_and_its_price():
    command, _, plan = tick([A100], ready(1), Target(0.5 * HOUR, max_instances=5))
    assert command.kind == "infeasible" and not plan.feasible
    assert command.instances == 5
    assert plan.earliest is not None and "earliest possible finish" in command.reason


def test_a_spent_budget_pauses_and_more_budget_resumes():
    command, memory, _ = tick([A100], ready(2), Target(20 * HOUR, 0.01))
    assert (command.instances, command.kind) == (0, "paused")
    assert set(command.retire) == {"i0", "i1"} and "0.01 $ are left" in command.pause.describe()
    enough = command.pause.enough_usd
    assert enough is not None and f"needs {format_usd(round_up_usd(enough))} $ from now on" in command.pause.describe()
    still, memory, _ = tick([A100], [], Target(20 * HOUR, 0.01), memory=memory)
    assert still.kind == "paused" and still.instances == 0
    assert tick([A100], [], Target(20 * HOUR, enough), memory=memory)[0].pause is None
    resumed, _, _ = tick([A100], [], Target(20 * HOUR, 30.0), memory=memory)
    assert resumed.pause is None and resumed.instances == 1


def test_a_fleet_that_is_too_dear_as_believed_waits_for_the_pilot():
    """Seven boots at once would spend much of the budget, which is enough only if speeds are better than believed."""
    target = Target(1.5 * HOUR, 14.0, 20)
    command, memory, _ = tick([GUESS], [], target, measured=False)
    assert (command.instances, command.kind) == (1, "pilot") and "the budget may not last" in command.reason
    booting = [HeldInstance("i0", GUESS, 100.0)]
    still, _, _ = tick([GUESS], booting, replace(target, budget_usd=13.8), measured=False, memory=memory)
    assert (still.instances, still.retire, still.kind) == (1, (), "pilot")


def test_it_shrinks_before_it_pauses():
    rate = 2.0 / HOUR * TIMING.reserve
    command, _, _ = tick([A100], ready(3), Target(20 * HOUR, 2.5 * rate))
    assert command.instances < 3 and command.kind == "shrink" and command.pause is None


def test_what_the_budget_can_finish_is_not_given_up():
    rest = replace(WORK, tokens=10_000.0 * 60.0)
    command, _, _ = tick([A100], ready(2), Target(HOUR, 2 * 2.0 / HOUR * 1.2 * TIMING.reserve), work=rest)
    assert (command.instances, command.retire) == (2, ())


def test_without_offers_what_is_held_goes_on():
    command, _, _ = tick([], ready(3), Target(3 * HOUR))
    assert (command.instances, command.retire) == (3, ())
    assert "no offers are known" in command.reason


def test_when_the_work_is_done_everything_ends():
    command, _, _ = tick([A100], ready(2), Target(HOUR), work=replace(WORK, tokens=0.0))
    assert (command.instances, command.kind) == (0, "done")
    assert set(command.retire) == {"i0", "i1"}


def test_several_pilots_learn_the_speeds_of_what_might_be_cheaper():
    guesses = [replace(GUESS, name=f"cloud/{i}", usd_per_hour=2.0 + 0.1 * i) for i in range(4)]
    command, _, _ = tick(guesses, [], Target(48 * HOUR), measured=False, pilots=3)
    assert command.instances == 3 and command.pilot


def test_an_offer_is_tried_once_when_its_odds_are_worth_a_boot():
    perhaps = replace(GUESS, name="cloud/perhaps", usd_per_hour=2.1)
    command, memory, _ = tick([A100, perhaps], ready(1), Target(20 * HOUR), pilots=2)
    assert ("cloud/perhaps", 1) in command.offers and "may save" in command.reason
    assert "cloud/perhaps" in memory.tried
    gone, memory, _ = tick([A100, perhaps], ready(1), Target(20 * HOUR), pilots=2, memory=replace(memory, offers=()))
    assert gone.instances == 1


def test_the_memory_survives_as_json():
    _, memory, _ = tick([A100, CHEAP], ready(1), Target(20 * HOUR))
    assert memory.assignments
    assert read_memory(memory_to_json(CapacityMemory(memory))).controller == memory


def test_the_same_tick_twice_commands_the_same():
    first, memory, _ = tick([A100, SPOT], ready(1), Target(3 * HOUR))
    again, _, _ = tick([A100, SPOT], ready(1), Target(3 * HOUR), memory=memory)
    assert (again.instances, again.offers, again.retire) == (first.instances, first.offers, first.retire)


offers = st.builds(
    PlannedOffer,
    name=st.just(""),
    usd_per_hour=st.floats(0.1, 40),
    tokens_per_second=st.floats(500, 50_000),
    boot_seconds=st.floats(10, 1500),
    capacity=st.none() | st.integers(0, 8),
    spot=st.booleans(),
    interruptions_per_hour=st.floats(0, 0.3),
    spread=st.sampled_from([0.05, 0.2, 0.5]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(offers, max_size=5),
    st.lists(st.sampled_from([0.0, 30.0, 400.0]), max_size=5),
    st.floats(1e6, 1e10),
    st.none() | st.floats(-1000, 1e6),
    st.none() | st.floats(0, 500),
    st.integers(1, 20),
    st.integers(1, 30),
    st.booleans(),
)
def test_no_command_passes_a_cap_or_what_the_budget_can_end(
    market, waits, tokens, deadline, budget, limit, units, measured
):
    options = [replace(one, name=f"o{i}{' spot' if one.spot else ''}") for i, one in enumerate(market)]
    held = [HeldInstance(f"i{i}", options[i % len(options)], wait) for i, wait in enumerate(waits)] if options else []
    work = Work(tokens, 1e10, 0.0, units, 0.1)
    target = Target(deadline, budget, limit)
    command, _, _ = decide(
        work, options, held, target, ControllerState(), measured=measured and bool(held), pilots=3, detail=False
    )
    assert command.instances == sum(number for _, number in command.offers) or not options
    assert command.instances <= max(min(limit, units), 1)
    assert set(command.retire) <= {one.instance for one in held}
    given_up = [one.instance for one in command.assignments]
    assert len(given_up) == len({*given_up}) and {*given_up} >= {*command.retire}
    taken = Counter(one.successor for one in command.assignments if one.successor is not None)
    assert taken <= Counter(dict(command.new))
    for name, number in Counter(one.option.name for one in held if one.instance not in command.retire).items():
        assert number <= dict(command.offers)[name]  # nothing is held that is neither commanded nor given up
    for name, number in command.offers:
        option = next(one for one in options if one.name == name)
        had = sum(one.option.name == name for one in held)
        assert option.capacity is None or number <= option.capacity + had
    if budget is not None:
        price = {one.name: one.usd_per_hour / HOUR for one in options}
        rate = sum(price[name] * number for name, number in command.offers)
        assert rate * TIMING.reserve <= budget * (1 + 1e-9)


@pytest.mark.parametrize("deadline", [None, 20 * HOUR])
def test_without_a_deadline_or_with_a_far_one_it_is_one_instance_of_the_cheapest_token(deadline):
    fast = replace(A100, name="cloud/fast", tokens_per_second=40_000.0, usd_per_hour=9.0)
    command, _, _ = tick([A100, fast], [], Target(deadline))
    assert command.offers == (("cloud/a100", 1),)


def test_spot_that_is_held_is_counted_on_where_no_more_of_it_may_be_ordered():
    """Eleven work on spot, one was taken, and a reliable boot is most of what is left in hand: one more of those is
    ordered. Giving up the eleven because their like may no longer be ordered would cost many times that."""
    sure, spot = replace(A100, boot_seconds=900.0), replace(SPOT, boot_seconds=900.0)
    work = replace(WORK, tokens=0.55 * 12 * 10_000.0 * HOUR)
    held = [HeldInstance(f"i{i}", spot) for i in range(11)]
    command, _, plan = tick([sure, spot], held, Target(0.8 * HOUR, max_instances=20), work=work)
    assert command.retire == () and plan.met
    assert dict(command.offers)[spot.name] == 11 and 12 <= command.instances <= 18


def test_an_exchange_that_cannot_be_made_one_by_one_is_made_at_once():
    """Eight small ones would do, at a third of the cost. With only the dearest one exchanged the deadline is missed."""
    small = PlannedOffer("cloud/small", 1.0, 10_000.0, 240.0, spread=0.05)
    slow = PlannedOffer("cloud/slow", 0.9, 2_000.0, 240.0, spread=0.05)
    large = PlannedOffer("cloud/large", 30.0, 60_000.0, 240.0, spread=0.05)
    work = replace(WORK, tokens=8 * 10_000.0 * 8.5 * HOUR)
    held = [HeldInstance("large", large), HeldInstance("slow", slow), HeldInstance("slow too", slow)]
    held += [HeldInstance(f"i{i}", small) for i in range(5)]
    command, _, _ = tick([small, slow, large], held, Target(10 * HOUR, max_instances=8), work=work)
    assert dict(command.offers) == {"cloud/small": 8} and command.kind == "switch"
    assert set(command.retire) == {"large", "slow", "slow too"}
