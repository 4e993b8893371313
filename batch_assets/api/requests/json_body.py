"""Bodies of requests that are JSON objects. They are read when the caller is known, and not before.

FastAPI parses a declared body before it asks any dependency: who has no key would be told of his JSON.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.error_answers import described, unsupported_type

Body = TypeVar("Body", bound=BaseModel)


def json_body(model: type[Body]) -> Callable[[Request], Awaitable[Body]]:
    """Dependency: the request's body as this model. A route declares it behind its caller. Raises ApiError 400."""

    async def read(request: Request) -> Body:
        return parse_body(model, request.headers.get("content-type", ""), await request.body())

    return read


def parse_body(model: type[Body], content_type: str, body: bytes) -> Body:
    """A body as this model. Raises ApiError 400."""
    if not body:
        raise ApiError(400, "Missing body of the request.", code="missing_required_parameter")
    check_content_type(content_type)
    try:
        found = json.loads(body, parse_constant=_refuse)  # orjson makes a float of an integer of more than 64 bits
    except (ValueError, RecursionError):
        raise ApiError(400, "We could not parse the JSON body of your request.") from None
    if not isinstance(found, dict):
        raise ApiError(400, "Invalid body: expected a JSON object.")
    try:
        return model.model_validate(found)
    except ValidationError as error:
        message, param, code = described(error.errors(include_url=False, include_context=False, include_input=False))
        raise ApiError(400, message, param=param, code=code) from None


def _refuse(word: str) -> None:
    raise ValueError(f"expected JSON, found {word}")


def check_content_type(said: str) -> None:
    """Raises ApiError 400 for what is no JSON."""
    kind = said.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise unsupported_type(kind, "application/json")
