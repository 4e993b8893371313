"""The service's OpenAPI description: what FastAPI finds in the routes, and what it cannot know.

Documented errors, the objects of answers, bodies that are read as they come (uploads, requests for engines), and how a
caller shows who he is. `tests/batch_assets/api/test_openapi.py` holds the service to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from batch_assets.api.batches.create import CreateBatch
from batch_assets.api.database.file_records import LONGEST_LIFE, SHORTEST_LIFE, Purpose
from batch_assets.api.database.states import BatchStatus
from batch_assets.api.online.request import InferenceRequest, Redrive


class Shown(BaseModel):
    """An object of an answer."""

    model_config = ConfigDict(extra="allow")


class ErrorDetails(BaseModel):
    """`type`: the family; `code`: a stable word, where there is one; `param`: the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetails


class File(Shown):
    """A file. Times are Unix seconds."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: str
    status_details: str | None


class FileList(Shown):
    """A page of files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Shown):
    """The answer that says that a file is deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class LineProblem(Shown):
    """What is wrong with an input file."""

    code: str | None
    message: str
    line: int | None
    param: str | None


class LineProblems(Shown):
    """All that was found, up to a limit."""

    object: Literal["list"]
    data: list[LineProblem]


class RequestCounts(Shown):
    """Lines that have an outcome. Counts only grow."""

    total: int
    completed: int
    failed: int


class Batch(Shown):
    """A batch. Times are Unix seconds, null until they happen."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: LineProblems | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: dict[str, Any] | None
    metadata: dict[str, str] | None


class BatchList(Shown):
    """A page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Model(Shown):
    """A model that can be asked for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    shutdown_date: str | None


class ModelList(Shown):
    """The models that can be asked for."""

    object: Literal["list"]
    data: list[Model]


class Usage(Shown):
    """Tokens of one answer."""

    prompt_tokens: int
    total_tokens: int


class Answer(Shown):
    """An engine's answer; its other fields are the engine's."""

    object: str
    model: str
    usage: Usage


class Response(Shown):
    """An engine's answer to `/v1/responses`; its other fields are the engine's."""

    object: Literal["response"]
    model: str


class Bucket(Shown):
    """A day of usage or costs, with one result per group."""

    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[dict[str, Any]]


class UsagePage(Shown):
    """Days of usage or costs. `next_page`: the value of `page` for what follows."""

    object: Literal["page"]
    data: list[Bucket]
    has_more: bool
    next_page: str | None


REFERENCE = "#/components/schemas/{model}"
Operation = tuple[str, str]  # method, path
ANSWERS: Mapping[Operation, type[BaseModel]] = {
    ("post", "/v1/files"): File,
    ("get", "/v1/files"): FileList,
    ("get", "/v1/files/{file_id}"): File,
    ("delete", "/v1/files/{file_id}"): DeletedFile,
    ("post", "/v1/batches"): Batch,
    ("get", "/v1/batches"): BatchList,
    ("get", "/v1/batches/{batch_id}"): Batch,
    ("post", "/v1/batches/{batch_id}/cancel"): Batch,
    ("get", "/v1/models"): ModelList,
    ("get", "/v1/models/{model}"): Model,
    ("get", "/v1/organization/usage/completions"): UsagePage,
    ("get", "/v1/organization/usage/embeddings"): UsagePage,
    ("get", "/v1/organization/costs"): UsagePage,
}
BODIES: Mapping[Operation, type[BaseModel]] = {
    ("post", "/v1/batches"): CreateBatch,
    ("post", "/v1/inference"): InferenceRequest,
    ("post", "/v1/dead_letters/redrive"): Redrive,
}
INTERACTIVE: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": Answer,
    "/v1/completions": Answer,
    "/v1/embeddings": Answer,
    "/v1/responses": Response,
}
CONTENT = ("get", "/v1/files/{file_id}/content")
_WORDS = {
    400: "The request is not what it should be; `param` and `code` say where and why.",
    401: "No key or token, or one that is not valid (any more).",
    403: "The key lacks the scope; or the request comes from a web page.",
    404: "There is no such object, or it is another tenant's.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Over a limit a minute (`rate_limit_exceeded`) or over a quota (`quota_exceeded`); see its headers.",
    502: "The engine was lost, or its answer could not be read.",
    503: "No engine, database or store now, no engine within the latency target, or overloaded; see `Retry-After`.",
    504: "The engine did not answer in time.",
}
_ALWAYS, _OF_ENGINES, _OF_BODIES = (400, 401, 403, 404, 429, 503), (502, 504), (408, 413)
_TEXT = {"type": "string"}
EVENT = {"type": "object", "required": ["data"], "properties": {"data": _TEXT}}  # of a stream
UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSON lines, one request each."},
        "purpose": {"type": "string", "enum": [Purpose.BATCH]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": SHORTEST_LIFE, "maximum": LONGEST_LIFE},
    },
    "additionalProperties": False,
}
_MESSAGES = {
    "type": "array",
    "items": {"type": "object", "required": ["role"], "properties": {"role": _TEXT, "content": {}}},
}
ASKED: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES},
    "/v1/completions": {"prompt": {"anyOf": [_TEXT, {"type": "array"}]}},
    "/v1/responses": {"input": {"anyOf": [_TEXT, {"type": "array"}]}},
    "/v1/embeddings": {"input": {"anyOf": [_TEXT, {"type": "array"}]}},
}


