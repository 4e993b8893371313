"""When a failed request is tried again, and whether the row is charged for it. Pure functions.

A try is charged only when the engine is proved alive after the failure: a dying engine or its network fails
every row in flight, and none of them is to blame (facts of vLLM's deaths: kill of its core gives 500s first,
/health turns 503 after 0.3-4.5 s, the process ends 2-6 s later). Alive is the engine that failed, not another one
that was started at its address meanwhile and answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gpu_runner.client.protocol import Transient

Judgement = Literal["undecided", "charged", "void"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Seconds, and counts per row or online request.

    A row has `max_tries` charged tries. `backoff` doubles from `backoff_min` to `backoff_max`, of which the share
    `jitter` is left to chance; a server's Retry-After beats it up to `retry_after_max`. A success proves life when its
    request was sent after the failure, or when it arrives `proof_lag` after it (an answer may sit in a buffer while the
    engine dies). Where nothing can prove life by success, an answering /health `proof_health` after the
    failure does. `max_voids` uncharged failures on living engines at most, so that every row ends.

    Connections that break together, `burst_rows` and the share `burst_share` of the window within `burst_seconds`, are
    the server's or the network's: a bad row breaks its own.
    """

    max_tries: int = 3
    backoff_min: float = 2.0
    backoff_max: float = 30.0
    jitter: float = 0.5
    retry_after_max: float = 60.0
    proof_lag: float = 1.0
    proof_health: float = 6.0
    max_voids: int = 10
    burst_seconds: float = 1.0
    burst_rows: int = 8
    burst_share: float = 0.25


def backoff(policy: RetryPolicy, failures: int, retry_after: float | None, uniform: Callable[[], float]) -> float:
    """Seconds to wait after the n-th failure of a row (n from 1): 2-4, 4-8, 8-16, 15-30 by default.

    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015. `uniform`: 0 to 1.
    """
    high = min(policy.backoff_max, policy.backoff_min * 2.0 ** min(failures, 30))
    wait = high * (1 - policy.jitter + policy.jitter * uniform())
    return max(wait, min(retry_after or 0.0, policy.retry_after_max))


@dataclass(slots=True)
class LivenessEvidence:
    """What is known of an engine's life: the latest success that was sent, arrived, and health answered."""

    sent: float = float("-inf")
    arrived: float = float("-inf")
    health: float = float("-inf")

    def success(self, sent: float, arrived: float) -> None:
        """Notes an answer that only a living engine can give."""
        self.sent = max(self.sent, sent)
        self.arrived = max(self.arrived, arrived)

    def add(self, more: LivenessEvidence) -> None:
        """Notes all that is known otherwise."""
        self.success(more.sent, more.arrived)
        self.health = max(self.health, more.health)


def classify_failure(
    policy: RetryPolicy,
    proof: LivenessEvidence,
    failed_at: float,
    error: Transient,
    *,
    voids: int,
    outage: bool,
    by_chance: int,
    health_counts: bool,
) -> Judgement:
    """Whether a failure counts as a try.

    `outage`: an unrelated request failed as well since then, so the engine was the cause.
    `by_chance`: so many refusals in a row (429, 503) any row may meet on this server now.
    `health_counts`: nothing can prove life by success here, take an answering /health.
    """
    alive = proof.sent > failed_at or proof.arrived >= failed_at + policy.proof_lag
    if not alive and not (health_counts and proof.health >= failed_at + policy.proof_health):
        return "undecided"
    unlucky = error.overload and voids < by_chance - policy.max_tries + 1
    innocent = outage or error.unreached or unlucky
    return "void" if innocent and voids < policy.max_voids else "charged"
