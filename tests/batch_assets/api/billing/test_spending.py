"""Budgets: parsed, kept to the picodollar, and given back where lines cost less than they might have."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from batch_assets.api.billing.price_list import TokenPrices
from batch_assets.api.billing.spending import BatchBudget, BudgetHolds, BudgetInvalid, most_tokens, parse_budget
from batch_assets.api.billing.usage import PICODOLLARS, Tokens

PRICES = TokenPrices(input=Decimal(0), output=Decimal(1))  # a microdollar an output token
MICRO = 10**6


def row(name: str, tokens: int) -> tuple[str, bytes]:
    return name, json.dumps({"messages": [], "max_tokens": tokens}).encode()


@pytest.mark.parametrize(("text", "usd"), [("1", 1.0), (" 0.000001 ", 1e-6), ("1000000", 1e6), ("2.50", 2.5)])
def test_a_budget_is_dollars(text: str, usd: float) -> None:
    assert parse_budget({"budget_usd": text}) == round(usd * PICODOLLARS)
    assert parse_budget({}) is None


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1e99", "$5", "0.0000001", "1000001", "1,5"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(BudgetInvalid, match="US dollars"):
        parse_budget({"budget_usd": text})


def test_lines_are_let_through_while_they_fit_and_room_comes_back() -> None:
    budget = BatchBudget(100 * MICRO, PRICES)
    assert budget.admit([row("a", 40), row("b", 40), row("c", 40)]) == 2
    with pytest.raises(BudgetHolds):
        budget.check()
    assert not budget.paused, "lines are under way that may cost less"
    budget.settle("0", "a", Tokens(0, 0, 10))
    budget.check()
    assert budget.admit([row("c", 40), row("d", 40)]) == 1
    budget.settle("0", "b", Tokens(0, 0, 40))
    budget.settle("0", "c", Tokens(0, 0, 40))
    assert budget.spent == 90 * MICRO and budget.paused
    assert budget.admit([row("e", 10)]) == 1 and not budget.paused


def test_what_is_held_back_is_given_back_once() -> None:
    budget = BatchBudget(100 * MICRO, PRICES)
    assert budget.admit([row("a", 40)]) == budget.admit([row("a", 40)]) == 1, "a line that is read again is one line"
    assert budget.admit([row("b", 61)]) == 0
    for name in ("a", "a", "of another worker"):
        budget.settle("0", name, Tokens(0, 0, 0))
    assert budget.admit([row("c", 101)]) == 0 and budget.admit([row("c", 100)]) == 1


def test_what_was_kept_before_counts() -> None:
    budget = BatchBudget(100 * MICRO, PRICES)
    budget.set_part("0", Tokens(0, 0, 95))
    assert budget.admit([row("a", 6)]) == 0 and budget.paused


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ({"messages": [], "max_tokens": 7}, 7),
        ({"messages": [], "max_tokens": 7, "max_completion_tokens": 5}, 7),
        ({"messages": [], "max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"prompt": "a", "max_completion_tokens": 5}, 1000),
        ({"prompt": "a", "max_tokens": 7, "max_completion_tokens": 9}, 7),
        ({"messages": [], "max_tokens": 7, "n": 3}, 21),
        ({"messages": [], "max_tokens": -1, "max_completion_tokens": 0, "n": -5}, 1000),
        ({"prompt": "a", "max_tokens": 7, "n": 1, "best_of": 4}, 28),
        ({"prompt": ["a", "b"], "max_tokens": 7}, 14),
        ({"prompt": [1, 2, 3], "max_tokens": 7}, 7),
        ({"messages": []}, 1000),
        ({"input": "a"}, 0),
        ({"messages": [], "max_tokens": 7, "input": ""}, 7),
        ({"prompt": "a", "input": ""}, 1000),
    ],
)
def test_a_bound_counts_bytes_and_the_most_that_may_be_written(body: dict[str, object], output: int) -> None:
    raw = json.dumps(body).encode()
    assert most_tokens(raw, 1000) == Tokens(len(raw), 0, output)
