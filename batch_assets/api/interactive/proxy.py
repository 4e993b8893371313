"""Sends an interactive request on to an engine, and its answer back: whole, or as a stream that goes through.

- A caller who leaves ends the request to the engine, whose slot is then free: also while the engine is silent.
- A request is sent once. Only where no engine can have read it (the connection was refused, or had been closed in
  idleness) it goes to another one. An engine that fails requests gets no further ones for a while.
- Every wait is bounded, and so is every body that is held. Only headers of our own go to an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Self

import aiohttp
import orjson
from starlette.types import Receive, Send

from batch_assets.api.access.request_access import RequestAccess
from batch_assets.api.batches.snapshot import TASKS
from batch_assets.api.interactive.boot_wait import BootWait
from batch_assets.api.interactive.cache_salt import CacheSalts
from batch_assets.api.interactive.engine_choice import EngineChoice, EngineOrder, SentRequest
from batch_assets.api.interactive.engine_directory import EngineDirectory, EngineTarget
from batch_assets.api.interactive.engine_errors import (
    LATE,
    LOST,
    RELAYED,
    UNREADABLE,
    EngineError,
    error_for_caller,
    error_of_answer,
    is_failure,
    no_route,
    read_error,
)
from batch_assets.api.interactive.event_stream import StreamReader, Usage, read_usage
from batch_assets.api.interactive.first_tokens import FirstTokens
from batch_assets.api.interactive.request_body import LONGEST_MODEL, InteractiveRequest
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.error_answers import envelope
from batch_assets.api.telemetry.metrics import ServiceMetrics
from batch_assets.api.telemetry.tracing import NO_SPANS, Span, SpanKind, Spans, engine_call
from gpu_runner.bounded_http.bounded_read import (
    ERROR_BYTES,
    PAGE_BYTES,
    BodyTooLarge,
    UnaskedEncoding,
    read_beginning,
    read_body,
)
from gpu_runner.bounded_http.tls_files import TlsFiles, ssl_of
from gpu_runner.client.answers import unreadable
from gpu_runner.client.engine_connections import KEEP_ALIVE_SECONDS, watched_socket
from gpu_runner.client.request_progress import RequestProgress, request_trace
from gpu_runner.routing.latency_target import ANY_LATENCY, HEADROOM_HEADER, LatencyTarget

log = logging.getLogger(__name__)

MOST_ANSWER = 64 << 20
MOST_MODELS = 1000
KEEP_SECONDS = 5.0
MOST_SENDING = 0.1  # share of an answer's time that went to its caller; beyond, its pace is the caller's
OPTIONAL_ROUTES = frozenset({"/v1/responses"})  # not every engine has them


@dataclass(frozen=True, slots=True)
class ProxyPolicy:
    """Seconds and counts. `first_byte`: until an answer begins (the longest that the stock clients wait). `silent`:
    between two parts of a stream. `in_flight`: requests of this process at once. `tries`: engines asked for one
    request.
    """

    connect: float = 5.0
    first_byte: float = 600.0
    silent: float = 120.0
    in_flight: int = 2000
    tries: int = 3


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What an engine answers, its headers read. `waits`: its number in `FirstTokens`."""

    engine: EngineTarget
    http: aiohttp.ClientResponse
    waits: int
    sent: SentRequest


class Disconnected(Exception):
    """The caller has left."""


class _NotSent(Exception):
    """No engine can have read this request."""


