"""A provider of OpenAI's Batch API in the test's own event loop: files and batches in memory, answers by a function."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from support.http_server import Handler, http_server, models

Line = dict[str, Any]


def completion(text: str = "an answer", prompt: int = 5, written: int = 3, **usage: Any) -> Line:
    """What a line's body is where the row was answered."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": prompt, "completion_tokens": written, **usage}}


def line(asked: Line, body: Any = None, status: int = 200) -> Line:
    """An output line."""
    response = {"status_code": status, "request_id": "r", "body": completion() if body is None else body}
    return {"id": "l", "custom_id": asked["custom_id"], "response": response, "error": None}


def error_line(asked: Line, code: str) -> Line:
    """A line of the error file."""
    return {"id": "l", "custom_id": asked["custom_id"], "response": None, "error": {"code": code, "message": "no"}}


@dataclass
class FakeBatchApi:
    """`answer(asked lines)` makes the lines of the output and of the error file. `ends`: whether batches end by
    themselves; `finished`: how many rows one has finished that is cancelled. `refusals`: handlers for the next calls
    of a path ("files", "batches"), in place of an answer. `errors`: of a batch that fails. `file_states`: what the
    next looks at a new file say of it. `most_lines`: of a batch that does not fail. `deleted`: files by the client.
    """

    answer: Callable[[list[Line]], tuple[list[Any], list[Any]]] = lambda asked: ([line(one) for one in asked], [])
    ends: bool = True
    finished: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    status: str = "completed"
    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    refusals: dict[str, list[Handler]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    file_states: list[str] = field(default_factory=list)
    most_lines: int | None = None
    deleted: set[str] = field(default_factory=set)

    @property
    def asked(self) -> list[Line]:
        """All lines of all batches that were created."""
        return [one for batch in self.batches.values() for one in self.lines(batch["input_file_id"])]

    def lines(self, file_id: str) -> list[Line]:
        """The lines of a file."""
        return [json.loads(one) for one in self.files[file_id].splitlines()]

    def end(self, batch: dict[str, Any]) -> None:
        """The batch has its files."""
        asked = self.lines(batch["input_file_id"])
        asked = asked[: self.finished] if batch["status"] == "cancelling" else asked
        full = self.most_lines is not None and len(asked) > self.most_lines
        batch["status"] = {"cancelling": "cancelled"}.get(batch["status"], "failed" if full else self.status)
        if batch["status"] == "failed":
            batch["errors"] = {"object": "list", "data": self.errors}
        if full or (self.errors and batch["status"] == "failed"):
            return
        for name, found in zip(("output", "error"), self.answer(asked), strict=True):
            if found:
                file_id = f"{name}-{batch['id']}"
                self.files[file_id] = b"".join(
                    one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in found
                )
                batch[f"{name}_file_id"] = file_id

    async def _route(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"].split("/")
        self.keys.add(request.headers.get("Authorization", ""))
        if refusals := self.refusals.get(path[0]):
            return await refusals.pop(0)(request)
        if path[0] == "files":
            return await self._files(request, path)
        if path[0] == "batches":
            return await self._batches(request, path)
        return web.json_response({"error": {"message": "no such page"}}, status=404)

    async def _files(self, request: web.Request, path: list[str]) -> web.StreamResponse:
        if request.method == "POST":
            form = await request.post()
            assert form["purpose"] == "batch"
            file = form["file"]
            assert isinstance(file, web.FileField)
            name = f"file-{len(self.files)}"
            self.files[name] = file.file.read()
            return web.json_response({"id": name, "object": "file", "status": self._file_state()})
        if path[1] not in self.files or path[1] in self.deleted:
            return web.json_response({"error": {"message": "no such file"}}, status=404)
        if request.method == "DELETE":
            self.deleted.add(path[1])
            return web.json_response({"id": path[1], "object": "file", "deleted": True})
        if len(path) == 2:
            return web.json_response({"id": path[1], "object": "file", "status": self._file_state()})
        return web.Response(body=self.files[path[1]])

    def _file_state(self) -> str:
        return self.file_states.pop(0) if self.file_states else "processed"

    async def _batches(self, request: web.Request, path: list[str]) -> web.StreamResponse:
        if request.method == "POST" and len(path) == 1:
            asked = await request.json()
            if self.file_states:
                return web.json_response({"error": {"message": "the file is in state pending"}}, status=400)
            name = f"batch-{len(self.batches)}"
            batch = {**asked, "id": name, "object": "batch", "status": "in_progress", "errors": None}
            self.batches[name] = batch
            return web.json_response(batch)
        if len(path) == 1:
            return web.json_response({"object": "list", "data": list(self.batches.values()), "has_more": False})
        if path[1] not in self.batches:
            return web.json_response({"error": {"message": "no such batch"}}, status=404)
        batch = self.batches[path[1]]
        running = batch["status"] in ("in_progress", "cancelling")
        if len(path) == 3:
            batch["status"] = "cancelling" if running else batch["status"]
        elif running and (self.ends or batch["status"] == "cancelling"):
            self.end(batch)
        return web.json_response(batch)


@asynccontextmanager
async def fake_batch_api(model: str, **how: Any) -> AsyncIterator[FakeBatchApi]:
    """Serves on a free port of 127.0.0.1."""
    api = FakeBatchApi(**how)
    entry: Mapping[str, Any] = {"id": model, "object": "model", "owned_by": "us"}
    routes: dict[str, Handler] = {"/v1/models": models(dict(entry)), "/v1/{path:.*}": api._route}
    async with http_server(routes) as url:
        api.url = url
        yield api
