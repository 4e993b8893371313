"""A provider of OpenAI's Batch API in the test's own event loop: files and batches in memory, answers by a function."""

from __future__ import annotations

import json
import time
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


# What a client has done, or is about to do, when it hears nothing more.
MOMENTS = ("uploads", "uploaded", "creates", "created", "looks", "downloads", "collected", "settles")


@dataclass
class FakeBatchApi:
    """`answer(asked lines)` makes the lines of the output and of the error file. `ends`: whether batches end by
    themselves; `finished`: how many rows one has finished that is cancelled. `refusals`: handlers for the next calls
    of a path ("files", "batches"), in place of an answer. `errors`: of a batch that fails. `file_states`: what the
    next looks at a new file say of it. `most_lines`: of a batch that does not fail. `deleted`: files by the client.
    `at` is called with each moment of a batch's life, see MOMENTS. `listed_after`: seconds until a batch is listed;
    `lists`, `keeps_metadata`: whether it lists batches, and shows their metadata. `extra`: of each batch object.
    `halves`: files are sent in two.
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
    at: Callable[[str], None] = lambda moment: None
    listed_after: float = 0.0
    lists: bool = True
    keeps_metadata: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    halves: bool = False
    names: dict[str, str] = field(default_factory=dict)
    once: dict[str, str] = field(default_factory=dict)

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
            self.at("uploads")
            name = f"file-{len(self.files)}"
            with file.file as content:
                self.files[name] = content.read()
            self.names[name] = file.filename
            self.at("uploaded")
            return web.json_response({"id": name, "object": "file", "status": self._file_state()})
        if len(path) == 1:
            listed = [{"id": one, "filename": name} for one, name in self.names.items() if one not in self.deleted]
            return self._page(request, listed)
        if path[1] not in self.files or path[1] in self.deleted:
            return web.json_response({"error": {"message": "no such file"}}, status=404)
        if request.method == "DELETE":
            self.at("collected" if path[1].startswith("file") else "settles")
            self.deleted.add(path[1])
            return web.json_response({"id": path[1], "object": "file", "deleted": True})
        if len(path) == 2:
            return web.json_response({"id": path[1], "object": "file", "status": self._file_state()})
        if self.halves:
            return await self._in_halves(request, self.files[path[1]])
        return web.Response(body=self.files[path[1]])

    async def _in_halves(self, request: web.Request, content: bytes) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": str(len(content))})
        await answer.prepare(request)
        await answer.write(content[: len(content) // 2])
        self.at("downloads")
        await answer.write(content[len(content) // 2 :])
        return answer

    def _page(self, request: web.Request, oldest_first: list[Line]) -> web.StreamResponse:
        """A page of a list, the newest first."""
        listed = oldest_first[::-1]
        if after := request.query.get("after"):
            listed = listed[[one["id"] for one in listed].index(after) + 1 :]
        limit = int(request.query.get("limit", 20))
        return web.json_response({"object": "list", "data": listed[:limit], "has_more": len(listed) > limit})

    def _file_state(self) -> str:
        return self.file_states.pop(0) if self.file_states else "processed"

    async def _batches(self, request: web.Request, path: list[str]) -> web.StreamResponse:
        if request.method == "POST" and len(path) == 1:
            asked = await request.json()
            if self.file_states:
                return web.json_response({"error": {"message": "the file is in state pending"}}, status=400)
            return self._create(asked, request.headers.get("Idempotency-Key", ""))
        if len(path) == 1 and not self.lists:
            return web.json_response({"error": {"message": "no such method"}}, status=405)
        if len(path) == 1:
            until = time.time() - self.listed_after
            return self._page(request, [one for one in self.batches.values() if one["created_at"] <= until])
        self.at("looks")
        if path[1] not in self.batches:
            return web.json_response({"error": {"message": "no such batch"}}, status=404)
        batch = self.batches[path[1]]
        running = batch["status"] in ("in_progress", "cancelling")
        if len(path) == 3:
            batch["status"] = "cancelling" if running else batch["status"]
        elif running and (self.ends or batch["status"] == "cancelling"):
            self.end(batch)
        return web.json_response(batch)

    def _create(self, asked: Line, key: str) -> web.StreamResponse:
        self.at("creates")
        if not self.lists and key in self.once:
            return web.json_response(self.batches[self.once[key]])
        name = f"batch-{len(self.batches)}"
        batch = {**asked, "id": name, "object": "batch", "status": "in_progress", "errors": None}
        batch |= {"created_at": time.time(), **self.extra}
        batch |= {} if self.keeps_metadata else {"metadata": None}
        self.batches[name] = batch
        self.once[key] = name
        self.at("created")
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
