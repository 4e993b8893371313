"""Which requests meet which fault."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_runner.simulator.generated_text import prompt_digest
from gpu_runner.simulator.scripted_faults import FaultPlan


def hits(plan: FaultPlan, prompts: list[str], *, reused: bool = False) -> list[int]:
    """Numbers of the requests that meet a fault."""
    found = []
    for number, prompt in enumerate(prompts, start=1):
        if plan.pick(number, prompt_digest(prompt.encode()), prompt, reused=reused):
            found.append(number)
    return found


def plan(*rules: dict[str, Any], seed: int = 0) -> FaultPlan:
    return FaultPlan(list(rules), seed)


def test_rules_match_by_text_by_number_and_by_share() -> None:
    prompts = [f"prompt {n}" for n in range(1, 13)]
    assert hits(plan({"kind": "http_500", "match": {"contains": "t 1"}}), prompts) == [1, 10, 11, 12]
    assert hits(plan({"kind": "http_500", "match": {"every": 5}}), prompts) == [5, 10]
    assert hits(plan({"kind": "http_500", "match": {"at_request": 3}}), prompts) == [3]
    assert hits(plan({"kind": "http_500", "match": {"every": 5, "contains": "0"}}), prompts) == [10]
    assert hits(plan({"kind": "http_500"}), prompts) == list(range(1, 13))
    assert hits(plan(), prompts) == []


def test_a_share_picks_the_same_prompts_in_any_order_and_others_with_another_seed() -> None:
    prompts = [f"prompt {n}" for n in range(5000)]
    rule = {"kind": "reset", "match": {"rate": 0.1}}
    found = {prompts[n - 1] for n in hits(plan(rule), prompts)}
    backwards = prompts[::-1]
    assert {backwards[n - 1] for n in hits(plan(rule), backwards)} == found
    assert 400 < len(found) < 600
    assert {prompts[n - 1] for n in hits(plan(rule, seed=1), prompts)} != found


def test_times_counts_per_prompt() -> None:
    prompts = ["a", "b", "a", "a", "b", "b"]
    assert hits(plan({"kind": "http_429", "times": 2}), prompts) == [1, 2, 3, 5]


def test_the_first_rule_that_matches_wins_and_is_counted() -> None:
    rules = plan(
        {"kind": "hang", "match": {"contains": "x"}, "times": 1}, {"kind": "reset", "match": {"contains": "x"}}
    )
    kinds = [fault.kind for n in (1, 2) if (fault := rules.pick(n, "d", "x", reused=False))]
    assert kinds == ["hang", "reset"]
    assert rules.applied == {"hang": 1, "reset": 1}


def test_an_idle_drop_needs_a_connection_that_was_used_before() -> None:
    rule = {"kind": "drop_idle", "match": {"every": 2}}
    assert hits(plan(rule), ["a"] * 4) == []
    assert hits(plan(rule), ["a"] * 4, reused=True) == [2, 4]


def test_engine_faults_without_a_match_wait_for_no_request() -> None:
    rules = plan({"kind": "stall", "seconds": 2}, {"kind": "crash", "match": {"contains": "kill"}})
    assert [fault.kind for fault in rules.immediate] == ["stall"]
    assert hits(rules, ["a", "kill me"]) == [2]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("reset", "expected a kind of"),
        ({"kind": "explode"}, "expected a kind of"),
        ({"kind": "reset", "chance": 1}, r"unknown keys \['chance'\]"),
        ({"kind": "reset", "match": "x"}, "match: expected an object"),
        ({"kind": "reset", "match": {"every": 0}}, "every must be above 0"),
        ({"kind": "reset", "match": {"every": "2"}}, "match: expected one of"),
        ({"kind": "reset", "match": {"prompt": "x"}}, "match: expected one of"),
        ({"kind": "reset", "times": 0}, "times: expected a number of requests"),
        ({"kind": "http_429", "retry_after": "soon"}, "retry_after: expected a number"),
    ],
)
def test_a_wrong_rule_says_what_is_wrong(rule: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FaultPlan([rule], 0)
