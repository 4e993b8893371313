"""What counts as a module that a row meets."""

from __future__ import annotations

from benchmarks.row_path import DEPTH, WORD, Met, holds
from gpu_runner.rows import Batch, Row


def a_row(prompt: str) -> Row:
    return Row("00000", "id", "key", prompt.encode())


def test_a_module_counts_once_one_of_its_functions_has_the_row_and_not_before() -> None:
    met = Met()
    with met.watching():
        Batch("00000", (a_row("another"),), {})
        assert met.modules == {}
        Batch("00000", (a_row(f"What is {WORD}?"),), {})
    assert list(met.modules) == ["gpu_runner.rows"]


def test_a_row_is_found_in_what_holds_it_no_deeper_than_is_looked() -> None:
    held: object = a_row(WORD)
    for depth in range(1, 2 * DEPTH):
        assert holds(held) == (depth <= DEPTH)
        held = {"one": held}
