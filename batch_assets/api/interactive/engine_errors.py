"""What an answer of an engine other than 200 means: for the caller, and for the engine. Pure."""

from __future__ import annotations

from typing import Any

from batch_assets.api.requests.errors import ApiError

RELAYED = frozenset({400, 404, 408, 413, 415, 422})  # what an engine says of the request itself
LOST = "The engine was lost before it answered."
LATE = "The engine did not answer in time."
UNREADABLE = "The engine's answer could not be read."


def is_failure(status: int) -> bool:
    """Of the engine, whatever it was asked: it is broken, or takes no more. 501: it has no such route."""
    return status == 429 or (status >= 500 and status != 501)


def error_for_caller(status: int, said: str, retry_after: str | None) -> ApiError:
    """`said`: the engine's words, as `message_of` gives them. `retry_after`: its header."""
    if status in RELAYED:
        return ApiError(status, said or "The engine refused the request.")
    if status in (429, 503):
        headers = {"Retry-After": _seconds(retry_after)}
        return ApiError(503, "The engine is overloaded. Please try again.", code="engine_overloaded", headers=headers)
    return ApiError(502, "The engine could not answer the request.", code="engine_error")


def error_of_answer(status: int | None, said: str) -> ApiError:
    """Of an error that an engine wrote as an answer of status 200. `status`: what it names; the words of one that names
    none are passed on, for nothing shows that they are about us.
    """
    if status is None and said:
        return ApiError(502, said, code="engine_error")
    return error_for_caller(status or 502, said, None)


def no_route(path: str) -> ApiError:
    """No engine of the model has this route."""
    return ApiError(404, f"Invalid URL (POST {path}): the engine of this model has no such route.", code="unknown_url")


def message_of(found: Any) -> str:
    """What an engine says in an error: `{"error": {"message": …}}`, or `{"message": …}` of older ones."""
    error = found.get("error", found) if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message[:500] if isinstance(message, str) else ""


def _seconds(text: str | None) -> str:
    return text if text is not None and text.isdecimal() and len(text) <= 4 else "1"
