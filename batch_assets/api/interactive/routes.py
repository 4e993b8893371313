"""Chats, completions, embeddings and responses (`/v1/…`) for callers who wait for the answer."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batch_assets.api.access.enforcement import LimitedAuthenticator
from batch_assets.api.access.request_access import access_of
from batch_assets.api.billing.interactive_usage import InteractiveUsage
from batch_assets.api.billing.usage import Kind, Tokens
from batch_assets.api.interactive.boot_wait import patience
from batch_assets.api.interactive.embedding_lists import PATH as EMBEDDINGS
from batch_assets.api.interactive.embedding_lists import EmbeddingLists, read_input
from batch_assets.api.interactive.event_stream import EventStream, ResponseStream, StreamReader, Usage
from batch_assets.api.interactive.proxy import Disconnected, Proxy, unless_disconnected
from batch_assets.api.interactive.request_body import InteractiveRequest, read_request
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.callers import Caller, caller, caller_with
from batch_assets.api.requests.callers import Scope as KeyScope
from batch_assets.api.requests.direct_routes import DirectRoute
from batch_assets.api.requests.error_answers import error_response
from gpu_runner.routing.latency_target import ANY_LATENCY, InvalidTarget, LatencyTarget, read_target

RESPONSES = "/v1/responses"

router = APIRouter(tags=["interactive"])
may_infer = caller_with(KeyScope.INFERENCE)
Allowed = Annotated[Caller, Depends(may_infer)]


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, caller: Allowed) -> Response:
    """One answer of a chat, whole or as a stream."""
    return await _interactive(request, caller)


@router.post("/v1/completions")
async def completions(request: Request, caller: Allowed) -> Response:
    """One completion of a prompt, whole or as a stream."""
    return await _interactive(request, caller)


@router.post("/v1/embeddings")
async def embeddings(request: Request, caller: Allowed) -> Response:
    """Vectors of texts."""
    return await _interactive(request, caller)


@router.post("/v1/responses")
async def responses(request: Request, caller: Allowed) -> Response:
    """One response, whole or as a stream, where the model's engine has this route. Nothing of it is kept."""
    return await _interactive(request, caller)


async def _directly(request: Request) -> Response:
    return await _interactive(request, await may_infer(await caller(request)))


DIRECT_ROUTES = tuple(
    DirectRoute("POST", path, lambda scope: True, _directly)
    for path in ("/v1/chat/completions", "/v1/completions", EMBEDDINGS, RESPONSES)
)


async def _interactive(request: Request, caller: Caller) -> Response:
    began = time.monotonic()
    resolve = request.app.state.settings.models.resolve
    wanted = read_request(await request.body(), resolve, is_response=request.url.path == RESPONSES)
    try:
        target = read_target(request.headers)
    except InvalidTarget as error:
        raise ApiError(400, str(error), code="invalid_target") from None
    billing: InteractiveUsage = request.app.state.interactive_usage
    billing.check_room()
    limits = request.app.state.authenticate
    limited = limits if isinstance(limits, LimitedAuthenticator) else None
    if limited is not None:
        await limited.take_tokens(request, caller.tenant, wanted.expected_tokens)
    return EngineResponse(request, wanted, caller, limited, began, target)


class EngineResponse(Response):
    """An answer that comes from an engine while it is sent. Ends the request to the engine when the caller leaves."""

    def __init__(
        self,
        request: Request,
        wanted: InteractiveRequest,
        caller: Caller,
        limited: LimitedAuthenticator | None,
        began: float,
        target: LatencyTarget,
    ) -> None:
        super().__init__()
        self._target = target
        self._request, self._wanted, self._caller, self._limited, self._began = request, wanted, caller, limited, began
        self._proxy: Proxy = request.app.state.proxy
        self._billing: InteractiveUsage = request.app.state.interactive_usage
        is_embedding = request.url.path == EMBEDDINGS and target == ANY_LATENCY  # a list would wait for others
        self._lists: EmbeddingLists | None = request.app.state.embedding_lists if is_embedding else None
        self._usage: Usage | None = None
        self._served = self._recorded = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(scope, receive, send))
        try:
            await unless_disconnected(work, receive)
        except Disconnected:
            pass  # nobody is there to be told
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        finally:
            await self._settle()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted, proxy = self._wanted, self._proxy
        path, access = self._request.url.path, access_of(self._request)
        await proxy.until_engine(path, wanted.model, self._caller.tenant, patience(self._request.headers))
        if self._lists is not None and (text := read_input(wanted, access)) is not None:
            answered = await self._lists.ask(text)
            if answered is not None:
                self._served, self._usage = True, answered.usage
                self._record(self._usage)
                await Response(answered.body, media_type="application/json")(scope, receive, send)
                return
        async with proxy.open(path, wanted, access, self._began, self._target) as answer:
            if answer.http.status != 200:
                raise await proxy.refusal(answer, path)
            self._served = True
            # An engine that knows no streams of these answers, as of embeddings, has sent all of it.
            if not wanted.stream or answer.http.content_type == "application/json":
                body, self._usage = await proxy.whole(answer)
                self._record(self._usage)
                await Response(body, media_type="application/json")(scope, receive, send)
                return
            stream: StreamReader
            if path == RESPONSES:
                stream = ResponseStream(on_usage=self._record)
            else:
                stream = EventStream(hold_usage=wanted.own_usage, on_usage=self._record)
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            try:
                await proxy.relay(answer, stream, send)
            finally:
                self._usage = stream.usage

    def _record(self, usage: Usage | None) -> None:
        """Write down what the answer used, once, before its end goes to the caller."""
        if self._recorded:
            return
        self._recorded = True
        kind = Kind.EMBEDDINGS if self._request.url.path == EMBEDDINGS else Kind.COMPLETIONS
        tokens = None
        if usage is not None:
            tokens = Tokens(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self._billing.answered(self._caller.tenant, self._wanted.model, kind, tokens)

    async def _settle(self) -> None:
        """Count what was used in place of what was expected.

        Of the limits, who leaves early has used what was expected; nothing is charged for what no engine has counted.
        """
        usage, wanted = self._usage, self._wanted
        if self._served:
            self._record(usage)
        if usage is not None:
            self._proxy.used(wanted.model, usage)
        if self._limited is None or (self._served and usage is None):
            return
        used = usage.total if usage is not None else 0
        await self._limited.settle_tokens(self._caller.tenant, used - wanted.expected_tokens)


_STREAM_HEADERS: list[Any] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
