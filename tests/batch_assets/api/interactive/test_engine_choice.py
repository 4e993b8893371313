"""The choice of an engine for a request: what is learned from requests, and what callers with a target are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
import pytest

from batch_assets.api.execution.engines.engine_supply import Awaited, ServingEngine, Waits, for_ever
from batch_assets.api.execution.engines.fleet_engines import serving
from batch_assets.api.interactive.engine_choice import EngineChoice, RoutingFigures, routing_policy
from batch_assets.api.interactive.engine_directory import EngineDirectory, EngineTarget
from batch_assets.api.interactive.engine_reports import EngineReading
from batch_assets.api.interactive.first_tokens import FirstTokens
from batch_assets.api.interactive.request_body import InteractiveRequest, read_request
from batch_assets.api.interactive.shared_supply import SharedSupply
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.settings import split_endpoint
from batch_assets.api.telemetry.metrics import ServiceMetrics
from batch_assets.settings import SettingError
from gpu_runner.client.engine_load import EngineLoad
from gpu_runner.fleet_database.database import Lease
from gpu_runner.inference.windows.first_token_window import FirstTokenPolicy
from gpu_runner.routing.engine_view import STALE_SECONDS
from gpu_runner.routing.latency_target import ANY_LATENCY, LatencyTarget
from gpu_runner.routing.router import RoutingPolicy, Rule
from gpu_runner.rows import Task
from resources.fleet.leased_engine import LeasedEngine

FAST = EngineTarget("http://fast", "m", hardware="cloud/big", places=128)
SLOW = EngineTarget("http://slow", "m", hardware="cloud/small", places=128)
FIRST_TOKEN = {FAST.url: 0.05, SLOW.url: 0.5}
IDLE = EngineLoad(running=0, waiting=0, kv_usage=0.0, generated_tokens=0, preemptions=0)


def chat(words: int = 50, **fields: Any) -> InteractiveRequest:
    messages = [{"role": "user", "content": "word " * words}]
    return read_request(orjson.dumps({"model": "m", "messages": messages, "stream": True, **fields}))


class TwoEngines:
    """A choice between two engines in simulated time; `silent`: engines that do not tell their load; `ways`: measured
    round trips.
    """

    def __init__(self, policy: RoutingPolicy | None = None, *engines: EngineTarget) -> None:
        self.now, self.silent, self.metrics = 1000.0, set[str](), ServiceMetrics()
        self.ways: dict[str, float] = {}
        self.directory = EngineDirectory(lambda: self.now)
        for engine in engines or (FAST, SLOW):
            self.directory.announce(engine)
        self.choice = EngineChoice(
            self.directory, lambda: self.now, policy or RoutingPolicy(), RoutingFigures(self.metrics), self._read
        )

    async def _read(self, engine: EngineTarget) -> EngineReading:
        return EngineReading() if engine.url in self.silent else EngineReading(IDLE, self.ways.get(engine.url))

    async def report(self) -> None:
        """All engines have been read now."""
        for engine in self.directory.targets():
            self.choice._reported(engine, await self._read(engine))

    async def order(
        self, request: InteractiveRequest | None = None, target: LatencyTarget = ANY_LATENCY
    ) -> list[EngineTarget]:
        engines = await self.directory.engines("m")
        return list(self.choice.order(engines, request or chat(), "acme", target).engines)

    async def serve(self, count: int, tokens: int = 11) -> Counter[str]:
        """Requests one after the other, ten a second, each answered; how many went where."""
        went = Counter[str]()
        for number in range(count):
            if number % 10 == 0:
                await self.report()
            engines = await self.directory.engines("m")
            order = self.choice.order(engines, chat(), "acme", ANY_LATENCY)
            sent = self.choice.sent(order.engines[0], order)
            went[order.engines[0].url] += 1
            self.now += FIRST_TOKEN[order.engines[0].url]
            sent.first_token()
            self.now += 0.1
            sent.answered(tokens, whole=False)
            sent.close()
        return went

    async def learned(self) -> None:
        """Each engine has served alone."""
        for other in (SLOW, FAST):
            self.directory.withdraw(other)
            await self.serve(40)
            self.directory.announce(other)

    def figure(self, line: str) -> float:
        found = [one for one in self.metrics.page().decode().splitlines() if one.startswith(line)]
        return float(found[0].split()[-1]) if found else 0.0


@contextlib.asynccontextmanager
async def site_of(*engines: EngineTarget, policy: RoutingPolicy | None = None) -> AsyncIterator[TwoEngines]:
    site = TwoEngines(policy, *engines)
    try:
        yield site
        assert set(asyncio.all_tasks()) - {asyncio.current_task()} or not site.choice.poller.watched
    finally:
        await site.choice.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing reads engines after the service"


def test_at_first_the_fewest_requests_decide_and_then_the_prediction() -> None:
    async def scenario() -> None:
        async with site_of() as site:
            await site.order()
            assert site.figure('batch_assets_routing_choices_total{reason="fewest_requests"}') == 1
            await site.learned()
            went = await site.serve(100)
            assert went[FAST.url] > 85 and went[SLOW.url] < 15, "what goes to the slow one is exploration"
            assert site.figure('batch_assets_routing_choices_total{reason="predicted"}') > 80
            assert 0 < site.figure('batch_assets_routing_error{model="m"}') < 1
            assert site.figure("batch_assets_routing_decision_seconds_count") > 100

    asyncio.run(scenario())


def test_with_the_rule_least_requests_predictions_are_made_and_not_followed() -> None:
    async def scenario() -> None:
        async with site_of(policy=RoutingPolicy(Rule.LEAST_REQUESTS)) as site:
            await site.learned()
            engines = [FAST, SLOW]
            for busy, chosen in ((FAST, SLOW), (SLOW, FAST)):
                sent = site.choice.sent(busy, site.choice.order(engines, chat(), "acme", ANY_LATENCY))
                assert (await site.order())[0] == chosen
                sent.close()
            await site.report()
            with pytest.raises(ApiError):
                for _ in range(2):
                    await site.order(target=LatencyTarget(0.001))

    asyncio.run(scenario())


def test_an_engine_whose_metrics_stop_is_unknown_until_they_come_again() -> None:
    async def scenario() -> None:
        async with site_of() as site:
            await site.learned()
            await site.report()
            assert (await site.order())[0] == FAST
            site.silent.add(SLOW.url)
            site.now += STALE_SECONDS + 1
            await site.report()
            before = site.figure('batch_assets_routing_choices_total{reason="fewest_requests"}')
            sent = site.choice.sent(FAST, site.choice.order([FAST, SLOW], chat(), "acme", ANY_LATENCY))
            assert (await site.order())[0] == SLOW, "FAST has a request of ours: what it says of itself does not count"
            assert site.figure('batch_assets_routing_choices_total{reason="fewest_requests"}') == before + 2
            assert site.figure('batch_assets_routing_engines{report="stale"}') == 1
            sent.close()
            site.silent.clear()
            await site.report()
            assert (await site.order())[0] == FAST

    asyncio.run(scenario())


def test_an_engine_that_is_withdrawn_is_forgotten_and_one_of_its_kind_begins_with_what_it_taught() -> None:
    async def scenario() -> None:
        async with site_of() as site:
            await site.learned()
            site.directory.withdraw(FAST)
            assert {engine.url for engine in await site.order()} == {SLOW.url}
            site.choice._forget()
            assert set(site.choice.router.errors()) == {SLOW.url}
            again = EngineTarget("http://another", "m", hardware="cloud/big")
            site.directory.announce(again)
            await site.order()
            learned, default = site.choice.router._models[again.url], site.choice.router._models[SLOW.url]
            assert learned._first.theta != default._first.theta and learned.mean > 0
            other_model = EngineTarget("http://other-model", "n", hardware="cloud/big")
            site.directory.announce(other_model)
            request = read_request(b'{"model": "n", "messages": []}')
            site.choice.order([other_model], request, "acme", ANY_LATENCY)
            fresh = site.choice.router._models[other_model.url]
            assert fresh._first.theta != learned._first.theta, (
                "the same hardware is of another speed with another model"
            )

    asyncio.run(scenario())


def test_an_engine_that_could_not_be_reached_is_asked_last_whatever_is_predicted() -> None:
    async def scenario() -> None:
        async with site_of() as site:
            await site.learned()
            await site.report()
            site.directory.begin(FAST)
            site.directory.end(FAST, reached=False)
            assert await site.order() == [SLOW, FAST]

    asyncio.run(scenario())


def test_a_target_that_nobody_meets_is_refused_with_the_time_to_wait_or_sent_on() -> None:
    async def scenario(policy: RoutingPolicy) -> None:
        async with site_of(policy=policy) as site:
            await site.learned()
            await site.report()
            engines = [FAST, SLOW]
            met = site.choice.order(engines, chat(), "acme", LatencyTarget(5.0))
            assert met.headroom is not None and 3 < met.headroom < 5
            site.choice.order(engines, chat(), "acme", LatencyTarget(0.001))  # one is tried all the same
            if policy.shed:
                with pytest.raises(ApiError) as refused:
                    site.choice.order(engines, chat(), "acme", LatencyTarget(0.001))
                assert (refused.value.status, refused.value.code) == (503, "target_unmet")
                assert refused.value.headers == {"Retry-After": "1"}
                assert site.figure('batch_assets_routing_choices_total{reason="shed"}') == 1
            else:
                late = site.choice.order(engines, chat(), "acme", LatencyTarget(0.001))
                assert late.engines[0] == FAST and late.headroom is not None and late.headroom < 0

    asyncio.run(scenario(RoutingPolicy()))
    asyncio.run(scenario(RoutingPolicy(shed=False)))


def test_answers_are_expected_as_long_as_this_caller_had_them() -> None:
    async def scenario() -> None:
        async with site_of() as site:
            await site.serve(30, tokens=700)
            engines = [FAST, SLOW]
            assert site.choice.order(engines, chat(), "acme", ANY_LATENCY).request.output == pytest.approx(700, rel=0.1)
            limited = site.choice.order(engines, chat(max_tokens=20, n=2), "acme", ANY_LATENCY).request
            assert limited.output == 40 and not limited.whole
            texts = read_request(b'{"model": "m", "input": ["one", "two"]}')
            embedding = site.choice.order(engines, texts, "acme", LatencyTarget(9.0, 0.0001)).request
            assert (embedding.output, embedding.whole, embedding.target) == (0, True, LatencyTarget(9.0))

    asyncio.run(scenario())


def test_prompts_that_begin_alike_have_the_same_first_blocks() -> None:
    async def scenario() -> None:
        async with site_of() as site:
            one, two = chat(2000, max_tokens=5), chat(2000, temperature=0.5, user="x")
            blocks = [site.choice.order([FAST], one, "a", ANY_LATENCY).request.blocks for one in (one, two)]
            assert blocks[0] == blocks[1] and len(blocks[0]) >= 9

    asyncio.run(scenario())


def test_head_room_does_not_tell_what_another_tenant_has_asked() -> None:
    async def scenario() -> None:
        async with site_of(FAST) as site:
            await site.serve(60)
            asked, target = chat(2000, max_tokens=5), LatencyTarget(60.0)
            sent = site.choice.sent(FAST, site.choice.order([FAST], asked, "acme", ANY_LATENCY))
            site.now += 0.05
            sent.first_token()
            sent.close()
            site.now += 60.0
            await site.report()
            rooms = {who: site.choice.order([FAST], asked, who, target).headroom for who in ("acme", "rival")}
            other = chat(2000, max_tokens=5, tools=[{"type": "function", "function": {"name": "f"}}])
            fresh = site.choice.order([FAST], other, "rival", target).headroom
            assert rooms["acme"] is not None and rooms["rival"] is not None and fresh is not None
            assert rooms["rival"] == pytest.approx(fresh, abs=0.002) and rooms["acme"] > rooms["rival"] + 0.01

    asyncio.run(scenario())


def test_a_stream_that_its_caller_read_slowly_says_nothing_of_the_engines_pace() -> None:
    async def scenario() -> None:
        async with site_of() as site:
            await site.learned()
            pace = site.choice.router._models[FAST.url]._pace
            for paced in (False, True):
                before = list(pace.theta)
                sent = site.choice.sent(FAST, site.choice.order([FAST], chat(), "acme", ANY_LATENCY))
                sent.first_token()
                site.now += 100.0
                sent.answered(11, whole=False, paced=paced)
                sent.close()
                assert (pace.theta != before) is paced

    asyncio.run(scenario())


def test_the_settings_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert routing_policy().rule is Rule.PREDICTED and routing_policy().shed
    monkeypatch.setenv("BATCH_ASSETS_ROUTING", "least_requests")
    monkeypatch.setenv("BATCH_ASSETS_ROUTING_UNMET", "send")
    assert routing_policy().rule is Rule.LEAST_REQUESTS and not routing_policy().shed
    monkeypatch.setenv("BATCH_ASSETS_ROUTING", "fastest")
    with pytest.raises(
        SettingError, match="BATCH_ASSETS_ROUTING: expected predicted or least_requests, found 'fastest'"
    ):
        routing_policy()


def test_the_way_is_measured_and_shown_by_region_and_the_choice_counts_by_region() -> None:
    async def scenario() -> None:
        here = EngineTarget("http://here", "m", region="here")
        there = EngineTarget("http://there", "m", region="there")
        async with site_of(here, there, policy=RoutingPolicy(region="here")) as site:
            assert await site.order() == [here, there], "nothing is measured: another region counts as far away"
            site.ways = {here.url: 0.3, there.url: 0.001}
            await site.report()
            assert await site.order() == [there, here], "what was measured counts, not the name"
            assert site.figure('batch_assets_routing_round_trip_seconds{region="there"}') == 0.001
            assert site.figure('batch_assets_routing_region_choices_total{region="there"}') == 1
            assert site.figure('batch_assets_routing_region_choices_total{region="here"}') == 1

    asyncio.run(scenario())


def test_the_region_of_the_service_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_ASSETS_REGION", "eu-west-1")
    assert routing_policy().region == "eu-west-1"
    monkeypatch.setenv("BATCH_ASSETS_REGION", "eu west")
    with pytest.raises(SettingError, match="BATCH_ASSETS_REGION: expected a name of letters"):
        routing_policy()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("http://host:8000", ("", "http://host:8000")),
        ("eu-west-1=http://host:8000/v1", ("eu-west-1", "http://host:8000/v1")),
        ("http://host/a=b", ("", "http://host/a=b")),
        ("=http://host", ("", "=http://host")),
    ],
)
def test_an_endpoint_may_name_its_region(given: str, found: tuple[str, str]) -> None:
    assert split_endpoint(given) == found


def test_a_leased_engine_is_announced_with_the_region_of_its_offer() -> None:
    class Supply:
        @contextlib.asynccontextmanager
        async def engine(self, model: str, task: Task, waits: Waits = for_ever) -> AsyncIterator[ServingEngine]:
            yield serving(
                LeasedEngine(
                    "http://leased/v1", None, 8, "ec2", "g5", region="eu-west-1", lease=Lease("e", 1, "r", "d")
                )
            )

        def running(self, model: str) -> Sequence[ServingEngine]:
            return []

        def awaited(self, model: str, task: Task) -> Awaited | None:
            return None

    async def scenario() -> None:
        directory = EngineDirectory(lambda: 0.0, endpoints=["http://far"], regions={"http://far": "us"}, models=listed)
        shared = SharedSupply(Supply(), directory, FirstTokens(lambda: 0.0), FirstTokenPolicy())
        async with shared.engine("m", "chat"):
            await directory.models()
            found = {engine.url: (engine.region, engine.hardware) for engine in directory.targets()}
            assert found == {"http://leased": ("eu-west-1", "ec2/g5"), "http://far": ("us", "")}
        await directory.close()

    asyncio.run(scenario())


async def listed(url: str) -> list[str]:
    return ["m"]
