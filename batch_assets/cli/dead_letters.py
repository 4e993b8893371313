"""`batch-assets dead-letters`: online requests that were given up, shown and put back by a running service.

The key is read from the environment, never from the command line, where other users of the machine could see it.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from batch_assets.cli.output import output_console, print_json
from batch_assets.cli.user_errors import CommandError
from gpu_runner.bounded_http.addresses import direct, engine_url
from gpu_runner.bounded_http.bounded_read import ERROR_BYTES, PAGE_BYTES
from gpu_runner.errors import ExitStatus, UserFacingError

URL, KEY = "BATCH_ASSETS_FRONT_DOOR_URL", "BATCH_ASSETS_FRONT_DOOR_KEY"
DEFAULT_URL = "http://127.0.0.1:8080"
MOST_LETTERS = 1000  # of one call of the service
CALL_SECONDS = 30.0
PART = 64 << 10
_COLUMNS = ("task_id", "tenant", "model", "code", "failures", "created_at", "died_at")


class ServiceError(UserFacingError):
    """The service did not do what it was asked for."""

    exit_status = ExitStatus.FAILED


def list_dead_letters(limit: int, *, as_json: bool) -> None:
    """Show dead letters of all tenants, newest first. Raises CommandError, ServiceError."""
    letters = _listed(limit)
    if as_json:
        print_json({"dead_letters": letters})
        return
    table = Table("task", "tenant", "model", "code", "tries", "made", "given up", box=SIMPLE_HEAD)
    for letter in letters:
        made, died = (_moment(letter[name]) for name in ("created_at", "died_at"))
        words = [str(letter[name])[:100] for name in ("task_id", "tenant", "model", "code", "failures")]
        table.add_row(*(Text(word) for word in (*words, made, died)))
    console = output_console()
    console.print(table)
    if len(letters) == limit:
        console.print(f"The newest {limit:,}; there may be more.")


def redrive_dead_letters(task_ids: Sequence[str], *, every: bool, as_json: bool) -> bool:
    """Put dead letters back into the queue; whether all that were named were dead letters. `every`: those that one
    listing shows. Raises CommandError, ServiceError.
    """
    if bool(task_ids) == every:
        raise CommandError("name tasks, or --all: one of both")
    if len(task_ids) > MOST_LETTERS:
        raise CommandError(f"expected at most {MOST_LETTERS:,} tasks, found {len(task_ids):,}")
    named = [str(letter["task_id"]) for letter in _listed(MOST_LETTERS)] if every else list(dict.fromkeys(task_ids))
    redriven = 0
    if named:
        found = _call("POST", "/v1/dead_letters/redrive", {"task_ids": named}).get("redriven")
        if not isinstance(found, int):
            raise ServiceError("the service's answer could not be read: expected a number under `redriven`")
        redriven = found
    if as_json:
        print_json({"redriven": redriven, "named": len(named)})
    else:
        sys.stdout.write(f"{redriven:,} of {len(named):,} put back into the queue\n")
    return redriven == len(named)


def _listed(limit: int) -> list[dict[str, Any]]:
    found = _call("GET", f"/v1/dead_letters?limit={limit}").get("data")
    if not isinstance(found, list) or not all(
        isinstance(one, dict) and one.keys() >= set(_COLUMNS) for one in found[:limit]
    ):
        raise ServiceError("the service's answer could not be read: expected a list of dead letters under `data`")
    return [{name: one[name] for name in _COLUMNS} for one in found[:limit]]


def _call(
    method: str, path: str, body: Mapping[str, Any] | None = None, clock: Callable[[], float] = time.monotonic
) -> dict[str, Any]:
    """The service's answer. At most PAGE_BYTES and CALL_SECONDS; no redirect is followed."""
    try:
        base = engine_url(os.environ.get(URL, "").strip() or DEFAULT_URL)
    except ValueError as error:
        raise CommandError(f"{URL}: {error}") from None
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if key := os.environ.get(KEY, "").strip():
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else orjson.dumps(body)
    until = clock() + CALL_SECONDS
    try:
        with direct.open(
            urllib.request.Request(base + path, data, headers, method=method), timeout=CALL_SECONDS
        ) as answer:
            found = orjson.loads(_read(answer, PAGE_BYTES, until, clock))
    except urllib.error.HTTPError as error:
        with error:
            raise ServiceError(_refused(error.code, _said(error, until, clock))) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServiceError(f"the service at {base} gave no answer that can be read: {type(reason).__name__}") from None
    if not isinstance(found, dict):
        raise ServiceError(f"the service at {base} gave no answer that can be read: expected a JSON object")
    return found


def _read(answer: Any, limit: int, until: float, clock: Callable[[], float]) -> bytes:
    """Raises ValueError beyond the limit, TimeoutError after `until`."""
    parts, size = [], 0
    while part := answer.read1(PART):
        parts.append(part)
        size += len(part)
        if size > limit:
            raise ValueError(f"more than {limit:,} bytes")
        if clock() > until:
            raise TimeoutError
    return b"".join(parts)


def _said(error: urllib.error.HTTPError, until: float, clock: Callable[[], float]) -> str:
    """The message of an error, as the service writes it; empty where there is none."""
    try:
        found = orjson.loads(_read(error.fp, ERROR_BYTES, until, clock))
        message = found["error"]["message"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    text = message[:300] if isinstance(message, str) else ""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _refused(status: int, said: str) -> str:
    text = f"the service answered {status}" + (f": {said}" if said else "")
    if status in (401, 403):
        text += f". {KEY} holds a key of the scope dead_letters (`batch-assets keys create`)"
    return text


def _moment(seconds: object) -> str:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e11:
        return "?"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
