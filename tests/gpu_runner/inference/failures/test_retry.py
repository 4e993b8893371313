"""When a failure is charged to its row, and how long it waits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gpu_runner.client.protocol import Transient
from gpu_runner.inference.failures.retry import Judgement, LivenessEvidence, RetryPolicy, backoff, classify_failure

POLICY = RetryPolicy()
RESET = Transient("connection_lost")
FACTS: dict[str, Any] = {"voids": 0, "outage": False, "by_chance": 2, "health_counts": False}


def verdict(proof: LivenessEvidence, error: Transient = RESET, failed_at: float = 100.0, **facts: Any) -> Judgement:
    return classify_failure(POLICY, proof, failed_at, error, **(FACTS | facts))


@pytest.mark.parametrize(("failures", "low", "high"), [(1, 2, 4), (2, 4, 8), (3, 8, 16), (4, 15, 30), (400, 15, 30)])
def test_backoff_doubles_with_jitter_up_to_30_seconds(failures: int, low: float, high: float) -> None:
    waits = {backoff(POLICY, failures, None, random.Random(seed).random) for seed in range(50)}
    assert len(waits) == 50
    assert low <= min(waits) and max(waits) <= high


def test_a_server_s_retry_after_counts_up_to_its_limit() -> None:
    assert backoff(POLICY, 1, 20.0, random.Random(0).random) == 20.0
    assert backoff(POLICY, 1, 86_400.0, random.Random(0).random) == 60.0
    assert backoff(POLICY, 1, 0.1, random.Random(0).random) >= 2.0


def test_nothing_is_charged_before_the_engine_is_proved_alive() -> None:
    assert verdict(LivenessEvidence()) == "undecided"
    assert (
        verdict(LivenessEvidence(sent=99, arrived=100.5)) == "undecided"
    )  # may have been under way while the engine died


@pytest.mark.parametrize(
    "proof", [LivenessEvidence(sent=100.1, arrived=100.2), LivenessEvidence(sent=90, arrived=101.0)]
)
def test_a_later_success_charges_the_row(proof: LivenessEvidence) -> None:
    assert verdict(proof) == "charged"


def test_health_proves_life_only_where_success_cannot() -> None:
    proof = LivenessEvidence(health=106.0)
    assert verdict(proof) == "undecided"
    assert verdict(proof, health_counts=True) == "charged"
    assert verdict(LivenessEvidence(health=105.9), health_counts=True) == "undecided"


ALIVE = LivenessEvidence(sent=101, arrived=102)


def test_a_failure_in_an_outage_is_nobody_s_try() -> None:
    assert verdict(ALIVE, outage=True) == "void"


def test_a_refused_connection_is_nobody_s_try() -> None:
    assert verdict(ALIVE, Transient("connect_failed", taken=False)) == "void"


def test_a_refusal_is_charged_only_when_it_cannot_be_chance() -> None:
    for busy in (Transient("http_429", taken=False), Transient("http_503")):
        assert verdict(ALIVE, busy, by_chance=2) == "charged"
        assert verdict(ALIVE, busy, by_chance=5) == "void"
        assert verdict(ALIVE, busy, by_chance=5, voids=3) == "charged"
    assert verdict(ALIVE, Transient("http_500"), by_chance=5) == "charged"


def test_uncharged_failures_of_one_row_come_to_an_end() -> None:
    assert verdict(ALIVE, outage=True, voids=POLICY.max_voids) == "charged"
