"""The first rows of a dataset for a notebook: prompts as an engine would get them and, with one, its answers."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import polars as pl

from batch_assets.capacity_planning.preview_rows import PreviewRow, ask_rows, first_rows
from batch_assets.orchestration.source_place import at_its_place
from batch_assets.request_status.dataset_status import observing
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.source import table_read_by
from gpu_runner.bounded_http.addresses import engine_url
from gpu_runner.bounded_http.key_variables import key_in
from gpu_runner.errors import ExitStatus, UserFacingError
from resources.fleet.engine_tls import tls_of_environment
from resources.fleet.fleet_config import KEY_VARIABLE

MOST_ROWS = 100
# What people look at comes first: a frame that is printed shows its first and last columns.
_SCHEMA: dict[str, Any] = {
    "prompt": pl.List(pl.Struct({"role": pl.String, "content": pl.String})),
    "output": pl.String,
    "refused": pl.String,
    "problem": pl.String,
    "finish_reason": pl.String,
    "prompt_tokens": pl.Int64,
    "completion_tokens": pl.Int64,
    "seconds": pl.Float64,
    "file": pl.String,
    "line": pl.Int64,
}


class NotebookPreviewError(UserFacingError):
    """The preview cannot be made as it was asked for."""

    exit_status = ExitStatus.WRONG_REQUEST


def preview(spec: GeneratedDatasetSpec, rows: int = 5, endpoint: str | None = None) -> pl.DataFrame:
    """The first rows as a frame: `prompt` (messages, or a text), `refused` where a row cannot be used.

    `endpoint`: URL of a running OpenAI-compatible server, which is asked for `output` (vectors as JSON); its key is
    BATCH_ASSETS_API_KEY. `problem`: why there is none, or what is wrong with it. Writes nothing. Raises
    NotebookPreviewError, SourceError, EngineError.
    """
    if not 1 <= rows <= MOST_ROWS:
        raise NotebookPreviewError(f"rows: expected 1 to {MOST_ROWS}, found {rows}")
    if table_read_by(spec.source) is not None:
        with observing([spec.name]) as (seen,):
            spec = at_its_place(spec, seen.instance, seen.store.objects)
    found = first_rows(spec, Path.cwd(), rows)
    if endpoint is not None:
        if (user := spec.prompt.user_model) is not None and user.engine is not None:
            raise NotebookPreviewError(
                "endpoint: expected one engine for the whole conversation, found prompt.user_model.engine "
                f"({user.engine}), which a fleet.yaml describes. Ask with `batch-assets preview`"
            )
        try:
            url = engine_url(endpoint)
        except ValueError as error:
            raise NotebookPreviewError(f"endpoint: {error}") from None
        # A key goes nowhere but where it was given for.
        given = os.environ.get("BATCH_ASSETS_ENDPOINT")
        key = key_in(KEY_VARIABLE) if not given or engine_url(given) == url else None
        with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop of its own in this one
            found, _ = thread.submit(ask_rows, found, spec.generation(), url, key, tls_of_environment()).result()
    schema = _SCHEMA if spec.task == "chat" else _SCHEMA | {"prompt": pl.String}
    shown = schema if endpoint is not None else {name: kind for name, kind in schema.items() if name in _ASKED_OR_NOT}
    return pl.DataFrame([_line(row) for row in found], schema=shown)


_ASKED_OR_NOT = ("prompt", "refused", "file", "line")


def _prompt(row: PreviewRow) -> Any:
    """The prompt as its column has it: parts of a content, and what is scored or ranked, as JSON text."""
    prompt = row.shown()
    if isinstance(prompt, list):
        return [{"role": one["role"], "content": _text(one.get("content"))} for one in prompt]
    return prompt if prompt is None else _text(prompt)


def _text(content: Any) -> str | None:
    return content if content is None or isinstance(content, str) else orjson.dumps(content).decode()


def _line(row: PreviewRow) -> dict[str, Any]:
    said: dict[str, Any] = {"file": row.file, "line": row.line, "prompt": _prompt(row), "refused": row.refused or None}
    answer = row.answer
    if answer is None:
        return said
    one = answer.completion
    said |= {"problem": answer.problem or None, "seconds": answer.seconds}
    if one is not None:
        output = one.output if isinstance(one.output, str) else orjson.dumps(list(one.output)).decode()
        names = ("finish_reason", "prompt_tokens", "completion_tokens")
        said |= {"output": output} | {name: getattr(one, name) for name in names}
    return said
