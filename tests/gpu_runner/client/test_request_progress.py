"""How far a request got, and which broken connections were idle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from support.http_server import ANSWER, http_server

from gpu_runner.client.engine_client import EngineClient
from gpu_runner.client.llama_cpp import SILENT_CONNECTIONS
from gpu_runner.client.request_progress import IDLE_CLOSE_SECONDS, SILENT_SECONDS, RequestProgress
from gpu_runner.rows import Generation

CHAT = Generation("chat", "m")
PROMPT = b'[{"role":"user","content":"x"}]'
CARD = {"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx": 512}, "tags": ["xllamacpp-1"]}


def progress(opened_at: float | None, sent_at: float | None) -> RequestProgress:
    made = RequestProgress()
    made.opened_at, made.sent_at = opened_at, sent_at
    return made


@pytest.mark.parametrize(
    ("opened_at", "sent_at", "broken_after", "idle"),
    [
        (None, 100.0, 0.1, True),  # kept alive
        (None, 100.0, IDLE_CLOSE_SECONDS + 1, False),  # the request was at work
        (99.9, 100.0, 0.1, False),  # new, and the server had the request at once
        (100.0 - SILENT_SECONDS - 0.1, 100.0, 0.1, True),  # new, and silent for long
        (100.0 - SILENT_SECONDS - 0.1, 100.0, IDLE_CLOSE_SECONDS + 1, False),
        (99.9, None, 10.0, True),  # nothing was sent
    ],
)
def test_a_connection_was_idle_that_broke_soon_after_a_long_silence(
    opened_at: float | None, sent_at: float | None, broken_after: float, idle: bool
) -> None:
    assert progress(opened_at, sent_at).closed_in_idleness((sent_at or 100.0) + broken_after) is idle


def test_a_place_is_given_back_once_when_the_request_is_sent_or_ends() -> None:
    async def main() -> None:
        limit = asyncio.Semaphore(1)
        with RequestProgress(limit) as sent:
            await sent.open()
            assert limit.locked()
            sent.send()
            assert not limit.locked()
        with pytest.raises(RuntimeError), RequestProgress(limit) as failed:
            await failed.open()
            raise RuntimeError
        assert limit._value == 1

    asyncio.run(main())


def test_a_request_canceled_while_it_waits_for_a_place_leaves_the_place_alone() -> None:
    async def main() -> None:
        limit = asyncio.Semaphore(1)

        async def ask() -> None:
            with RequestProgress(limit) as waiting:
                await waiting.open()

        with RequestProgress(limit) as first:
            await first.open()
            second = asyncio.create_task(ask())
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            assert limit.locked()
        assert not limit.locked()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("models", "most"),
    [([CARD], SILENT_CONNECTIONS), ([{"id": "m"}], 99)],  # one of 100 rows takes the connection of the list of models
)
def test_few_connections_to_llama_cpp_are_open_without_a_byte_sent(
    models: list[Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, seen = set[RequestProgress](), list[int]()
    open_, send = RequestProgress.open, RequestProgress.send

    async def note_open(self: RequestProgress) -> None:
        await open_(self)
        silent.add(self)
        seen.append(len(silent))

    def note_send(self: RequestProgress) -> None:
        send(self)
        silent.discard(self)

    async def list_models(_: web.Request) -> web.Response:
        return web.json_response({"data": models})

    async def generate(_: web.Request) -> web.Response:
        return web.json_response(ANSWER)

    async def main() -> None:
        routes = {"/v1/models": list_models, "/v1/chat/completions": generate}
        async with http_server(routes) as url, EngineClient(url, CHAT) as engine:
            await engine.info()
            monkeypatch.setattr(RequestProgress, "open", note_open)
            monkeypatch.setattr(RequestProgress, "send", note_send)
            assert len(await asyncio.gather(*(engine.generate(PROMPT) for _ in range(100)))) == 100

    asyncio.run(main())
    assert max(seen) == most and not silent
