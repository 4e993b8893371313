"""While the store is away every route that needs it answers 503, with Retry-After, and goes on when it is back."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest
from support.api_service import api_service, line
from support.timing import PATIENCE

from batch_assets.api.files import contents
from batch_assets.api.store_threads import StoreThreads
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
        async with api_service(tmp_path, "http://127.0.0.1:9") as site:
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


class HungObjects(LocalObjects):
    """A store whose calls wait for `go`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go, self.begun = threading.Event(), 0

    def _wait(self) -> None:
        self.begun += 1
        self.go.wait()

    def open(self, path: str) -> BinaryIO:
        self._wait()
        return super().open(path)

    def upload(self, path: str, source: Path) -> None:
        self._wait()
        super().upload(path, source)


def test_calls_that_do_not_need_the_store_are_answered_while_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "WAIT_SECONDS", 0.05)

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        async with api_service(tmp_path, "http://127.0.0.1:9") as site:
            file_id, threads = await site.upload([line("a")]), StoreThreads(4, "few")
            batch = await site.create([line("a")])
            objects = site.app.state.objects = HungObjects(tmp_path / "store")
            site.app.state.store_threads = threads
            upload = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
            hanging = [asyncio.create_task(site.client.post("/v1/files", **upload)) for _ in range(2)]  # type: ignore[arg-type]
            hanging += [asyncio.create_task(site.client.get(f"/v1/files/{file_id}/content")) for _ in range(2)]
            try:
                async with asyncio.timeout(10 * PATIENCE):
                    while objects.begun < 4:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    assert (await site.client.get(f"/v1/files/{file_id}")).status_code == 200
                    assert (await site.get(batch["id"]))["id"] == batch["id"]
                    assert len((await site.client.get("/v1/batches")).json()["data"]) == 1
                    check(await site.client.get(f"/v1/files/{file_id}/content"))  # no thread is free
            finally:
                objects.go.set()
                answers = await asyncio.gather(*hanging)
                threads.close()
            assert {answer.status_code for answer in answers} == {200}

    asyncio.run(scenario())


def test_a_store_that_fails_at_the_first_byte_is_said_before_the_answer_begins(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with api_service(tmp_path, "http://127.0.0.1:9") as site:
            file_id = await site.upload([line("a")])
            objects = AwayObjects(tmp_path / "store")
            objects.content = _Breaking()
            site.app.state.objects = objects
            check(await site.client.get(f"/v1/files/{file_id}/content"))
            assert objects.content.closed

    asyncio.run(scenario())
