"""Several endpoints of one service: all are used, and one that is away holds up neither batches nor requests."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.api_service import ApiService, api_service, line
from support.front_doors import NamedModels
from support.simulated_engine import SimulatedEngine, simulated_engine

from batch_assets.api.execution.engines.engine_supply import (
    EndpointsSupply,
    EndpointSupply,
    EngineAway,
    NoFurtherEngine,
)
from batch_assets.api.interactive.engine_directory import EngineDirectory, EngineTarget
from batch_assets.api.models import ServedModel, SeveralModels
from batch_assets.cli import main

NOBODY = "http://127.0.0.1:9"


def answered(engine: SimulatedEngine) -> int:
    """Requests that this engine has answered."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as page:
        counts = re.findall(rb"^vllm:request_success_total\{.*\} (\d+)", page.read(), re.MULTILINE)
    return sum(int(count) for count in counts)


class Said:
    """What a server says, now."""

    def __init__(self, models: Sequence[ServedModel] | None) -> None:
        self.said = models

    async def models(self) -> Sequence[ServedModel] | None:
        return self.said


@pytest.mark.slow
def test_lines_go_to_all_endpoints_of_the_model_and_one_that_ends_does_not_stop_the_others(tmp_path: Path) -> None:
    async def scenario(site: ApiService, first: SimulatedEngine, second: SimulatedEngine) -> None:
        whole = await site.create([line(f"a{number}") for number in range(300)])
        done = await site.until(whole["id"])
        assert done["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
        assert min(answered(first), answered(second)) >= 30
        rest = await site.create([line(f"b{number}") for number in range(300)])
        while True:
            if (await site.get(rest["id"]))["request_counts"]["completed"]:
                break
            await asyncio.sleep(0.02)
        second.process.kill()
        done = await site.until(rest["id"])
        assert done["request_counts"] == {"total": 300, "completed": 300, "failed": 0}

    async def run() -> None:
        slots = ("--max-num-seqs", "4", "--weights-ms", "5", "--output-tokens", "fixed:4")
        with simulated_engine(*slots) as first, simulated_engine(*slots) as second:
            async with api_service(tmp_path, (first.url, NOBODY, second.url)) as site:
                await scenario(site, first, second)

    asyncio.run(run())


def test_a_feed_holds_each_endpoint_of_its_model_once() -> None:
    async def scenario() -> None:
        urls = {"http://a": ["m"], "http://b": ["m", "n"], "http://c": ["n"]}
        supply = EndpointsSupply([(EndpointSupply(url, None), NamedModels(names, 0)) for url, names in urls.items()])
        async with supply.engine("m", "chat") as one, supply.engine("m", "chat") as two:
            assert {one.endpoint, two.endpoint} == {"http://a", "http://b"}
            with pytest.raises(NoFurtherEngine):
                async with supply.engine("m", "chat"):
                    pass
            async with supply.engine("n", "chat") as other, supply.engine("m", "embedding"):
                assert other.endpoint in ("http://b", "http://c")
        seen = set()
        for _ in range(2):
            async with supply.engine("m", "chat") as engine:
                seen.add(engine.endpoint)
        assert len(seen) == 2, "in turn"

    asyncio.run(scenario())


def test_a_model_that_no_endpoint_serves_any_more_is_one_whose_engine_is_away() -> None:
    """Its batches wait, and the log says why: that it is in use already would be said to nobody."""

    async def scenario() -> None:
        endpoints = [(EndpointSupply(url, None), Said([ServedModel("n", 0, "x")])) for url in ("http://a", "http://b")]
        with pytest.raises(EngineAway) as raised:
            async with EndpointsSupply(endpoints).engine("m", "chat"):
                pass
        assert not isinstance(raised.value, NoFurtherEngine)

    asyncio.run(scenario())


def test_an_endpoint_that_says_nothing_is_tried() -> None:
    async def scenario() -> str:
        supply = EndpointsSupply([(EndpointSupply("http://a", None), Said(None))])
        async with supply.engine("m", "chat") as engine:
            return engine.endpoint

    assert asyncio.run(scenario()) == "http://a"


def test_models_of_all_servers_are_known_each_with_its_longest_context() -> None:
    one = Said([ServedModel("m", 1, "x", 100), ServedModel("only-here", 1, "x", 50), ServedModel("vague", 1, "x", 10)])
    two = Said([ServedModel("m", 2, "x", 300), ServedModel("vague", 2, "x")])
    both = SeveralModels([one, two, Said(None)])
    found = {model.id: model.context for model in asyncio.run(both.models()) or ()}
    assert found == {"m": 300, "only-here": 50, "vague": None}
    one.said = two.said = None
    assert asyncio.run(both.models()) is None


def test_a_request_does_not_wait_for_an_endpoint_that_hangs() -> None:
    async def scenario() -> None:
        now, asked = [0.0], {"http://a": 0, "http://b": 0}

        async def models(url: str) -> list[str]:
            asked[url] += 1
            if url == "http://a":
                await asyncio.Event().wait()
            return ["m"]

        directory = EngineDirectory(lambda: now[0], endpoints=["http://a", "http://b/v1"], models=models)
        for moment in (0, 100, 200):
            now[0] = moment
            assert [engine.url for engine in await directory.engines("m")] == ["http://b"]
            await asyncio.sleep(0)
        assert asked == {"http://a": 1, "http://b": 3}, "one question at a time"
        await directory.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["--endpoint", "http://a:1", "--endpoint", "http://b:2/v1", "--endpoint", "http://a:1"], "http://c", 2),
        (["--endpoint", "http://a:1"], "no address", 1),
        ([], "http://c:3", 1),
        ([], "", 0),
    ],
)
def test_the_command_takes_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], environment: str, expected: int
) -> None:
    from batch_assets.api import server

    found = []
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCH_ASSETS_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("BATCH_ASSETS_ENDPOINT", environment)
    monkeypatch.setattr(server, "serve", found.append)
    main.app(["serve", *words], standalone_mode=False)
    assert len(found[0].endpoints) == expected


def test_an_endpoint_that_could_not_be_reached_is_asked_last_for_a_moment() -> None:
    async def scenario() -> None:
        now = [0.0]

        async def models(url: str) -> list[str]:
            return ["m"]

        directory = EngineDirectory(lambda: now[0], endpoints=["http://a", "http://b"], models=models)
        await directory.models()
        away, other = await directory.engines("m")
        directory.begin(away)
        directory.end(away, reached=False)
        assert directory.resting(away) and await directory.engines("m") == [other, away]
        now[0] = 5.0
        assert await directory.engines("m") == [away, other]
        await directory.close()

    asyncio.run(scenario())


def test_engines_that_were_unreachable_and_are_gone_are_forgotten() -> None:
    directory = EngineDirectory(lambda: 0.0)
    for number in range(50):
        engine = EngineTarget(f"http://{number}", "m")
        directory.announce(engine)
        directory.begin(engine)
        directory.end(engine, reached=False)
        directory.withdraw(engine)
    assert len(directory._load) == 1
