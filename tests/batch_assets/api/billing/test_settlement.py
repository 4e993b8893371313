"""The end of a batch: its lines add up to what it used, and none falls below what others have added."""

from __future__ import annotations

import datetime
from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from batch_assets.api.billing.usage import Kind, UsageKey, Used
from batch_assets.api.billing.usage_ledger import settlement

KEYS = [
    UsageKey(datetime.date(2027, 3, day), "acme", service_class, "m", Kind.COMPLETIONS)
    for day in (1, 2, 3)
    for service_class in ("batch", "batch_1h")
]
USED = st.builds(Used, **{name: st.integers(0, 50) for name in Used.__dataclass_fields__})


def fields(used: Used) -> dict[str, int]:
    return {**used.counts(), "amount": used.amount}


@given(USED, st.lists(st.tuples(st.sampled_from(KEYS), USED), max_size=8), st.sampled_from(KEYS))
def test_lines_add_up_and_none_falls_below_zero(
    whole: Used, parts: list[tuple[UsageKey, Used]], today: UsageKey
) -> None:
    found = settlement(whole, parts, today)
    lines: dict[UsageKey, Used] = {}
    for key, used in [*parts, *found.lines.items()]:
        lines[key] = lines.get(key, Used()).plus(used)
    assert reduce(Used.plus, lines.values(), Used()) == whole
    assert reduce(Used.plus, (used for _, used in parts), found.rest) == whole
    assert all(value >= 0 for used in lines.values() for value in fields(used).values())


def test_more_is_of_today_and_less_is_taken_from_the_newest_part_first() -> None:
    first, second, today = KEYS[0], KEYS[2], KEYS[4]
    parts = [(first, Used(requests=2, amount=100)), (second, Used(requests=2, amount=30))]
    found = settlement(Used(requests=5, amount=90), parts, today)
    assert found.rest == Used(requests=1, amount=-40)
    assert found.lines == {second: Used(amount=-30), first: Used(amount=-10), today: Used(requests=1)}
    assert settlement(Used(requests=4, amount=130), parts, today).lines == {}
