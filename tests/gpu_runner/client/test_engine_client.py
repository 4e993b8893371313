"""The HTTP client against tiny servers that misbehave in one way each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from support.http_server import ANSWER, http_server, models, status

from gpu_runner.client.engine_client import (
    EngineClient,
    EngineLost,
    EngineRefused,
    RequestDenied,
    TimeOuts,
    Transient,
)
from gpu_runner.client.protocol import Requests
from gpu_runner.client.verbatim_client import VerbatimClient
from gpu_runner.rows import TOKEN_LIMITS, Generation

CHAT = Generation("chat", "m", {"max_tokens": 5})
PROMPT = orjson.dumps([{"role": "user", "content": "a very secret prompt"}])

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RawServer:
    """A server on bare sockets. `script` says, per connection, what to do with each request on it: "answer",
    "reset" (before any byte), "half" (reset in the body), or "silence", which notes when the client leaves.
    """

    def __init__(self, *script: list[str]) -> None:
        self.script = list(script)
        self.connections = self.requests = 0
        self.silent: asyncio.Queue[str] = asyncio.Queue()
        self.url = ""
        self.tasks: set[asyncio.Task[Any]] = set()
        self.writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.writers.add(writer)
        steps = self.script[self.connections] if self.connections < len(self.script) else ["answer"] * 100
        self.connections += 1
        body = orjson.dumps(ANSWER)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        try:
            for step in steps:
                request = await reader.readuntil(b"\r\n\r\n")
                length = int(request.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                self.requests += 1
                if step == "silence":
                    self.silent.put_nowait("asked")
                    assert await reader.read() == b""
                    self.silent.put_nowait("left")
                    return
                if step == "reset":
                    writer.transport.abort()
                    return
                writer.write(head + body if step != "half" else head + body[:20])
                await writer.drain()
                if step == "half":
                    writer.transport.abort()
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    def close_connections(self) -> None:
        """Close all connections, as a server does that hears nothing on them."""
        for writer in self.writers:
            writer.close()


async def answer(request: web.Request) -> web.Response:
    return web.json_response(ANSWER)


async def failure(url: str, **options: Any) -> Exception:
    """What `generate` raises."""
    async with EngineClient(url, CHAT, **options) as engine:
        with pytest.raises(Exception) as raised:
            await engine.generate(PROMPT)
    return raised.value


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_an_endpoint_may_end_in_v1_or_not(ending: str) -> None:
    async def main() -> None:
        async with http_server({"/v1/chat/completions": answer}) as url, EngineClient(url + ending, CHAT) as engine:
            assert (await engine.generate(PROMPT)).output == "hi"

    asyncio.run(main())


def test_a_path_before_v1_is_kept() -> None:
    async def main() -> None:
        routes = {"/a/b/v1/chat/completions": answer, "/a/b/health": status(200)}
        async with http_server(routes) as url, EngineClient(url + "/a/b", CHAT) as engine:
            assert (await engine.generate(PROMPT)).output == "hi"
            assert await engine.healthy()

    asyncio.run(main())


@pytest.mark.parametrize("endpoint", ["", "localhost:8000", "ftp://host", "http://"])
def test_a_wrong_endpoint_is_refused_at_once(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        EngineClient(endpoint, CHAT)


def test_the_api_key_is_sent_and_stays_out_of_errors() -> None:
    async def guarded(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer k3y":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await answer(request)

    async def main() -> None:
        async with http_server({"/v1/chat/completions": guarded}) as url:
            async with EngineClient(url, CHAT, api_key="k3y") as engine:
                assert (await engine.generate(PROMPT)).output == "hi"
            error = await failure(url, api_key="wrong-k3y")
            assert isinstance(error, EngineRefused)
            assert "key" in str(error) and "k3y" not in str(error)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "kind"),
    [(400, RequestDenied), (402, RequestDenied), (413, RequestDenied), (422, RequestDenied), (403, RequestDenied),
     (404, RequestDenied),     (429, Transient), (500, Transient), (503, Transient)],
)  # fmt: skip
def test_each_status_has_its_class_and_no_exception_shows_the_body(code: int, kind: type[Exception]) -> None:
    async def main() -> None:
        async with http_server({"/v1/chat/completions": status(code, "echo of a very secret prompt")}) as url:
            error = await failure(url)
            assert isinstance(error, kind)
            assert "secret" not in f"{error} {error!r}"

    asyncio.run(main())


def test_a_redirect_is_never_followed() -> None:
    async def main() -> None:
        seen = []

        async def elsewhere(request: web.Request) -> web.Response:
            seen.append(request.path)
            return await answer(request)

        routes = {"/v1/chat/completions": status(307, Location="/other"), "/other": elsewhere}
        async with http_server(routes) as url:
            assert isinstance(await failure(url), EngineRefused)
            assert seen == []

    asyncio.run(main())


def test_a_connection_that_the_server_closed_in_idleness_costs_nothing() -> None:
    async def main() -> None:
        async with RawServer(["answer", "reset"]) as server, EngineClient(server.url, CHAT) as engine:
            await engine.generate(PROMPT)
            assert (await engine.generate(PROMPT)).output == "hi"
            assert (server.connections, server.requests) == (2, 3)

    asyncio.run(main())


def test_many_idle_connections_closed_at_once_cost_nothing() -> None:
    async def main() -> None:
        async with RawServer() as server, EngineClient(server.url, CHAT) as engine:
            for round_ in range(1, 5):
                found = await asyncio.gather(*(engine.generate(PROMPT) for _ in range(50)))
                assert len(found) == 50
                assert server.requests == 50 * round_
                server.close_connections()  # the client is given no moment to see it

    asyncio.run(main())


def test_a_reset_on_a_new_connection_is_a_failure() -> None:
    async def main() -> None:
        async with RawServer(["reset"]) as server:
            error = await failure(server.url)
            assert isinstance(error, Transient)
            assert (error.code, error.taken, server.requests) == ("connection_lost", True, 1)

    asyncio.run(main())


def test_a_reset_on_the_fresh_connection_is_a_failure_too() -> None:
    async def main() -> None:
        async with RawServer(["answer", "reset"], ["reset"]) as server, EngineClient(server.url, CHAT) as engine:
            await engine.generate(PROMPT)
            with pytest.raises(Transient, match="connection_lost"):
                await engine.generate(PROMPT)
            assert server.requests == 3

    asyncio.run(main())


def test_a_body_that_breaks_off_is_a_failure_and_not_repeated() -> None:
    async def main() -> None:
        async with RawServer(["answer", "half"]) as server, EngineClient(server.url, CHAT) as engine:
            await engine.generate(PROMPT)
            with pytest.raises(Transient, match="connection_lost"):
                await engine.generate(PROMPT)
            assert server.requests == 2

    asyncio.run(main())


def test_a_silent_server_ends_in_the_time_out() -> None:
    async def main() -> None:
        async with RawServer(["silence"]) as server:
            error = await failure(server.url, time_outs=TimeOuts(request=0.1))
            assert isinstance(error, Transient)
            assert (error.code, error.taken) == ("timeout", True)

    asyncio.run(main())


def test_where_nobody_listens_the_row_was_never_taken() -> None:
    async def main() -> None:
        async with RawServer() as server:
            url = server.url
        error = await failure(url)
        assert isinstance(error, Transient)
        assert (error.code, error.taken) == ("connect_failed", False)
        async with EngineClient(url, CHAT) as engine:
            assert not await engine.healthy()
            with pytest.raises(EngineLost, match="unreachable"):
                await engine.info()
            with pytest.raises(EngineLost, match="unreachable"):
                await engine.load()

    asyncio.run(main())


def test_a_large_prompt_is_sent_whole() -> None:
    async def main() -> None:
        sizes = []

        async def measure(request: web.Request) -> web.Response:
            sizes.append(len(await request.read()))
            return await answer(request)

        large = orjson.dumps([{"role": "user", "content": "x" * 3_000_000}])
        async with http_server({"/v1/chat/completions": measure}) as url, EngineClient(url, CHAT) as engine:
            await engine.generate(large)
            assert sizes[0] > len(large)

    asyncio.run(main())


@pytest.mark.parametrize(("owner", "in_body"), [("vllm", 100), ("somebody", None)])
@pytest.mark.parametrize("client", [EngineClient, VerbatimClient])
def test_vllm_gets_the_priority_in_the_body_too_as_older_ones_read_no_header(
    client: type[EngineClient], owner: str, in_body: int | None
) -> None:
    seen: list[tuple[str | None, dict[str, Any]]] = []

    async def chat(request: web.Request) -> web.Response:
        seen.append((request.headers.get("X-Vllm-Priority"), orjson.loads(await request.read())))
        return web.json_response(ANSWER)

    async def main() -> None:
        routes = {"/v1/models": models({"id": "m", "owned_by": owner}), "/v1/chat/completions": chat}
        async with http_server(routes) as url, client(url, CHAT, priority=100) as engine:
            await engine.info()
            await engine.generate(PROMPT if client is EngineClient else b'{"model":"m","messages":' + PROMPT + b"}")

    asyncio.run(main())
    [(header, body)] = seen
    assert (header, body.get("priority")) == ("100", in_body)
    assert body["model"] == "m" and body["messages"] == orjson.loads(PROMPT)


def test_the_load_is_read_from_metrics_and_asked_for_only_where_it_is() -> None:
    async def main() -> None:
        asked = []

        async def metrics(request: web.Request) -> web.Response:
            asked.append(1)
            return web.Response(text='vllm:num_requests_running{a="b"} 2\n' if len(asked) == 1 else "nothing 1\n")

        async with http_server({"/metrics": metrics}) as url, EngineClient(url, CHAT) as engine:
            load = await engine.load()
            assert load is not None and load.running == 2
            assert await engine.load() is None
            assert await engine.load() is None
            assert len(asked) == 2

    asyncio.run(main())


@pytest.mark.parametrize(("code", "healthy"), [(200, True), (404, True), (401, True), (500, False), (503, False)])
def test_health_is_whether_the_server_answers_without_an_error(code: int, healthy: bool) -> None:
    async def main() -> None:
        async with http_server({"/health": status(code)}) as url, EngineClient(url, CHAT) as engine:
            assert await engine.healthy() is healthy

    asyncio.run(main())


def test_a_canary_asks_for_one_token() -> None:
    async def main() -> None:
        bodies = []

        async def note(request: web.Request) -> web.Response:
            bodies.append(await request.json())
            return await answer(request)

        async with http_server({"/v1/chat/completions": note}) as url, EngineClient(url, CHAT) as engine:
            await engine.canary()
            await engine.canary(b'[{"role":"user","content":"hi"}]')
        assert bodies == [
            {"model": "m", "messages": [{"role": "user", "content": said}], "max_tokens": 1} for said in ("ping", "hi")
        ]

    asyncio.run(main())


@pytest.mark.parametrize("sampling", [{"max_completion_tokens": 50}, {"n_predict": 7}])
def test_a_canary_limits_its_answer_by_the_field_of_the_rows(sampling: dict[str, Any]) -> None:
    found = orjson.loads(Requests(Generation("chat", "m", sampling)).canary())
    assert {name: value for name, value in found.items() if name in TOKEN_LIMITS} == dict.fromkeys(sampling, 1)


@pytest.mark.parametrize(("task", "field"), [("completion", "prompt"), ("embedding", "input")])
def test_a_canary_with_a_row_s_prompt_asks_in_the_words_of_its_task(task: Any, field: str) -> None:
    found = orjson.loads(Requests(Generation(task, "m")).canary(b'"hi"'))
    assert found.pop("max_tokens", 1) == 1
    assert found == {"model": "m", field: "hi"}


def test_cancelled_requests_leave_no_connection() -> None:
    async def main() -> None:
        async with RawServer(["silence"], ["silence"]) as server:
            async with EngineClient(server.url, CHAT) as engine:
                tasks = [asyncio.create_task(engine.generate(PROMPT)) for _ in range(2)]
                assert [await server.silent.get() for _ in tasks] == ["asked", "asked"]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                assert [await asyncio.wait_for(server.silent.get(), 5) for _ in tasks] == ["left", "left"]
            assert not asyncio.all_tasks() - server.tasks - {asyncio.current_task()}

    asyncio.run(main())


def test_a_close_that_is_canceled_leaves_no_session_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client has two sessions: the cancellation of the first one's end does not keep the second from ending."""
    close, closed = aiohttp.ClientSession.close, list[aiohttp.ClientSession]()

    async def slowly(session: aiohttp.ClientSession) -> None:
        await close(session)
        closed.append(session)
        if len(closed) == 1:
            await asyncio.sleep(60)

    async def run() -> None:
        client = await EngineClient("http://127.0.0.1:1", CHAT).__aenter__()
        closing = asyncio.create_task(client.close())
        while not closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing

    monkeypatch.setattr(aiohttp.ClientSession, "close", slowly)
    asyncio.run(run())
    assert len(closed) == 2 and all(session.closed for session in closed)