class Proxy:
    """Async context manager; lives on one event loop."""

    def __init__(
        self,
        directory: EngineDirectory,
        metrics: ServiceMetrics,
        first_tokens: FirstTokens,
        choice: EngineChoice,
        policy: ProxyPolicy = ProxyPolicy(),
        spans: Spans = NO_SPANS,
    ) -> None:
        self.directory, self.first_tokens, self._metrics = directory, first_tokens, metrics
        self.choice, self._policy, self._spans = choice, policy, spans
        self.known: Callable[[], Awaitable[frozenset[str] | None]] | None = None  # models that could be served
        self.find: Callable[[str], Awaitable[None]] | None = None  # looks where else engines of a model are
        self.salts: CacheSalts | None = None
        self.boots: BootWait | None = None  # None: no engine is started for a request
        self.want: Callable[[str, str], None] | None = None  # has an engine of a model, for requests to a path, kept
        self._wanted: OrderedDict[str, float] = OrderedDict()
        self._in_flight = 0
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        policy = self._policy
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, ttl_dns_cache=300, socket_factory=watched_socket
            ),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=policy.connect, sock_read=policy.first_byte),
            trace_configs=[request_trace()],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.directory.close()
        if self.salts is not None:
            await self.salts.close()
        await self.choice.close()
        if self._session is not None:
            await self._session.close()

    @contextlib.asynccontextmanager
    async def open(
        self,
        path: str,
        request: InteractiveRequest,
        access: RequestAccess,
        began: float,
        target: LatencyTarget = ANY_LATENCY,
    ) -> AsyncIterator[EngineAnswer]:
        """An engine's answer to a request that came at `began`. Raises ApiError for everything that is no answer."""
        if self._in_flight >= self._policy.in_flight:
            raise ApiError(503, "The service is overloaded. Please try again.", headers={"Retry-After": "1"})
        engines = await self._engines(path, request.model)
        order = self.choice.order(engines, request, access.caller.tenant if access.caller else "", target)
        if order.headroom is not None:
            access.headers[HEADROOM_HEADER] = f"{order.headroom:.3f}"
        self._in_flight += 1
        try:
            # An engine may stand there twice: its kept connection was closed, a new one is not.
            for engine in (order.engines * 2)[: self._policy.tries]:
                try:
                    async with self._asked(engine, path, request, access, began, order) as answer:
                        yield answer
                        return
                except _NotSent:
                    self._metrics.engine_request("not_sent")
            raise ApiError(503, "No engine of this model can be reached now.", headers={"Retry-After": "2"})
        finally:
            self._in_flight -= 1

    async def until_engine(self, path: str, model: str, tenant: str, patience: float) -> None:
        """Return when an engine of a model runs, or could not be started for it. Raises ApiError where none comes while
        the caller waits, for so many seconds.
        """
        if self.boots is None or await self.directory.engines(model):
            return
        if model not in (await self.known() or () if self.known is not None else ()):
            return

        async def there() -> bool:
            self._keep(model, path)
            return bool(await self.directory.engines(model))

        self._keep(model, path)
        if self.find is not None:
            await self.find(model)
        if not await there():
            await self.boots.wait(model, path, tenant, patience, there)

    async def _engines(self, path: str, model: str) -> list[EngineTarget]:
        """Engines of a model for requests to a path. Raises ApiError where there is none."""
        engines = await self.directory.engines(model)
        if not engines and model not in (await self.known() or () if self.known is not None else ()):
            message = f"The model `{model}` does not exist or you do not have access to it."
            raise ApiError(404, message, code="model_not_found", param="model")
        self._keep(model, path)
        if not engines and self.find is not None:
            await self.find(model)
            engines = await self.directory.engines(model)
        if not engines:
            raise ApiError(503, "No engine of this model runs now.", headers={"Retry-After": "30"})
        if not (engines := [one for one in engines if self.directory.has_route(one, path)]):
            raise no_route(path)
        return engines

    def _keep(self, model: str, path: str) -> None:
        """Say that this model is asked for, now and then."""
        now = asyncio.get_running_loop().time()
        if self.want is None or now - self._wanted.get(model, -math.inf) < KEEP_SECONDS:
            return
        self._wanted[model] = now
        self._wanted.move_to_end(model)
        if len(self._wanted) > MOST_MODELS:
            self._wanted.popitem(last=False)
        self.want(model, path)

    @contextlib.asynccontextmanager
    async def _asked(
        self,
        engine: EngineTarget,
        path: str,
        request: InteractiveRequest,
        access: RequestAccess,
        began: float,
        order: EngineOrder,
    ) -> AsyncIterator[EngineAnswer]:
        assert self._session is not None
        span = self._call_span(path, engine, access)
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "X-Request-Id": access.request_id,
            "traceparent": span.trace.header,
        }
        if engine.api_key:
            headers["Authorization"] = f"Bearer {engine.api_key}"
        progress = RequestProgress()
        tenant = access.caller.tenant if access.caller else ""
        body = request.body if self.salts is None else await self.salts.body(engine, path, request, tenant)
        probe = self.directory.begin(engine)
        sent = self.choice.sent(engine, order)
        waits = self.first_tokens.begin(engine.url, began, streamed=request.stream)
        reached, answer = True, None
        try:
            try:
                with progress:
                    answer = await self._session.post(
                        f"{engine.url}{path}",
                        data=body,
                        headers=headers,
                        allow_redirects=False,
                        trace_request_ctx=progress,
                        ssl=ssl_of(engine.tls),
                    )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                reached = False
                raise _NotSent from error
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if progress.closed_in_idleness(asyncio.get_running_loop().time()):
                    raise _NotSent from error
                raise self._broken("lost", 502, LOST, engine) from error
            except TimeoutError as error:
                raise self._broken("timeout", 504, LATE, engine) from error
            except aiohttp.ClientError as error:
                raise self._broken("garbage", 502, UNREADABLE, engine) from error
            if answer.status != 200:  # else `whole` or `relay` knows
                self.directory.answered(engine, well=not is_failure(answer.status))
            yield EngineAnswer(engine, answer, waits, sent)
        finally:
            self.directory.end(engine, reached=reached, probe=probe)
            sent.close()
            _end(span, answer)
            self.first_tokens.end(engine.url, waits, came=False)
            if answer is not None:
                answer.close()  # of an answer that was read to its end the connection is kept already

    def _call_span(self, path: str, engine: EngineTarget, access: RequestAccess) -> Span:
        name, attributes = engine_call(TASKS.get(path, "chat"), engine.model, engine.url)
        return self._spans.begin(name, SpanKind.CLIENT, access.trace, attributes)

    def _broken(self, outcome: str, status: int, message: str, engine: EngineTarget) -> ApiError:
        """What the caller is told of an engine that did not answer, or not to the end."""
        self.directory.answered(engine, well=False)
        self._metrics.engine_request(outcome)
        return ApiError(status, message, code=f"engine_{outcome}")

    async def refusal(self, found: EngineAnswer, path: str) -> ApiError:
        """What an answer other than 200 to a request to this path means for the caller. Raises nothing."""
        answer = found.http
        status, said = answer.status, EngineError()
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            async with asyncio.timeout(self._policy.connect):
                said = read_error(orjson.loads(await read_beginning(answer, ERROR_BYTES)))
        self._metrics.engine_request("refused" if status in RELAYED else "failed")
        if path in OPTIONAL_ROUTES and (
            status in (405, 501) or (status == 404 and "model" not in said.message.lower())
        ):
            self.directory.lacks_route(found.engine, path)
            return no_route(path)
        return error_for_caller(status, said, answer.headers.get("Retry-After"))

    async def whole(self, answer: EngineAnswer) -> tuple[bytes, Usage | None]:
        """The body of an answer that is no stream, and its usage. Raises ApiError."""
        try:
            body = await read_body(answer.http, MOST_ANSWER)
            found = orjson.loads(body)
            usage = read_usage(found)
        except TimeoutError as error:
            raise self._broken("timeout", 504, LATE, answer.engine) from error
        except (BodyTooLarge, UnaskedEncoding, ValueError, aiohttp.ClientError, OSError) as error:
            raise self._broken("garbage", 502, UNREADABLE, answer.engine) from error
        if (said := unreadable.error_in(found)) is not None:
            named = unreadable.status_in(said)
            status = named or 502
            self.directory.answered(answer.engine, well=not is_failure(status))
            self._metrics.engine_request("refused" if status in RELAYED else "failed")
            raise error_of_answer(named, read_error(found))
        self.directory.answered(answer.engine, well=True)
        self._metrics.engine_request("answered")
        answer.sent.answered(None if usage is None else usage.completion_tokens, whole=True)
        return body, usage

    async def relay(self, answer: EngineAnswer, stream: StreamReader, send: Send) -> None:
        """Pass a stream on, event by event, to its end. What goes wrong now can only be said in the stream."""
        outcome, sending, clock, began = "answered", 0.0, self.choice.clock, self.choice.clock()
        try:
            while data := await self._part(answer.http):
                before = stream.generating
                passed = stream.feed(data)
                if stream.generating and not before:
                    self._first_token(answer)
                if passed:
                    since = clock()
                    await send({"type": "http.response.body", "body": passed, "more_body": True})
                    sending += clock() - since
            if left := stream.finish():
                await send({"type": "http.response.body", "body": left, "more_body": True})
            if not stream.done:
                outcome = "lost"
        except TimeoutError:
            outcome = "timeout"
        except (aiohttp.ClientError, OSError):
            outcome = "lost"
        self.directory.answered(answer.engine, well=outcome == "answered")
        self._metrics.engine_request(outcome)
        if outcome == "answered" and stream.usage is not None:
            paced = sending <= MOST_SENDING * (clock() - began)
            answer.sent.answered(stream.usage.completion_tokens, whole=False, paced=paced)
        if outcome != "answered":
            error = envelope("The engine was lost before its answer ended.", "server_error", code=f"engine_{outcome}")
            event = b"data: " + orjson.dumps(error) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def models_of(self, url: str, api_key: str | None, tls: TlsFiles | None = None) -> list[str]:
        """Names of the models that a server says it serves. Raises what goes wrong: aiohttp.ClientError, ValueError."""
        assert self._session is not None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        async with (
            asyncio.timeout(2 * self._policy.connect),
            self._session.get(
                f"{url}/v1/models",
                headers=headers,
                allow_redirects=False,
                trace_request_ctx=RequestProgress(),
                ssl=ssl_of(tls),
            ) as answer,
        ):
            answer.raise_for_status()
            found = orjson.loads(await read_body(answer, PAGE_BYTES))
        names = [entry.get("id") for entry in found["data"][:MOST_MODELS]]
        return [name for name in names if isinstance(name, str) and 0 < len(name) <= LONGEST_MODEL]

    def used(self, model: str, usage: Usage) -> None:
        """Count what an answer has used."""
        self._metrics.used(model, usage.prompt_tokens, usage.completion_tokens)

    async def _part(self, answer: aiohttp.ClientResponse) -> bytes:
        async with asyncio.timeout(self._policy.silent):
            return await answer.content.readany()

    def _first_token(self, answer: EngineAnswer) -> None:
        answer.sent.first_token()
        seconds = self.first_tokens.end(answer.engine.url, answer.waits, came=True)
        if seconds is not None:
            self._metrics.first_token(answer.engine.model, seconds)


async def until_disconnect(receive: Receive) -> None:
    """Return when the caller has left. The request's body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(work: asyncio.Task[None], receive: Receive) -> None:
    """Wait for `work`; cancel it when the caller leaves. Raises Disconnected, or what `work` raised."""
    gone = asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return
        raise Disconnected
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


def _end(span: Span, answer: aiohttp.ClientResponse | None) -> None:
    """The end of a call: with its status, or without an answer."""
    if answer is None:
        span.end({}, error="no_answer")
    else:
        span.end(
            {"http.response.status_code": answer.status}, error=None if answer.status == 200 else str(answer.status)
        )
