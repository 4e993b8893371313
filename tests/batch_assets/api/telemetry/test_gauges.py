"""Figures that are read when somebody looks: a source that fails or hangs costs its own figures, not the page."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.certificates import DAY, Authority

from batch_assets.api.telemetry.gauges import KEPT_SECONDS, KeptSamples, certificate_gauges
from batch_assets.api.telemetry.metrics import Sample, ServiceMetrics
from gpu_runner.bounded_http.tls_files import RotatingContext, TlsFiles, server_context

FIGURE: Sample = ("batch_assets_fleet_usd_per_hour", "", {}, 3.0)


def values(samples: Iterable[Sample]) -> dict[str, float]:
    return {name: value for name, _, _, value in samples}


@pytest.mark.parametrize("error", [OSError("away"), ValueError("no such database"), ImportError("no driver")])
def test_a_source_that_fails_is_left_out_of_the_page(error: Exception) -> None:
    def read() -> Iterable[Sample]:
        yield FIGURE
        raise error

    figures = ServiceMetrics()
    figures.add_gauges(KeptSamples("fleet", read, lambda: 0.0))
    page = figures.page().decode()
    assert 'batch_assets_source_up{source="fleet"} 0.0' in page and "usd_per_hour" not in page


def test_a_source_that_hangs_holds_one_thread_and_no_page() -> None:
    reads, answers, now = [0], threading.Event(), [0.0]

    def read() -> Iterable[Sample]:
        reads[0] += 1
        assert answers.wait(60)
        return [FIGURE]

    source = KeptSamples("fleet", read, lambda: now[0], wait_seconds=0.01)
    try:
        for _ in range(20):
            now[0] += KEPT_SECONDS
            assert values(source()) == {"batch_assets_source_up": 0.0}
        assert reads == [1]
    finally:
        answers.set()
    for thread in threading.enumerate():
        if thread.name == "metrics-fleet":
            thread.join(60)
    assert values(source()) == {"batch_assets_fleet_usd_per_hour": 3.0, "batch_assets_source_up": 1.0}
    assert reads == [1]


def test_a_source_is_read_again_when_its_figures_are_old() -> None:
    reads, now = [0.0], [0.0]

    def read() -> Iterable[Sample]:
        reads[0] += 1
        return [("batch_assets_reads", "", {}, reads[0])]

    source = KeptSamples("records", read, lambda: now[0], wait_seconds=60.0)
    assert [values(source())["batch_assets_reads"] for _ in range(3)] == [1.0] * 3
    now[0] = KEPT_SECONDS
    assert values(source())["batch_assets_reads"] == 2.0


def test_a_certificate_that_was_replaced_shows_before_somebody_connects(tmp_path: Path) -> None:
    authority = Authority()
    files = TlsFiles(*authority.issue("service", life=2 * DAY).write(tmp_path))
    context = RotatingContext(files, server_context, look_seconds=0.0)
    ((_, _, labels, before),) = certificate_gauges(context, None)
    authority.issue("service", life=30 * DAY).write(tmp_path)
    ((_, _, _, after),) = certificate_gauges(context, None)
    assert labels == {"certificate": "service"} and after - before == pytest.approx(28 * 86400, abs=3600)
