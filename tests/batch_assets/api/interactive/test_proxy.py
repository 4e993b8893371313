"""The proxy against servers that behave, leave, hang, lie: what the caller sees, and what the engine is asked."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from support.asgi_calls import AsgiCall
from support.front_doors import front_door_alone
from support.http_server import Handler, http_server, status
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE

from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.execution.engines.engine_supply import EndpointSupply
from batch_assets.api.front_door import FrontDoor
from batch_assets.api.interactive.engine_directory import EngineDirectory, EngineTarget
from batch_assets.api.interactive.engine_errors import read_error
from batch_assets.api.interactive.first_tokens import FirstTokens
from batch_assets.api.interactive.proxy import Proxy, ProxyPolicy
from batch_assets.api.interactive.shared_supply import first_token_policy
from batch_assets.api.requests.callers import Scope
from batch_assets.api.settings import ApiSettings
from batch_assets.settings import SettingError

CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
ANSWER = {"id": "1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}


def token(text: str) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}) + b"\n\n"


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, *urls: str, policy: ProxyPolicy | None = None, limits: str = ""
) -> AsyncIterator[FrontDoor]:
    """The service with engines of model `m` at these addresses; with `limits`, it asks for keys."""
    database = f"sqlite:///{tmp_path / 'api.db'}"
    (tmp_path / "limits.yaml").write_text(limits)
    service = front_door_alone(ApiSettings(tmp_path, str(tmp_path / "store"), database))
    proxy: Proxy = service.inner.state.proxy
    if policy is not None:
        proxy = Proxy(proxy.directory, service.metrics, FirstTokens(time.monotonic), proxy.choice, policy)
        service.inner.state.proxy = proxy
    for url in urls:
        proxy.directory.announce(EngineTarget(url, "m", "engine-key"))
    async with (
        service.inner.router.lifespan_context(service.inner),
        proxy if policy is not None else contextlib.nullcontext(),
    ):
        yield service


def error_of(call: AsgiCall) -> dict[str, Any]:
    body = orjson.loads(call.body)
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def outcomes(service: FrontDoor) -> dict[str, float]:
    lines = [line for line in service.metrics.page().decode().splitlines() if "engine_requests_total{" in line]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


async def refused_address() -> str:
    """An address at which nobody listens."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return f"http://127.0.0.1:{port}"


class Recorder:
    """An engine that keeps what it was asked, and answers."""

    def __init__(self, body: object = ANSWER) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.body = body

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(({name.lower(): value for name, value in request.headers.items()}, await request.read()))
        return web.Response(body=orjson.dumps(self.body), content_type="application/json")


async def ask(service: FrontDoor, body: object = ASK, path: str = CHAT, **headers: str) -> AsgiCall:
    return await AsgiCall(service.app, path, body, headers).run()


