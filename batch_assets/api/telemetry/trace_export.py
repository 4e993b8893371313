"""Whether traces are collected, by the standard variables of OpenTelemetry's SDK.

Off unless the environment names a collector (`OTEL_EXPORTER_OTLP_ENDPOINT`, or the same of traces alone): then
OpenTelemetry's packages are imported (`opentelemetry_spans`), else they are not.
"""

from __future__ import annotations

import os

from batch_assets.api.telemetry.tracing import NO_SPANS, Spans
from batch_assets.settings import SettingError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"


def spans_of_environment() -> Spans:
    """As the standard variables of OpenTelemetry say. Raises SettingError for a protocol that is not spoken."""
    named = any(os.environ.get(name, "").strip() for name in ENDPOINTS)
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if not named or disabled or exporter == "none":
        return NO_SPANS
    if exporter != "otlp":
        raise SettingError(f"OTEL_TRACES_EXPORTER: expected otlp or none, found {exporter!r:.40}")
    for name in PROTOCOLS:
        if (found := os.environ.get(name, "").strip() or PROTOCOL) != PROTOCOL:
            raise SettingError(f"{name}: expected {PROTOCOL}, the one that is spoken here, found {found!r:.40}")
    from batch_assets.api.telemetry.opentelemetry_spans import exporting_spans

    return exporting_spans()
