"""`/v1/files`, a case for each documented sentence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.api_service import ApiService, api_service, line

from batch_assets.api.files.routes import attachment
from batch_assets.api.settings import ApiLimits

NOBODY = "http://127.0.0.1:9"  # no engine is needed
FILE_FIELDS = {
    "id",
    "object",
    "bytes",
    "created_at",
    "expires_at",
    "filename",
    "purpose",
    "status",
    "status_details",
}


def on_site(
    tmp_path: Path, steps: Callable[[ApiService], Coroutine[Any, Any, None]], limits: ApiLimits | None = None
) -> None:
    async def run() -> None:
        async with api_service(tmp_path, NOBODY, limits) as site:
            await steps(site)

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/uploads", "/v1/uploads/upload_1/parts", "/v1/uploads/upload_1/complete"])
def test_uploads_in_parts_are_answered_with_what_to_use_instead(tmp_path: Path, path: str) -> None:
    async def steps(site: ApiService) -> None:
        answer = await site.client.post(path, json={"bytes": 1, "filename": "in.jsonl", "purpose": "batch"})
        message = f"Invalid URL (POST {path}): files are sent whole, by POST /v1/files"
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "unknown_url"}
        assert answer.status_code == 404 and answer.json() == {"error": error}

    on_site(tmp_path, steps)


def test_an_uploaded_file_can_be_read_listed_and_deleted(tmp_path: Path) -> None:
    async def steps(site: ApiService) -> None:
        data = b'{"a": 1}\n' * 200_000
        form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        answer = await site.client.post("/v1/files", files={"file": ("in.jsonl", data)}, data=form)
        file = answer.json()
        assert answer.status_code == 200 and set(file) == FILE_FIELDS
        assert file["id"].startswith("file-") and file["object"] == "file" and file["status"] == "processed"
        assert (file["bytes"], file["filename"], file["purpose"]) == (len(data), "in.jsonl", "batch")
        assert file["expires_at"] == file["created_at"] + 3600
        assert (await site.client.get(f"/v1/files/{file['id']}")).json() == file
        content = await site.client.get(f"/v1/files/{file['id']}/content")
        assert content.content == data and content.headers["Content-Length"] == str(len(data))
        assert (await site.client.get("/v1/files")).json()["data"] == [file]
        gone = await site.client.delete(f"/v1/files/{file['id']}")
        assert gone.json() == {"id": file["id"], "object": "file", "deleted": True}
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answer = await site.client.request(method, f"/v1/files/{file['id']}{path}")
            assert answer.status_code == 404 and answer.json()["error"]["type"] == "invalid_request_error"
        assert (await site.client.get("/v1/files")).json()["data"] == []

    on_site(tmp_path, steps)


def test_a_file_lives_thirty_days_unless_it_is_said(tmp_path: Path) -> None:
    async def steps(site: ApiService) -> None:
        file = (await site.client.get(f"/v1/files/{await site.upload([line('a')])}")).json()
        assert file["expires_at"] - file["created_at"] == 30 * 86_400

    on_site(tmp_path, steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form", "param"),
    [
        ("in.jsonl", {}, "purpose"),
        ("in.jsonl", {"purpose": "poetry"}, "purpose"),
        ("in.jsonl", {"purpose": "batch_output"}, "purpose"),
        ("in.csv", {"purpose": "batch"}, "file"),
        (None, {"purpose": "batch"}, "file"),
        ("in.jsonl", {"purpose": "batch", "colour": "red"}, "colour"),
        ("in.jsonl", {"purpose": "batch", "expires_after": '{"anchor": "created_at", "seconds": 1}'}, "expires_after"),
        ("in.jsonl", {"purpose": "batch", "expires_after[anchor]": "now"}, "expires_after.anchor"),
        ("in.jsonl", {"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after.anchor"),
        ("in.jsonl", {"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after.seconds"),
        (
            "in.jsonl",
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "10"},
            "expires_after.seconds",
        ),
        (
            "in.jsonl",
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "2592001"},
            "expires_after.seconds",
        ),
    ],
)
def test_a_wrong_upload_is_status_400_and_names_the_parameter(
    tmp_path: Path, name: str | None, form: dict[str, str], param: str
) -> None:
    async def steps(site: ApiService) -> None:
        files = {"file": (name, b"{}")} if name else {"other": (None, "x")}
        answer = await site.client.post("/v1/files", files=files, data=form)  # type: ignore[arg-type]
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param
        known = ("missing_required_parameter", "invalid_value", "invalid_file_format", "unknown_parameter")
        assert error["code"] in known

    on_site(tmp_path, steps)


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "multipart/form-data; boundary=xyz"])
def test_a_body_that_is_no_form_is_status_400(tmp_path: Path, kind: str) -> None:
    async def steps(site: ApiService) -> None:
        answer = await site.client.post("/v1/files", content=b"--abc\r\nnonsense", headers={"Content-Type": kind})
        assert answer.status_code == 400

    on_site(tmp_path, steps)


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("in.jsonl", 'attachment; filename="in.jsonl"'),
        ("ü.jsonl", "attachment; filename=\"_.jsonl\"; filename*=UTF-8''%C3%BC.jsonl"),
        ('a"b\\c', "attachment; filename=\"a_b_c\"; filename*=UTF-8''a%22b%5Cc"),
    ],
)
def test_a_content_is_named_for_old_and_new_clients(name: str, header: str) -> None:
    assert attachment(name) == header


@pytest.mark.parametrize("told", [True, False])
def test_a_file_above_the_limit_is_refused_while_it_comes_and_nothing_is_left(tmp_path: Path, told: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        for _ in range(40):
            yield b" " * 100_000

    async def steps(site: ApiService) -> None:
        content = b"".join([part async for part in parts()]) if told else parts()
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        answer = await site.client.post("/v1/files", content=content, headers=headers)
        assert answer.status_code == 413 and answer.json()["error"]["param"] in ("file", None)
        assert not list((tmp_path / "store").rglob("file-*"))

    on_site(tmp_path, steps, ApiLimits(file_bytes=1_000_000))


def test_lists_go_newest_first_and_page_by_the_id_of_the_last_file(tmp_path: Path) -> None:
    async def steps(site: ApiService) -> None:
        made = [await site.upload([line(str(number))]) for number in range(5)]
        first = (await site.client.get("/v1/files", params={"limit": 2})).json()
        assert first["object"] == "list" and first["has_more"] is True
        assert [file["id"] for file in first["data"]] == [made[4], made[3]]
        assert (first["first_id"], first["last_id"]) == (made[4], made[3])
        rest = (await site.client.get("/v1/files", params={"limit": 3, "after": made[3]})).json()
        assert [file["id"] for file in rest["data"]] == [made[2], made[1], made[0]] and rest["has_more"] is False
        oldest = (await site.client.get("/v1/files", params={"order": "asc", "limit": 1})).json()
        assert oldest["data"][0]["id"] == made[0]
        assert (await site.client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
        empty = (await site.client.get("/v1/files", params={"after": made[0]})).json()
        assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}

    on_site(tmp_path, steps)


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 10_001}, {"order": "random"}, {"purpose": "poetry"}])
def test_a_wrong_query_is_status_400(tmp_path: Path, query: dict[str, Any]) -> None:
    async def steps(site: ApiService) -> None:
        answer = await site.client.get("/v1/files", params=query)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(query))

    on_site(tmp_path, steps)


def test_a_file_of_another_tenant_is_not_there(tmp_path: Path) -> None:
    async def steps(site: ApiService) -> None:
        file = await site.upload([line("a")], **{"x-tenant": "a"})
        other = {"x-tenant": "b"}
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answer = await site.client.request(method, f"/v1/files/{file}{path}", headers=other)
            assert answer.status_code == 404
        assert (await site.client.get("/v1/files", headers=other)).json()["data"] == []
        after = await site.client.get("/v1/files", headers=other, params={"after": file})
        assert after.status_code == 404
        body = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        assert (await site.client.post("/v1/batches", json=body, headers=other)).status_code == 400
        assert (await site.client.get(f"/v1/files/{file}", headers={"x-tenant": "a"})).status_code == 200

    on_site(tmp_path, steps)
