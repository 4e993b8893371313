"""What an endpoint says of its models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from batch_assets.api.models import EndpointModels, known_models


@pytest.mark.parametrize("data", [[], None, [7]])
def test_an_endpoint_that_lists_no_models_is_not_known_yet(data: Any) -> None:
    async def asked() -> frozenset[str] | None:
        async def models(request: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": data})

        app = web.Application()
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return await known_models(EndpointModels(f"http://127.0.0.1:{runner.addresses[0][1]}", None))
        finally:
            await runner.cleanup()

    assert asyncio.run(asked()) is None
