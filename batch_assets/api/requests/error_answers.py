"""Errors as OpenAI documents them: `{"error": {message, type, param, code}}`, for every answer that is no success.

Shapes and words follow what the stock clients read (openai-python 3.54, `_exceptions.py`: type, param, code).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from batch_assets.api.database.service_database import is_records_trouble
from batch_assets.api.requests.api_error import ApiError
from resources.objects.store_health import is_store_trouble

log = logging.getLogger(__name__)

MESSAGE_LENGTH = 500
RETRY_AFTER_SECONDS = 5  # while the records or the store are away
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
CLOSED = 499  # as nginx has it: the caller was gone before its answer began
INSTEAD = {"/v1/uploads": "files are sent whole, by POST /v1/files"}  # of calls of OpenAI's that are not here
REASON = "error_code"  # in the state of a request's ASGI scope


def not_found(kind: str, name: str, param: str = "id") -> ApiError:
    """No such object, or one of another tenant: both look the same."""
    return ApiError(404, f"No such {kind}: {name[:80]}", param=param)


def unsupported_type(found: str, expected: str) -> ApiError:
    """A body of another type than the call takes."""
    said = f"Unsupported content type: '{found[:80]}'. This API method only accepts '{expected}' requests."
    return ApiError(400, said, code="unsupported_content_type")


def envelope(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ErrorResponse(JSONResponse):
    """An error as an answer. It leaves its code in the request's state, for metrics."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(envelope(error.message, error.kind, error.param, error.code), error.status, error.headers)
        self._reason = error.code or error.kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        scope.setdefault("state", {})[REASON] = self._reason
        await super().__call__(scope, receive, send)


def error_response(error: ApiError) -> JSONResponse:
    """An error as an answer."""
    return ErrorResponse(error)


def add_error_handlers(app: FastAPI) -> None:
    """Every error that leaves the application has the documented shape."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(SQLAlchemyError, _on_records_error)
    app.add_exception_handler(Exception, _on_defect)


async def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:200]
    if error.status_code == 404:
        instead = next((f": {said}" for call, said in INSTEAD.items() if f"{path}/".startswith(f"{call}/")), "")
        refused = ApiError(404, f"Invalid URL ({method} {path}){instead}", code="unknown_url")
    elif error.status_code == 405:
        hint = "(HINT: Perhaps you meant to use a different HTTP method?)"
        refused = ApiError(405, f"Not allowed to {method} on {path} {hint}", code="method_not_supported")
        refused.headers = {"Allow": ", ".join(_allowed(request))}
    else:
        refused = ApiError(error.status_code, str(error.detail)[:MESSAGE_LENGTH])
    return error_response(refused)


def _allowed(request: Request) -> list[str]:
    """Methods of this path. The framework's own answer names those of one route, and a path has a route for each."""
    asked = {"type": "http", "path": request.scope["path"], "root_path": "", "headers": []}

    def takes(method: str) -> bool:
        return any(route.matches({**asked, "method": method})[0] is Match.FULL for route in request.app.routes)

    return [method for method in METHODS if takes(method)]


async def _on_invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = [{**found, "loc": found["loc"][1:]} for found in error.errors()]  # the first word: query, path or header
    message, param, code = described(problems)
    return error_response(ApiError(400, message, param=param, code=code))


def described(problems: Sequence[Any]) -> tuple[str, str | None, str | None]:
    """(message, param, code) for what pydantic found wrong; the first problem, without the value that was sent."""
    first = problems[0]
    param = ".".join(str(part) for part in first.get("loc", ()))[:100] or None
    if first.get("type") == "missing":
        return f"Missing required parameter: '{param}'.", param, "missing_required_parameter"
    if first.get("type") == "extra_forbidden":
        return f"Unknown parameter: '{param}'.", param, "unknown_parameter"
    return f"Invalid value for '{param}': {first.get('msg', 'invalid')}."[:MESSAGE_LENGTH], param, "invalid_value"


async def _on_records_error(request: Request, error: Exception) -> Response:
    """Answer, on every route, that the records are away. Whether a change was made may be unknown; it may be asked
    for again.
    """
    if not is_records_trouble(error):
        return await _on_defect(request, error)
    log.warning("%s %s: records: %s", request.method, request.url.path[:200], type(error).__name__)
    return error_response(records_away())


def records_away() -> ApiError:
    """The database cannot be asked now."""
    said = "The service's records cannot be reached now. Please try again."
    return ApiError(503, said, code="records_unavailable", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


@contextlib.contextmanager
def store_calls() -> Iterator[None]:
    """Around calls of the store for a request. Raises ApiError 503 when it refuses or does not answer.

    An object that is not there is the caller's to judge.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        if not is_store_trouble(error):
            raise
        log.warning("store: %s", type(error).__name__)
        raise store_away() from None


def store_away() -> ApiError:
    """The store cannot be asked now."""
    said = "The service's store cannot be reached now. Please try again."
    return ApiError(503, said, code="store_unavailable", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


async def _on_defect(request: Request, error: Exception) -> Response:
    """What went wrong inside stays inside: the log has it, by the request's path."""
    if isinstance(error, ClientDisconnect):  # in the middle of the body: nobody reads this answer
        return Response(status_code=CLOSED)
    log.error("%s %s: %s", request.method, request.url.path[:200], type(error).__name__)
    message = "The server had an error while processing your request. Sorry about that!"
    return error_response(ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message))
