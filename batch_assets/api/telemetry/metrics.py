"""What operators measure of the service, in Prometheus' format: a registry of its own, with bounded labels.

No label holds what a caller chose: routes are templates, models those that are served, statuses those of HTTP. There is
no label of tenants; who used how much stands in the audit log and in the records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_MODELS, MOST_REASONS = 100, 60
OTHER = "other"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

Sample = tuple[str, str, dict[str, str], float]  # name, help, labels, value
Gauges = Callable[[], Iterable[Sample]]


class ServiceMetrics:
    """The figures of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._models, self._reasons = BoundedLabel(MOST_MODELS), BoundedLabel(MOST_REASONS)
        name = "batch_assets_http_"
        self._requests = Counter(
            f"{name}requests_total", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            f"{name}request_seconds",
            "From the request to the end of its answer.",
            ["route"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.in_progress = Gauge(f"{name}requests_in_progress", "Requests under way.", registry=self.registry)
        self._rejects = Counter(
            "batch_assets_rejects_total",
            "Requests refused, by status and by the code of the error.",
            ["status", "reason"],
            registry=self.registry,
        )
        self._first_token = Histogram(
            "batch_assets_first_token_seconds",
            "Interactive requests, from their arrival to the first token of a streamed answer.",
            ["model"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._tokens = Counter(
            "batch_assets_tokens_total", "Tokens of interactive requests.", ["model", "kind"], registry=self.registry
        )
        self._batch_tokens = Counter(
            "batch_assets_batch_tokens_total", "Tokens of lines of batches.", ["model", "kind"], registry=self.registry
        )
        self._batch_lines = Counter(
            "batch_assets_batch_lines_total", "Lines of batches kept.", ["model", "outcome"], registry=self.registry
        )
        self._lost = Counter(
            "batch_assets_batch_results_lost_total",
            "Objects of 250 results that were damaged or gone, by what became of their lines.",
            ["model", "action"],
            registry=self.registry,
        )
        self._engine = Counter(
            "batch_assets_engine_requests_total", "Requests sent on to engines.", ["outcome"], registry=self.registry
        )
        # Labels are bounded, and looked up for each request.
        self._answers = functools.cache(lambda method, route, status: self._requests.labels(method, route, str(status)))
        self._answer_seconds = functools.cache(self._seconds.labels)
        self._token_kinds = functools.cache(self._tokens.labels)
        self._engine_outcomes = functools.cache(self._engine.labels)

    def answered(self, method: str, route: str, status: int, seconds: float, reason: str | None = None) -> None:
        """One request was answered. `route` is its template, `reason` the code of its error."""
        known = method if method in _METHODS else OTHER
        self._answers(known, route, status).inc()
        self._answer_seconds(route).observe(seconds)
        if status >= 400:
            self._rejects.labels(str(status), self._reasons.of(reason or "none")).inc()

    def first_token(self, model: str, seconds: float) -> None:
        """An interactive request got its first token."""
        self._first_token.labels(self._models.of(model)).observe(seconds)

    def used(self, model: str, prompt_tokens: int, completion_tokens: int) -> None:
        """An interactive request used these tokens."""
        known = self._models.of(model)
        self._token_kinds(known, "prompt").inc(prompt_tokens)
        self._token_kinds(known, "completion").inc(completion_tokens)

    def engine_request(self, outcome: str) -> None:
        """A request to an engine ended: one of a few words of our own."""
        self._engine_outcomes(outcome).inc()

    def add_gauges(self, read: Gauges) -> None:
        """Figures that are read when somebody looks, of the records or the fleet."""
        self.registry.register(_Gauges(read))

    def page(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self.registry)

    def committed(self, model: str, ok: int, dead: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Lines of a batch are in the store, and used these tokens."""
        known = self._models.of(model)
        self._batch_lines.labels(known, "ok").inc(ok)
        self._batch_lines.labels(known, "dead").inc(dead)
        self._batch_tokens.labels(known, "prompt").inc(prompt_tokens)
        self._batch_tokens.labels(known, "completion").inc(completion_tokens)

    def results_lost(self, model: str, again: int, given_up: int) -> None:
        """Objects of a batch's results were damaged or gone: their lines are asked for again, or fail."""
        known = self._models.of(model)
        self._lost.labels(known, "asked_again").inc(again)
        self._lost.labels(known, "given_up").inc(given_up)


class BoundedLabel:
    """Values of a label: the first ones that come, and one word for all others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: set[str] = set()

    def of(self, value: str) -> str:
        """The value as a label."""
        if value in self._values:
            return value
        if len(self._values) >= self._most:
            return OTHER
        self._values.add(value)
        return value


class _Gauges:
    """A collector of figures that are read when they are wanted."""

    def __init__(self, read: Gauges) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, text, labels, value in self._read():
            family = families.setdefault(name, GaugeMetricFamily(name, text, labels=list(labels)))
            family.add_metric(list(labels.values()), value)
        return families.values()

    def describe(self) -> Iterable[Metric]:
        return ()
