"""docs/metrics.md lists every metric of `/metrics` by its full name, and no other."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from support.api_service import settings_of
from support.certificates import Authority
from support.front_doors import front_door_alone

from batch_assets.api.database.database_figures import RecordFigures
from batch_assets.api.database.states import BatchStatus
from batch_assets.api.interactive.engine_directory import EngineTarget
from batch_assets.api.telemetry.gauges import certificate_gauges, fleet_samples, plan_samples, record_samples
from batch_assets.api.telemetry.metrics import ServiceMetrics
from gpu_runner.bounded_http.tls_files import RotatingContext, TlsFiles, server_context
from gpu_runner.fleet_database.capacity_plan import CapacityMemory, CapacityPlan
from gpu_runner.fleet_database.reporting.fleet_figures import FleetFigures
from gpu_runner.fleet_database.targets import DatasetTarget

REPOSITORY = Path(__file__).parents[4]
PAGE = REPOSITORY / "docs" / "metrics.md"
CODE = REPOSITORY / "batch_assets" / "api"

BATCHES = RecordFigures({BatchStatus.COMPLETED: 1}, {BatchStatus.VALIDATING: 1.0}, {"m": 1}, {"m": 1}, 0, 0, 0, 0, 0, 0)
FLEET = FleetFigures({"ready": 1}, {"live": 1}, {"running": 1}, {"aws": 1.0}, 1.0, 1.0)


PLANNED = DatasetTarget(
    "api/m", 1, "r", 0, 0, 1, 1, None, "cheapest", None, (), None, CapacityMemory(), CapacityPlan(), None, None
)


def with_content(metrics: ServiceMetrics, folder: Path) -> None:
    """What the page shows only where there is something to show."""
    certificate = RotatingContext(TlsFiles(*Authority().issue("service").write(folder)), server_context)
    metrics.add_gauges(lambda: [*record_samples(BATCHES), *fleet_samples(FLEET), *plan_samples([PLANNED], {})])
    metrics.add_gauges(lambda: certificate_gauges(certificate, None))


def rows(registry: CollectorRegistry) -> Iterator[str]:
    """A line of the table for each metric that is exposed."""
    for metric in registry.collect():
        collector = registry._names_to_collectors.get(metric.name)
        labels = list(getattr(collector, "_labelnames", None) or (metric.samples[0].labels if metric.samples else ()))
        labels = [label for label in labels if label != "le"]
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        named = ", ".join(f"`{label}`" for label in labels)
        yield f"| `{name}` | {metric.type} | {named} | {metric.documentation} |"


def exposed(folder: Path) -> set[str]:
    async def collect() -> set[str]:
        service = front_door_alone(settings_of(folder, None))
        proxy = service.inner.state.proxy
        async with proxy:
            proxy.choice.poller.watch(EngineTarget("http://127.0.0.1:9", "m"))
            proxy.directory.announce(EngineTarget("http://127.0.0.1:9", "m"))
            proxy.choice.router.known("http://127.0.0.1:9", "", "eu")
            proxy.choice.router.round_trips.measured("http://127.0.0.1:9", 0.01)
            with_content(service.metrics, folder)
            return set(rows(service.metrics.registry))

    return asyncio.run(collect())


def test_every_metric_that_is_exposed_is_listed_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_ASSETS_MICRO_BATCHES", "on")
    found = exposed(tmp_path)
    listed = {line for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    assert sorted(listed) == sorted(found)
    names = {row.split("`")[1] for row in found}
    shown = {*(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "deploy" / "monitoring").iterdir()}
    for file in shown:
        for name in re.findall(r"\b(batch_assets_[a-z_]*[a-z])\b", file.read_text()):
            assert re.sub("_(bucket|sum|count)$", "", name) in names, f"{file.name}: {name} is no metric"
    for file in CODE.rglob("*.py"):  # also what this test does not bring about
        for name in re.findall(r'"(batch_assets_[a-z_]*[a-z])"', file.read_text()):
            assert name in names, f"{file.name}: {name} is in no row of docs/metrics.md"