def test_an_answer_comes_back_byte_for_byte_and_the_engine_sees_our_headers_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Recorder()
        async with http_server({CHAT: engine.answer}) as url, running(tmp_path, url) as service:
            trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
            call = await ask(
                service, authorization="Bearer sk-of-the-caller", cookie="a=b", traceparent=trace, baggage="user=secret"
            )
            assert call.status == 200 and call.body == orjson.dumps(ANSWER)
            headers, body = engine.requests[0]
            assert body == orjson.dumps(ASK)
            assert headers["authorization"] == "Bearer engine-key"
            assert headers["x-request-id"] == call.headers["x-request-id"]
            assert headers["traceparent"].startswith("00-4bf92f3577b34da6a3ce929d0e0e4736-") and trace not in headers
            assert not headers.keys() & {"cookie", "baggage", "user-agent"}
            assert outcomes(service) == {"answered": 1}

    asyncio.run(scenario())


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings"])
def test_the_simulated_engine_answers_with_usage(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        with simulated_engine("--speed", "100", model="m") as engine:
            settings = ApiSettings(tmp_path, "", f"sqlite:///{tmp_path / 'api.db'}", endpoints=(engine.url,))
            service = front_door_alone(settings)
            async with service.inner.router.lifespan_context(service.inner):
                call = await ask(service, {**ASK, "prompt": "hello", "input": "hello"}, path)
                assert call.status == 200
                assert orjson.loads(call.body)["usage"]["prompt_tokens"] > 0
                unknown = await ask(service, {**ASK, "model": "gpt-9"}, path)
                assert unknown.status == 404
                assert error_of(unknown) == {
                    "message": "The model `gpt-9` does not exist or you do not have access to it.",
                    "type": "invalid_request_error",
                    "param": "model",
                    "code": "model_not_found",
                }

    asyncio.run(scenario())


def test_a_stream_goes_through_event_by_event_with_its_usage_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        sent = [token("a"), token("b"), b"data: " + orjson.dumps(ANSWER) + b"\n\n", b"data: [DONE]\n\n"]
        seen = asyncio.Semaphore(0)

        async def engine(request: web.Request) -> web.StreamResponse:
            assert (await request.json())["stream_options"] == {"include_usage": True}
            answer = web.StreamResponse()
            await answer.prepare(request)
            for part in sent:
                await answer.write(part)
                if part.startswith(b'data: {"choices"'):
                    await seen.acquire()  # the next only when this one has reached the caller
            return answer

        async with http_server({CHAT: engine}) as url, running(tmp_path, url) as service:
            look = service.inner.state.proxy.first_tokens.reader(url)
            call = AsgiCall(service.app, CHAT, {**ASK, "stream": True})
            call.on_message = lambda message: seen.release() if message.get("body") else None
            await call.run()
            assert call.body == sent[0] + sent[1] + sent[3]
            assert call.headers["content-type"].startswith("text/event-stream")
            assert b'tokens_total{kind="completion",model="m"} 4.0' in service.metrics.page()
            assert b'first_token_seconds_count{model="m"} 1.0' in service.metrics.page()
            sample = look()
            assert len(sample.seconds) == 1 and sample.waiting is None
            assert look().seconds == ()

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_leaves_ends_the_request_to_a_silent_engine(tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def engine(request: web.Request) -> web.StreamResponse:
            answer = web.StreamResponse()
            if stream:
                await answer.prepare(request)
                await answer.write(token("a"))
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return answer

        async with (
            http_server({CHAT: engine}, handler_cancellation=True) as url,
            running(tmp_path, url) as service,
        ):
            call = AsgiCall(service.app, CHAT, {**ASK, "stream": stream})
            task = asyncio.create_task(call.run())
            await begun.wait()
            call.leave()
            await task
            await asyncio.wait_for(ended.wait(), 20)
            assert service.inner.state.proxy._in_flight == 0

    asyncio.run(scenario())


def test_a_caller_who_leaves_frees_the_slot_of_the_simulated_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        with simulated_engine("--speed", "0.01", model="m") as engine:
            async with running(tmp_path, engine.url) as service:
                call = AsgiCall(service.app, CHAT, {**ASK, "max_tokens": 1000, "ignore_eos": True, "stream": True})
                call.on_message = lambda message: call.leave() if message.get("body") else None
                await call.run()
                async with asyncio.timeout(20 * PATIENCE):  # the engine notices the end of the connection by itself
                    while not (outcomes := engine.get("/simulator/stats")["outcomes"]):  # noqa: ASYNC110 (another process)
                        await asyncio.sleep(0.01)
                assert outcomes == {"aborted": 1} and service.inner.state.proxy._in_flight == 0

    asyncio.run(scenario())


def test_an_engine_that_cannot_be_reached_is_passed_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        gone, engine = "http://127.0.0.1:1", Recorder()  # nobody listens there, and it comes first in order
        async with http_server({CHAT: engine.answer}) as url, running(tmp_path, gone, url) as service:
            calls = [await ask(service) for _ in range(4)]
            assert [call.status for call in calls] == [200] * 4
            assert len(engine.requests) == 4
            assert outcomes(service)["not_sent"] == 1, "an engine that was not reached rests"

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("code", [500, 502, 503, 429])
def test_an_engine_that_fails_at_once_does_not_attract_the_requests(tmp_path: Path, code: int) -> None:
    async def scenario() -> None:
        broken, good = 0, 0

        async def failing(request: web.Request) -> web.Response:
            nonlocal broken
            broken += 1
            return web.Response(status=code, text="{}")

        async def slow(request: web.Request) -> web.Response:
            nonlocal good
            good += 1
            await asyncio.sleep(0.02)
            return web.json_response(ANSWER)

        async with (
            http_server({CHAT: failing}) as bad_url,
            http_server({CHAT: slow}) as good_url,
            running(tmp_path, bad_url, good_url) as service,
        ):
            left, statuses = iter(range(200)), list[int]()

            async def caller() -> None:
                for _ in left:
                    statuses.append((await ask(service)).status)

            await asyncio.gather(*(caller() for _ in range(4)))
            failed = sum(one != 200 for one in statuses)
            assert len(statuses) == 200 and failed == broken, "no request was sent twice"
            assert 3 <= failed <= 12, "it rests after three failures in a row, whatever was under way"
            page = service.metrics.page().decode()
            assert "batch_assets_routing_resting 1.0" in page

    asyncio.run(scenario())


def test_an_engine_that_closes_the_connection_at_once_rests_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Recorder()
        closing = await asyncio.start_server(_read_and_close, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{closing.sockets[0].getsockname()[1]}"
        async with closing, http_server({CHAT: engine.answer}) as good, running(tmp_path, url, good) as service:
            calls = [await ask(service) for _ in range(40)]
            assert sum(call.status != 200 for call in calls) <= 4 and calls[-1].status == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_breaks_its_answers_off_rests_too(tmp_path: Path, stream: bool) -> None:
    """It says 200 at once, and so would look the fastest."""

    async def scenario() -> None:
        broken = 0

        async def breaking(request: web.Request) -> web.StreamResponse:
            nonlocal broken
            broken += 1
            kind = "text/event-stream" if stream else "application/json"
            answer = web.StreamResponse(headers={"Content-Type": kind, "Content-Length": "1000"})
            await answer.prepare(request)
            await answer.write(b'data: {"choices": []}\n\n' if stream else b'{"choices": [')
            assert request.transport is not None
            request.transport.close()
            return answer

        engine = Recorder()
        async with (
            http_server({CHAT: breaking}) as bad,
            http_server({CHAT: engine.answer}) as good,
            running(tmp_path, bad, good) as service,
        ):
            for _ in range(40):
                await ask(service, {**ASK, "stream": stream})
            assert broken <= 4

    asyncio.run(scenario())


async def _read_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(65536)
    writer.close()


def test_no_engine_at_all_is_503(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, await refused_address()) as service:
            call = await ask(service)
            assert call.status == 503 and "retry-after" in call.headers

    asyncio.run(scenario())


def test_a_request_that_an_engine_may_have_read_is_not_sent_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        asked = 0

        async def engine(request: web.Request) -> web.Response:
            nonlocal asked
            asked += 1
            await request.read()
            assert request.transport is not None
            request.transport.abort()
            raise asyncio.CancelledError

        async with http_server({CHAT: engine}) as url, running(tmp_path, url) as service:
            call = await ask(service)
            assert call.status == 502 and error_of(call)["code"] == "engine_lost"
            assert asked == 1

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answered", "seen", "code"),
    [
        (400, 400, None),
        (404, 404, None),
        (422, 422, None),
        (401, 502, "engine_error"),
        (403, 502, "engine_error"),
        (302, 502, "engine_error"),
        (500, 502, "engine_error"),
        (429, 503, "engine_overloaded"),
        (503, 503, "engine_overloaded"),
    ],
)
def test_what_an_engine_says_of_the_request_is_passed_on_what_it_says_of_us_is_not(
    tmp_path: Path, answered: int, seen: int, code: str | None
) -> None:
    async def scenario() -> None:
        text = orjson.dumps({"error": {"message": "too long", "type": "BadRequestError", "code": answered}}).decode()
        async with http_server({CHAT: status(answered, text)}) as url, running(tmp_path, url) as service:
            call = await ask(service)
            assert call.status == seen
            error = error_of(call)
            assert error["code"] == code and (error["message"] == "too long") is (seen == answered and seen < 429)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        ({"message": "too many images", "code": 400}, 400, "too many images"),
        ({"message": "the model went away"}, 502, "the model went away"),
        ({"message": "your account has no credit", "code": 402}, 502, "The engine could not answer the request."),
    ],
)
def test_an_error_of_status_200_is_an_error_for_the_caller(
    tmp_path: Path, error: dict[str, Any], status: int, said: str
) -> None:
    async def scenario() -> None:
        async def engine(request: web.Request) -> web.Response:
            return web.json_response({"error": error})

        async with http_server({CHAT: engine}) as url, running(tmp_path, url) as service:
            call = await ask(service)
            assert (call.status, error_of(call)["message"]) == (status, said)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "said", [{"code": "insufficient_quota"}, {"type": "insufficient_quota", "code": None}, {"type": "billing_error"}]
)
def test_an_engine_without_quota_is_not_called_overloaded_and_the_stock_client_does_not_ask_again(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    async def scenario() -> None:
        text = orjson.dumps({"error": {"message": "You exceeded your current quota.", **said}}).decode()
        async with http_server({CHAT: status(429, text)}) as url, running(tmp_path, url) as service:
            call = await ask(service)
            assert (call.status, error_of(call)["code"]) == (503, "engine_quota_exceeded")
            assert call.headers["x-should-retry"] == "false" and "retry-after" not in call.headers

    asyncio.run(scenario())


def test_the_field_and_the_code_of_an_engines_error_reach_the_caller(tmp_path: Path) -> None:
    async def scenario() -> None:
        said = {"message": "too long", "type": "x", "param": "messages[0].content", "code": "context_length_exceeded"}
        text = orjson.dumps({"error": said}).decode()
        async with http_server({CHAT: status(400, text)}) as url, running(tmp_path, url) as service:
            error = error_of(await ask(service))
            assert (error["param"], error["code"]) == (said["param"], said["code"])

    asyncio.run(scenario())


@pytest.mark.parametrize("found", [None, [], {"param": 7, "code": {}}, {"param": "a b\n", "code": "x" * 101}, "text"])
def test_what_is_no_name_of_a_field_is_not_passed_on(found: object) -> None:
    said = read_error({"error": found})
    assert (said.param, said.code) == (None, None)


def broken(kind: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        if kind == "garbage":
            return web.Response(body=b"\x00<oops>")
        if kind == "encoded":
            return web.Response(body=b"{}", headers={"Content-Encoding": "br"})
        answer = web.StreamResponse(headers={"Content-Length": "100"} if kind == "short" else {})
        await answer.prepare(request)
        await answer.write(b"{")
        if kind == "hangs":
            await asyncio.Event().wait()
        assert request.transport is not None
        request.transport.abort()
        return answer

    return handler


@pytest.mark.parametrize("kind", ["garbage", "encoded", "short", "reset"])
def test_an_answer_that_is_none_is_502(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with http_server({CHAT: broken(kind)}) as url, running(tmp_path, url) as service:
            call = await ask(service)
            assert call.status == 502 and error_of(call)["type"] == "server_error"

    asyncio.run(scenario())


def test_an_engine_that_is_silent_for_too_long_is_504(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def silent(request: web.Request) -> web.Response:
            await asyncio.Event().wait()
            raise AssertionError

        policy = ProxyPolicy(first_byte=0.05)
        async with (
            http_server({CHAT: silent}, handler_cancellation=True) as url,
            running(tmp_path, url, policy=policy) as service,
        ):
            call = await ask(service)
            assert call.status == 504 and error_of(call)["code"] == "engine_timeout"

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["reset", "hangs"])
def test_a_stream_that_breaks_says_so_in_the_stream(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with (
            http_server({CHAT: broken(kind)}, handler_cancellation=True) as url,
            running(tmp_path, url, policy=ProxyPolicy(silent=0.05)) as service,
        ):
            call = await ask(service, {**ASK, "stream": True})
            assert call.status == 200 and b"[DONE]" not in call.body
            error = orjson.loads(call.body.split(b"data: ")[-1])["error"]
            assert error["code"] == ("engine_lost" if kind == "reset" else "engine_timeout")
            assert call.messages[-1]["more_body"] is False

    asyncio.run(scenario())


def test_a_model_that_could_be_served_and_is_not_is_503_not_404(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_ASSETS_BOOT_WAIT_SECONDS", "0")

    async def scenario() -> None:
        async with running(tmp_path) as service:
            assert (await ask(service, {**ASK, "model": "not-running"})).status == 503
            assert (await ask(service, {**ASK, "model": "unknown"})).status == 404

    asyncio.run(scenario())


def test_what_a_feed_holds_is_shared_while_it_holds_it(tmp_path: Path) -> None:
    """And its rows give way to what comes there."""

    async def scenario() -> None:
        async with http_server({CHAT: Recorder().answer}) as url, running(tmp_path) as service:
            supply = service.inner.state.share_engines(EndpointSupply(f"{url}/v1", "engine-key", 64))
            assert (await ask(service)).status == 404
            async with supply.engine("m", "chat") as engine:
                assert (await ask(service)).status == 200
                assert engine.max_num_seqs == 64 and engine.share is not None
                tokens = service.inner.state.proxy.first_tokens
                number = tokens.begin(url, time.monotonic() - 2)
                waiting = engine.share.look().waiting
                assert waiting is not None and waiting >= 2
                tokens.end(url, number, came=True)
                assert engine.share.look().seconds[0] >= 2 and engine.share.look().seconds == ()
                assert not engine.share.look().unseen
                assert (await ask(service)).status == 200
                assert engine.share.look().unseen, "an answer that is not streamed shows no first token"
                assert not engine.share.look().unseen
            assert (await ask(service)).status == 404

    asyncio.run(scenario())


def test_who_names_a_target_never_has_rows_in_an_engines_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not first_token_policy().standing
    monkeypatch.setenv("BATCH_ASSETS_FIRST_TOKEN_SECONDS", "0.3")
    assert first_token_policy().standing and first_token_policy().target == 0.3


@pytest.mark.parametrize("text", ["0", "-1", "nan", "x", "1e9"])
def test_a_bad_target_of_first_tokens_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("BATCH_ASSETS_FIRST_TOKEN_SECONDS", text)
    with pytest.raises(SettingError):
        first_token_policy()


def test_the_number_of_requests_at_once_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, "http://127.0.0.1:9", policy=ProxyPolicy(in_flight=0)) as service:
            assert (await ask(service)).status == 503

    asyncio.run(scenario())


def key_in(tmp_path: Path, *scopes: Scope) -> dict[str, str]:
    with contextlib.closing(KeyStore(f"sqlite:///{tmp_path / 'api.db'}", time.time)) as store:
        return {"authorization": f"Bearer {store.create('acme', frozenset(scopes))[1]}"}


def test_tokens_are_counted_by_what_was_used_not_by_what_was_feared(tmp_path: Path) -> None:
    async def scenario() -> None:
        key = key_in(tmp_path, Scope.INFERENCE)
        limits = "default: {tokens_per_minute: 1000}"
        async with http_server({CHAT: Recorder().answer}) as url, running(tmp_path, url, limits=limits) as service:
            body = {**ASK, "max_tokens": 900}
            calls = [await ask(service, body, **key) for _ in range(8)]
            assert [call.status for call in calls] == [200] * 8, "7 tokens each, though each might have used 900"
            call = await ask(service, {**ASK, "max_tokens": 5000}, **key)
            assert call.status == 429 and error_of(call)["type"] == "tokens"
            assert call.headers["x-ratelimit-limit-tokens"] == "1000"
            assert 900 < int(call.headers["x-ratelimit-remaining-tokens"]) <= 1000

    asyncio.run(scenario())


def test_who_leaves_early_is_charged_what_was_expected_and_a_refusal_costs_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        key = key_in(tmp_path, Scope.INFERENCE)
        limits = "default: {tokens_per_minute: 1000}"

        async def engine(request: web.Request) -> web.StreamResponse:
            if (await request.json()).get("stream"):
                answer = web.StreamResponse()
                await answer.prepare(request)
                await answer.write(token("a"))
                await asyncio.Event().wait()
            return web.Response(status=400, body=b"{}")

        async with (
            http_server({CHAT: engine}, handler_cancellation=True) as url,
            running(tmp_path, url, limits=limits) as service,
        ):
            for _ in range(5):
                assert (await ask(service, {**ASK, "max_tokens": 900}, **key)).status == 400
            call = AsgiCall(service.app, CHAT, {**ASK, "max_tokens": 900, "stream": True}, key)
            call.on_message = lambda message: call.leave() if message.get("body") else None
            await call.run()
            assert (await ask(service, {**ASK, "max_tokens": 900}, **key)).status == 429

    asyncio.run(scenario())


def test_a_key_without_the_scope_may_not_ask(tmp_path: Path) -> None:
    async def scenario() -> None:
        key = key_in(tmp_path, Scope.FILES_READ)
        async with http_server({CHAT: Recorder().answer}) as url, running(tmp_path, url) as service:
            assert (await ask(service, **key)).status == 403
            assert (await ask(service)).status == 401

    asyncio.run(scenario())


def test_a_target_is_read_and_a_wrong_one_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Recorder()
        async with http_server({CHAT: engine.answer}) as url, running(tmp_path, url) as service:
            call = await ask(service, **{"x-target-ttft-seconds": "0.5", "x-target-tpot-seconds": "0.05"})
            assert call.status == 200, "nothing is known of this engine yet, so nobody is refused"
            assert "x-target-headroom-seconds" not in call.headers
            for name in ("x-target-ttft-seconds", "x-target-tpot-seconds"):
                wrong = await ask(service, **{name: "soon"})
                assert wrong.status == 400 and error_of(wrong)["code"] == "invalid_target"
                assert error_of(wrong)["message"].startswith(f"{name}: expected seconds")
            assert len(engine.requests) == 1
            headers, _ = engine.requests[0]
            assert not [name for name in headers if name.startswith("x-target")], "targets are not the engine's"

    asyncio.run(scenario())


def test_engines_are_asked_in_turn_and_only_while_they_are_announced() -> None:
    async def scenario() -> None:
        now = [0.0]
        directory = EngineDirectory(lambda: now[0])
        one, two = EngineTarget("http://a", "m"), EngineTarget("http://b", "m")
        for engine in (one, one, two):
            directory.announce(engine)
        directory.begin(one)
        assert await directory.engines("m") == [two, one]
        directory.end(one, reached=False)
        assert await directory.engines("m") == [two, one], "it was not reached a moment ago"
        now[0] = 5
        assert await directory.engines("m") == [one, two]
        directory.withdraw(one)
        assert one in await directory.engines("m"), "somebody else still holds it"
        directory.withdraw(one)
        directory.withdraw(one)
        assert await directory.engines("m") == [two] and await directory.engines("x") == []
        assert await directory.models() == ["m"]

    asyncio.run(scenario())


class Resting:
    """An engine in a directory with a clock of its own."""

    def __init__(self) -> None:
        self.now, self.engine = 0.0, EngineTarget("http://a", "m")
        self.directory = EngineDirectory(lambda: self.now)
        self.directory.announce(self.engine)

    def ask(self, *, well: bool) -> None:
        probe = self.directory.begin(self.engine)
        self.directory.answered(self.engine, well=well)
        self.directory.end(self.engine, reached=True, probe=probe)

    @property
    def rests(self) -> bool:
        return self.directory.resting(self.engine)


def test_an_engine_rests_after_three_failures_in_a_row_and_longer_each_time() -> None:
    site = Resting()
    for well in (False, False, True, False, False):
        site.ask(well=well)
        assert not site.rests, "failures of single requests"
    site.ask(well=False)
    lengths = []
    for _ in range(7):
        began = site.now
        for _ in range(20):
            site.ask(well=False)  # sent before, or because all engines rest
        while site.rests:
            site.now += 0.5
        lengths.append(site.now - began)
        site.ask(well=False)
        assert site.rests
    assert lengths == [2, 4, 8, 16, 32, 60, 60]


def test_after_a_rest_one_request_at_a_time_goes_there_until_one_is_answered() -> None:
    site = Resting()
    for _ in range(3):
        site.ask(well=False)
    site.now += 2.0
    assert not site.rests
    assert site.directory.begin(site.engine) and site.rests, "its one request is under way"
    assert not site.directory.begin(site.engine)
    site.directory.end(site.engine, reached=True)
    assert site.rests, "the other one has ended"
    site.directory.end(site.engine, reached=True, probe=True)
    assert not site.rests, "its caller has left: another one may try"
    site.ask(well=True)
    site.ask(well=False)
    assert not site.rests, "it is well again"


def test_an_engine_that_failed_and_is_gone_is_forgotten() -> None:
    site = Resting()
    for number in range(100):
        one = EngineTarget(f"http://{number}", "m")
        site.directory.announce(one)
        site.directory.begin(one)
        site.directory.withdraw(one)
        site.directory.answered(one, well=False)
        site.directory.end(one, reached=True)
    assert len(site.directory._load) <= 1


def test_the_endpoint_is_asked_for_its_models_rarely_and_an_outage_changes_nothing() -> None:
    async def scenario() -> None:
        now, asked, away = [0.0], 0, False

        async def models(url: str) -> list[str]:
            nonlocal asked
            asked += 1
            if away:
                raise OSError
            return ["m"]

        directory = EngineDirectory(lambda: now[0], endpoints=["http://a"], models=models)
        for number in range(200):
            now[0] = number * 0.1
            await directory.engines("m")
            await directory.engines(f"guess-{number}")
        assert asked <= 11, "unknown names make us ask every two seconds, no more"
        away = True
        now[0] = 100
        assert await directory.engines("m")

    asyncio.run(scenario())


def test_an_answer_that_is_no_stream_is_passed_on_as_what_it_is(tmp_path: Path) -> None:
    async def vectors(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3}})

    async def scenario() -> None:
        async with http_server({"/v1/embeddings": vectors}) as url, running(tmp_path, url) as service:
            call = await AsgiCall(service.app, "/v1/embeddings", {"model": "m", "input": "a", "stream": True}).run()
            assert (call.status, call.headers["content-type"]) == (200, "application/json")
            assert orjson.loads(call.body)["usage"]["prompt_tokens"] == 3
            assert 'batch_assets_tokens_total{kind="prompt",model="m"} 3.0' in service.metrics.page().decode()

    asyncio.run(scenario())
