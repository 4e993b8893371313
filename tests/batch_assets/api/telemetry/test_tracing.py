"""Traces: one tree from a caller's span through request and batch to the engine's, ids only, off unless asked for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from support.api_service import ApiService, line, no_instance, settings_of
from support.http_server import http_server
from support.otlp_receiver import Collector, SeenSpan, otlp_receiver

from batch_assets.api import service
from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.front_door import build_front_door
from batch_assets.api.requests.callers import Scope
from batch_assets.api.telemetry.trace_export import spans_of_environment
from batch_assets.api.telemetry.tracing import NoSpans
from batch_assets.settings import SettingError

SERVER, CLIENT, INTERNAL = 2, 3, 1  # of OTLP's enum SpanKind
CALLER = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
TRACEPARENT = f"00-{CALLER[0]}-{CALLER[1]}-01"
PROMPT, ANSWER = "PROMPT-TEXT-7261", "ANSWER-TEXT-9140"
KNOWN = {
    "http.request.method",
    "http.route",
    "http.response.status_code",
    "batch_assets.request_id",
    "batch_assets.tenant",
    "batch_assets.batch_id",
    "batch_assets.epoch",
    "batch_assets.completed",
    "batch_assets.failed",
    "gen_ai.operation.name",
    "gen_ai.request.model",
    "server.address",
    "error.type",
}


class Engine:
    """An engine that notes the header `traceparent` of what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def chat(self, request: web.Request) -> web.Response:
        self.asked.append(request.headers.get("traceparent"))
        choice = {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        async with http_server({"/v1/models": self.models, "/v1/chat/completions": self.chat}) as url:
            yield url


@contextlib.asynccontextmanager
async def whole_service(home: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiService]:
    """The service with callers, worker and one key."""
    monkeypatch.setattr(service, "_open_instance", no_instance)
    settings = settings_of(home, endpoint)
    with contextlib.closing(KeyStore(settings.database, lambda: 0.0)) as keys:
        _, secret = keys.create("acme", frozenset(Scope))
    built = build_front_door(settings)
    async with built.inner.router.lifespan_context(built.inner):
        transport = httpx.ASGITransport(built.app, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            yield ApiService(built.inner, client)


def traced(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


def attributes_of(span: SeenSpan, *names: str) -> tuple[Any, ...]:
    return tuple(span.attributes.get(name) for name in names)


def test_a_batch_is_one_tree_from_its_caller_to_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine = Engine()
        async with otlp_receiver() as collector, engine.running() as url:
            traced(monkeypatch, collector)
            async with whole_service(tmp_path, url, monkeypatch) as site:
                lines = [line(f"row-{number}", content=PROMPT) for number in range(3)]
                input_file = await site.upload(lines)
                body = {"input_file_id": input_file, "endpoint": "/v1/chat/completions", "completion_window": "1h"}
                answer = await site.client.post("/v1/batches", json=body, headers={"traceparent": TRACEPARENT})
                assert answer.status_code == 200
                done = await site.until(answer.json()["id"])
                assert done["status"] == "completed"
            (create,) = collector.children(CALLER[1])
            assert (create.name, create.kind, create.trace) == ("POST /v1/batches", SERVER, CALLER[0])
            assert attributes_of(create, "http.response.status_code", "batch_assets.tenant") == (200, "acme")
            (batch,) = collector.children(create)
            assert (batch.name, batch.kind) == ("batch", INTERNAL)
            assert attributes_of(batch, "batch_assets.batch_id", "batch_assets.completed") == (done["id"], 3)
            calls = collector.children(batch)
            assert [(call.name, call.kind, call.failed) for call in calls] == [("chat tiny", CLIENT, False)] * 3
            assert {span.trace for span in (batch, *calls)} == {CALLER[0]}
            assert sorted(map(str, engine.asked)) == sorted(f"00-{CALLER[0]}-{call.id}-01" for call in calls)
            assert collector.services == {"batch-assets"}
            nothing_but_ids(collector)

    asyncio.run(scenario())


def nothing_but_ids(collector: Collector) -> None:
    """No text of requests or answers, no key, and no attribute that is not known."""
    for secret in (PROMPT, ANSWER, "row-1", "sk-"):
        assert secret.encode() not in collector.raw
    assert {name for span in collector.spans for name in span.attributes} <= KNOWN


def test_an_interactive_request_is_a_tree_and_a_failed_call_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = Engine()
        async with otlp_receiver() as collector, engine.running() as url:
            traced(monkeypatch, collector)
            async with whole_service(tmp_path, url, monkeypatch) as site:
                ask = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}]}
                headers = {"traceparent": TRACEPARENT}
                answer = await site.client.post("/v1/chat/completions", json=ask, headers=headers)
                assert answer.status_code == 200 and ANSWER in answer.text
                missing = await site.client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT})
                assert missing.status_code == 404
            (request,) = collector.children(CALLER[1])
            (call,) = collector.children(request)
            assert (request.name, call.name) == ("POST /v1/chat/completions", "chat tiny")
            assert engine.asked == [f"00-{CALLER[0]}-{call.id}-01"]
            (refused,) = collector.named("text_completion tiny")
            assert refused.failed and refused.attributes["error.type"] == "404"
            (own,) = [span for span in collector.spans if span.id == refused.parent]
            assert own.parent == "" and own.trace != CALLER[0]  # a request without a trace begins one
            nothing_but_ids(collector)

    asyncio.run(scenario())


def test_a_submitted_request_continues_a_span_that_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine = Engine()
        async with otlp_receiver() as collector, engine.running() as url:
            traced(monkeypatch, collector)
            async with whole_service(tmp_path, url, monkeypatch) as site:
                ask = {"model": "tiny", "input": PROMPT, "client_id": "c"}
                answer = await site.client.post("/v1/inference", json=ask, headers={"traceparent": TRACEPARENT})
                assert answer.status_code == 202, answer.text
                task_id = answer.json()["task_id"]
                found = await site.client.get(f"/v1/result/{task_id}", params={"wait": "30"})
                assert found.json()["status"] == "SUCCESS", found.text
            (submitted,) = collector.children(CALLER[1])
            (call,) = collector.children(submitted)
            assert (submitted.name, call.name) == ("POST /v1/inference", "chat tiny")
            assert engine.asked == [f"00-{CALLER[0]}-{call.id}-01"]
            nothing_but_ids(collector)

    asyncio.run(scenario())


def test_a_collector_that_is_away_costs_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine = Engine()
        async with engine.running() as url:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
            async with whole_service(tmp_path, url, monkeypatch) as site:
                ask = {"model": "tiny", "messages": []}
                assert (await site.client.post("/v1/chat/completions", json=ask)).status_code == 200

    asyncio.run(scenario())


def test_a_collector_that_hangs_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from batch_assets.api.telemetry.opentelemetry_spans import OpenTelemetrySpans

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=600)))
        spans = OpenTelemetrySpans(provider, close_seconds=0.01)
        spans.request(None).end({})
        spans.close()
        (ending,) = [thread for thread in threading.enumerate() if thread.name == "traces-end"]
        assert ending.is_alive()
        connection, _ = silent.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            ending.join(60)
    assert not ending.is_alive()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_a_collector_nobody_traces(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert isinstance(spans_of_environment(), NoSpans)


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_TRACES_EXPORTER", "zipkin")]
)
def test_what_is_not_spoken_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=f"{name}: expected .*found '{value}'"):
        spans_of_environment()
