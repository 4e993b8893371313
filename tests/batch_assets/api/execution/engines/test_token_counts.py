"""Over-long texts are refused before a batch begins, where an engine counts their tokens; else nothing changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from support.api_service import CHAT, api_service, line
from support.http_server import ANSWER, http_server, status
from support.timing import PATIENCE

from batch_assets.api.batches.long_texts import LongText
from batch_assets.api.execution.batch_lifecycle import COUNTINGS
from batch_assets.api.execution.engines.engine_supply import ServingEngine
from batch_assets.api.execution.engines.token_counts import CHAT_SLACK, SURE_AFTER, too_long_texts

CONTEXT = 20


class Counting:
    """An engine that takes CONTEXT tokens, each word being one."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["model"] == "tiny"
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        self.asked.append(text)
        return web.json_response({"count": len(text.split()), "max_model_len": CONTEXT, "tokens": []})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": CONTEXT}]})

    async def chat(self, request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        if len(text.split()) > CONTEXT:
            return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)
        return web.json_response(ANSWER)


def texts(*contents: str) -> list[LongText]:
    found = [
        LongText(len(text), number, orjson.dumps({"model": "tiny", "prompt": text}), "body.prompt")
        for number, text in enumerate(contents, 1)
    ]
    return sorted(found, reverse=True)


def engine(url: str) -> ServingEngine:
    return ServingEngine(f"{url}/v1", "engine-key", None, "endpoint", "endpoint")


def batch_of(
    tmp_path: Path, tokenize: Callable[[web.Request], Awaitable[web.StreamResponse]], engine: Counting
) -> tuple[dict[str, object], list[dict[str, object]]]:
    """What becomes of a batch of a short line, one of long words, and one of too many words."""
    contents = {"short": "a b", "words": "long " + "w" * 300, "over": "w " * (CONTEXT + CHAT_SLACK + 1)}
    lines = [line(name, messages=[{"role": "user", "content": text}]) for name, text in contents.items()]

    async def run() -> tuple[dict[str, object], list[dict[str, object]]]:
        routes = {"/tokenize": tokenize, "/v1/models": engine.models, CHAT: engine.chat}
        async with http_server(routes) as url, api_service(tmp_path, url) as site:
            batch = await site.until((await site.create(lines))["id"])
            return batch, await site.lines_of(batch["error_file_id"])

    return asyncio.run(run())


def test_an_over_long_text_refuses_its_batch_before_anything_is_asked(tmp_path: Path) -> None:
    engine = Counting()
    batch, _ = batch_of(tmp_path, engine.tokenize, engine)
    assert batch["status"] == "failed"
    (error,) = batch["errors"]["data"]  # type: ignore[index]
    assert error == {
        "code": "context_length_exceeded",
        "message": "This model's maximum context length is 20 tokens. The prompt has 277 tokens.",
        "param": "body.messages",
        "line": 3,
    }
    assert len(engine.asked) == 3 and "w" * 300 in engine.asked[1]


@pytest.mark.slow
@pytest.mark.parametrize("missing", [status(404), status(500), status(200, "no JSON"), status(400)])
def test_without_a_count_the_engines_refusal_is_the_lines_error(
    tmp_path: Path, missing: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> None:
    batch, errors = batch_of(tmp_path, missing, Counting())
    assert batch["status"] == "completed"
    assert [error["custom_id"] for error in errors] == ["over"]


def test_an_engine_that_is_away_leaves_it_to_the_next_one() -> None:
    async def scenario() -> None:
        counting = Counting()
        async with http_server({"/tokenize": counting.tokenize}) as url:
            engines = [engine("http://127.0.0.1:9"), engine(url)]
            errors = await too_long_texts(engines, texts("w " * 30, "w"), CONTEXT)
            assert [error.line for error in errors] == [1]
            assert await too_long_texts([], texts("w " * 30), CONTEXT) == []

    asyncio.run(scenario())


def test_a_chat_near_the_limit_is_left_to_the_engine(tmp_path: Path) -> None:
    text = "w " * (CONTEXT + CHAT_SLACK)
    request = orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}]})

    async def scenario() -> list[object]:
        async with http_server({"/tokenize": Counting().tokenize}) as url:
            chat = LongText(len(request), 1, request, "body.messages")
            return list(await too_long_texts([engine(url)], [chat], CONTEXT))

    assert asyncio.run(scenario()) == []


def test_a_longer_context_of_another_engine_counts() -> None:
    async def scenario() -> list[object]:
        async with http_server({"/tokenize": Counting().tokenize}) as url:
            return list(await too_long_texts([engine(url)], texts("w " * 30), 40))

    assert asyncio.run(scenario()) == []


def test_texts_that_are_likely_short_enough_are_not_asked_about() -> None:
    """Of thousands that are longer than the context in bytes, few are near it in tokens."""

    async def scenario() -> int:
        counting = Counting()
        async with http_server({"/tokenize": counting.tokenize}) as url:
            assert await too_long_texts([engine(url)], texts(*("w" * 200 for _ in range(200))), CONTEXT) == []
        return len(counting.asked)

    assert asyncio.run(scenario()) == SURE_AFTER


def test_an_engine_that_hangs_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batch_assets.api.execution.engines.token_counts.CALL_SECONDS", 0.05)

    async def hang(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> list[object]:
        async with http_server({"/tokenize": hang}, shutdown_timeout=0.1) as url:
            return list(await too_long_texts([engine(url)], texts("w " * 30, "w " * 40), CONTEXT))

    assert asyncio.run(scenario()) == []


def test_several_slow_engines_cost_no_more_time_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batch_assets.api.execution.engines.token_counts.ALL_SECONDS", 0.5)
    asked = []

    async def hang(request: web.Request) -> web.Response:
        asked.append(request.host)
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> float:
        async with http_server({"/tokenize": hang}) as one, http_server({"/tokenize": hang}) as two:
            began = asyncio.get_running_loop().time()
            assert await too_long_texts([engine(one), engine(two)], texts("w " * 30), CONTEXT) == []
            return asyncio.get_running_loop().time() - began

    took = asyncio.run(scenario())
    assert len(asked) == 1 and took >= 0.5, "the second one is not begun with"


@pytest.mark.slow
def test_counting_keeps_no_other_batch_from_its_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More batches than are validated, and than are counted, at once wait for an engine that does not count."""
    for bound in ("CALL_SECONDS", "ALL_SECONDS"):
        monkeypatch.setattr(f"batch_assets.api.execution.engines.token_counts.{bound}", 60.0 * PATIENCE)

    async def run() -> str:
        counting = Counting()
        hanging: list[str] = []

        warm = asyncio.Event()

        async def hang(request: web.Request) -> web.Response:
            if not warm.is_set():
                return await counting.tokenize(request)
            hanging.append(request.host)
            await asyncio.Event().wait()
            raise AssertionError

        routes = {"/tokenize": hang, "/v1/models": counting.models, CHAT: counting.chat}
        async with http_server(routes) as url, api_service(tmp_path, url) as site:
            await site.until((await site.create([line("warm")]))["id"])  # an engine runs
            warm.set()
            long = [line("long", messages=[{"role": "user", "content": "long " + "w" * 300}])]
            for _ in range(COUNTINGS):
                await site.create(long)
            async with asyncio.timeout(20 * PATIENCE):  # less than a call may take
                while len(hanging) < COUNTINGS:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                for lines in (long, [line("short")]):
                    batch = await site.until((await site.create(lines))["id"])
            return str(batch["status"])

    assert asyncio.run(run()) == "completed"
