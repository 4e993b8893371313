"""What a batch says while no engine serves its model, and when it is refused because none ever can."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.api_service import ApiService, api_service, line
from support.http_server import http_server, status
from support.market_offers import H100, T4, FakeProvider
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE

from batch_assets.api.capacity.never_served import KEPT_SECONDS, NeverServed
from batch_assets.api.execution import worker
from batch_assets.api.execution.engines import fleet_engines
from batch_assets.api.execution.engines.engine_supply import Awaited, EngineWait, Waiting
from batch_assets.api.execution.engines.fleet_engines import FleetSupply
from gpu_runner.offers.offer import Offer
from gpu_runner.offers.speed import LengthMix
from gpu_runner.providers.base import ProviderError
from gpu_runner.providers.engine_process import free_port
from resources.fleet.resource import GpuFleet
from resources.pricing.market import Market

LARGE = "meta-llama/Llama-3.1-70B"  # 131 GiB of weights
MIX = LengthMix(200, 200)


@pytest.fixture(autouse=True)
def says_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "WAITING_SECONDS", 0.0)
    monkeypatch.setattr(worker, "COUNT_SECONDS", 0.01)


def test_a_wait_begins_with_the_first_wish_and_ends_when_an_engine_answers() -> None:
    now = [100.0]
    wait = EngineWait(lambda: now[0])
    assert wait.look(None) is None
    wait.begin()
    now[0] = 105.0
    wait.begin()
    assert wait.look(None) == Waiting(Awaited.ENGINE, 100.0)
    wait.failed(Awaited.ANSWER)
    assert wait.look(None) == Waiting(Awaited.ANSWER, 100.0)
    assert wait.look(Awaited.BOOT) == Waiting(Awaited.BOOT, 100.0)
    with wait.serving():
        wait.begin()  # another loop wants a second one
        assert wait.look(None) is None
    wait.begin()
    assert wait.look(None) == Waiting(Awaited.ENGINE, 105.0)


async def waits_for(site: ApiService, batch_id: str, *, waits: bool) -> dict[str, str]:
    async with asyncio.timeout(10 * PATIENCE):
        while ("waiting_for" in ((found := await site.get(batch_id))["metadata"] or {})) != waits:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return dict(found["metadata"] or {})


def test_a_batch_says_what_it_waits_for_and_since_when_until_an_engine_answers(tmp_path: Path) -> None:
    port = free_port()

    async def steps() -> None:
        began = int(time.time())
        async with api_service(tmp_path, f"http://127.0.0.1:{port}") as site:
            plain = (await site.create([line("a")]))["id"]
            own = (await site.create([line("b")], metadata={"who": "me", "waiting_for": "Godot"}))["id"]
            async with asyncio.timeout(10 * PATIENCE):  # until the first try to reach it has failed
                while (said := await waits_for(site, plain, waits=True))["waiting_for"] == Awaited.ENGINE:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert said.keys() == {"waiting_for", "waiting_since"} and said["waiting_for"] == Awaited.ANSWER
            assert began <= int(said["waiting_since"]) <= time.time()
            assert (await waits_for(site, own, waits=True))["waiting_for"] == "Godot"
            with simulated_engine("--speed", "20", "--output-tokens", "fixed:2", "--port", str(port)):
                assert (await site.until(plain))["metadata"] is None
                assert (await site.until(own))["metadata"] == {"who": "me", "waiting_for": "Godot"}

    asyncio.run(steps())


def test_who_waits_for_a_lease_knows_whether_an_engine_starts_or_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_engines, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(fleet_engines, "WAIT_SECONDS", 0.01)

    def supply(url: str) -> FleetSupply:
        return FleetSupply(fleet_in(tmp_path, [{"name": "lab", "kind": "endpoint", "url": url, "models": ["m"]}]))

    async def said_while(waiting: FleetSupply, awaited: Awaited) -> None:
        async with contextlib.AsyncExitStack() as stack:
            entering = asyncio.create_task(stack.enter_async_context(waiting.engine("m", "chat")))
            async with asyncio.timeout(10 * PATIENCE):
                while waiting.awaited("m", "chat") is not awaited:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert waiting.awaited("m", "embedding") is None
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)
        assert waiting.awaited("m", "chat") is None

    async def steps() -> None:
        await said_while(supply(f"http://127.0.0.1:{free_port()}"), Awaited.BOOT)
        async with http_server({"/": status(200)}) as engine:
            first, second = supply(engine), supply(engine)
            async with first.engine("m", "chat"):
                await said_while(second, Awaited.FREE_ENGINE)

    asyncio.run(steps())


def market(*offers: Offer, failure: Exception | None = None) -> Market:
    return Market([FakeProvider("north", list(offers), failure=failure)], clock=lambda: H100.observed_at)


def test_a_model_never_fits_only_where_every_offer_says_so_for_good() -> None:
    never = market(T4, H100).never_fits(LARGE, "chat", MIX, 2_000, ())
    assert [one.offer.gpu for one in never] == ["T4", "H100"] and "H100 has 80" in never[1].reason
    eight = replace(H100, instance_type="h100.8x", gpus=8, price_per_hour=20.0, capacity=0)
    assert market(T4, H100, eight).never_fits(LARGE, "chat", MIX, 2_000, ()) == []  # out of capacity is not for good
    assert market().never_fits(LARGE, "chat", MIX, 2_000, ()) == []  # there may be offers later


def test_a_provider_that_offers_nothing_now_may_offer_something_later() -> None:
    north, south, played = FakeProvider("north", [T4]), FakeProvider("south", []), FakeProvider("played", [])
    played.listed = [replace(H100, provider="played")]

    def never(*providers: FakeProvider) -> list[str]:
        both = Market(providers, simulated=["played"], really=lambda _: True, clock=lambda: H100.observed_at)
        return [one.offer.provider for one in both.never_fits(LARGE, "chat", MIX, 2_000, ())]

    assert never(north, south) == never(north, south, played) == []
    assert never(north, played) == ["north"], "what is only played counts for nothing beside it"
    assert never(south, played) == never(played) == []


def test_of_a_provider_that_is_silent_nothing_is_known_for_good() -> None:
    assert market(T4, failure=ProviderError("away")).never_fits(LARGE, "chat", MIX, 2_000, ()) == []


def fleet_in(home: Path, engines: object, text: str | None = None) -> GpuFleet:
    (home / "fleet.yaml").write_text(json.dumps({"engines": engines}) if text is None else text)
    return GpuFleet(database=f"sqlite:///{home}/fleet.db", home=str(home), config_path=str(home / "fleet.yaml"))


SMALL_CLOUD = """
simulated:
  providers:
    - name: tiny
      offers: [{instance_type: l4, gpu: L4, gpu_memory_gib: 24, price_per_hour: 0.5}]
