"""The output file and the error file of a batch, in the order of its input.

A line of the output file is an answer of status 200. Everything else is in the error file: an answer of another status
(`response` is set, `error` null), or no answer (`error` is set, `response` null). Together they are the input's lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from batch_assets.api.batches.snapshot import SNAPSHOT
from batch_assets.api.billing.answer_usage import answer_usage
from batch_assets.api.database.batch_records import BatchRecord
from batch_assets.api.database.file_records import FileRecord, Purpose, content_path
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.requests.api_error import error_type
from batch_assets.api.requests.error_answers import MESSAGE_LENGTH, envelope
from gpu_runner.rows import Outcome
from resources.objects.object_read_ahead import read_ahead
from resources.objects.opening import temporary_folder

_WORDS = ("message", "param", "code")
READS = 4  # at once, of 250 rows each
KINDS = OUTPUT, ERROR = "output", "error"
REJECTED, HTTP = "rejected_", "http_"
REST = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
    "result_damaged": "The result of this request was damaged or lost in the store.",
}
CODES = {"timeout": ("request_timeout", "This request timed out.")}
MESSAGES = {
    "answer_too_large": "The answer to this request was larger than this service keeps.",
    "engine_killed": "The engine ended each time that it worked on this request.",
}


@dataclass(slots=True)
class Usage:
    """Tokens of all answers of a batch."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, outcome: Outcome) -> None:
        """Those of one more answer."""
        found = answer_usage(outcome)
        self.input_tokens += found.tokens.input_tokens
        self.cached_tokens += found.tokens.cached_tokens
        self.output_tokens += found.tokens.output_tokens
        self.reasoning_tokens += found.reasoning_tokens

    def to_json(self) -> str:
        """As `usage` of a batch object."""
        return json.dumps(
            {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": self.input_tokens + self.output_tokens,
            }
        )


class ResultsLost(Exception):
    """Batch objects of a batch that is not over are damaged or gone: their rows can be asked for again."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(f"{len(keys)} batch objects")
        self.keys = keys


@dataclass(slots=True)
class Results:
    """What was written: the files' records, and the counts of the batch.

    `lost`: keys of objects without results that can be asked for again.
    """

    output: FileRecord | None = None
    error: FileRecord | None = None
    completed: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)
    lost: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[FileRecord]:
        """Those that have lines."""
        return [file for file in (self.output, self.error) if file is not None]


def write_results(run: BatchRun, rest: str, created_at: int, expires_at: int, *, without_lost: bool = False) -> Results:
    """Write both files into the store. `rest`: the code of lines that have no outcome. Blocks.

    Raises CorruptObject for the input, ResultsLost; not `without_lost`: lines of lost objects are then errors.
    """
    found = Results()
    with temporary_folder() as folder:
        output, error = Path(folder) / "output", Path(folder) / "error"
        with output.open("wb") as good, error.open("wb") as bad:
            _write_lines(run, rest, found, good, bad)
        if found.lost and not without_lost:
            raise ResultsLost(found.lost)
        for kind, path, lines in ((OUTPUT, output, found.completed), (ERROR, error, found.failed)):
            if not lines:
                continue
            file = FileRecord(
                _file_id(run.batch_id, run.held.epoch, kind),
                run.record.tenant,
                Purpose.BATCH_OUTPUT,
                f"{run.batch_id}_{kind}.jsonl",
                path.stat().st_size,
                created_at,
                expires_at,
            )
            run.store.objects.upload(file.path, path)
            setattr(found, kind, file)
    return found


def _file_id(batch_id: str, epoch: int, kind: str) -> str:
    """The same for the same worker's try; another's has its own, so that neither overwrites what the other names."""
    name = f"{batch_id}/{epoch}/{kind}"
    return f"file-{hashlib.sha256(name.encode()).hexdigest()[:24]}"


def unnamed_contents(batch: BatchRecord) -> list[str]:
    """Paths of result files that a worker may have written before it saw that the batch was another's."""
    ids = [_file_id(batch.id, epoch, kind) for epoch in range(1, batch.epoch + 1) for kind in KINDS]
    return [content_path(one) for one in ids if one not in (batch.output_file_id, batch.error_file_id)]


def _write_lines(run: BatchRun, rest: str, found: Results, good: BinaryIO, bad: BinaryIO) -> None:
    manifest = run.store.manifest(SNAPSHOT)
    tables = run.store.prompt_tables(manifest, run.entries, ("row_id",))
    keys = [entry.key for entry in run.entries]
    for (entry, table), kept in zip(tables, read_ahead(run.outcomes, keys, READS), strict=True):
        outcomes, reason = (kept, rest) if kept is not None else (run.journaled(entry.key), "result_damaged")
        if kept is None and entry.key not in run.given_up:
            found.lost.append(entry.key)
        for custom_id in table.column("row_id").to_pylist():
            outcome = outcomes.get(custom_id)
            if outcome is not None and outcome.ok:
                found.completed += 1
                found.usage.add(outcome)
                good.write(result_line(run.batch_id, custom_id, outcome, rest))
            else:
                found.failed += 1
                bad.write(result_line(run.batch_id, custom_id, outcome, reason))


def result_line(batch_id: str, custom_id: str, outcome: Outcome | None, rest: str) -> bytes:
    """One line of a file, with its end."""
    name = hashlib.blake2b(f"{batch_id}/{custom_id}".encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
    response: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    if outcome is None:
        error = {"code": rest, "message": REST.get(rest, "This request was not executed.")}
    elif outcome.ok:
        response = _response(name, 200, str(outcome.output))
    else:
        code = outcome.error or ""
        status = code.removeprefix(REJECTED).removeprefix(HTTP)
        if status != code and status.isdigit():
            response = _response(name, int(status), _refusal(int(status), outcome.error_message or ""))
        else:
            known = (code, MESSAGES.get(code, "This request could not be executed."))
            error = dict(zip(("code", "message"), CODES.get(code, known), strict=True))
    line = {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _response(name: str, status: int, body: str) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{name}", "body": orjson.Fragment(body)}


def _refusal(status: int, said: str) -> str:
    """What an engine says in an error as OpenAI has it. vLLM's `code` is the status as a number, its `type` a class."""
    try:
        found = _object(orjson.loads(said))
    except orjson.JSONDecodeError:
        found = {}
    error = found.get("error", found)
    error = {"message": error} if isinstance(error, str) else _object(error)
    message, param, code = (one if isinstance(one := error.get(name), str) else None for name in _WORDS)
    text = message or said[:MESSAGE_LENGTH] or "The engine refused the request."
    return orjson.dumps(envelope(text, error_type(status), param, code)).decode()


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
