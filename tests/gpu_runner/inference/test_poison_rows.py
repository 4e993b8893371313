"""Finding the rows that kill an engine, with few deaths."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runner.inference.poison_rows import PoisonBisector


def find(rows: int, poison: set[int]) -> tuple[list[int], int, list[int]]:
    """(poison rows in the order found, deaths, rows that survived), where a lone row must kill twice."""
    suspects: PoisonBisector[int] = PoisonBisector()
    suspects.add(range(rows))
    found: list[int] = []
    survivors: list[int] = []
    alone: set[int] = set()
    deaths = 0
    while suspects:
        group = suspects.next()
        tried = list(group.waiting)
        if not poison & set(tried):
            survivors += tried
            suspects.survived(group)
            continue
        deaths += 1
        if len(tried) == 1 and tried[0] in alone:
            found += tried
            tried = []
        elif len(tried) == 1:
            alone.add(tried[0])
        suspects.died(group, tried, [])
    assert suspects.size == 0
    return found, deaths, survivors


def test_one_row_of_250_is_found_wherever_it_is() -> None:
    worst = 0
    for poison in range(250):
        found, deaths, survivors = find(250, {poison})
        assert found == [poison]
        assert sorted(survivors) == [i for i in range(250) if i != poison]
        worst = max(worst, deaths)
    assert worst + 2 <= 9  # two deaths before anybody is a suspect (bar-E10)


def test_one_row_of_a_whole_window_is_found_with_as_few_deaths() -> None:
    assert max(find(4096, {poison})[1] for poison in range(0, 4096, 7)) + 2 <= 10


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 1200), picks=st.sets(st.integers(0, 1199), max_size=30))
def test_several_rows_are_found_and_nobody_else(rows: int, picks: set[int]) -> None:
    poison = {pick for pick in picks if pick < rows}
    found, deaths, survivors = find(rows, poison)
    assert sorted(found) == sorted(poison)
    assert sorted(survivors) == sorted(set(range(rows)) - poison)
    assert deaths <= len(poison) * (2 + math.ceil(math.log(max(rows, 2), 4)))


def test_a_death_without_a_guilty_row_finds_nobody() -> None:
    suspects: PoisonBisector[int] = PoisonBisector()
    suspects.add(range(64))
    suspects.died(suspects.next(), range(64), [])
    tried: list[int] = []
    while suspects:
        group = suspects.next()
        tried += group.waiting
        suspects.survived(group)
    assert sorted(tried) == list(range(64))


def test_the_last_part_is_split_unseen_when_all_others_survived() -> None:
    suspects: PoisonBisector[int] = PoisonBisector()
    suspects.add(range(16))
    suspects.died(suspects.next(), range(16), [])
    for _ in range(3):
        suspects.survived(suspects.next())
    assert len(suspects.next().waiting) == 1


def test_rows_that_were_not_submitted_are_no_part_of_the_split() -> None:
    suspects: PoisonBisector[int] = PoisonBisector()
    suspects.add(range(10))
    suspects.died(suspects.next(), [0, 1], range(2, 10))
    groups = [list(suspects.next().waiting) for _ in range(3)]
    assert groups == [[0], [1], list(range(2, 10))]


def test_a_trial_that_was_broken_off_is_repeated_with_what_is_left() -> None:
    suspects: PoisonBisector[int] = PoisonBisector()
    suspects.add(range(4))
    suspects.put_back(suspects.next(), [2, 3])
    group = suspects.next()
    assert (list(group.waiting), group.left) == ([2, 3], 2)
    suspects.put_back(group, [])
    assert not suspects