def describe(app: FastAPI) -> None:
    """Have the application show this description at /openapi.json and /docs."""
    app.openapi = partial(document, app)  # type: ignore[method-assign]


def document(app: FastAPI) -> dict[str, Any]:
    """The description, made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        components = made.setdefault("components", {})
        components.setdefault("schemas", {}).update(_schemas())
        for name in ("HTTPValidationError", "ValidationError"):  # what is wrong is said in OpenAI's shape
            components["schemas"].pop(name, None)
        components["securitySchemes"] = {
            "bearer": {
                "type": "http",
                "scheme": "bearer",
                "description": "An API key or a JSON Web Token. On loopback without any key: not asked for.",
            }
        }
        made["security"] = [{"bearer": []}, {}]
        for path, operations in made["paths"].items():
            for method, operation in operations.items():
                _complete(method, path, operation)
        app.openapi_schema = made
    return app.openapi_schema


def _schemas() -> dict[str, Any]:
    models: list[type[BaseModel]] = [Error, *INTERACTIVE.values(), *ANSWERS.values()]
    named: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "serialization") for model in models]
    named += [(model, "validation") for model in BODIES.values()]
    _, found = models_json_schema(named, ref_template=REFERENCE)
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def _complete(method: str, path: str, operation: dict[str, Any]) -> None:
    """Add what routes do not say to one operation."""
    responses = operation["responses"]
    responses.pop("422", None)
    if (answer := ANSWERS.get((method, path))) is not None:
        responses["200"]["content"] = {"application/json": {"schema": _reference(answer)}}
    elif (method, path) == CONTENT:
        responses["200"]["content"] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    elif path in INTERACTIVE:
        streams = {"text/event-stream": {"schema": EVENT}} if path != "/v1/embeddings" else {}
        responses["200"]["content"] = {"application/json": {"schema": _reference(INTERACTIVE[path])}, **streams}
    statuses = [*_ALWAYS, *(_OF_BODIES if method == "post" else ()), *(_OF_ENGINES if path in INTERACTIVE else ())]
    for status in statuses:
        content = {"application/json": {"schema": _reference(Error)}}
        responses.setdefault(str(status), {"description": _WORDS[status], "content": content})
    if (method, path) == ("post", "/v1/files"):
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": UPLOAD}}}
    elif (body := BODIES.get((method, path))) is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _reference(body)}}}
    elif path in INTERACTIVE:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _asked(path)}}}


def _asked(path: str) -> dict[str, Any]:
    """The body of a request for an engine: what is read here. All other fields are the engine's."""
    own = dict(ASKED[path])
    options = {"type": "object", "properties": {"include_usage": {"type": "boolean"}}}
    common = {"model": _TEXT, "stream": {"type": "boolean"}, "stream_options": options}
    return {"type": "object", "required": ["model", *own], "properties": {**common, **own}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=model.__name__)}
