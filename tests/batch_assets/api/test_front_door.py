"""The service as it is put together: who is let in, limits, headers, health, metrics, audit log."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import orjson
import pytest
import uvicorn
from support.front_doors import front_door_alone
from support.timing import PATIENCE

from batch_assets.api.access.authentication import AccessSettingsError, jwt_settings
from batch_assets.api.access.enforcement import LimitedAuthenticator
from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.access.rate_limits import duration, read_limits
from batch_assets.api.access.request_access import trace_of
from batch_assets.api.front_door import FrontDoor, build_front_door
from batch_assets.api.health import Readiness
from batch_assets.api.requests.callers import Scope, embedded_caller
from batch_assets.api.server import DrainingServer, drain_seconds
from batch_assets.api.settings import ApiSettings
from batch_assets.api.telemetry.metrics import MOST_MODELS, ServiceMetrics
from batch_assets.settings import SettingError
from gpu_runner.errors import UserFacingError

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def settings_in(tmp_path: Path, host: str = "127.0.0.1") -> ApiSettings:
    return ApiSettings(tmp_path, str(tmp_path / "store"), f"sqlite:///{tmp_path / 'api.db'}", host=host)


def key_for(tmp_path: Path, tenant: str = "acme", scopes: frozenset[Scope] = frozenset(Scope)) -> str:
    with contextlib.closing(KeyStore(f"sqlite:///{tmp_path / 'api.db'}", time.time)) as store:
        return store.create(tenant, scopes)[1]


@contextlib.asynccontextmanager
async def running(tmp_path: Path, host: str = "127.0.0.1") -> AsyncIterator[tuple[httpx.AsyncClient, FrontDoor]]:
    service = front_door_alone(settings_in(tmp_path, host))
    transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
    async with (
        service.inner.router.lifespan_context(service.inner),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client,
    ):
        yield client, service


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", ""])
def test_an_address_that_others_reach_needs_a_key_before_it_listens(tmp_path: Path, host: str) -> None:
    with pytest.raises(AccessSettingsError, match="keys create"):
        build_front_door(settings_in(tmp_path, host))
    key_for(tmp_path)
    service = build_front_door(settings_in(tmp_path, host))
    assert isinstance(service.inner.state.authenticate, LimitedAuthenticator)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_none(tmp_path: Path, host: str) -> None:
    service = build_front_door(settings_in(tmp_path, host))
    assert service.inner.state.authenticate is embedded_caller


def test_loopback_asks_for_keys_as_soon_as_there_are_any(tmp_path: Path) -> None:
    async def scenario() -> None:
        secret = key_for(tmp_path)
        async with running(tmp_path) as (client, _):
            assert (await client.get("/metrics")).status_code == 401
            assert (await client.get("/metrics", headers=bearer(secret))).status_code == 200

    asyncio.run(scenario())


def test_a_request_over_the_limit_gets_429_with_openais_headers(tmp_path: Path) -> None:
    (tmp_path / "limits.yaml").write_text("default: {requests_per_minute: 3}\ntenants: {big: {}}\n")

    async def scenario() -> None:
        small, big = key_for(tmp_path), key_for(tmp_path, "big")
        async with running(tmp_path) as (client, _):
            answers = [await client.get("/metrics", headers=bearer(small)) for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
            assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
            last = answers[-1]
            assert last.headers["x-ratelimit-limit-requests"] == "3"
            assert last.headers["x-ratelimit-reset-requests"].endswith("s")
            assert 1 <= int(last.headers["retry-after"]) <= 20
            assert 0 < int(last.headers["retry-after-ms"]) <= 20_000
            error = last.json()["error"]
            assert error["code"] == "rate_limit_exceeded" and error["type"] == "requests" and error["param"] is None
            assert (await client.get("/metrics", headers=bearer(big))).headers["x-ratelimit-limit-requests"] == "1000"

    asyncio.run(scenario())


def test_each_answer_has_an_id_and_the_audit_log_names_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        key_for(tmp_path)
        async with running(tmp_path) as (client, _):
            refused = await client.get("/v1/nothing?secret=words", headers=bearer("sk-" + "a" * 43))
            denied = await client.get("/metrics", headers={**bearer("sk-" + "a" * 43)})
            assert refused.headers["x-request-id"].startswith("req_") and denied.status_code == 401
            assert refused.headers["openai-version"] == denied.headers["openai-version"] == "2020-10-01"
            assert refused.headers["x-request-id"] != denied.headers["x-request-id"]

    asyncio.run(scenario())
    text = (tmp_path / "audit.jsonl").read_text() if (tmp_path / "audit.jsonl").exists() else ""
    assert "secret" not in text and "sk-" not in text


def test_every_answer_has_an_id_of_its_own_errors_and_defects_too(tmp_path: Path) -> None:
    async def defect() -> None:
        raise RuntimeError("defect")

    async def scenario() -> list[tuple[int, str]]:
        async with running(tmp_path) as (client, service):
            service.inner.add_api_route("/v1/defect", defect)
            asked = [("GET", "/metrics"), ("GET", "/v1/nothing"), ("PUT", "/v1/batches"), ("GET", "/v1/defect")]
            found = [await client.request(method, path) for method, path in asked]
            found.append(await client.post("/v1/batches", content=b"{}", headers={"Content-Length": "9" * 14}))
            return [(answer.status_code, answer.headers["x-request-id"]) for answer in found]

    answers = asyncio.run(scenario())
    assert {200, 404, 405, 413, 500} <= {status for status, _ in answers}, answers
    assert len({name for _, name in answers}) == len(answers) and all(name.startswith("req_") for _, name in answers)


def test_metrics_have_bounded_labels(tmp_path: Path) -> None:
    async def scenario() -> bytes:
        async with running(tmp_path) as (client, service):
            for number in range(300):
                await client.request(f"M{number}", f"/v1/unknown/{number}")
                service.metrics.first_token(f"model-{number}", 0.1)
                service.metrics.used(f"model-{number}", 1, 2)
            return (await client.get("/metrics")).content

    page = asyncio.run(scenario()).decode()
    lines = [line for line in page.splitlines() if line.startswith("batch_assets_http_requests_total")]
    assert len(lines) <= 3, lines
    models = {line.split('model="')[1].split('"')[0] for line in page.splitlines() if 'model="' in line}
    assert len(models) == MOST_MODELS + 1 and "other" in models
    assert 'batch_assets_tokens_total{kind="completion",model="other"} 400.0' in page


def test_gauges_are_read_when_somebody_looks() -> None:
    figures, value = ServiceMetrics(), [1.0]
    figures.add_gauges(lambda: [("batch_assets_batches", "Batches.", {"status": "in_progress"}, value[0])])
    assert b'batch_assets_batches{status="in_progress"} 1.0' in figures.page()
    value[0] = 7.0
    assert b'batch_assets_batches{status="in_progress"} 7.0' in figures.page()


def test_ready_says_what_is_missing_and_alive_does_not_care(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (client, service):
            assert (await client.get("/readyz")).json() == {"status": "ready", "missing": []}
            service.readiness.draining = True
            answer = await client.get("/readyz")
            assert answer.status_code == 503 and answer.json()["missing"] == ["draining"]
            assert (await client.get("/healthz")).status_code == 200

    asyncio.run(scenario())


def test_a_flood_of_probes_is_one_look(tmp_path: Path) -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        raise OSError

    async def scenario() -> None:
        now = [0.0]
        readiness = Readiness(lambda: now[0], {"database": look})
        assert set(await asyncio.gather(*(readiness.missing() for _ in range(50)))) == {("database",)}
        assert looks == 1
        now[0] = 1.0
        await readiness.missing()
        assert looks == 2

    asyncio.run(scenario())


def test_a_database_that_hangs_is_asked_once_until_it_answers(tmp_path: Path) -> None:
    looks, answers = 0, threading.Event()

    def look() -> None:
        nonlocal looks
        looks += 1
        assert answers.wait(60)

    async def scenario() -> None:
        now = [0.0]
        readiness = Readiness(lambda: now[0], {"database": look}, wait_seconds=0.01)
        for _ in range(20):
            now[0] += 1.0
            assert await readiness.missing() == ("database",)
        assert looks == 1
        answers.set()
        readiness.wait_seconds = 60.0
        now[0] += 1.0
        assert await readiness.missing() == ()

    try:
        asyncio.run(scenario())
    finally:
        answers.set()


def test_ready_answers_while_other_calls_hold_all_threads_of_the_event_loop() -> None:
    go = threading.Event()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        stuck = loop.run_in_executor(None, go.wait)
        try:
            readiness = Readiness(time.monotonic, {"database": lambda: None}, wait_seconds=10 * PATIENCE)
            assert await asyncio.wait_for(readiness.missing(), 4 * PATIENCE) == ()
        finally:
            go.set()
            await stuck

    asyncio.run(scenario())


def test_sigterm_says_so_first_and_ends_after_the_drain() -> None:
    async def scenario() -> None:
        readiness = Readiness(time.monotonic, {})
        server = DrainingServer(uvicorn.Config(lambda: None), readiness, 0.01)
        server.handle_exit(signal.SIGTERM, None)
        assert readiness.draining and not server.should_exit
        await asyncio.sleep(0.05)
        assert server.should_exit

    asyncio.run(scenario())


def test_sigint_and_a_second_sigterm_end_at_once() -> None:
    async def scenario() -> None:
        server = DrainingServer(uvicorn.Config(lambda: None), Readiness(time.monotonic, {}), 3600)
        server.handle_exit(signal.SIGTERM, None)
        server.handle_exit(signal.SIGTERM, None)
        assert server.should_exit
        server = DrainingServer(uvicorn.Config(lambda: None), Readiness(time.monotonic, {}), 3600)
        server.handle_exit(signal.SIGINT, None)
        assert server.should_exit

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["-1", "x", "1e9", "nan"])
def test_a_bad_drain_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("BATCH_ASSETS_API_DRAIN_SECONDS", text)
    with pytest.raises(SettingError):
        drain_seconds()


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", True),
        (f"00-{TRACE.upper()}-00f067aa0ba902b7-01", False),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", False),
        ("", False),
        (None, False),
        ("x" * 10_000, False),
    ],
)
def test_a_trace_is_continued_when_it_is_one(header: str | None, kept: bool) -> None:
    trace = trace_of(header)
    assert (trace.trace_id == TRACE) is kept
    assert trace.flags == ("01" if kept else "00")
    assert "00f067aa0ba902b7" not in trace.header and len(trace.header) == 55


@pytest.mark.parametrize(
    "text",
    [
        "default: {requests_per_minute: 0}",
        "default: {requests_per_minute: many}",
        "default: {unknown: 1}",
        "tenants: {Acme: {}}",
        "tenants: [a]",
        "- 1",
        "a: &a [*a]",
        "x" * (2 << 20),
    ],
    ids=lambda text: text[:20],
)
def test_a_bad_file_of_limits_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "limits.yaml").write_text(text)
    with pytest.raises(UserFacingError, match=r"limits\.yaml"):
        read_limits(tmp_path / "limits.yaml")


def test_a_mistake_in_the_limits_ends_the_start_also_where_nobody_has_limits(tmp_path: Path) -> None:
    (tmp_path / "limits.yaml").write_text("default: {request_per_minute: 3}\n")
    with pytest.raises(UserFacingError, match=r"limits\.yaml.*request_per_minute"):
        build_front_door(settings_in(tmp_path))


def test_half_of_what_tokens_need_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jwt_settings() is None
    monkeypatch.setenv("BATCH_ASSETS_JWT_ISSUER", "https://issuer.example")
    with pytest.raises(AccessSettingsError, match="AUDIENCE"):
        jwt_settings()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.12, "120ms"), (1.5, "1.5s"), (59.999, "59.999s"), (360, "6m0s"), (61.2, "1m2s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_line_of_the_audit_log_is_json(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (client, service):

            @service.inner.delete("/v1/test/{file_id}")
            async def delete(file_id: str) -> str:
                return "gone"

            await client.delete("/v1/test/file-abc")
            await client.delete("/v1/test/what a prompt might be")

    asyncio.run(scenario())
    events = [orjson.loads(line) for line in (tmp_path / "audit.jsonl").read_bytes().splitlines()]
    assert [event["objects"] for event in events] == [["file-abc"], []]
    assert {event["route"] for event in events} == {"/v1/test/{file_id}"}
