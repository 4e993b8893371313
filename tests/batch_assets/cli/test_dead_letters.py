"""`batch-assets dead-letters` against a running service, and against servers that are none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from aiohttp import web
from support.http_server import Handler, http_server
from support.online_calls import OnlineCalls, online_calls
from support.timing import PATIENCE

from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.requests.callers import Scope
from batch_assets.cli import dead_letters
from batch_assets.cli.user_errors import CommandError

CHAT = "/v1/chat/completions"
ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]}


class Engine:
    """Answers no request until it is well."""

    well = False

    async def answer(self, request: web.Request) -> web.Response:
        return web.json_response(ANSWER if self.well else ["no answer"])


@contextlib.asynccontextmanager
async def service(home: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> AsyncIterator[OnlineCalls]:
    """The service at an address of loopback, named by the environment with a key for operators."""
    keys = KeyStore(f"sqlite:///{home}/api.db", time.time)
    with contextlib.closing(keys):
        secrets = {scope: keys.create("acme", frozenset({scope}))[1] for scope in (Scope.INFERENCE, Scope.DEAD_LETTERS)}
    headers = {"Authorization": f"Bearer {secrets[Scope.INFERENCE]}"}
    async with (
        http_server({CHAT: engine.answer}) as url,
        online_calls(home, [url], monkeypatch, headers=headers) as site,
    ):
        server = uvicorn.Server(uvicorn.Config(site.door.app, port=0, lifespan="off", log_level="error"))
        task = asyncio.create_task(server._serve())  # `serve` would take the signals of this process
        try:
            while not server.started:
                await asyncio.sleep(0.01)
                assert not task.done()
            port = server.servers[0].sockets[0].getsockname()[1]
            monkeypatch.setenv(dead_letters.URL, f"http://127.0.0.1:{port}")
            monkeypatch.setenv(dead_letters.KEY, secrets[Scope.DEAD_LETTERS])
            yield site
        finally:
            server.should_exit = True
            await task


async def given_up(site: OnlineCalls) -> str:
    task_id = await site.accepted({"input": "secret words", "model": "tiny"})
    assert (await site.ended(task_id))["status"] == "FAILED"
    return task_id


def test_dead_letters_are_listed_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        engine = Engine()
        async with service(tmp_path, monkeypatch, engine) as site:
            one, two = await given_up(site), await given_up(site)
            await asyncio.to_thread(dead_letters.list_dead_letters, 1, as_json=False)
            said = capsys.readouterr().out
            assert two in said and one not in said, "the newest of them"
            assert "engine_garbage" in said and "there may be more" in said and "secret" not in said
            await asyncio.to_thread(dead_letters.list_dead_letters, 100, as_json=True)
            listed = json.loads(capsys.readouterr().out)["dead_letters"]
            assert [letter["task_id"] for letter in listed] == [two, one]

            engine.well = True
            unknown = "task_" + "0" * 32
            whole = await asyncio.to_thread(
                dead_letters.redrive_dead_letters, [one, unknown], every=False, as_json=False
            )
            assert not whole and capsys.readouterr().out == "1 of 2 put back into the queue\n"
            assert (await site.ended(one))["status"] == "SUCCESS"
            assert await asyncio.to_thread(dead_letters.redrive_dead_letters, [], every=True, as_json=True)
            assert json.loads(capsys.readouterr().out) == {"redriven": 1, "named": 1}
            assert (await site.ended(two))["status"] == "SUCCESS"
            assert await asyncio.to_thread(dead_letters.redrive_dead_letters, [], every=True, as_json=True)

            monkeypatch.setenv(dead_letters.KEY, "sk-wrong")
            with pytest.raises(dead_letters.ServiceError, match=r"answered 401: .*scope dead_letters") as refused:
                await asyncio.to_thread(dead_letters.list_dead_letters, 1, as_json=False)
            assert "sk-wrong" not in str(refused.value)

    asyncio.run(scenario())


def answers(body: bytes, status: int = 200, **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status, headers=headers)

    return handler


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (answers(b"<html>"), "no answer that can be read: JSONDecodeError"),
        (answers(b"[]"), "expected a JSON object"),
        (answers(b'{"data": [{"task_id": 1}]}'), "expected a list of dead letters"),
        (answers(b'{"data": "x"}'), "expected a list of dead letters"),
        (answers(b"x" * (5 << 20)), "no answer that can be read: ValueError"),
        (answers(b"", 302, Location="http://127.0.0.1:1/"), "the service answered 302"),
        (answers(b'{"error": {"message": "no\\u001b[31m"}}', 500), "the service answered 500: no [31m"),
        (answers(b"[[[[", 503), "the service answered 503"),
    ],
)
def test_what_is_no_answer_is_said_in_one_line(handler: Handler, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with http_server({"/v1/dead_letters": handler}) as url:
            monkeypatch.setenv(dead_letters.URL, url)
            with pytest.raises(dead_letters.ServiceError, match=re.escape(said)):
                await asyncio.to_thread(dead_letters.list_dead_letters, 10, as_json=False)

    asyncio.run(scenario())


def test_an_answer_that_never_ends_is_waited_for_no_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "CALL_SECONDS", 0.5)

    async def dribble(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b" ")
                await asyncio.sleep(0.05)
        return response

    async def scenario() -> None:
        async with http_server({"/v1/dead_letters": dribble}, shutdown_timeout=0.1) as url:
            monkeypatch.setenv(dead_letters.URL, url)
            async with asyncio.timeout(10 * PATIENCE):
                with pytest.raises(dead_letters.ServiceError, match="TimeoutError"):
                    await asyncio.to_thread(dead_letters.list_dead_letters, 10, as_json=False)

    asyncio.run(scenario())


@pytest.mark.parametrize(("task_ids", "every"), [([], False), (["task_1"], True), (["t"] * 1001, False)])
def test_tasks_are_named_or_all_of_them(task_ids: Any, every: bool) -> None:
    with pytest.raises(CommandError):
        dead_letters.redrive_dead_letters(task_ids, every=every, as_json=False)


def test_an_address_that_holds_a_secret_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dead_letters.URL, "http://me:secret@127.0.0.1:1")
    with pytest.raises(CommandError, match=r"BATCH_ASSETS_FRONT_DOOR_URL: .*belongs in the environment") as refused:
        dead_letters.list_dead_letters(1, as_json=False)
    assert "secret" not in str(refused.value)
