"""Salts of tenants: who gets one, what an engine receives, and where the key is kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from support.asgi_calls import AsgiCall
from support.front_doors import front_door_alone
from support.http_server import http_server

from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.front_door import FrontDoor
from batch_assets.api.interactive.cache_salt import FILE, KEY, SETTING, CacheSalts, salt_key
from batch_assets.api.interactive.engine_directory import EngineTarget
from batch_assets.api.interactive.engine_reports import EngineReading
from batch_assets.api.interactive.request_body import read_request
from batch_assets.api.requests.callers import Scope
from batch_assets.api.settings import ApiSettings
from batch_assets.settings import SettingError
from gpu_runner.client.engine_load import EngineLoad, parse_metrics

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANSWER = {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}], "data": []}
VLLM = 'vllm:num_requests_running{model_name="m"} 0.0\n'
LLAMA_CPP = "llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n"
ENGINE = EngineTarget("http://engine", "m")


class Engine:
    """Keeps the bodies that it was sent. `page`: its metrics; None: it has none."""

    def __init__(self, page: str | None) -> None:
        self.page, self.bodies, self.pages = page, list[dict[str, Any]](), 0

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(orjson.loads(await request.read()))
        return web.json_response(ANSWER)

    async def metrics(self, request: web.Request) -> web.Response:
        self.pages += 1
        await asyncio.sleep(0.05)
        return web.Response(status=404) if self.page is None else web.Response(text=self.page)


@contextlib.asynccontextmanager
async def service(home: Path, engine: Engine) -> AsyncIterator[tuple[FrontDoor, dict[str, dict[str, str]]]]:
    """The service, and headers of two tenants."""
    keys = KeyStore(f"sqlite:///{home}/api.db", time.time)
    with contextlib.closing(keys):
        made = {tenant: keys.create(tenant, frozenset({Scope.INFERENCE}))[1] for tenant in ("acme", "rival")}
    headers = {tenant: {"authorization": f"Bearer {secret}"} for tenant, secret in made.items()}
    routes = dict.fromkeys((CHAT, COMPLETIONS, EMBEDDINGS), engine.answer) | {"/metrics": engine.metrics}
    async with http_server(routes) as url:
        door = front_door_alone(ApiSettings(home, "", f"sqlite:///{home}/api.db"))
        door.inner.state.proxy.directory.announce(EngineTarget(url, "m"))
        async with door.inner.router.lifespan_context(door.inner):
            yield door, headers


async def ask(door: FrontDoor, headers: dict[str, str], body: object = ASK, path: str = CHAT) -> None:
    call = await AsgiCall(door.app, path, body, headers).run()
    assert call.status == 200, call.body


def test_vllm_gets_the_salt_of_the_tenant_from_the_first_request_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Engine(VLLM)
        async with service(tmp_path, engine) as (door, headers):
            await asyncio.gather(*(ask(door, headers[who]) for who in ("acme", "acme", "rival", "rival", "rival")))
            assert engine.pages <= 2, "the engine is asked once what it is, for all that wait, and once for its load"
            salts = [body.pop("cache_salt") for body in engine.bodies]
            assert sorted(salts.count(salt) for salt in set(salts)) == [2, 3], "a tenant's requests share theirs"
            assert all(len(salt) == 64 for salt in salts) and engine.bodies == [ASK] * 5
            assert not any("acme" in salt for salt in salts)

            engine.bodies.clear()
            await ask(door, headers["acme"], {"model": "m", "prompt": "hi"}, COMPLETIONS)
            await ask(door, headers["acme"], {"model": "m", "input": "hi"}, EMBEDDINGS)
            await ask(door, headers["acme"], {**ASK, "cache_salt": "my own"})
            await ask(door, headers["acme"], {**ASK, "cache_salt": None})
            assert engine.bodies[0]["cache_salt"] in salts
            assert "cache_salt" not in engine.bodies[1], "a list may hold texts of several tenants"
            assert [body["cache_salt"] for body in engine.bodies[2:]] == ["my own", None]

    asyncio.run(scenario())


def test_online_requests_have_the_salt_of_their_tenant_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Engine(VLLM)
        async with service(tmp_path, engine) as (door, headers):
            await ask(door, headers["acme"])
            body = {"input": "hello", "model": "m", "client_id": "c"}
            call = await AsgiCall(door.app, "/v1/inference", body, headers["acme"]).run()
            assert call.status == 202
            async with asyncio.timeout(20):
                while len(engine.bodies) < 2:  # noqa: ASYNC110  (the engine has no event)
                    await asyncio.sleep(0.01)
            assert engine.bodies[1]["cache_salt"] == engine.bodies[0]["cache_salt"]

    asyncio.run(scenario())


@pytest.mark.parametrize("page", [LLAMA_CPP, None, "nothing of an engine\n"])
def test_other_engines_get_the_request_as_it_was(tmp_path: Path, page: str | None) -> None:
    async def scenario() -> None:
        engine = Engine(page)
        async with service(tmp_path, engine) as (door, headers):
            for _ in range(3):
                await ask(door, headers["acme"])
            assert engine.bodies == [ASK] * 3

    asyncio.run(scenario())


def test_an_engine_that_was_not_there_is_asked_again() -> None:
    async def scenario() -> None:
        found = [EngineReading(), EngineReading(parse_metrics(VLLM.encode()), 0.01), EngineReading()]

        async def read(engine: EngineTarget) -> EngineReading:
            return found.pop(0)

        salts, request = CacheSalts(b"k" * 32, {}, read), read_request(orjson.dumps(ASK))
        assert await salts.body(ENGINE, CHAT, request, "acme") == request.body
        salted = orjson.loads(await salts.body(ENGINE, CHAT, request, "acme"))
        assert salted == {"cache_salt": salts.salt("acme"), **ASK} and len(found) == 1
        salts.seen(ENGINE, EngineReading(EngineLoad(0, 0, 0.0, 0, 0), 0.01))
        assert await salts.body(ENGINE, CHAT, request, "acme") == request.body, "another engine has the address"
        await salts.close()

    asyncio.run(scenario())


def test_a_salt_is_of_one_tenant_one_key_and_one_group() -> None:
    async def read(engine: EngineTarget) -> EngineReading:
        raise AssertionError

    one, two = CacheSalts(b"a" * 32, {}, read), CacheSalts(b"b" * 32, {"acme": "g", "labs": "g"}, read)
    assert one.salt("acme") == one.salt("acme") != one.salt("rival")
    assert one.salt("acme") != two.salt("acme") == two.salt("labs") != two.salt("rival")


def test_the_key_is_made_once_for_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert salt_key(tmp_path, several_tenants=False) is None and not list(tmp_path.iterdir())
    key = salt_key(tmp_path, several_tenants=True)
    assert key is not None and len(key) == 64 and salt_key(tmp_path, several_tenants=True) == key
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    monkeypatch.setenv(KEY, "k" * 32)
    assert salt_key(tmp_path, several_tenants=True) == b"k" * 32
    monkeypatch.setenv(KEY, "secret-but-short")
    with pytest.raises(SettingError, match=f"{KEY}: expected at least 32 characters, found 16") as refused:
        salt_key(tmp_path, several_tenants=True)
    assert "secret" not in str(refused.value)
    monkeypatch.delenv(KEY)
    (tmp_path / FILE).write_text("half")
    with pytest.raises(SettingError, match="expected 64 hexadecimal digits"):
        salt_key(tmp_path, several_tenants=True)
    monkeypatch.setenv(SETTING, "off")
    assert salt_key(tmp_path, several_tenants=True) is None
    monkeypatch.setenv(SETTING, "on")
    with pytest.raises(SettingError, match=f"{SETTING}: expected auto or off"):
        salt_key(tmp_path, several_tenants=True)
