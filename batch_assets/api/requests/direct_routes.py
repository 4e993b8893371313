"""Routes that are called a thousand times a second, answered before FastAPI. ASGI middleware, around the application.

FastAPI's own part of such a small request (routing, dependencies, exit stacks, its middleware) takes more CPU than all
that the request is about. A direct route reads a request that has the plain form by itself; every other one, also one
with a parameter that is not valid, goes to the route of the same path in FastAPI, which has the documentation, too.
Callers, bounds of bodies, errors and metrics are the same on both ways.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batch_assets.api.requests.request_bounds import BodyLimits, RequestLimits

Answer = Callable[[Request], Awaitable[Response]]
_ROUTE = "direct_route"  # in a request's ASGI scope, between the choice of the route and its answer


@dataclass(frozen=True, slots=True)
class DirectRoute:
    """`path`: as in FastAPI, with at most one parameter, at its end. `plain`: whether a scope, whose method and path
    are these, is one that `answer` can read; it looks at headers and the query string.
    """

    method: str
    path: str
    plain: Callable[[Scope], bool]
    answer: Answer

    def takes(self, scope: Scope) -> bool:
        """Whether this request is answered here. Its path parameter is then in the scope."""
        if scope["method"] != self.method:
            return False
        path: str = scope["path"]
        prefix, parameter, _ = self.path.partition("{")
        if not parameter:
            return path == prefix and self.plain(scope)
        value = path.removeprefix(prefix)
        if not value or len(value) == len(path) or "/" in value or "\n" in value or not self.plain(scope):
            return False
        scope["path_params"] = {self.path[len(prefix) + 1 : -1]: value}
        return True


class DirectRoutes:
    """`app`: what answers all other requests, after its own middleware. `inner`: the application in it."""

    def __init__(self, app: ASGIApp, inner: FastAPI, routes: Sequence[DirectRoute], limits: BodyLimits) -> None:
        self._app, self._inner, self._routes = app, inner, tuple(routes)
        self._limited = RequestLimits(self._answer, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope.get("root_path"):
            for route in self._routes:
                if route.takes(scope):
                    scope["app"], scope[_ROUTE] = self._inner, route
                    await self._limited(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        route: DirectRoute = scope[_ROUTE]
        scope["route"] = route
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            response = await route.answer(request)
            await response(scope, receive, noted)
        except Exception as error:
            if started:
                raise
            refusal, defect = await self._refused(request, error)
            await refusal(scope, receive, send)
            if defect is not None:
                raise defect from None  # as Starlette does: the server's log has where it was

    async def _refused(self, request: Request, error: Exception) -> tuple[Response, Exception | None]:
        """What FastAPI's application answers to this error; and the error, where it is a defect."""
        for kind in type(error).__mro__:
            if (handler := self._inner.exception_handlers.get(kind)) is not None:
                response: Response = await handler(request, error)  # type: ignore[misc]
                return response, error if kind is Exception else None
        raise error
