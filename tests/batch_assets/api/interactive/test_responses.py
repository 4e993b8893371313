"""`/v1/responses` where the engine has it: whole, streamed, ended with its caller; elsewhere the documented error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from support.asgi_calls import AsgiCall
from support.front_doors import front_door_alone
from support.http_server import http_server
from support.timing import PATIENCE

from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.service_database import Records
from batch_assets.api.front_door import FrontDoor
from batch_assets.api.interactive.engine_directory import EngineTarget
from batch_assets.api.interactive.event_stream import ResponseStream, Usage
from batch_assets.api.settings import ApiSettings, ModelSettings

RESPONSES = "/v1/responses"
ASK = {"model": "short", "input": "hi", "max_output_tokens": 10}
USAGE = {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 1}, "output_tokens": 4, "total_tokens": 7}
ANSWER = {"id": "resp_1", "object": "response", "status": "completed", "output": [], "usage": USAGE}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **fields}) + b"\n\n"


EVENTS = (
    event("response.created", response={**ANSWER, "usage": None})
    + event("response.output_text.delta", delta="a")
    + event("response.completed", response=ANSWER)
)


@contextlib.asynccontextmanager
async def running(tmp_path: Path, *urls: str) -> AsyncIterator[FrontDoor]:
    settings = ApiSettings(tmp_path, str(tmp_path / "store"), f"sqlite:///{tmp_path / 'api.db'}")
    service = front_door_alone(replace(settings, models=ModelSettings(aliases={"short": "org/model-long"})))
    for url in urls:
        service.inner.state.proxy.directory.announce(EngineTarget(url, "org/model-long"))
    async with service.inner.router.lifespan_context(service.inner):
        yield service


def charged(tmp_path: Path) -> dict[str, tuple[int, int, int]]:
    with contextlib.closing(UsageLedger(Records(f"sqlite:///{tmp_path / 'api.db'}"))) as ledger:
        lines = ledger.lines()
    return {one.key.model: (one.used.input_tokens, one.used.cached_tokens, one.used.output_tokens) for one in lines}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_through_under_the_name_of_its_model_and_is_charged(tmp_path: Path, stream: bool) -> None:
    asked: list[dict[str, Any]] = []

    async def engine(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        if not stream:
            return web.json_response(ANSWER)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for part in range(0, len(EVENTS), 37):
            await answer.write(EVENTS[part : part + 37])
        return answer

    async def scenario() -> None:
        async with http_server({RESPONSES: engine}) as url, running(tmp_path, url) as service:
            call = await AsgiCall(service.app, RESPONSES, {**ASK, "stream": stream}).run()
            assert call.status == 200
            assert call.body == EVENTS if stream else orjson.loads(call.body) == ANSWER
        (body,) = asked
        assert body["model"] == "org/model-long" and body["store"] is False and "stream_options" not in body

    asyncio.run(scenario())
    assert charged(tmp_path) == {"org/model-long": (3, 1, 4)}


def test_an_engine_without_the_route_is_a_404_and_is_not_asked_again(tmp_path: Path) -> None:
    asked: list[str] = []

    async def none(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"detail": "Not Found"}, status=404)

    async def scenario() -> None:
        async with http_server({RESPONSES: none}) as url, running(tmp_path, url) as service:
            for _ in range(3):
                call = await AsgiCall(service.app, RESPONSES, ASK).run()
                error = orjson.loads(call.body)["error"]
                assert call.status == 404 and error["code"] == "unknown_url" and RESPONSES in error["message"]

    asyncio.run(scenario())
    assert len(asked) == 1 and charged(tmp_path) == {}


@pytest.mark.parametrize(
    "more", [{"background": True}, {"previous_response_id": "resp_1"}, {"conversation": "c"}, {"stream": 1}]
)
def test_what_would_need_a_kept_response_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as service:
            call = await AsgiCall(service.app, RESPONSES, {**ASK, **more}).run()
            assert call.status == 400 and orjson.loads(call.body)["error"]["param"] == next(iter(more))

    asyncio.run(scenario())


def test_a_caller_who_leaves_ends_the_response_in_the_engine(tmp_path: Path) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(event("response.created", response=ANSWER))
        began.set()
        with contextlib.suppress(ConnectionError):
            while request.transport is not None and not request.transport.is_closing():
                await answer.write(b": ping\n\n")
                await asyncio.sleep(0.01)
        ended.set()
        return answer

    async def scenario() -> None:
        async with http_server({RESPONSES: silent}) as url, running(tmp_path, url) as service:
            call = AsgiCall(service.app, RESPONSES, {**ASK, "stream": True})
            task = asyncio.create_task(call.run())
            await began.wait()
            call.leave()
            await task
            async with asyncio.timeout(10 * PATIENCE):
                await ended.wait()
            assert ended.is_set() and service.inner.state.proxy._in_flight == 0
            assert all(message.get("more_body", True) for message in call.messages)  # no end was said to nobody

    asyncio.run(scenario())


def test_a_stream_is_read_however_it_is_cut_and_its_usage_is_known_before_its_end_goes_on() -> None:
    for size in (1, 5, 64, len(EVENTS)):
        heard: list[Usage] = []
        passed = b""
        stream = ResponseStream(on_usage=heard.append)
        for at in range(0, len(EVENTS), size):
            part = stream.feed(EVENTS[at : at + size])
            assert heard or b"response.completed" not in part
            passed += part
        assert passed + stream.finish() == EVENTS and stream.done and stream.generating
        assert heard == [Usage(3, 4, 1)]


def test_a_stream_that_breaks_off_is_not_done() -> None:
    stream = ResponseStream()
    stream.feed(EVENTS[:-20])
    assert not stream.done and stream.usage is None
