"""Sums of money in words: nothing is shown as nothing that is not, and what is said to be enough is enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.money import format_usd, round_up_usd

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "usd, words",
    [
        (0.0, "0.00"),
        (1234.5, "1,234.50"),
        (1.374, "1.37"),
        (0.5, "0.50"),
        (0.05, "0.05"),
        (0.0633, "0.063"),
        (0.00423, "0.0042"),
        (0.000_031_2, "0.000031"),
        (0.00996, "0.01"),
        (-0.00423, "-0.0042"),
        (float("inf"), "inf"),
        (0.1 + 0.2 - 0.3, "0.00"),
        (-5e-17, "0.00"),
    ],
)
def test_sums_have_two_decimals_and_two_significant_digits(usd: float, words: str):
    assert format_usd(usd) == words


def test_columns_have_four_decimals():
    sums = (0.0, 0.0417, 1.5, 9.99, 12.0, 0.000_0042)
    words = ["0.0000", "0.0417", "1.5000", "9.9900", "12.00", "0.0000042"]
    assert [format_usd(one, fine=True) for one in sums] == words


@given(st.floats(1e-9, 1e9))
def test_what_is_said_to_be_enough_is_enough_as_it_is_shown(usd: float):
    shown = float(format_usd(round_up_usd(usd)).replace(",", ""))
    assert usd <= shown <= max(usd * 1.12, usd + 0.010001)


def test_no_module_formats_money_by_itself():
    """A sum of less than a cent was `0.00 $` in one place and `0.0042 $` in another."""
    own = re.compile(r":,?\.\d[fg]\} \$(?!/h)|\$\{[^{}]*:,?\.\d[fg]\}")
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for folder in ("batch_assets", "resources", "gpu_runner")
        for file in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if own.search(line)
    ]
    assert found == []
