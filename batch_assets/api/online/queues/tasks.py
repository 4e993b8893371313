"""What is kept of a request: the task, and its result. Frozen, and packed into bytes for whoever keeps them."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import Any

import orjson

from batch_assets.api.interactive.event_stream import Usage

log = logging.getLogger(__name__)


class TaskStatus(enum.StrEnum):
    """`status` of a result."""

    PENDING = "PENDING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"


class TaskKind(enum.StrEnum):
    """What is asked of an engine. `path` is its route."""

    CHAT = "chat"
    EMBEDDING = "embedding"

    @property
    def path(self) -> str:
        """The engine's route for it."""
        return "/v1/chat/completions" if self is TaskKind.CHAT else "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class OnlineTask:
    """An accepted request.

    `body`: the JSON that an engine gets. `created_at`: Unix seconds. `lifetime`: seconds after which nobody wants an
    answer. `reusable`: its answer may be another request's answer, too. `expected_tokens`: counted at first.
    """

    task_id: str
    tenant: str
    client_id: str
    model: str
    kind: TaskKind
    body: bytes
    created_at: float
    lifetime: float
    reusable: bool
    expected_tokens: int
    traceparent: str

    def packed(self) -> bytes:
        """As bytes: one line of JSON, then the body."""
        head = {
            "tenant": self.tenant,
            "client_id": self.client_id,
            "model": self.model,
            "kind": self.kind,
            "created_at": self.created_at,
            "lifetime": self.lifetime,
            "reusable": self.reusable,
            "expected_tokens": self.expected_tokens,
            "traceparent": self.traceparent,
        }
        return orjson.dumps(head) + b"\n" + self.body


def unpack_task(task_id: str, packed: bytes) -> OnlineTask:
    """The task in these bytes."""
    head, _, body = packed.partition(b"\n")
    fields: dict[str, Any] = orjson.loads(head)
    return OnlineTask(task_id=task_id, body=body, **{**fields, "kind": TaskKind(fields["kind"])})


def read_task(task_id: str, packed: bytes | None) -> OnlineTask | None:
    """The task; None, and a line in the log, for what is none: it must not hold up others."""
    try:
        return unpack_task(task_id, packed or b"")
    except (ValueError, TypeError, LookupError):
        log.error("what is kept of %s is no task", task_id[:40])
        return None


@dataclass(frozen=True, slots=True)
class TaskError:
    """Why a task failed. `code` is a stable word of the documentation, `message` for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How a task ended. `output`: JSON, of SUCCESS only; `choices`: the engine's, where the output does not say it all.

    `tries`: requests to engines that were made for it and failed. `cached`: answered by another request's answer.
    """

    status: TaskStatus
    finished_at: float
    output: bytes | None = None
    choices: bytes | None = None
    usage: Usage | None = None
    error: TaskError | None = None
    tries: int = 0
    cached: bool = False

    def packed(self) -> bytes:
        """The JSON object that callers see, but for the task's id."""
        usage = None
        if self.usage is not None:
            used = self.usage
            usage = {
                "prompt_tokens": used.prompt_tokens,
                "completion_tokens": used.completion_tokens,
                "total_tokens": used.total,
            }
        error = None if self.error is None else {"code": self.error.code, "message": self.error.message}
        fields: dict[str, Any] = {
            "status": self.status,
            "output": None if self.output is None else orjson.Fragment(self.output),
            "usage": usage,
            "error": error,
            "finished_at": round(self.finished_at, 3),
            "tries": self.tries,
            "cached": self.cached,
        }
        if self.choices is not None:
            fields["choices"] = orjson.Fragment(self.choices)
        return orjson.dumps(fields)


def failed(code: str, message: str, now: float, tries: int = 0) -> TaskResult:
    """The result of a task without an answer."""
    return TaskResult(TaskStatus.FAILED, now, error=TaskError(code, message), tries=tries)
