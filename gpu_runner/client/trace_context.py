"""The trace that a request to an engine belongs to: `traceparent` of W3C Trace Context, for the task that sends it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

TRACEPARENT: ContextVar[str | None] = ContextVar("traceparent", default=None)


def trace_headers() -> Mapping[str, str] | None:
    """Headers of a request that this task sends; None where it belongs to no trace."""
    found = TRACEPARENT.get()
    return None if found is None else {"traceparent": found}
