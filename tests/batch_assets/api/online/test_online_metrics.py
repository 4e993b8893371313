"""Metrics of online requests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from batch_assets.api.online.online_metrics import OnlineFigures
from batch_assets.api.telemetry.metrics import MOST_MODELS, OTHER


def test_labels_of_models_are_bounded() -> None:
    registry = CollectorRegistry()
    figures = OnlineFigures(registry)
    for number in range(3 * MOST_MODELS):
        figures.engine(f"model-{number}", "answered", 0.1)
    counts = {
        sample.labels["model"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "batch_assets_gpu_worker_latency_seconds_count"
    }
    assert len(counts) == MOST_MODELS + 1 and counts[OTHER] == 2 * MOST_MODELS
