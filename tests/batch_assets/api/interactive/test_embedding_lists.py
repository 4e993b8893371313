"""Texts of many callers as lists to one engine: each caller its own answer, error, tokens and end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.asgi_calls import AsgiCall
from support.embedder import Embedder
from support.front_doors import front_door_alone
from support.http_server import http_server
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE

from batch_assets.api.front_door import FrontDoor
from batch_assets.api.interactive.embedding_lists import LONGEST_TEXT, PATH
from batch_assets.api.interactive.engine_directory import EngineTarget
from batch_assets.api.settings import ApiSettings
from batch_assets.settings import SettingError


@contextlib.asynccontextmanager
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> AsyncIterator[FrontDoor]:
    monkeypatch.setenv("BATCH_ASSETS_MICRO_BATCHES", "on")
    service = front_door_alone(ApiSettings(tmp_path, str(tmp_path / "store"), f"sqlite:///{tmp_path / 'api.db'}"))
    service.inner.state.proxy.directory.announce(EngineTarget(url, "m", "engine-key"))
    async with service.inner.router.lifespan_context(service.inner):
        yield service


async def ask(service: FrontDoor, text: Any, **fields: Any) -> AsgiCall:
    return await AsgiCall(service.app, PATH, {"model": "m", "input": text, **fields}, {}).run()


def metric(service: FrontDoor, name: str) -> float:
    lines = service.metrics.page().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"batch_assets_{name}"))


def test_texts_of_many_callers_go_together_and_each_gets_its_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = Embedder()
        async with http_server({PATH: engine.answer}) as url, running(tmp_path, monkeypatch, url) as service:
            texts = ["x" * size for size in range(1, 101)]
            engine.gate.clear()
            asked = asyncio.gather(*[ask(service, text) for text in texts])
            async with asyncio.timeout(40 * PATIENCE):
                while sum(map(len, engine.lists)) + metric(service, "micro_batch_waiting") < 100:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            engine.gate.set()  # as many requests as may be under way, and all other texts together
            calls = await asked
            for text, call in zip(texts, calls, strict=True):
                found = orjson.loads(call.body)
                assert call.status == 200 and found["model"] == "m" and found["object"] == "list"
                assert found["data"] == [{"index": 0, "object": "embedding", "embedding": [float(len(text))]}]
            used = [orjson.loads(call.body)["usage"]["prompt_tokens"] for call in calls]
            assert sum(used) == sum(map(len, texts)) and used == sorted(used)
            assert len(engine.lists) < 20 and sum(map(len, engine.lists)) == 100
            assert metric(service, "batch_size_distribution_sum") == 100
            assert metric(service, "batch_size_distribution_count") == len(engine.lists)
            assert metric(service, "micro_batch_waiting") == 0
            assert metric(service, 'tokens_total{kind="prompt",model="m"}') == sum(map(len, texts))

    asyncio.run(scenario())


def test_a_text_that_is_refused_is_its_callers_affair_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine = Embedder()
        async with http_server({PATH: engine.answer}) as url, running(tmp_path, monkeypatch, url) as service:
            texts = [f"text {number}" for number in range(40)]
            texts[17] = "bad text"
            calls = await asyncio.gather(*[ask(service, text) for text in texts])
            assert [number for number, call in enumerate(calls) if call.status != 200] == [17]
            assert calls[17].status == 400
            assert orjson.loads(calls[17].body)["error"]["message"] == "cannot be embedded"

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [404, 408, 415])
def test_words_of_an_engine_about_a_whole_list_reach_no_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    async def scenario() -> None:
        engine = Embedder(status)
        async with http_server({PATH: engine.answer}) as url, running(tmp_path, monkeypatch, url) as service:
            calls = await asyncio.gather(*[ask(service, f"bad secret {number}") for number in range(64)])
            assert max(map(len, engine.lists)) > 1
            for number, call in enumerate(calls):
                assert call.status == status
                message = orjson.loads(call.body)["error"]["message"]
                alone = [f"bad secret {number}"] in engine.lists
                assert message == (
                    f"no model for {[f'bad secret {number}']}" if alone else "The engine refused the request."
                )

    asyncio.run(scenario())


def test_only_requests_that_agree_in_all_other_fields_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = Embedder()
        async with http_server({PATH: engine.answer}) as url, running(tmp_path, monkeypatch, url) as service:
            asked = [ask(service, "a" * 5, dimensions=size) for size in (8, 16) for _ in range(10)]
            asked += [ask(service, ["already", "a list"])]
            assert {call.status for call in await asyncio.gather(*asked)} == {200}
            assert sum(body["input"] == ["already", "a list"] for body in engine.asked) == 1
            sizes = dict.fromkeys((8, 16, None), 0)
            for body in engine.asked:
                sizes[body.get("dimensions")] += 1 if isinstance(body["input"], str) else len(body["input"])
            assert sizes == {8: 10, 16: 10, None: 2}

    asyncio.run(scenario())


def test_a_long_text_goes_alone_and_callers_beyond_the_bound_are_told_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = Embedder()
        async with http_server({PATH: engine.answer}) as url, running(tmp_path, monkeypatch, url) as service:
            texts = ["a" * LONGEST_TEXT, "\x01" * (LONGEST_TEXT // 4), "b", "c"]  # the second is long as JSON
            await asyncio.gather(*[ask(service, text) for text in texts])
            assert metric(service, "batch_size_distribution_sum") == 2
            monkeypatch.setattr("batch_assets.api.interactive.embedding_lists.MOST_CALLERS", 5)
            calls = await asyncio.gather(*[ask(service, f"text {number}") for number in range(8)])
            assert sorted(call.status for call in calls) == [200] * 5 + [503] * 3
            assert {call.headers["retry-after"] for call in calls if call.status == 503} == {"1"}
            assert (await ask(service, "later")).status == 200

    asyncio.run(scenario())


def test_with_the_simulated_engine_and_an_unknown_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        with simulated_engine("--speed", "100", model="m") as engine:
            async with running(tmp_path, monkeypatch, engine.url) as service:
                calls = await asyncio.gather(*[ask(service, f"text {number}") for number in range(30)])
                assert {call.status for call in calls} == {200}
                assert len({call.body for call in calls}) == 30
                unknown = await ask(service, "x", model="gpt-9")
                assert unknown.status == 404 and orjson.loads(unknown.body)["error"]["code"] == "model_not_found"

    asyncio.run(scenario())


def test_the_setting_is_on_or_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_ASSETS_MICRO_BATCHES", "yes")
    with pytest.raises(SettingError, match="expected on or off, found 'yes'"):
        front_door_alone(ApiSettings(tmp_path, "", f"sqlite:///{tmp_path / 'api.db'}"))
