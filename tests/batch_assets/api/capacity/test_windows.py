"""Many windows as one question: what is kept when the binding one is kept, by the queue's own order."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batch_assets.api.capacity.windows import Demand, WindowWork, binding_demand, demands_of, done_by
from gpu_runner.planner.types import HeldInstance, PlannedOffer


def ready(number: int, *, ready_in: float = 0.0, speed: float = 100.0) -> list[HeldInstance]:
    option = PlannedOffer("cloud/a100", 2.0, speed, 60.0)
    return [HeldInstance(f"i{n} {ready_in}", option, ready_in) for n in range(number)]


def sent_before(windows: Sequence[WindowWork]) -> list[tuple[WindowWork, float]]:
    """Row by row as the queue sends them: each window with the tokens that are done when its last row is."""
    had: dict[str, int] = {one.tenant: 0 for one in windows}
    left = {number: one.rows for number, one in enumerate(windows)}
    total, found = 0.0, []
    while any(left.values()):
        top = max(windows[number].priority for number in left if left[number])
        at_top = [number for number in left if left[number] and windows[number].priority == top]
        # `had` counts rows of this priority only: tenants begin with equal shares in each.
        tenant = min({windows[number].tenant for number in at_top}, key=lambda name: (had[name], name))
        own = [(windows[number].seconds, number) for number in at_top if windows[number].tenant == tenant]
        heapq.heapify(own)
        number = own[0][1]
        left[number] -= 1
        had[tenant] += 1
        total += windows[number].tokens / windows[number].rows
        if not left[number]:
            found.append((windows[number], total))
            if not any(left[other] for other in at_top):
                had = dict.fromkeys(had, 0)
    return found


WINDOWS = st.lists(
    st.builds(
        WindowWork,
        tenant=st.sampled_from("abc"),
        priority=st.integers(0, 2),
        seconds=st.integers(10, 1000).map(float),
        rows=st.integers(1, 20),
        tokens=st.floats(1.0, 5_000.0),
    ),
    min_size=1,
    max_size=8,
)


@given(WINDOWS)
def test_a_demand_holds_all_that_the_queue_sends_before_the_end_of_a_window(windows: list[WindowWork]) -> None:
    demands = {one.seconds: one.tokens for one in demands_of(windows)}
    # Shares are equal to a row: a tenant whose turn comes first is ahead by one row of each other tenant.
    ahead = 3 * max(one.tokens / one.rows for one in windows)
    for window, done in sent_before(windows):
        assert done <= demands[window.seconds] + ahead


@pytest.mark.slow
@given(WINDOWS, st.integers(0, 30), st.floats(1.0, 200.0), st.floats(0.0, 300.0))
def test_a_fleet_that_keeps_the_binding_window_keeps_all(
    windows: list[WindowWork], number: int, speed: float, boot: float
) -> None:
    """Held instances that work, and new ones that answer after one boot: exactly as many as the binding one needs."""
    held, demands = ready(number % 4, speed=speed), demands_of(windows)
    binding = binding_demand(demands, held, boot)
    assert binding is not None
    fleet = [*held, *ready(number, ready_in=boot, speed=speed)] if binding.helped else held
    assume(done_by(fleet, binding.seconds) >= binding.tokens)
    for demand in demands:
        kept = done_by(fleet, demand.seconds) >= demand.tokens * (1 - 1e-9)
        assert kept or demand.seconds <= boot, "a new instance would come too late for it"


@given(WINDOWS, st.floats(0.0, 300.0), st.floats(1.0, 200.0))
def test_of_what_works_now_as_much_may_go_as_the_binding_window_can_spare(
    windows: list[WindowWork], boot: float, speed: float
) -> None:
    """The fleet is enough: one that is smaller and still keeps the binding window keeps all of them."""
    demands = demands_of(windows)
    held = ready(200, speed=speed)
    assume(all(done_by(held, one.seconds) >= one.tokens for one in demands))
    binding = binding_demand(demands, held, boot)
    assert binding is not None
    needed = binding.tokens / binding.seconds
    least = [HeldInstance("i", PlannedOffer("cloud/a100", 2.0, needed, 60.0))]
    for demand in demands:
        assert done_by(least, demand.seconds) >= demand.tokens * (1 - 1e-9)


def test_the_longest_window_binds_where_most_work_is_and_the_short_one_where_a_boot_leaves_no_time() -> None:
    short, long = WindowWork("a", 1, 100, 10, 98.0), WindowWork("a", 1, 1000, 100, 902.0)
    demands = demands_of([long, short])
    assert [(one.seconds, one.rows, one.tokens) for one in demands] == [(100, 10, 98.0), (1000, 110, 1000.0)]
    at_once, after_boot = binding_demand(demands, (), 0.0), binding_demand(demands, (), 90.0)
    assert at_once is not None and at_once.seconds == 1000  # 1 token a second against 0.98
    assert after_boot is not None and after_boot.seconds == 100  # 9.8 tokens a second against 1.1


def test_lines_of_higher_priority_and_of_other_tenants_go_before() -> None:
    urgent, own = WindowWork("a", 2, 5000, 50, 500.0), WindowWork("a", 1, 100, 10, 100.0)
    other = WindowWork("b", 1, 9000, 40, 80.0)
    (first, *_) = demands_of([urgent, own, other])
    assert first == Demand(100, 50 + 10 + 10, 500.0 + 100.0 + 20.0)  # as many rows of the other tenant as of this one


def test_a_window_that_ends_before_a_new_instance_answers_asks_for_none() -> None:
    lost, late = WindowWork("a", 1, 30, 10, 1e6), WindowWork("a", 1, 600, 10, 10.0)
    alone = binding_demand(demands_of([lost]), (), 60.0)
    assert alone is not None and not alone.helped
    both = binding_demand(demands_of([lost, late]), (), 60.0)
    assert both is not None and both.seconds == 600 and both.tokens == 1e6 + 10


def test_nothing_left_and_windows_that_have_ended_bind_nothing() -> None:
    assert binding_demand(demands_of([]), (), 60.0) is None
    assert binding_demand(demands_of([WindowWork("a", 1, 100, 0, 0.0)]), (), 60.0) is None
    assert binding_demand(demands_of([WindowWork("a", 1, -1, 5, 10.0)]), (), 60.0) is None
