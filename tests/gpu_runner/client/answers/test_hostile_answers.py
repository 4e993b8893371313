"""Engines whose bodies are too large, encoded, slow or endless: what the client reads of them, and what it holds."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.hostile_server import HostileServer, bomb, endless, text, whole

from gpu_runner.bounded_http import bounded_read
from gpu_runner.client.answers.answer_limit import FRAME_BYTES, answer_limit
from gpu_runner.client.engine_client import EngineClient, EngineRefused, RequestDenied, RowRejected, TimeOuts, Transient
from gpu_runner.rows import Generation

GENERATION = Generation("completion", "m", {"max_tokens": 64})
ASK = "/v1/completions"
MB = 1 << 20


def asked(server: HostileServer, call: str = "generate", **options: Any) -> Any:
    """What a call of the client returns, or the error it raises."""

    async def main() -> Any:
        async with EngineClient(server.url, GENERATION, **options) as engine:
            try:
                return await (engine.generate(b'"x"') if call == "generate" else getattr(engine, call)())
            except Exception as error:
                return error

    return asyncio.run(main())


@pytest.mark.parametrize(
    "route",
    [endless(), endless(head=b"Transfer-Encoding: chunked\r\n", block=b"10000\r\n" + b" " * 0x10000 + b"\r\n"),
     whole(b" " * (8 * MB)), endless(head=b"Content-Length: 500000000\r\n")],
    ids=["no length", "chunked", "8 MB", "500 MB promised"],
)  # fmt: skip
def test_a_body_beyond_the_limit_is_a_dead_letter_and_not_read(route: Any) -> None:
    with HostileServer({ASK: route}) as server:
        error = asked(server)
        assert isinstance(error, RowRejected)
        assert error.code == "answer_too_large" and "expected at most 270,336 bytes" in error.message
        assert server.sent < 20 * MB  # what sockets hold


def test_an_encoding_that_was_not_asked_for_is_not_unpacked() -> None:
    with HostileServer({ASK: bomb(), "/v1/models": bomb(), "/metrics": bomb(), "/health": bomb()}) as server:
        error = asked(server)
        assert isinstance(error, RequestDenied) and error.code == "content_encoding" and "gzip" in str(error)
        assert isinstance(asked(server, "info"), EngineRefused)
        assert asked(server, "load") is None


def test_an_encoded_error_still_counts_by_its_status() -> None:
    with HostileServer({ASK: whole(b"\x1f\x8b", status="503 No", head=b"Content-Encoding: gzip\r\n")}) as server:
        error = asked(server)
        assert isinstance(error, Transient) and error.code == "http_503"


@pytest.mark.parametrize(("call", "path"), [("info", "/v1/models"), ("load", "/metrics"), ("healthy", "/health")])
def test_an_endless_page_is_left_after_some_megabytes(call: str, path: str) -> None:
    with HostileServer({path: endless(b"vllm:num_requests_running 1\n" * 2000)}) as server:
        found = asked(server, call)
        assert isinstance(found, EngineRefused) if call == "info" else found in (None, True)
        assert server.sent < 40 * MB


@pytest.mark.parametrize("status", ["400 Bad", "500 Error", "403 No"])
def test_an_endless_error_still_counts_by_its_status(status: str) -> None:
    head = f"HTTP/1.1 {status}\r\nConnection: close\r\n".encode()
    with HostileServer({ASK: lambda most: (head, iter([b"x" * (1 << 16)] * (most >> 16)))}) as server:
        error = asked(server)
        assert getattr(error, "code", "") in ("rejected_400", "http_500", "rejected_403")
        assert server.sent < 20 * MB


@pytest.mark.parametrize("head", [b"X-A: b\r\n" * 200, b"X-A: " + b"b" * 10_000 + b"\r\n"], ids=["many", "long"])
def test_headers_are_bounded_in_number_and_length(head: bytes) -> None:
    with HostileServer({ASK: whole(text(), head=head)}) as server:
        error = asked(server)
        assert isinstance(error, Transient)


def test_a_body_that_drips_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_read, "BODY_SECONDS", 0.2)
    length = b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n"

    def drip(most: int) -> Any:
        return length, (b" " for _ in iter(lambda: time.sleep(0.01), 1))

    with HostileServer({ASK: drip}) as server:
        error = asked(server, time_outs=TimeOuts(request=30))
        assert isinstance(error, Transient) and error.code == "timeout"


def test_a_body_of_many_values_is_not_parsed() -> None:
    with HostileServer({ASK: whole(b"[" + b"[]," * 3 * MB + b"0]")}) as server:
        error = asked(server, answer_bytes=16 * MB)
        assert isinstance(error, RowRejected) and "values" in error.message


@pytest.mark.parametrize(
    ("task", "sampling", "most"),
    [
        ("chat", {"max_tokens": 1024}, FRAME_BYTES + 1024 * 128),
        ("chat", {}, FRAME_BYTES + 4096 * 128),  # the context
        ("chat", {"max_tokens": 10, "logprobs": True, "top_logprobs": 20}, FRAME_BYTES + 10 * (128 + 22 * 512)),
        ("completion", {"max_tokens": 10, "logprobs": 0}, FRAME_BYTES + 10 * (128 + 2 * 512)),
        ("completion", {"max_tokens": 10, "echo": True}, FRAME_BYTES + 4106 * 128),
        ("embedding", {"dimensions": 256}, FRAME_BYTES + 256 * 32),
        ("embedding", {}, FRAME_BYTES + 65_536 * 32),
    ],
)
def test_the_limit_follows_what_the_request_asks_for(task: Any, sampling: dict[str, Any], most: int) -> None:
    assert answer_limit(Generation(task, "m", sampling), context=4096) == most


@pytest.mark.parametrize("sampling", [{"max_tokens": 1 << 60}, {"max_tokens": True}, {"max_tokens": "x"}])
def test_no_request_makes_the_limit_unlimited(sampling: dict[str, Any]) -> None:
    assert FRAME_BYTES < answer_limit(Generation("chat", "m", sampling)) <= 256 * MB


@pytest.mark.slow
def test_no_hostile_engine_takes_more_than_300_mb_and_every_row_has_one_outcome() -> None:
    large = whole(text("x" * 8 * MB))
    routes = {
        "/endless/v1/completions": endless(),
        "/bomb/v1/completions": bomb(),
        "/models/v1/models": endless(begin=b'{"data":['),
        "/metrics/metrics": endless(b"vllm:num_requests_running 1\n" * 2000),
        "/large/v1/completions": large,
        "/permitted/v1/completions": large,
    }
    names = [path.split("/")[1] for path in routes]
    with HostileServer(routes) as server:
        client = [sys.executable, str(Path(__file__).parents[3] / "support" / "hostile_client.py"), server.url, *names]
        run = subprocess.run(client, capture_output=True, text=True, timeout=300, check=True)
    found = {line["case"]: line for line in map(json.loads, run.stdout.splitlines())}
    assert {name: line["found"] for name, line in found.items()} == {
        "endless": "RowRejected answer_too_large",
        "bomb": "RequestDenied content_encoding",
        "models": "EngineRefused ",
        "metrics": None,
        "large": {"answer_too_large": 500},
        "permitted": {"ok": 16},
    }
    for line in found.values():
        print(f"{line['case']}: +{line['more_mb']:.0f} MB")
        assert line["more_mb"] <= 300
