"""Loopback never goes through a proxy, for any HTTP client that we or Dagster use."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from batch_assets.local_dagster.loopback import keep_loopback_direct
from gpu_runner.providers.engine_process import answers, free_port

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "grpc_proxy")


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment that does not answer, and nothing that is exempt from it."""
    for name in PROXIES:
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"no_proxy": ""}, "localhost,127.0.0.1,::1"),
        ({"no_proxy": "corp.example, localhost"}, "corp.example,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "a", "no_proxy": "b"}, "b,a,localhost,127.0.0.1,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_loopback_is_added_to_what_needs_no_proxy(before: dict[str, str], after: str):
    environment = dict(before)
    keep_loopback_direct(environment)
    assert environment == {"no_proxy": after, "NO_PROXY": after}
    keep_loopback_direct(environment)
    assert environment == {"no_proxy": after, "NO_PROXY": after}


def test_a_list_of_grpc_gets_loopback_too():
    environment = {"no_grpc_proxy": "corp.example"}
    keep_loopback_direct(environment)
    assert environment["no_grpc_proxy"] == "corp.example,localhost,127.0.0.1,::1"


ANSWER = {
    "data": {"version": "x"},
    "choices": [{"index": 0, "text": "hello", "finish_reason": "stop"}],
}


@pytest.fixture
def url() -> Iterator[str]:
    """A server on loopback."""
    with serving() as found:
        yield found


@contextlib.contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server on loopback that answers everything alike: a completion of an engine, data of GraphQL."""
    body = json.dumps(ANSWER).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("ETag", '"x"')
            self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))  # how often it looks for its end
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def by_urllib(url: str) -> None:
    import urllib.request

    urllib.request.build_opener().open(url, timeout=5).close()  # the one of urlopen keeps the proxies it began with


def by_requests(url: str) -> None:
    import requests

    assert requests.get(url, timeout=5).status_code == 200


def by_aiohttp(url: str) -> None:
    import aiohttp

    async def ask() -> None:
        async with aiohttp.ClientSession(trust_env=True) as session, session.get(url) as answer:
            assert answer.status == 200

    asyncio.run(ask())


def by_httpx(url: str) -> None:
    import httpx

    assert httpx.get(url, timeout=5).status_code == 200


def by_obstore(url: str) -> None:
    import obstore
    from obstore.store import S3Store

    retries = {"max_retries": 0, "retry_timeout": timedelta(seconds=5)}
    store = S3Store(
        "bucket",
        endpoint=url,
        region="us-east-1",
        access_key_id="a",
        secret_access_key="b",
        client_options={"allow_http": True, "timeout": "5s"},
        retry_config=retries,
    )
    obstore.put(store, "x", b"y", use_multipart=False)


@pytest.mark.parametrize("client", [by_urllib, by_requests, by_aiohttp, by_httpx, by_obstore])
def test_no_client_asks_a_proxy_for_loopback(dead_proxy: None, url: str, client: Any):
    with pytest.raises(Exception, match=r".*"):  # as it was: each of them asks the proxy
        client(url)
    keep_loopback_direct(os.environ)
    client(url)  # raises through a dead proxy


def test_an_engine_on_loopback_is_asked_without_a_proxy_wherever_the_code_runs(dead_proxy: None, url: str):
    assert answers(url)


SCHEMES = ["http", "https", "socks5", "socks5h"]


@pytest.fixture(params=SCHEMES)
def any_dead_proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a proxy of each kind: a client may refuse one that it does not know before it looks at the host."""
    for name in PROXIES:
        monkeypatch.setenv(name, f"{request.param}://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("client", [by_urllib, by_requests, by_aiohttp, by_obstore])
def test_a_proxy_of_any_kind_is_left_out_for_loopback(any_dead_proxy: None, url: str, client: Any):
    keep_loopback_direct(os.environ)
    client(url)  # raises through a dead proxy


def ask_engine(url: str) -> bytes:
    """As a run asks an engine."""
    from gpu_runner.client.engine_client import EngineClient
    from gpu_runner.rows import Generation

    async def ask() -> bytes:
        async with EngineClient(url, Generation("completion", "m")) as engine:
            completion = await engine.generate(b'"hi"')
            assert await engine.healthy()
            return str(completion.output).encode()

    return asyncio.run(ask())


def test_a_run_asks_an_engine_on_loopback_without_a_proxy_of_any_kind(any_dead_proxy: None, url: str):
    assert answers(url)
    assert ask_engine(url) == b"hello"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make a certificate")
def test_an_engine_with_tls_on_loopback_is_asked_without_a_proxy(
    any_dead_proxy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "certificate")]
    subprocess.run([*words, "-addext", "subjectAltName=IP:127.0.0.1", *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate"))
    with serving(context) as url:
        assert answers(url)


def test_the_command_line_asks_dagster_on_loopback_without_a_proxy(
    any_dead_proxy: None, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from batch_assets.local_dagster.dagster_client import DagsterClient
    from batch_assets.local_dagster.home import StackAddress

    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    keep_loopback_direct(os.environ)
    client = DagsterClient(StackAddress(url, int(url.rpartition(":")[2]), 1))
    assert client.alive()
    assert client._client._execute("{ version }") == {"version": "x"}


GRPC = """
import sys, grpc
from concurrent import futures
from batch_assets.local_dagster.loopback import keep_loopback_direct
import os
if sys.argv[1] == "mended": keep_loopback_direct(os.environ)
server = grpc.server(futures.ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
channel = grpc.insecure_channel(f"127.0.0.1:{port}")
try:
    grpc.channel_ready_future(channel).result(timeout=float(sys.argv[2]))
    print("ready")
except grpc.FutureTimeoutError:
    print("not ready")
server.stop(None)
"""


def test_grpc_to_the_code_server_asks_no_proxy(dead_proxy: None):
    said = []
    for words in (("before", "0.5"), ("mended", "30")):
        command = [sys.executable, "-c", GRPC, *words]
        said.append(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout)
    assert said == ["not ready\n", "ready\n"]


def test_every_process_of_ours_keeps_loopback_direct(dead_proxy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from batch_assets.local_dagster.home import prepare_home

    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with contextlib.suppress(OSError):
        prepare_home()
    assert "127.0.0.1" in os.environ["no_proxy"].split(",")
