"""An HTTP server on loopback with the routes that a test gives it, and answers for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

ANSWER = {
    "choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def http_server(routes: dict[str, Handler], **options: Any) -> AsyncIterator[str]:
    """An HTTP server on a free port; yields its address."""
    app = web.Application(client_max_size=1 << 23)
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    # Handlers that hang are not waited for: aiohttp would do so for a minute.
    runner = web.AppRunner(app, access_log=None, **{"shutdown_timeout": 0.1, **options})
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def status(code: int, text: str = "no", **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=code, text=text, headers=headers)

    return handler


def models(*entries: dict[str, Any]) -> Handler:
    """A list of models."""

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": list(entries)})

    return handler
