"""A request that is refused, as an error of Python: what the rest of the service raises, without a web framework.

`error_answers` makes HTTP answers of it.
"""

from __future__ import annotations

from collections.abc import Mapping

INVALID_REQUEST = "invalid_request_error"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused. `param` is the field that it is about, `code` a stable word of the documentation."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or error_type(status)
        self.headers = dict(headers or {})


def error_type(status: int) -> str:
    """The `type` that goes with an HTTP status."""
    return "server_error" if status >= 500 else _TYPES.get(status, INVALID_REQUEST)
