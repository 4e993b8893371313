"""Metrics of online requests, in the registry of the service."""

from __future__ import annotations

import functools
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from batch_assets.api.online.queues.queue_protocol import QueueDepth
from batch_assets.api.telemetry.metrics import MOST_MODELS, BoundedLabel

_STATES = ("waiting", "claimed", "delayed", "dead")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class OnlineFigures:
    """The figures of one process. Labels are words of our own, and models up to a bound."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "batch_assets_online_"
        self._models = BoundedLabel(MOST_MODELS)
        self._depth = Gauge(f"{prefix}queue_depth", "Tasks by state, of all processes.", ["state"], registry=registry)
        self._fullness = Gauge(f"{prefix}fullness", "Of queue or engines; admission slows from 0.9.", registry=registry)
        self.redis_away = Gauge(f"{prefix}queue_away", "1 while the queue cannot be used, else 0.", registry=registry)
        self._accepted = Counter(f"{prefix}accepted_total", "Requests accepted.", ["repeated"], registry=registry)
        self._refused = Counter(f"{prefix}refused_total", "Requests not accepted.", ["reason"], registry=registry)
        self._ended = Counter(f"{prefix}ended_total", "Tasks that ended, by code.", ["code"], registry=registry)
        self._retries = Counter(f"{prefix}retries_total", "Tries again, by failure.", ["failure"], registry=registry)
        self.duplicates = Counter(
            f"{prefix}duplicates_total", "Answers to tasks that had one already.", registry=registry
        )
        self.reclaimed = Counter(f"{prefix}reclaimed_total", "Tasks taken over from lost consumers.", registry=registry)
        self._cache = Counter(
            f"{prefix}cache_total",
            "Reusable requests: hit, collapsed, miss, bypassed (away or slow), corrupt.",
            ["outcome"],
            registry=registry,
        )
        self.seconds = Histogram(
            f"{prefix}seconds", "From acceptance to the result.", registry=registry, buckets=_SECONDS
        )
        self._worker = Histogram(
            "batch_assets_gpu_worker_latency_seconds",
            "One request to an engine, from sending it to its whole answer or failure.",
            ["model", "outcome"],
            registry=registry,
            buckets=_SECONDS,
        )

        # Labels are bounded, and looked up for each request.
        self._code = functools.cache(self._ended.labels)
        self._worker_outcome = functools.cache(self._worker.labels)

    def read(self, depth: Callable[[], QueueDepth], fullness: Callable[[], float]) -> None:
        """What is in the queue, and how full it is, are read when somebody looks. For any thread."""
        for state in _STATES:
            self._depth.labels(state).set_function(functools.partial(_count, depth, state))
        self._fullness.set_function(fullness)

    def accepted(self, *, repeated: bool) -> None:
        """One request was accepted, or known again."""
        self._accepted.labels(str(repeated).lower()).inc()

    def refused(self, reason: str) -> None:
        """One request was not accepted."""
        self._refused.labels(reason).inc()

    def ended(self, code: str) -> None:
        """One task ended."""
        self._code(code).inc()

    def retried(self, failure: str) -> None:
        """One task is to be tried again."""
        self._retries.labels(failure).inc()

    def cache(self, outcome: str) -> None:
        """One look for an answer."""
        self._cache.labels(outcome).inc()

    def engine(self, model: str, outcome: str, seconds: float) -> None:
        """One request to an engine ended."""
        self._worker_outcome(self._models.of(model), outcome).observe(seconds)


def _count(depth: Callable[[], QueueDepth], state: str) -> float:
    return float(getattr(depth(), state))
