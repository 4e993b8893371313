"""The ASGI application: routers, error shapes, bounds.

`create_app` is all that a server, a test or a benchmark needs. What a router needs of the service it finds in
`app.state`: `settings`, `authenticate`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from fastapi import FastAPI

from batch_assets.api import models
from batch_assets.api.batches import routes as batches
from batch_assets.api.billing import routes as usage
from batch_assets.api.files import routes as files
from batch_assets.api.openapi import docs_page
from batch_assets.api.openapi.openapi_document import describe
from batch_assets.api.requests.callers import Authenticate, embedded_caller
from batch_assets.api.requests.error_answers import add_error_handlers
from batch_assets.api.requests.request_bounds import BodyLimit, RequestLimits
from batch_assets.api.service import Service
from batch_assets.api.settings import ApiLimits, ApiSettings
from batch_assets.api.store_threads import REQUESTS, StoreThreads
from batch_assets.api.telemetry.tracing import NO_SPANS

FILES = "/v1/files"
MULTIPART_BYTES = 1 << 20  # what boundaries and small fields may add to a file


def create_app(settings: ApiSettings, authenticate: Authenticate = embedded_caller) -> FastAPI:
    """The service's application. Its lifespan opens and closes what it uses."""
    app = FastAPI(
        title="Batch Assets",
        summary="OpenAI's Batch API over the engines of a fleet.",
        lifespan=_lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.settings = settings
    app.state.authenticate = authenticate
    app.state.share_engines = lambda supply: supply
    app.state.spans = NO_SPANS
    app.state.on_commit = lambda footer: None
    app.state.on_lost = lambda model, again, given_up: None
    app.state.check_fleet = lambda: None
    add_error_handlers(app)
    describe(app)
    for router in (files.router, batches.router, models.router, usage.router, docs_page.router):
        app.include_router(router)
    app.add_middleware(RequestLimits, limits=partial(body_limit, settings.limits))
    return app


def body_limit(limits: ApiLimits, method: str, path: str) -> BodyLimit:
    """How much may be sent to this path."""
    if path == FILES and method == "POST":
        return BodyLimit(limits.file_bytes + MULTIPART_BYTES, limits.silent_seconds, limits.upload_seconds)
    return BodyLimit(limits.json_bytes, limits.silent_seconds, limits.json_seconds)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state = app.state
    service = await asyncio.to_thread(
        Service, state.settings, state.share_engines, state.spans, state.on_commit, state.check_fleet, state.on_lost
    )
    state.store_threads = StoreThreads(REQUESTS, "requests-store")
    try:
        service.attach(app)
        service.start()
        yield
    finally:
        state.store_threads.close()
        await asyncio.to_thread(service.close)
