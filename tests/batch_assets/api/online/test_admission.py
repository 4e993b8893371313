"""Who is let in while much waits: thresholds, shares, rates, and when to come again."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from batch_assets.api.online.admission import SLOW_FROM, Admission, EnginePressure
from batch_assets.api.online.queues.queue_protocol import QueueDepth

CAPACITY = 1000


def admission(tenants: dict[str, int], pressure: EnginePressure | None = None, rate: int = 100) -> Admission:
    """With this in the queue, and so many answers a second for a long time."""
    found = Admission(CAPACITY, lambda: 0.5)
    depth = QueueDepth(waiting=sum(tenants.values()), tenants=tenants)
    pressures = {} if pressure is None else {"m": pressure}
    for second in range(1, 60):
        found.observe(depth, pressures, rate, float(second))
    return found


def let_in(found: Admission, tenant: str, seconds: int, per_second: int = 1000, model: str = "m") -> int:
    """How many of so many requests a second are let in; the queue stays as it was."""
    count = 0
    for step in range(seconds * per_second):
        if found.ask(tenant, model, 60.0 + step / per_second).wait is None:
            count += 1
            found._new.clear()
            found._new_total = 0
    return count


def test_below_nine_tenths_everybody_is_let_in() -> None:
    found = admission({"a": 800})
    assert sum(found.ask("a", "m", 60.0).wait is None for _ in range(100)) == 100


def test_a_full_queue_lets_nobody_in_and_says_when_to_come_again() -> None:
    found = admission({"a": CAPACITY})
    for tenant in ("a", "b"):
        wait = found.ask(tenant, "m", 60.0).wait
        assert wait is not None and 0.75 <= wait <= 60
    slow, quick = (admission({"a": CAPACITY}, rate=rate).ask("a", "m", 60.0).wait for rate in (1, 100))
    assert slow is not None and quick is not None and slow > quick


def test_nothing_is_accepted_beyond_the_capacity() -> None:
    found = Admission(CAPACITY, lambda: 0.5)
    found.observe(QueueDepth(), {}, 0, 1.0)
    accepted = sum(found.ask("a", "m", 1.0 + step / 1e6).wait is None for step in range(5000))
    assert SLOW_FROM * CAPACITY <= accepted <= CAPACITY


def test_what_was_let_in_and_not_kept_takes_no_room() -> None:
    found = Admission(10, lambda: 0.5)
    for _ in range(100):
        assert found.ask("a", "m", 1.0).wait is None
        found.withdraw("a")
    found.withdraw("nobody")
    assert found.fullness == 0


def test_a_tenant_above_its_share_is_refused_and_others_are_not() -> None:
    found = admission({"big": 860, "small": 80})
    assert let_in(found, "big", 2) == 0
    assert 20 <= let_in(found, "small", 2) <= 200


def test_the_rate_falls_with_the_room_that_is_left() -> None:
    rates = [let_in(admission({"big": filled - 200, "small": 200}), "small", 10) for filled in (910, 950, 990)]
    assert rates[0] > rates[1] > rates[2] > 0


def test_tenants_get_equal_parts() -> None:
    found = admission({"a": 310, "b": 310, "c": 310})
    got: Counter[str] = Counter()
    for step in range(10_000):
        for tenant in ("a", "b", "c"):
            got[tenant] += found.ask(tenant, "m", 60.0 + step / 1000).wait is None
            found._new.clear()
            found._new_total = 0
    assert all(count == 0 for count in got.values()), "each holds more than its share"
    spread = admission({**dict.fromkeys("abcdefgh", 100), "x": 70, "y": 70})
    counts = [let_in(spread, name, 5) for name in ("x", "y")]
    assert counts[0] > 0 and abs(counts[0] - counts[1]) <= 2


def test_full_engines_slow_their_own_model_only() -> None:
    found = admission({"a": 10}, EnginePressure(kv=0.97))
    assert let_in(found, "a", 10) <= 0.35 * 100 * 10
    assert let_in(found, "a", 1, model="other") == 1000
    stuck = admission({"a": 10}, EnginePressure(queue=5.0))
    assert 0 < let_in(stuck, "a", 10) <= 0.1 * 100 * 10, "never quite to nothing: else nobody would see them recover"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5)), max_size=50),
    st.integers(0, 2000),
    st.floats(0, 2),
    st.integers(0, 1000),
)
def test_waits_are_bounded_whatever_happens(
    asked: list[tuple[str, float]], waiting: int, pressure: float, answered: int
) -> None:
    found = Admission(CAPACITY, lambda: 1.0)
    found.observe(QueueDepth(waiting=waiting, tenants={"a": waiting}), {"m": EnginePressure(pressure)}, answered, 1.0)
    now = 1.0
    for tenant, passed in asked:
        now += passed
        wait = found.ask(tenant, "m", now).wait
        assert wait is None or 0 < wait <= 75
    assert found.fullness >= 0


def test_a_burst_of_one_tenant_leaves_turns_for_others_though_no_answer_comes() -> None:
    """In one moment, between two looks at the queue, on an engine that has nearly stopped."""
    found = Admission(200, lambda: 0.5)
    found.observe(QueueDepth(), {"m": EnginePressure(queue=0.5)}, 0, 1.0)

    def burst(tenant: str, at: float) -> int:
        return sum(found.ask(tenant, "m", at).wait is None for _ in range(400))

    assert burst("a", 1.0) == 181
    assert burst("b", 1.1) == 11, "half of the 19 places that were left, and one by the rate"
    assert burst("c", 1.2) >= 4
    assert found.depth.waiting == 197 and found.fullness > 0.95


def test_bursts_that_come_together_share_the_places() -> None:
    found = Admission(200, lambda: 0.5)
    got: Counter[str] = Counter()
    for _ in range(400):
        for tenant in "aaaaaaaaab":  # nine times as fast as the other
            got[tenant] += found.ask(tenant, "m", 1.0).wait is None
    assert got["a"] <= 130 and got["b"] >= 50 and 180 <= got.total() <= 200
