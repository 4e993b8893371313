"""A collector for tests: takes OTLP over HTTP, and shows what came as a tree."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.http_server import http_server


@dataclass(frozen=True)
class SeenSpan:
    """One span. Ids are hexadecimal; `parent` is empty for a root."""

    name: str
    kind: int
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    failed: bool


@dataclass
class Collector:
    """What came, and the bytes of all requests."""

    url: str = ""
    spans: list[SeenSpan] = field(default_factory=list)
    raw: bytes = b""
    services: set[str] = field(default_factory=set)

    def children(self, parent: SeenSpan | str) -> list[SeenSpan]:
        """Spans whose parent this is."""
        name = parent if isinstance(parent, str) else parent.id
        return [span for span in self.spans if span.parent == name]

    def named(self, name: str) -> list[SeenSpan]:
        """Spans of this name."""
        return [span for span in self.spans if span.name == name]

    async def take(self, request: web.Request) -> web.Response:
        """POST /v1/traces."""
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services.add(str(_values(resource.resource.attributes).get("service.name")))
            for scope in resource.scope_spans:
                self.spans += [_seen(span) for span in scope.spans]
        return web.Response(content_type="application/x-protobuf")


@contextlib.asynccontextmanager
async def otlp_receiver() -> AsyncIterator[Collector]:
    """A collector on a free port of loopback."""
    collector = Collector()
    async with http_server({"/v1/traces": collector.take}) as collector.url:
        yield collector


def _seen(span: Any) -> SeenSpan:
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    return SeenSpan(span.name, span.kind, *ids, _values(span.attributes), span.status.code == 2)


def _values(attributes: Iterable[Any]) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
