"""Traces: a span for each request, each batch under way, and each call of an engine, in one tree.

Here is what the service needs of them, without OpenTelemetry; `trace_export` says whether somebody collects them.
Attributes are ids, names, statuses and counts: no text of requests or answers, no keys, no addresses of callers.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping
from typing import Protocol

from batch_assets.api.access.request_access import Trace, parse_traceparent, trace_of
from batch_assets.api.database.batch_records import BatchRecord
from gpu_runner.client.trace_context import TRACEPARENT
from gpu_runner.rows import Task

# As OpenTelemetry's conventions for generative AI name what is asked for.
OPERATIONS: Mapping[Task, str] = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings"}

Attributes = Mapping[str, str | int]


class SpanKind(enum.Enum):
    """Which side of a call a span is."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


class Span(Protocol):
    """Something that is under way. `trace`: it, for whoever is asked next."""

    trace: Trace

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """End the span. `error`: a word of ours for what went wrong."""


class Spans(Protocol):
    """Where spans begin. Safe to use from several threads. `active`: somebody collects them."""

    active: bool

    def request(self, traceparent: str | None) -> Span:
        """A request that came with this header."""

    def begin(self, name: str, kind: SpanKind, parent: Trace, attributes: Attributes) -> Span:
        """A part of what `parent` is."""

    def close(self) -> None:
        """Send what is left. Blocks for seconds at most."""


class _Untraced:
    """A span that nobody collects: whoever is asked next gets the trace of whoever asked."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """Nothing."""


class NoSpans:
    """Nobody collects. A caller's trace is continued all the same."""

    active = False

    def request(self, traceparent: str | None) -> Span:
        """A request that came with this header."""
        return _Untraced(trace_of(traceparent))

    def begin(self, name: str, kind: SpanKind, parent: Trace, attributes: Attributes) -> Span:
        """A part of what `parent` is."""
        return _Untraced(parent)

    def close(self) -> None:
        """Nothing."""


NO_SPANS: Spans = NoSpans()


def engine_call(task: Task, model: str, endpoint: str) -> tuple[str, Attributes]:
    """Name and attributes of the span of one request to an engine, by OpenTelemetry's conventions."""
    operation = OPERATIONS[task]
    host = endpoint.partition("://")[2].partition("/")[0]
    return f"{operation} {model}", {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": model,
        "server.address": host,
    }


def batch_span(spans: Spans, record: BatchRecord) -> Span | None:
    """The work of one worker on a batch, as a part of the request that created it; None where nobody collects it."""
    parent = parse_traceparent(record.traceparent)
    if parent is None or not spans.active:
        return None
    attributes: Attributes = {"batch_assets.batch_id": record.id, "batch_assets.epoch": record.epoch + 1}
    return spans.begin("batch", SpanKind.INTERNAL, parent, attributes)


@contextlib.contextmanager
def sent_in(span: Span) -> Iterator[None]:
    """Requests to engines that this task sends meanwhile carry the span; it ends with them."""
    token = TRACEPARENT.set(span.trace.header)
    error: str | None = None
    try:
        yield
    except BaseException as failed:
        error = type(failed).__name__
        raise
    finally:
        TRACEPARENT.reset(token)
        span.end({}, error=error)
