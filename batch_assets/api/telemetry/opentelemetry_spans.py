"""Spans by OpenTelemetry's SDK, sent by OTLP over HTTP. Imported when a collector is named, by `trace_export` alone.

The SDK reads its standard variables itself: OTEL_EXPORTER_OTLP_… (address, headers, certificates, time-out),
OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_…. Spans wait in its queue, which is bounded:
a collector that is away costs spans, not requests.
"""

from __future__ import annotations

import threading

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

from batch_assets.api.access.request_access import Trace, parse_traceparent
from batch_assets.api.telemetry.tracing import Attributes, Span, SpanKind

SERVICE = "batch-assets"
CLOSE_SECONDS = 5.0  # of the SDK's 30: a service that ends has ten in all
KINDS = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
}


def exporting_spans() -> OpenTelemetrySpans:
    """Spans that go to the collector of the environment."""
    resource = Resource({SERVICE_NAME: SERVICE}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OpenTelemetrySpans(provider)


class OpenTelemetrySpans:
    """Spans of one provider."""

    active = True

    def __init__(self, provider: TracerProvider, close_seconds: float = CLOSE_SECONDS) -> None:
        self._provider, self._close_seconds = provider, close_seconds
        self._tracer = provider.get_tracer("batch_assets")

    def request(self, traceparent: str | None) -> Span:
        """A request that came with this header."""
        caller = parse_traceparent(traceparent)
        parent = Context() if caller is None else _parent(caller)
        return OpenTelemetrySpan(self._tracer.start_span("request", parent, trace.SpanKind.SERVER))

    def begin(self, name: str, kind: SpanKind, parent: Trace, attributes: Attributes) -> Span:
        """A part of what `parent` is."""
        return OpenTelemetrySpan(
            self._tracer.start_span(name, _parent(parent), KINDS[kind], attributes=dict(attributes))
        )

    def close(self) -> None:
        """Send what is left, and end the threads of the SDK. A collector that hangs is not waited for."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(self._close_seconds)


class OpenTelemetrySpan:
    """A span of the SDK. One of a request is named when its route is known, at its end."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.trace = Trace(
            trace.format_trace_id(context.trace_id),
            trace.format_span_id(context.span_id),
            f"{int(context.trace_flags):02x}",
        )

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """End the span."""
        self._span.set_attributes(dict(attributes))
        if "http.route" in attributes:
            self._span.update_name(f"{attributes['http.request.method']} {attributes['http.route']}")
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def _parent(parent: Trace) -> Context:
    context = SpanContext(
        int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True, trace_flags=TraceFlags(int(parent.flags, 16))
    )
    return trace.set_span_in_context(NonRecordingSpan(context), Context())
