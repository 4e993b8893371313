"""Who serves: what a client makes of a server's list of models."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from support.http_server import http_server, models, status

from gpu_runner.client.engine_client import EngineClient, EngineLost, EngineRefused
from gpu_runner.client.engine_info import model_entry
from gpu_runner.rows import Generation

CHAT = Generation("chat", "m", {"max_tokens": 5})


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": "0.32.0"})


def test_info_says_who_serves() -> None:
    async def main() -> None:
        routes = {"/v1/models": models({"id": "m", "max_model_len": 1024}), "/version": version}
        async with http_server(routes) as url, EngineClient(url, CHAT) as engine:
            info = await engine.info()
            assert (info.model, info.version, info.max_model_len, info.simulated) == ("m", "0.32.0", 1024, False)

    asyncio.run(main())


def test_a_server_without_version_and_length_is_taken_as_it_is() -> None:
    async def main() -> None:
        async with http_server({"/v1/models": models({"id": "m"})}) as url, EngineClient(url, CHAT) as engine:
            info = await engine.info()
            assert (info.version, info.max_model_len) == ("", None)

    asyncio.run(main())


@pytest.mark.parametrize(("code", "kind"), [(503, EngineLost), (401, EngineRefused), (400, EngineRefused)])
def test_a_server_that_does_not_say_who_it_is_gets_no_row(code: int, kind: type[Exception]) -> None:
    async def main() -> None:
        async with http_server({"/v1/models": status(code)}) as url, EngineClient(url, CHAT) as engine:
            with pytest.raises(kind):
                await engine.info()

    asyncio.run(main())


def test_another_model_is_refused_by_name_before_any_row() -> None:
    async def main() -> None:
        async with (
            http_server({"/v1/models": models({"id": "other"})}) as url,
            EngineClient(url, CHAT) as engine,
        ):
            with pytest.raises(EngineRefused, match=r"expected model m, found other: .+"):
                await engine.info()

    asyncio.run(main())


@pytest.mark.parametrize(
    "page", [b"no JSON", b"[]", b"{}", b'{"data": 1}', b'{"data": [null, {"id": 1}]}', b"[" * 100_000]
)
def test_a_page_that_is_no_list_of_models_has_no_entry_and_is_refused(page: bytes) -> None:
    with pytest.raises(EngineRefused, match=r"list of models|found none"):
        model_entry(page, "m")


def test_the_entry_is_that_of_the_wanted_model() -> None:
    assert model_entry(b'{"data": [{"id": "n"}, {"id": "m", "max_model_len": 7}]}', "m")["max_model_len"] == 7
