"""The price list: exact amounts, classes by window, one clear error for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_assets.api.billing.price_list import PriceList, PricesError, charged, read_prices
from batch_assets.api.billing.usage import PICODOLLARS, Tokens
from resources.yaml_files import SETTINGS_BYTES

FILE = """
default:
  interactive: {input: 1, output: 2}
models:
  tiny:
    interactive: {input: 0.2, cached_input: 0.05, output: 0.6}
    batch:
      - {within: 1h, input: 0.15, output: 0.45}
      - {within: 24h, input: 0.1, output: 0.3}
      - {input: 0.000001, output: 0.15}
"""


@pytest.fixture
def prices(tmp_path: Path) -> PriceList:
    path = tmp_path / "prices.yaml"
    path.write_text(FILE)
    return read_prices(path)


@pytest.mark.parametrize(
    ("seconds", "name"),
    [(1, "batch_1h"), (3600, "batch_1h"), (3601, "batch_24h"), (86_400, "batch_24h"), (10**7, "batch")],
)
def test_the_class_of_a_batch_is_the_first_tier_that_its_window_fits_into(
    prices: PriceList, seconds: float, name: str
) -> None:
    assert prices.batch_class("tiny", seconds) == name
    assert prices.batch_class("other", seconds) == "batch" and prices.batch_prices("other", seconds) is None


def test_amounts_are_exact_and_cached_tokens_have_their_own_price(prices: PriceList) -> None:
    found = prices.interactive_prices("tiny")
    assert found is not None
    assert found.amount(Tokens(1_000_000, 0, 0)) == PICODOLLARS // 5
    assert found.amount(Tokens(3, 1, 2)) == 2 * 200_000 + 50_000 + 2 * 600_000
    smallest = prices.batch_prices("tiny", 10**7)
    assert smallest is not None and smallest.amount(Tokens(1, 0, 0)) == 1
    other = prices.interactive_prices("other")
    assert other is not None and other.amount(Tokens(1, 1, 1)) == 3_000_000  # no price of its own for cached tokens


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), max_size=20))
@settings(max_examples=50, deadline=None)
def test_a_sum_of_amounts_is_the_amount_of_the_sum(parts: list[tuple[int, int]]) -> None:
    prices = PriceList.model_validate({"default": {"interactive": {"input": 0.07, "output": 0.313}}})
    found = prices.interactive_prices("m")
    assert found is not None
    whole = Tokens(sum(one for one, _ in parts), 0, sum(one for _, one in parts))
    assert sum(found.amount(Tokens(one, 0, other)) for one, other in parts) == found.amount(whole)


def test_tokens_without_a_price_are_counted_as_such() -> None:
    used = charged(None, Tokens(3, 0, 4))
    assert (used.unpriced_tokens, used.amount, used.input_tokens, used.output_tokens) == (7, 0, 3, 4)


def test_without_a_file_nothing_has_a_price(tmp_path: Path) -> None:
    assert read_prices(tmp_path / "prices.yaml") == PriceList()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: [1]", "models"),
        ("model: {}", "model"),
        ("models: {m: {interactive: {output: 1}}}", "input"),
        ("models: {m: {interactive: {input: -1}}}", "input"),
        ("models: {m: {interactive: {input: .nan}}}", "input"),
        ("models: {m: {interactive: {input: .inf}}}", "input"),
        ("models: {m: {interactive: {input: true}}}", "input"),
        ("models: {m: {interactive: {input: 0.0000001}}}", "decimals"),
        ("models: {m: {interactive: {input: '1.0000000000000000000000000000000001'}}}", "decimals"),
        ("[]", "dictionary"),
        ("false", "dictionary"),
        ("models: {m: {interactive: {input: cheap}}}", "input"),
        ("models: {m: {batch: [{within: 1h, input: 1}]}}", "within"),
        ("models: {m: {batch: [{input: 1}, {input: 2}]}}", "within"),
        ("models: {m: {batch: [{within: 2h, input: 1}, {within: 1h, input: 1}, {input: 1}]}}", "short to long"),
        ("models: {m: {batch: [{within: soon, input: 1}, {input: 1}]}}", "soon"),
        (f"models: {{m: {{batch: [{{within: {'0' * 80}1h, input: 1}}, {{input: 1}}]}}}}", "40 characters"),
        ("a: [", "line"),
        ("x" * (SETTINGS_BYTES + 1), "bytes"),
    ],
)
def test_a_list_that_cannot_be_used_is_one_clear_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(PricesError, match=said) as found:
        read_prices(path)
    assert str(path) in str(found.value) and "\n" not in str(found.value)
