"""Engines of one fleet for two replicas: who waits for one, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from support.http_server import http_server, models, status
from support.timing import PATIENCE

from batch_assets.api.execution.engines import fleet_engines
from batch_assets.api.execution.engines.engine_supply import NobodyWaits
from batch_assets.api.execution.engines.fleet_engines import FleetSupply
from gpu_runner.client.engine_client import EngineLost
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.engine_process import free_port
from gpu_runner.rows import Task
from resources.fleet.resource import GpuFleet

NAME = "api/m"
LISTS = {"/": status(200), "/v1/models": models({"id": "m"})}


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_engines, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(fleet_engines, "WAIT_SECONDS", 0.01)


@pytest.fixture
def fleet_db(url: str) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(url)) as found:
        yield found


def supply_of(url: str, home: Path, engine: str, *names: str) -> FleetSupply:
    """Of a replica whose fleet has engines of these names; without names one, `lab`."""
    engines = [{"name": name, "kind": "endpoint", "url": engine, "models": ["m"]} for name in names or ("lab",)]
    (home / "fleet.yaml").write_text(json.dumps({"engines": engines}))
    return FleetSupply(GpuFleet(database=url, home=str(home), config_path=str(home / "fleet.yaml")))


def test_who_waits_for_the_engine_of_another_replica_gets_it_and_one_that_waits_no_more_does_not(
    url: str, fleet_db: FleetDatabase, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with http_server(LISTS) as engine:
            one, two = supply_of(url, tmp_path, engine), supply_of(url, tmp_path, engine)
            async with asyncio.timeout(60 * PATIENCE), contextlib.AsyncExitStack() as first:
                held = await first.enter_async_context(one.engine("m", "chat"))
                assert (held.name, held.own) == ("lab", False)
                with pytest.raises(NobodyWaits):
                    async with two.engine("m", "chat", lambda: False):
                        raise AssertionError("it is leased")
                assert len(fleet_db.runs()) == 1, "nobody stands in line any more"
                async with contextlib.AsyncExitStack() as second:
                    waiting = asyncio.create_task(second.enter_async_context(two.engine("m", "chat")))
                    await asyncio.sleep(0.1)
                    assert not waiting.done()
                    await first.aclose()
                    assert (await waiting).name == "lab"
                    assert fleet_db.leases_of(NAME) == 1

    asyncio.run(scenario())


def test_an_engine_that_is_being_started_is_not_given_up_because_nobody_asks_just_now(
    url: str, fleet_db: FleetDatabase, tmp_path: Path
) -> None:
    """A boot takes minutes, and whoever asks again would wait for another one."""
    port = free_port()
    asked = 0

    def waits() -> bool:
        nonlocal asked
        asked += 1
        return fleet_db.leases_of(NAME) == 0  # until the engine is leased, and awaited

    async def scenario() -> None:
        supply = supply_of(url, tmp_path, f"http://127.0.0.1:{port}")
        async with asyncio.timeout(60 * PATIENCE), contextlib.AsyncExitStack() as stack:
            entering = asyncio.create_task(stack.enter_async_context(supply.engine("m", "chat", waits)))
            while asked < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert not entering.done() and fleet_db.leases_of(NAME) == 1
            server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)
            try:
                assert (await entering).name == "lab"
            finally:
                server.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_who_is_cancelled_while_it_waits_for_an_engine_leaves_no_error_behind(
    url: str, fleet_db: FleetDatabase, tmp_path: Path
) -> None:
    """As each feed of a service is that ends: asyncio would log a failure that nobody has asked for."""
    said: list[object] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        async with http_server(LISTS) as engine, asyncio.timeout(60 * PATIENCE):
            one, two = supply_of(url, tmp_path, engine), supply_of(url, tmp_path, engine)

            async def wait() -> None:
                async with two.engine("m", "chat"):
                    raise AssertionError("it is leased")

            async with one.engine("m", "chat"):
                waiting = asyncio.create_task(wait())
                while len(fleet_db.runs()) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                assert waiting.cancelled() and len(fleet_db.runs()) == 1
                del waiting
                await asyncio.sleep(0.05)
                gc.collect()
                await asyncio.sleep(0)

    asyncio.run(scenario())
    assert said == []


def test_feeds_of_one_model_share_an_engine_that_stands(url: str, fleet_db: FleetDatabase, tmp_path: Path) -> None:
    """Whatever their tasks are. The lease ends with the last of them."""

    async def scenario() -> None:
        async with http_server(LISTS) as engine, asyncio.timeout(60 * PATIENCE):
            supply = supply_of(url, tmp_path, engine)
            async with contextlib.AsyncExitStack() as chats, contextlib.AsyncExitStack() as embeddings:
                first = await chats.enter_async_context(supply.engine("m", "chat"))
                second = await embeddings.enter_async_context(supply.engine("m", "embedding"))
                assert (first.name, second.name) == ("lab", "lab")
                assert fleet_db.leases_of(NAME) == 1 and len(supply.running("m")) == 1
                first.spending.begin(10.0)
                second.spending.begin(11.0)
                first.spending.settle(1, 1, 0, 12.0)
                first.spending.lose(12.0)
                second.spending.settle(1, 1, 0, 14.0)
                spent = second.spending.spent()
                assert (spent.rows, spent.useful_seconds, spent.wasted_seconds) == (2, 4.0, 0.0)
                await chats.aclose()
                assert fleet_db.leases_of(NAME) == 1 and len(supply.running("m")) == 1
                await embeddings.aclose()
                assert fleet_db.leases_of(NAME) == 0 and not supply.running("m")

    asyncio.run(scenario())


def test_an_engine_is_shared_only_where_it_lists_the_model(
    url: str, fleet_db: FleetDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each line of the other endpoint would be the engine's 404."""
    monkeypatch.setattr("batch_assets.api.models.KEPT_SECONDS", 0.0)
    asked, served = [0], ["other"]

    async def lists(request: web.Request) -> web.Response:
        asked[0] += 1
        return web.json_response({"data": [{"id": name} for name in served]})

    async def scenario() -> None:
        routes = {"/": status(200), "/v1/models": lists}
        async with http_server(routes) as engine, asyncio.timeout(60 * PATIENCE):
            supply = supply_of(url, tmp_path, engine)
            async with supply.engine("m", "chat"), contextlib.AsyncExitStack() as stack:
                waiting = asyncio.create_task(stack.enter_async_context(supply.engine("m", "embedding")))
                while asked[0] < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert not waiting.done()
                served.append("m")
                assert (await waiting).name == "lab" and fleet_db.leases_of(NAME) == 1

    asyncio.run(scenario())


