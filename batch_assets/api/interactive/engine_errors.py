"""What an answer of an engine other than 200 means: for the caller, and for the engine. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from batch_assets.api.access.rate_limits import NO_RETRY
from batch_assets.api.requests.api_error import ApiError
from gpu_runner.client.answers.quota_codes import quota_code

RELAYED = frozenset({400, 404, 408, 413, 415, 422})  # what an engine says of the request itself
NO_QUOTA = "The account of this service at the engine has no quota or credit left. Its operator has to look at it."
LOST = "The engine was lost before it answered."
LATE = "The engine did not answer in time."
UNREADABLE = "The engine's answer could not be read."
_NAME = re.compile(r"[\w.\[\]-]{1,100}")  # of a field or of an error


@dataclass(frozen=True, slots=True)
class EngineError:
    """What an engine says in an error. `param`: the field that it is about; `code`: a stable word; None: not said."""

    message: str = ""
    param: str | None = None
    code: str | None = None


def is_failure(status: int) -> bool:
    """Whether the engine itself failed: it is broken, or takes no more. 501: it has no such route."""
    return status == 429 or (status >= 500 and status != 501)


def error_for_caller(status: int, said: EngineError, retry_after: str | None) -> ApiError:
    """`said`: as `read_error` gives it. `retry_after`: the engine's header."""
    if said.code and quota_code(said.code):
        return ApiError(503, NO_QUOTA, code="engine_quota_exceeded", headers=NO_RETRY)
    if status in RELAYED:
        return ApiError(status, said.message or "The engine refused the request.", param=said.param, code=said.code)
    if status in (429, 503):
        headers = {"Retry-After": _seconds(retry_after)}
        return ApiError(503, "The engine is overloaded. Please try again.", code="engine_overloaded", headers=headers)
    return ApiError(502, "The engine could not answer the request.", code="engine_error")


def error_of_answer(status: int | None, said: EngineError) -> ApiError:
    """The error that an engine wrote with status 200. `status`: what it names; the words of one that names
    none are passed on, for nothing shows that they are about us.
    """
    if status is None and said.message:
        return ApiError(502, said.message, code="engine_error")
    return error_for_caller(status or 502, said, None)


def no_route(path: str) -> ApiError:
    """No engine of the model has this route."""
    return ApiError(404, f"Invalid URL (POST {path}): the engine of this model has no such route.", code="unknown_url")


def read_error(found: Any) -> EngineError:
    """An error as engines write it: `{"error": {"message", "param", "code"}}`, or older ones without the outer object.

    A `code` that is a number, as vLLM's, repeats the status and says nothing of its own. Where the `type` says that the
    account can pay for no further request, it is the code.
    """
    error = found.get("error", found) if isinstance(found, dict) else None
    if not isinstance(error, dict):
        return EngineError()
    message = error.get("message")
    code, kind = _name(error.get("code")), _name(error.get("type"))
    code = quota_code(code or "", kind or "") or code
    return EngineError(message[:500] if isinstance(message, str) else "", _name(error.get("param")), code)


def _name(found: Any) -> str | None:
    return found if isinstance(found, str) and _NAME.fullmatch(found) else None


def _seconds(text: str | None) -> str:
    return text if text is not None and text.isdecimal() and len(text) <= 4 else "1"
