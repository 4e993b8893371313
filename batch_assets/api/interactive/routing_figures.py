"""What is measured of the choice of engines."""

from __future__ import annotations

import functools

from prometheus_client import Counter, Histogram

from batch_assets.api.telemetry.metrics import Gauges, ServiceMetrics

SHED = "shed"  # beside the words of Reason
_SECONDS = (20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3)


class RoutingFigures:
    """The figures of one process."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        name = "batch_assets_routing_"
        self._metrics = metrics
        self._choices = Counter(
            f"{name}choices_total", "Requests by why their engine was chosen.", ["reason"], registry=metrics.registry
        )
        self._regions = Counter(
            f"{name}region_choices_total",
            "Requests by the region of their engine; empty: it is not named.",
            ["region"],
            registry=metrics.registry,
        )
        self._seconds = Histogram(
            f"{name}decision_seconds", "Of one choice.", registry=metrics.registry, buckets=_SECONDS
        )

        # Labels are bounded, and looked up for each request.
        self._reason = functools.cache(self._choices.labels)
        self._region = functools.cache(self._regions.labels)

    def chosen(self, reason: str, region: str) -> None:
        """One of the words of Reason, or `shed`."""
        self._reason(reason).inc()
        if reason != SHED:
            self._region(region).inc()

    def decided(self, seconds: float) -> None:
        """A choice took so long."""
        self._seconds.observe(seconds)

    def read(self, gauges: Gauges) -> None:
        """Figures that are read when somebody looks."""
        self._metrics.add_gauges(gauges)
