from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.backups.retention import DAY, HOUR, NEWEST, Keep, expired


def test_the_newest_of_each_hour_and_day_is_kept() -> None:
    made = [(f"{day}-{hour}", day * DAY + hour * HOUR) for day in range(4) for hour in range(24)]
    assert expired(made[:NEWEST], Keep(hourly=1, daily=0)) == []
    gone = expired(made, Keep(hourly=4, daily=2))
    kept = [name for name, _ in made if name not in gone]
    assert kept == ["2-23", "3-20", "3-21", "3-22", "3-23"]


def test_backups_that_are_not_made_any_more_stay() -> None:
    assert expired([("old", 0.0), ("older", -5 * DAY)], Keep(hourly=1, daily=2)) == []


@given(
    st.lists(st.floats(0, 40 * DAY), unique=True, max_size=60),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_a_second_look_deletes_nothing_more(times: list[float], hourly: int, daily: int) -> None:
    made = [(str(number), at) for number, at in enumerate(times)]
    gone = expired(made, Keep(hourly, daily))
    left = [one for one in made if one[0] not in gone]
    assert expired(left, Keep(hourly, daily)) == []
    assert len(left) <= hourly + daily + NEWEST
    if made:
        assert max(made, key=lambda one: one[1]) in left


@pytest.mark.parametrize("text", ["hourly=0,daily=0", "24", "hourly=-1,daily=2", "hourly=1"])
def test_a_wrong_setting_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="expected hourly=N,daily=N"):
        Keep.parse(text)


def test_a_setting() -> None:
    assert Keep.parse("hourly=6, daily=30") == Keep(6, 30)
