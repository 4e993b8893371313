"""Two replicas on one fleet: each sends interactive requests to what the other one leases."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.api_service import CHAT
from support.asgi_calls import AsgiCall
from support.fleet_databases import Clock
from support.front_doors import front_door_alone
from support.http_server import http_server, status
from support.timing import PATIENCE

from batch_assets.api.execution.engines import fleet_engines
from batch_assets.api.execution.engines.engine_supply import ServingEngine
from batch_assets.api.execution.engines.fleet_engines import FleetSupply
from batch_assets.api.interactive import replica_engines
from batch_assets.api.interactive.engine_directory import EngineDirectory, EngineTarget
from batch_assets.api.interactive.first_tokens import FirstTokens
from batch_assets.api.interactive.replica_engines import WANTED_SECONDS, ReplicaEngines
from batch_assets.api.interactive.shared_supply import SharedSupply
from batch_assets.api.settings import ApiSettings
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.tables import RUNS
from gpu_runner.fleet_database.wait_reason import WaitKind
from gpu_runner.inference.windows.first_token_window import FirstTokenPolicy
from resources.fleet import shared_engines
from resources.fleet.resource import GpuFleet

MODEL = "not-running"  # a model that a front door alone knows
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ENGINE = "http://127.0.0.1:1"


def fleet_of(url: str, home: Path, engine: str = ENGINE) -> GpuFleet:
    """With one engine that stands already, `lab`."""
    engines = [{"name": "lab", "kind": "endpoint", "url": engine, "models": [MODEL]}]
    (home / "fleet.yaml").write_text(json.dumps({"engines": engines}))
    return GpuFleet(database=url, home=str(home), config_path=str(home / "fleet.yaml"), beat=0.0)


@pytest.fixture
def fleet_db(url: str) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(url)) as found:
        yield found


@pytest.mark.slow
def test_a_replica_answers_with_the_engine_that_another_one_leases(
    url: str, fleet_db: FleetDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first request on, and no longer than it is leased."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("BATCH_ASSETS_FLEET_DB", url)
    monkeypatch.setenv("BATCH_ASSETS_BOOT_WAIT_SECONDS", "0")
    monkeypatch.setattr(shared_engines, "LAPSED_SECONDS", 0.01)

    async def scenario() -> None:
        async with http_server({CHAT: status(200, '{"choices": []}')}) as engine:
            supply = FleetSupply(fleet_of(url, tmp_path, engine))
            door = front_door_alone(ApiSettings(tmp_path, str(tmp_path / "store"), f"sqlite:///{tmp_path}/api.db"))

            async def ask() -> int:
                return (await AsgiCall(door.app, CHAT, ASK, {}).run()).status

            async with door.inner.router.lifespan_context(door.inner):
                assert await ask() == 503
                async with supply.engine(MODEL, "chat"):
                    assert [await ask(), await ask()] == [200, 200]
                    assert fleet_db.leases_of(f"api/{MODEL}") == 1
                async with asyncio.timeout(30 * PATIENCE):
                    while await ask() != 503:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
        assert fleet_db.runs() == [], "nothing is left of who sent requests there"

    asyncio.run(scenario())


class Replica:
    """What one looks up, turn by turn."""

    def __init__(self, fleet: GpuFleet) -> None:
        self.clock = Clock(0.0)
        self.directory = EngineDirectory(self.clock)
        self.engines = ReplicaEngines(fleet, self.directory, self.clock)

    def look(self, *models: str) -> list[str]:
        """Names of the engines that are announced after it."""
        self.engines._look_safely(models)
        return [one.name for one in self.directory.targets()]


def test_holders_are_told_while_others_use_their_engines(url: str, fleet_db: FleetDatabase, tmp_path: Path) -> None:
    replica, name = Replica(fleet_of(url, tmp_path)), f"api/{MODEL}"
    assert replica.look(MODEL) == [] and fleet_db.runs() == []
    assert fleet_db.try_lease("lab", "holder", name, 60) is not None
    assert replica.look(MODEL, "other") == ["lab"]
    ((dataset, wait),) = [(beat.dataset, beat.wait) for beat in fleet_db.runs()]
    assert dataset == name and wait is not None and wait.kind is WaitKind.INTERACTIVE
    assert not fleet_db.shared_by_others(name, 10), "it is this process itself"
    with fleet_db.engine.begin() as connection:
        connection.execute(sa.update(RUNS).values(pid=RUNS.c.pid + 1))
    assert fleet_db.shared_by_others(name, 10) and not fleet_db.shared_by_others("api/other", 10)
    assert replica.look() == [] and fleet_db.runs() == []
    assert not fleet_db.shared_by_others(name, 10)


def test_a_process_that_was_killed_shares_nothing_any_more(url: str, fleet_db: FleetDatabase, tmp_path: Path) -> None:
    replica, name = Replica(fleet_of(url, tmp_path)), f"api/{MODEL}"
    assert fleet_db.try_lease("lab", "holder", name, 60) is not None
    assert replica.look(MODEL) == ["lab"]
    with fleet_db.engine.begin() as connection:
        connection.execute(sa.update(RUNS).values(pid=RUNS.c.pid + 1, beat_at=RUNS.c.beat_at - 11))
    assert not fleet_db.shared_by_others(name, 10)
    (beat,) = fleet_db.runs()
    fleet_db.declare_dead(beat.run_id)
    assert replica.look(MODEL) == ["lab"]
    replica.look(MODEL)
    ((run_id, wait),) = [(beat.run_id, beat.wait) for beat in fleet_db.runs()]
    assert run_id != beat.run_id and wait is not None, "it was only stopped, and says so anew"


def test_what_this_replica_leases_itself_is_announced_once(url: str, fleet_db: FleetDatabase, tmp_path: Path) -> None:
    """By the way that its lease has; the fleet knows it by the same name."""
    replica = Replica(fleet_of(url, tmp_path))
    own = EngineTarget("http://tunnel", MODEL, name="lab")
    assert fleet_db.try_lease("lab", "holder", f"api/{MODEL}", 60) is not None
    assert replica.look(MODEL) == ["lab"]
    replica.directory.announce(own)
    assert replica.look(MODEL) == ["lab"] and replica.directory.targets()[0].url == "http://tunnel"
    assert fleet_db.runs() == []
    replica.directory.withdraw(own)
    assert replica.look(MODEL) == ["lab"]


def test_its_own_lease_of_an_engine_that_it_used_before_is_no_use_of_another_ones(
    url: str, fleet_db: FleetDatabase, tmp_path: Path
) -> None:
    replica = Replica(fleet_of(url, tmp_path))
    assert fleet_db.try_lease("lab", "holder", f"api/{MODEL}", 60) is not None
    replica.look(MODEL)
    (shared,) = replica.directory.targets()
    replica.directory.announce(replace(shared))
    assert replica.look(MODEL) == ["lab"] and fleet_db.runs() == []
    replica.directory.withdraw(shared)
    assert replica.directory.targets() == [shared], "it is served without a gap"


def test_what_is_known_stays_while_the_fleet_cannot_be_asked(
    url: str, fleet_db: FleetDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(fleet_of(url, tmp_path))
    assert fleet_db.try_lease("lab", "holder", f"api/{MODEL}", 60) is not None
    assert replica.look(MODEL) == ["lab"]
    with monkeypatch.context() as away:
        away.setattr(FleetDatabase, "fleet", lambda self: 1 / 0)
        assert replica.look(MODEL) == ["lab"]
    (tmp_path / "fleet.yaml").write_text("engines: 1")
    replica.clock.forward(WANTED_SECONDS)
    assert replica.look(MODEL) == ["lab"]


def test_a_caller_is_not_held_up_by_a_fleet_that_does_not_answer(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fleet.yaml").write_text("engines: 1")
    fleet = GpuFleet(database=url, home=str(tmp_path), config_path=str(tmp_path / "fleet.yaml"))

    async def scenario() -> None:
        directory = EngineDirectory(lambda: 0.0)
        with ReplicaEngines(fleet, directory) as replica:
            await asyncio.wait_for(replica.find(MODEL), 30 * PATIENCE)
            assert not directory.targets()

    asyncio.run(scenario())


def test_only_so_many_callers_wait_for_a_fleet_that_does_not_answer(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_engines, "MOST_ASKED", 2)
    monkeypatch.setattr(replica_engines, "FIND_SECONDS", 600.0 * PATIENCE)

    async def scenario() -> None:
        engines = Replica(fleet_of(url, tmp_path)).engines  # nobody looks
        waiting = [asyncio.create_task(engines.find(MODEL)) for _ in range(2)]
        async with asyncio.timeout(30 * PATIENCE):
            while len(engines._asked) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await engines.find(MODEL)
        assert not any(one.done() for one in waiting)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(scenario())


def test_the_way_to_an_engine_stays_open_while_a_long_answer_comes(
    url: str, fleet_db: FleetDatabase, tmp_path: Path
) -> None:
    replica = Replica(fleet_of(url, tmp_path))
    assert fleet_db.try_lease("lab", "holder", f"api/{MODEL}", 60) is not None
    replica.engines.want(MODEL)
    assert replica.look(*replica.engines._still_wanted()) == ["lab"]
    (target,) = replica.directory.targets()
    probe = replica.directory.begin(target)
    replica.clock.forward(WANTED_SECONDS)
    assert replica.engines._still_wanted() == {MODEL}
    replica.directory.end(target, reached=True, probe=probe)
    assert replica.engines._still_wanted() == set()


def test_rows_give_way_to_interactive_requests_of_other_replicas(
    url: str, fleet_db: FleetDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_engines, "LOOK_SECONDS", 0.01)

    async def shared(engine: ServingEngine, expected: bool) -> None:
        assert engine.share is not None
        async with asyncio.timeout(30 * PATIENCE):
            while engine.share.look().unseen is not expected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with http_server({CHAT: status(200)}) as url_of_engine:
            fleet = fleet_of(url, tmp_path, url_of_engine)
            directory = EngineDirectory(lambda: 0.0)
            supply = SharedSupply(FleetSupply(fleet), directory, FirstTokens(lambda: 0.0), FirstTokenPolicy())
            other = Replica(fleet)
            async with supply.engine(MODEL, "chat") as engine:
                await shared(engine, False)
                assert await asyncio.to_thread(other.look, MODEL) == ["lab"]
                with fleet_db.engine.begin() as connection:
                    waits = RUNS.c.wait_kind == WaitKind.INTERACTIVE.value
                    connection.execute(sa.update(RUNS).where(waits).values(host="another"))
                await shared(engine, True)
                await asyncio.to_thread(other.look)
                await shared(engine, False)

    asyncio.run(scenario())
