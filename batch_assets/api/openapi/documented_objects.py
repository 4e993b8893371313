"""The objects of the API as its OpenAPI description shows them, with OpenAI's names. Nothing is parsed with them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from batch_assets.api.database.file_records import Purpose
from batch_assets.api.database.states import BatchStatus


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
