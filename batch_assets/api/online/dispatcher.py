"""The seam to engines: a dispatcher takes one request and brings its answer, or says what kind of failure it was.

`ProxyDispatcher` sends each request as it is, by the proxy, which chooses the engine. `list_dispatcher` puts texts of
several requests together.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import Protocol

import orjson

from batch_assets.api.access.request_access import RequestAccess, continued_trace
from batch_assets.api.interactive.event_stream import Usage
from batch_assets.api.interactive.proxy import Proxy
from batch_assets.api.interactive.request_body import SALT, InteractiveRequest, size_of
from batch_assets.api.online.queues.tasks import TaskKind
from batch_assets.api.online.request import ReadAnswer
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.callers import Caller

_REFUSED = frozenset({400, 404, 413, 415, 422})


class Failure(enum.Enum):
    """What a request without an answer means: the engine refused it for good; the engine broke, which costs a try;
    there is no engine now, or it is full, which costs none.
    """

    REFUSED = "refused"
    BROKEN = "broken"
    AWAY = "away"


class DispatchFailed(Exception):
    """No answer. `code` is a stable word, `message` may go to the caller."""

    def __init__(self, failure: Failure, code: str, message: str) -> None:
        super().__init__(code)
        self.failure, self.code, self.message = failure, code, message


@dataclass(frozen=True, slots=True)
class DispatchRequest:
    """One request for an engine. `deadline`: Unix seconds, after which nobody wants the answer. `failures`: tries that
    failed before this one. `tenant`: whose it is; of several whose answer is the same, the first one's.
    """

    kind: TaskKind
    model: str
    body: bytes
    expected_tokens: int
    deadline: float
    traceparent: str
    failures: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class DispatchAnswer:
    """The engine's answer, whole. `read`: what a result shows of it, where somebody has read it already."""

    body: bytes
    usage: Usage | None
    read: ReadAnswer | None = None


class Dispatcher(Protocol):
    """Sends requests to engines, and gives their answers back."""

    def identity(self, model: str) -> str:
        """What tells the model that this name stands for now from another one: part of the key of answers."""

    async def ask(self, request: DispatchRequest) -> DispatchAnswer:
        """An answer of status 200. Raises DispatchFailed. Cancelled, it leaves nothing in the engine."""


class ProxyDispatcher:
    """One request at a time, by the proxy of interactive requests."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def identity(self, model: str) -> str:
        """The name: who serves another model under it waits five minutes or names it anew."""
        return model

    async def ask(self, request: DispatchRequest) -> DispatchAnswer:
        """An engine's answer. Raises DispatchFailed."""
        fields = orjson.loads(request.body)
        size, salted = size_of(fields, len(request.body)), SALT in fields
        wanted = InteractiveRequest(request.model, request.body, False, False, request.expected_tokens, size, salted)
        caller = Caller(request.tenant, None, frozenset())
        access = RequestAccess(trace=continued_trace(request.traceparent), caller=caller)
        asked = False
        try:
            async with self._proxy.open(request.kind.path, wanted, access, time.monotonic()) as answer:
                asked = True
                if answer.http.status != 200:
                    raise await self._proxy.refusal(answer, request.kind.path)
                body, usage = await self._proxy.whole(answer)
        except ApiError as error:
            raise failure_of(error, asked=asked) from None
        if usage is not None:
            self._proxy.used(request.model, usage)
        return DispatchAnswer(body, usage)


def failure_of(error: ApiError, *, asked: bool) -> DispatchFailed:
    """What the proxy's error means. `asked`: an engine has answered, so it is the engine's word."""
    if asked and error.status in _REFUSED:
        return DispatchFailed(Failure.REFUSED, "request_refused", error.message)
    if error.status in (429, 503) or (error.status == 404 and not asked):
        return DispatchFailed(Failure.AWAY, error.code or "no_engine", error.message)
    return DispatchFailed(Failure.BROKEN, error.code or "engine_error", error.message)
