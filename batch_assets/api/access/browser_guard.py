"""Keeps web pages out of a service on loopback that asks for no key. ASGI middleware.

A page in the user's browser can send requests to 127.0.0.1, uploads among them, and can rebind its own name to that
address. Programs send none of the headers that give a page away, so the stock clients are not touched.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.error_answers import error_response

_NAMES = ("127.0.0.1", "localhost", "[::1]")


class BrowserGuard:
    """Lets requests through that name this server and come from a program, or from its own page of docs."""

    def __init__(self, app: ASGIApp, port: int, scheme: str = "http") -> None:
        self._app, self._scheme = app, scheme
        self._hosts = {f"{name}:{port}" for name in _NAMES} | (
            set(_NAMES) if port == {"http": 80, "https": 443}[scheme] else set()
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := self._refused(scope["headers"])) is not None:
            await error_response(refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refused(self, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        hosts, origins, sites = (_values(headers, name) for name in (b"host", b"origin", b"sec-fetch-site"))
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return ApiError(403, "Host: expected an address of this server", code="unknown_host")
        if any(origin != f"{self._scheme}://{hosts[0]}" for origin in origins):
            return ApiError(403, "Origin: the request comes from a web page of another origin", code="foreign_origin")
        if any(site not in ("none", "same-origin") for site in sites):
            return ApiError(403, "Sec-Fetch-Site: the request comes from a web page", code="foreign_origin")
        return None


def _values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1").strip().lower() for key, value in headers if key.lower() == name]
