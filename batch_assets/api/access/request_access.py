"""What is known of one request while it is answered: its id, its trace, its caller, headers for its answer.

It lies in the state of the request's ASGI scope, so that whoever writes headers, metrics and the audit log finds it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from batch_assets.api.requests.callers import Caller

STATE = "request_access"
# W3C Trace Context, section 3.2: version, trace id, parent id, flags. Ids of zeros only are none.
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class Trace:
    """Where this request belongs in a trace. `flags`: as the caller sent them; "00" for a trace that begins here."""

    trace_id: str
    span_id: str
    flags: str

    @property
    def header(self) -> str:
        """`traceparent` for whoever is asked next."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def parse_traceparent(header: str | None) -> Trace | None:
    """The span that a `traceparent` names; None where it names none."""
    found = _TRACEPARENT.fullmatch(header or "")
    return None if found is None else Trace(found[1], found[2], found[3])


def trace_of(header: str | None, random_hex: Callable[[int], str] = secrets.token_hex) -> Trace:
    """The trace that a request's `traceparent` names, with a span of our own; a new trace where it names none."""
    found = parse_traceparent(header)
    if found is None:
        return Trace(random_hex(16), random_hex(8), "00")
    return Trace(found.trace_id, random_hex(8), found.flags)


def continued_trace(header: str) -> Trace:
    """The trace of what has begun under this `traceparent`, and goes on: its span is still the same. A new trace where
    the header names none.
    """
    return parse_traceparent(header) or trace_of(None)


@dataclass(slots=True)
class RequestAccess:
    """One request. `headers` are added to its answer. `refused`: why its key or token is refused, for the audit log."""

    request_id: str = field(default_factory=lambda: f"req_{secrets.token_hex(16)}")
    trace: Trace = field(default_factory=lambda: trace_of(None))
    caller: Caller | None = None
    headers: dict[str, str] = field(default_factory=dict)
    refused: str | None = None


def begin_access(scope: MutableMapping[str, Any], trace: Trace) -> RequestAccess:
    """A request that has just come, in this trace."""
    found = scope.setdefault("state", {})[STATE] = RequestAccess(trace=trace)
    return found


def access_of(request: Request) -> RequestAccess:
    """What is known of this request so far."""
    return access_in(request.scope)


def access_in(scope: MutableMapping[str, Any]) -> RequestAccess:
    """The same, of an ASGI scope."""
    state: dict[str, Any] = scope.setdefault("state", {})
    found = state.get(STATE)
    if not isinstance(found, RequestAccess):
        found = state[STATE] = RequestAccess()
    return found
