"""A checker of OpenAI's Batch API over HTTP: it knows the documented contract, and nothing of any implementation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from support.timing import PATIENCE

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
INVALID = "invalid_request_error"
ANY = object()  # a value that is not compared
TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def is_error(
    answer: httpx.Response, status: int, param: Any = ANY, code: Any = ANY, kind: str = INVALID
) -> dict[str, Any]:
    """Check the documented shape of an error; returns what is in `error`."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    assert answer.headers["content-type"].startswith("application/json")
    body = answer.json()
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"], error
    assert error["type"] == kind, error
    assert param is ANY or error["param"] == param, error
    assert code is ANY or error["code"] == code, error
    return error


def jsonl(*lines: Any) -> bytes:
    """Lines as a file, each with its end; bytes and text as they are."""
    return b"".join(_encoded(line) + b"\n" for line in lines)


def _encoded(line: Any) -> bytes:
    if isinstance(line, bytes):
        return line
    return (line if isinstance(line, str) else json.dumps(line)).encode()


@dataclass
class BatchApi:
    """Calls of one service. `base`: its address without `/v1`."""

    base: str
    model: str = "tiny"
    key: str = "none"
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {self.key}"}
        self.client = httpx.Client(base_url=self.base, headers=headers, timeout=60 * PATIENCE)

    def close(self) -> None:
        """Close all connections."""
        self.client.close()

    # files

    def chat(self, name: Any, /, **body: Any) -> dict[str, Any]:
        """One line of an input file, for chat completions."""
        custom_id = f"r-{name}" if isinstance(name, int) else name
        messages = [{"role": "user", "content": f"Say {name}"}]
        asked = {"model": self.model, "messages": messages, "max_tokens": 8, **body}
        return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked}

    def chats(self, number: int, **body: Any) -> bytes:
        """That many lines, `r-0` and following."""
        return jsonl(*(self.chat(one, **body) for one in range(number)))

    def upload(self, content: bytes, name: str = "in.jsonl", purpose: str = "batch", **fields: str) -> httpx.Response:
        """Upload a file."""
        return self.client.post("/v1/files", files={"file": (name, content)}, data={"purpose": purpose, **fields})

    def file(self, content: bytes | None = None, **more: str) -> dict[str, Any]:
        """A new file; its object."""
        answer = self.upload(self.chats(1) if content is None else content, **more)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def content(self, file_id: str) -> bytes:
        """What a file holds."""
        answer = self.client.get(f"/v1/files/{file_id}/content")
        assert answer.status_code == 200, answer.text
        return answer.content

    def lines(self, file_id: str | None) -> list[Any]:
        """The lines of a file; none where there is no file."""
        return [json.loads(line) for line in self.content(file_id).splitlines()] if file_id else []

    # batches

    def create(
        self,
        file_id: Any,
        endpoint: Any = CHAT,
        window: Any = "24h",
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> httpx.Response:
        """Create a batch."""
        asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window, **more}
        return self.client.post("/v1/batches", json=asked, headers=headers)

    def batch(
        self, content: bytes | None = None, endpoint: str = CHAT, window: str = "24h", **more: Any
    ) -> dict[str, Any]:
        """A new batch of a new file."""
        answer = self.create(self.file(content)["id"], endpoint, window, **more)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def get(self, batch_id: str) -> dict[str, Any]:
        """The batch as it is now."""
        answer = self.client.get(f"/v1/batches/{batch_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def cancel(self, batch_id: str, **headers: str) -> httpx.Response:
        """Cancel a batch."""
        return self.client.post(f"/v1/batches/{batch_id}/cancel", headers=headers)

    def until(self, batch_id: str, states: Sequence[str] = ENDED) -> dict[str, Any]:
        """The batch in one of these states. Its counts never fall and never exceed its total on the way."""
        deadline = time.monotonic() + 60 * PATIENCE
        before = self.get(batch_id)
        while True:
            batch = self.get(batch_id)
            counts, earlier = batch["request_counts"], before["request_counts"]
            assert all(counts[name] >= earlier[name] for name in counts), (before, batch)
            assert counts["completed"] + counts["failed"] <= counts["total"], batch
            if batch["status"] in (*states, *ENDED):
                assert batch["status"] in states, batch
                return batch
            assert time.monotonic() < deadline, batch
            before = batch
            time.sleep(0.05)

    def ended(
        self, content: bytes | None = None, endpoint: str = CHAT, window: str = "24h", **more: Any
    ) -> dict[str, Any]:
        """A new batch of a new file, when it has ended."""
        return self.until(self.batch(content, endpoint, window, **more)["id"])

    def results(self, batch: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """(lines of the output file, lines of the error file)."""
        return self.lines(batch["output_file_id"]), self.lines(batch["error_file_id"])

    def refused(self, content: bytes, endpoint: str = CHAT) -> list[dict[str, Any]]:
        """The errors of a batch whose input is refused."""
        batch = self.ended(content, endpoint)
        assert batch["status"] == "failed" and isinstance(batch["failed_at"], int), batch
        assert batch["output_file_id"] is None and batch["error_file_id"] is None and batch["completed_at"] is None
        assert batch["errors"]["object"] == "list"
        errors: list[dict[str, Any]] = batch["errors"]["data"]
        for error in errors:
            assert set(error) == {"code", "message", "param", "line"}, error
            assert isinstance(error["code"], str) and isinstance(error["message"], str) and error["message"]
        return errors

    def pages(self, path: str, limit: int, **query: str) -> Iterator[list[str]]:
        """The ids of each page of a list, as a client turns them."""
        after: dict[str, str] = {}
        while True:
            page = self.client.get(path, params={"limit": limit, **query, **after}).json()
            ids = [one["id"] for one in page["data"]]
            assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
            yield ids
            if not page["has_more"]:
                return
            after = {"after": page["last_id"]}
