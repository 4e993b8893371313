"""Around every request: its id and trace, headers of its answer, one line of log, metrics, the audit log.

ASGI middleware, outermost. Ids only: nothing of bodies, no query strings, no addresses that a caller made up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batch_assets.api.access.audit import AuditEvent, AuditLog, known_ids, worth_keeping
from batch_assets.api.access.request_access import RequestAccess, begin_access
from batch_assets.api.requests.error_answers import CLOSED, REASON
from batch_assets.api.telemetry.metrics import ServiceMetrics
from batch_assets.api.telemetry.tracing import NO_SPANS, Attributes, Spans

log = logging.getLogger(__name__)

UNMATCHED = "unmatched"
OPENAI_VERSION = "2020-10-01"  # of the REST API, as OpenAI sends it with every answer


class Observation:
    """`wall`: Unix seconds. `clock`: monotonic seconds."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServiceMetrics,
        audit: AuditLog | None,
        *,
        wall: Callable[[], float],
        clock: Callable[[], float],
        spans: Spans = NO_SPANS,
    ) -> None:
        self._app, self._metrics, self._audit, self._wall, self._clock = app, metrics, audit, wall, clock
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        span = self._spans.request(headers.get(b"traceparent", b"").decode("latin-1"))
        access = begin_access(scope, span.trace)
        began, status = self._clock(), CLOSED

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": self._completed(message["headers"], access, began)}
            await send(message)

        self._metrics.in_progress.inc()
        try:
            await self._app(scope, receive, noted)
        except ClientDisconnect:
            pass  # no defect, and nobody is there to be told
        finally:
            self._metrics.in_progress.dec()
            self._note(scope, access, status, self._clock() - began)
            if self._spans.active:
                span.end(_attributes(scope, access, status), error=str(status) if status >= 500 else None)

    def _completed(
        self, headers: Iterable[tuple[bytes, bytes]], access: RequestAccess, began: float
    ) -> list[tuple[bytes, bytes]]:
        """Headers of the answer and ours; one that the answer has already stays as it is."""
        milliseconds = int((self._clock() - began) * 1000)
        own = {
            "x-request-id": access.request_id,
            "openai-processing-ms": str(milliseconds),
            "openai-version": OPENAI_VERSION,
            **access.headers,
        }
        there = list(headers)
        known = {name.lower() for name, _ in there}
        added = [(name.lower().encode(), value.encode("latin-1")) for name, value in own.items()]
        return there + [(name, value) for name, value in added if name not in known]

    def _note(self, scope: Scope, access: RequestAccess, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", UNMATCHED)
        method, caller = scope["method"], access.caller
        code = scope.get("state", {}).get(REASON)
        self._metrics.answered(method, route, status, seconds, code)
        if self._audit is not None and worth_keeping(method, route, status):
            objects = known_ids([str(value) for value in scope.get("path_params", {}).values()])
            tenant, key_id = (None, None) if caller is None else (caller.tenant, caller.key_id)
            who = (self._wall(), access.request_id, tenant, key_id)
            self._audit.write(AuditEvent(*who, method[:10], route, objects, status, seconds, access.refused or code))
        if log.isEnabledFor(logging.INFO):
            line = {
                "request_id": access.request_id,
                "trace_id": access.trace.trace_id,
                "tenant": caller.tenant if caller else None,
                "key_id": caller.key_id if caller else None,
                "method": method[:10],
                "route": route,
                "status": status,
                "ms": round(seconds * 1000, 1),
            }
            log.info(orjson.dumps(line).decode())


def _attributes(scope: Scope, access: RequestAccess, status: int) -> Attributes:
    """Attributes of a request's span: ids that we give, and what routes and statuses are called."""
    found = {
        "http.request.method": scope["method"][:10],
        "http.route": getattr(scope.get("route"), "path", UNMATCHED),
        "http.response.status_code": status,
        "batch_assets.request_id": access.request_id,
    }
    return found if access.caller is None else {**found, "batch_assets.tenant": access.caller.tenant}
