"""While the store is away every route that needs it answers 503, with Retry-After, and goes on when it is back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest
from support.api_site import api_site, line

from resources.objects.opening import LocalObjects, StoreError


class _Breaking:
    """A content that is there, and cannot be read."""

    closed = False

    def read(self, size: int = -1) -> bytes:
        raise StoreError("away: secret-bucket")

    def close(self) -> None:
        self.closed = True


class AwayObjects(LocalObjects):
    """A store that fails as it is told."""

    failure: Exception | None = None
    content: Any = None

    def open(self, path: str) -> BinaryIO:
        if self.content is not None:
            return self.content  # type: ignore[no-any-return]
        if self.failure is not None:
            raise self.failure
        return super().open(path)

    def upload(self, path: str, source: Path) -> None:
        if self.failure is not None:
            raise self.failure
        super().upload(path, source)


def check(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "store_unavailable", None)
    assert "secret-bucket" not in answer.text


@pytest.mark.parametrize("failure", [StoreError, OSError, FileNotFoundError])
def test_uploads_and_contents_say_so_and_go_on_afterwards(tmp_path: Path, failure: type[Exception]) -> None:
    async def scenario() -> None:
        async with api_site(tmp_path, "http://127.0.0.1:9") as site:
            file_id = await site.upload([line("a")])
            objects = AwayObjects(tmp_path / "store")
            objects.failure, there = failure("away: secret-bucket"), site.app.state.objects
            site.app.state.objects = objects
            upload = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
            check(await site.client.post("/v1/files", **upload))  # type: ignore[arg-type]
            check(await site.client.get(f"/v1/files/{file_id}/content"))
            listed = (await site.client.get("/v1/files")).json()["data"]
            assert [file["id"] for file in listed] == [file_id], "nothing of an upload that failed is left"
            site.app.state.objects = there
            assert (await site.client.get(f"/v1/files/{file_id}/content")).status_code == 200

    asyncio.run(scenario())


def test_a_store_that_fails_at_the_first_byte_is_said_before_the_answer_begins(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with api_site(tmp_path, "http://127.0.0.1:9") as site:
            file_id = await site.upload([line("a")])
            objects = AwayObjects(tmp_path / "store")
            objects.content = _Breaking()
            site.app.state.objects = objects
            check(await site.client.get(f"/v1/files/{file_id}/content"))
            assert objects.content.closed

    asyncio.run(scenario())