def test_who_shares_an_engine_gets_a_further_one_as_soon_as_the_model_may_have_it(
    url: str, fleet_db: FleetDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_engines, "SHARED_SECONDS", 0.0)

    async def scenario() -> None:
        async with http_server(LISTS) as engine, asyncio.timeout(60 * PATIENCE):
            supply = supply_of(url, tmp_path, engine, "lab", "lab2")
            async with supply.engine("m", "chat") as first:
                async with supply.engine("m", "embedding") as second:
                    assert second.name == first.name
                    await asyncio.sleep(0.1)
                    assert not second.ending.is_set()
                    fleet_db.set_instances(NAME, 2)
                    await second.ending.wait()
                    assert not first.ending.is_set()
                async with supply.engine("m", "embedding") as second:
                    assert {first.name, second.name} == {"lab", "lab2"} and fleet_db.leases_of(NAME) == 2

    asyncio.run(scenario())


def test_an_engine_that_failed_is_not_shared_any_more(url: str, fleet_db: FleetDatabase, tmp_path: Path) -> None:
    """Else feeds would take it from each other for ever, and it would never be given back."""

    async def scenario() -> None:
        async with http_server(LISTS) as engine, asyncio.timeout(60 * PATIENCE):
            supply = supply_of(url, tmp_path, engine)
            async with contextlib.AsyncExitStack() as embeddings:
                await embeddings.enter_async_context(supply.engine("m", "embedding"))
                with pytest.raises(EngineLost):
                    async with supply.engine("m", "chat"):
                        raise EngineLost("gone", "it answers no more")
                waits = iter([True, False])
                with pytest.raises(NobodyWaits):
                    async with supply.engine("m", "chat", lambda: next(waits, False)):
                        raise AssertionError("it is to be leased anew")
            async with supply.engine("m", "chat"):
                assert fleet_db.leases_of(NAME) == 1

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("standing", "task", "serves"),
    [(True, "embedding", True), (False, "embedding", False), (False, "completion", True), (True, "chat", False)],
)
def test_what_was_started_for_chats_makes_no_embeddings(
    url: str, tmp_path: Path, standing: bool, task: Task, serves: bool
) -> None:
    async def scenario() -> None:
        async with http_server(LISTS) as engine, asyncio.timeout(60 * PATIENCE):
            supply = supply_of(url, tmp_path, engine)
            async with supply.engine("m", "chat"):
                (held,) = supply._held
                assert held.lease.standing, "it stands in fleet.yaml"
                held.lease.standing = standing
                assert held.may_serve("m", task) is serves and not held.may_serve("other", task)

    asyncio.run(scenario())