"""


def test_what_a_fleet_can_never_serve_is_said_with_the_reason(tmp_path: Path) -> None:
    engine = {"name": "lab", "kind": "endpoint", "url": "http://127.0.0.1:9", "models": ["m"]}
    assert "No engine and no provider" in str(NeverServed(fleet_in(tmp_path, [engine])).why("other", "chat"))
    assert NeverServed(fleet_in(tmp_path, [engine])).why("m", "chat") is None  # dead, and it may come back
    cloud = NeverServed(fleet_in(tmp_path, None, SMALL_CLOUD))
    assert "needs" in str(cloud.why(LARGE, "chat")) and cloud.why("Qwen/Qwen3-0.6B", "chat") is None
    (tmp_path / "fleet.yaml").unlink()
    nothing = GpuFleet(
        database=f"sqlite:///{tmp_path}/fleet.db", home=str(tmp_path), config_path=str(tmp_path / "fleet.yaml")
    )
    assert "No engine" in str(NeverServed(nothing).why("m", "chat"))  # simulations have to be asked for


def test_a_model_that_becomes_servable_is_not_refused_any_more(tmp_path: Path) -> None:
    """A batch that is refused has failed: what was said a moment ago is no reason for that."""
    now = [0.0]
    lab = {"name": "lab", "kind": "endpoint", "url": "http://127.0.0.1:9", "models": ["m"]}
    never = NeverServed(fleet_in(tmp_path, [lab]), lambda: now[0])
    assert never.why("other", "chat") is not None
    fleet_in(tmp_path, [lab, {**lab, "name": "more", "models": ["other"]}])
    assert never.why("other", "chat") is None
    fleet_in(tmp_path, [lab])
    assert never.why("other", "chat") is None  # it waits a little longer for nothing
    now[0] += KEPT_SECONDS
    assert never.why("other", "chat") is not None
