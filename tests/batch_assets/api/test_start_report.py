"""What the service says of itself and its engines: when it begins, and at /readyz."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from support.front_doors import front_door_alone

from batch_assets.api.front_door import EndpointWatch
from batch_assets.api.models import FleetModels, ServedModel, known_models
from batch_assets.api.server import Start, start_report
from batch_assets.api.service import _fleet_models
from batch_assets.api.settings import ApiSettings
from resources.fleet.resource import FleetConfigError, GpuFleet

DEAD, ALIVE = "http://127.0.0.1:9", "http://127.0.0.1:8000"


def settings_in(home: Path, *endpoints: str, host: str = "127.0.0.1") -> ApiSettings:
    return ApiSettings(home, str(home / "store"), f"sqlite:///{home / 'api.db'}", host=host, endpoints=endpoints)


def test_it_says_address_engines_models_and_which_engine_is_away(tmp_path: Path) -> None:
    lines = start_report(settings_in(tmp_path, DEAD, ALIVE), Start(False, away=[DEAD], models=["tiny"]))
    assert lines == [
        "OpenAI's API: http://127.0.0.1:8080/v1   (no key is asked for: this machine only; Ctrl-C ends it)",
        f"engine {DEAD}: does not answer: what is asked of it waits until it does",
        f"engine {ALIVE}: answers",
        "models: tiny",
    ]


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    lines = start_report(settings_in(tmp_path, host="::1"), Start(True, models=[]))
    assert "http://[::1]:8080/v1" in lines[0] and "a key or a token" in lines[0]
    assert lines[1].startswith("engines: none. missing: name engines or providers in fleet.yaml")
    assert lines[2].startswith("models: none. missing:")
    fleet = Start(True, engines=["one"], providers=["sim"], models=[f"m{number}" for number in range(25)])
    lines = start_report(settings_in(tmp_path), fleet)
    assert lines[1].startswith("fleet: engines one; providers sim;") and lines[2].endswith("m19 and 5 more")


class Turned:
    """An engine that answers, or does not."""

    answers = False

    async def ask(self) -> Sequence[ServedModel] | None:
        return [ServedModel("m", 0, "x")] if self.answers else None


def test_an_engine_that_goes_and_comes_is_told_once_each(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        engine = Turned()
        async with EndpointWatch({ALIVE: engine}, 0.001) as watch:
            await watch.first_look()
            assert watch.away == (ALIVE,)
            await asyncio.sleep(0.02)
            engine.answers = True
            while watch.away:  # noqa: ASYNC110  (it has no event)
                await asyncio.sleep(0.001)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        f"engine {ALIVE} gives no list of models: what is asked of it waits until it does",
        f"engine {ALIVE} answers again",
    ]


def test_ready_names_a_configured_engine_that_is_away_and_stays_ready(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = front_door_alone(settings_in(tmp_path, DEAD))
        transport = httpx.ASGITransport(service.app)
        async with (
            service.inner.router.lifespan_context(service.inner),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client,
        ):
            assert service.watch is not None
            await service.watch.first_look()
            answer = await client.get("/readyz")
            assert answer.status_code == 200
            assert answer.json() == {"status": "ready", "missing": [], "engines_away": [DEAD]}

    asyncio.run(scenario())


def fleet_in(home: Path, text: str) -> GpuFleet:
    (home / "fleet.yaml").write_text(text)
    return GpuFleet(database=f"sqlite:///{home}/fleet.db", home=str(home), config_path=str(home / "fleet.yaml"))


def test_a_model_that_nothing_of_the_fleet_may_serve_is_not_listed(tmp_path: Path) -> None:
    engine = f"engines: [{{name: one, kind: endpoint, url: '{ALIVE}', models: [a]}}]"
    assert _fleet_models(fleet_in(tmp_path, engine), {"a", "b"}) == {"a"}
    assert _fleet_models(fleet_in(tmp_path, engine.replace(", models: [a]", "")), {"a", "b"}) == {"a", "b"}
    assert _fleet_models(fleet_in(tmp_path, "simulated: default"), {"b"}) == {"b"}


def test_while_the_file_cannot_be_used_the_models_of_before_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batch_assets.api.models.KEPT_SECONDS", 0.0)
    said = [["a"], None, ["a", "b"]]

    def names() -> list[str]:
        found = said.pop(0)
        if found is None:
            raise FleetConfigError("fleet.yaml: no YAML")
        return found

    async def asked() -> list[frozenset[str] | None]:
        models = FleetModels(names, 0)
        return [await known_models(models) for _ in range(3)]

    assert asyncio.run(asked()) == [{"a"}, {"a"}, {"a", "b"}]
