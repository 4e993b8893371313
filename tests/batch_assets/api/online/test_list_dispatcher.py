"""Embeddings that are asked for online go to engines as lists: each request its own answer, tokens, failure and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.embedder import Embedder
from support.http_server import http_server
from support.online_calls import OnlineCalls, online_calls
from support.timing import PATIENCE

from batch_assets.api.interactive import embedding_lists
from batch_assets.api.interactive.embedding_lists import PATH
from batch_assets.api.online.list_dispatcher import MOST_TEXTS
from gpu_runner.micro_batches.list_batcher import BatchPolicy

FIRST = "first of all"


def serve(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scenario: Callable[[OnlineCalls, Embedder], Coroutine[Any, Any, None]],
    *,
    refusal: int = 400,
    lists: str = "on",
) -> None:
    monkeypatch.setenv("BATCH_ASSETS_MICRO_BATCHES", lists)
    monkeypatch.setattr(embedding_lists, "BatchPolicy", lambda: BatchPolicy(calls=1))

    async def run() -> None:
        engine = Embedder(refusal)
        async with http_server({PATH: engine.answer}) as url, online_calls(tmp_path, [url], monkeypatch) as site:
            await scenario(site, engine)

    asyncio.run(run())


async def embedded(site: OnlineCalls, texts: list[str], **more: Any) -> Any:
    return await site.ended(await site.accepted({"input": texts, "model": "tiny", **more}))


async def together(site: OnlineCalls, engine: Embedder, asked: list[list[str]]) -> list[Any]:
    """What became of these, all of which are there before the engine has answered a first text, and so are one list."""
    engine.gate.clear()
    first = asyncio.create_task(embedded(site, [FIRST]))
    await until(lambda: engine.lists == [[FIRST]])
    found = asyncio.gather(*[embedded(site, texts) for texts in asked])
    listed = sum(len(texts) for texts in asked if len(texts) <= MOST_TEXTS)
    await until(lambda: site.figure("batch_assets_micro_batch_waiting") == listed)
    engine.gate.set()
    assert (await first)["output"] == [[float(len(FIRST))]]
    return await found


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(40 * PATIENCE):
        while not reached():  # noqa: ASYNC110  (neither engine nor metrics have an event)
            await asyncio.sleep(0.01)


def charged(site: OnlineCalls) -> float:
    return site.figure("batch_assets_tokens_total", kind="prompt", model="tiny")


def test_texts_of_many_requests_go_together_and_each_gets_its_own_vector_and_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(site: OnlineCalls, engine: Embedder) -> None:
        texts = ["x" * size for size in range(1, 61)]
        found = await together(site, engine, [[text] for text in texts])
        assert [one["output"] for one in found] == [[[float(len(text))]] for text in texts]
        assert sum(one["usage"]["prompt_tokens"] for one in found) == sum(map(len, texts))
        assert charged(site) == sum(map(len, texts)) + len(FIRST)
        assert [len(texts) for texts in engine.lists] == [1, 60]

    serve(tmp_path, monkeypatch, scenario)


def test_a_request_of_a_few_texts_is_taken_apart_and_one_of_many_goes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(site: OnlineCalls, engine: Embedder) -> None:
        few, many = [f"{'y' * n}" for n in (5, 2, 9)], ["z" * (n + 1) for n in range(MOST_TEXTS + 1)]
        first, second = await together(site, engine, [few, many])
        assert first["output"] == [[5.0], [2.0], [9.0]] and first["usage"]["prompt_tokens"] == 16
        assert second["output"] == [[float(n + 1)] for n in range(MOST_TEXTS + 1)]
        assert many in engine.lists and few in engine.lists
        engine.counts = False
        assert (await embedded(site, ["ab", "c"]))["usage"] is None

    serve(tmp_path, monkeypatch, scenario)


def test_a_text_that_is_refused_fails_its_own_request_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(site: OnlineCalls, engine: Embedder) -> None:
        asked = [[f"text {number}"] for number in range(30)]
        asked[11] = ["fine", "bad one"]
        found = await together(site, engine, asked)
        assert [number for number, one in enumerate(found) if one["status"] != "SUCCESS"] == [11]
        assert found[11]["error"] == {"code": "request_refused", "message": "cannot be embedded"}

    serve(tmp_path, monkeypatch, scenario)


def test_what_breaks_the_engine_costs_the_others_one_try_and_is_the_only_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(site: OnlineCalls, engine: Embedder) -> None:
        asked = [[f"text {number}"] for number in range(20)] + [["bad one"]]
        found = await together(site, engine, asked)
        assert [one["status"] for one in found] == ["SUCCESS"] * 20 + ["FAILED"]
        assert found[-1]["error"]["code"] == "engine_error" and found[-1]["tries"] == 3
        assert max(one["tries"] for one in found[:-1]) == 1
        assert engine.lists.count(["bad one"]) == 2

    serve(tmp_path, monkeypatch, scenario, refusal=500)


def test_a_service_that_ends_with_lists_under_way_gives_their_requests_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_ASSETS_MICRO_BATCHES", "on")

    async def run() -> None:
        engine = Embedder()
        engine.gate.clear()
        async with http_server({PATH: engine.answer}) as url:
            async with online_calls(tmp_path, [url], monkeypatch) as site:
                names = [await site.accepted({"input": [f"text {n}"], "model": "tiny"}) for n in range(10)]
                async with asyncio.timeout(10 * PATIENCE):
                    while sum(map(len, engine.lists)) < 10:  # noqa: ASYNC110  (the engine has no event)
                        await asyncio.sleep(0.01)
            engine.gate.set()
            async with online_calls(tmp_path, [url], monkeypatch) as site:
                found = [await site.ended(name) for name in names]
                assert [(one["status"], one["tries"]) for one in found] == [("SUCCESS", 0)] * 10
                assert charged(site) == sum(one["usage"]["prompt_tokens"] for one in found)

    asyncio.run(run())


def test_without_the_setting_each_request_goes_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: OnlineCalls, engine: Embedder) -> None:
        await asyncio.gather(*[embedded(site, [f"text {number}"]) for number in range(10)])
        assert sorted(engine.lists) == sorted([f"text {number}"] for number in range(10))

    serve(tmp_path, monkeypatch, scenario, lists="off")
