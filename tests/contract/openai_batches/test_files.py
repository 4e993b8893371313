"""`GET` and `DELETE` of `/v1/files`: retrieve, content, delete, lists."""

from __future__ import annotations

from typing import Any

import pytest
from support.batch_api import BatchApi, is_error

pytestmark = pytest.mark.slow

UNKNOWN = ["file-nope", "nope", "batch_abc", "x" * 3_000, "%00", "a%20b", "%F0%9F%98%80", "file-%27%20or%201=1"]


def test_a_file_is_retrieved_as_it_was_uploaded(api: BatchApi) -> None:
    file = api.file()
    assert api.client.get(f"/v1/files/{file['id']}").json() == file


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_file_is_status_404_for_every_call(api: BatchApi, name: str) -> None:
    for answer in (
        api.client.get(f"/v1/files/{name}"),
        api.client.get(f"/v1/files/{name}/content"),
        api.client.delete(f"/v1/files/{name}"),
    ):
        is_error(answer, 404)


def test_the_error_of_an_unknown_file_names_the_id(api: BatchApi) -> None:
    error = is_error(api.client.get("/v1/files/file-nope"), 404, "id")
    assert "file-nope" in error["message"]


def test_content_comes_as_a_file_of_its_name_and_size(api: BatchApi) -> None:
    file = api.file(name="eingabe-ü.jsonl")
    answer = api.client.get(f"/v1/files/{file['id']}/content")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert int(answer.headers["content-length"]) == file["bytes"] == len(answer.content)
    disposition = answer.headers["content-disposition"]
    assert disposition == "attachment; filename=\"eingabe-_.jsonl\"; filename*=UTF-8''eingabe-%C3%BC.jsonl"


@pytest.mark.parametrize("headers", [{"Range": "bytes=0-3"}, {"Accept": "application/json"}, {"Accept-Encoding": "br"}])
def test_content_is_whole_or_the_part_that_was_asked_for(api: BatchApi, headers: dict[str, str]) -> None:
    name = api.file(b"0123456789")["id"]
    answer = api.client.get(f"/v1/files/{name}/content", headers=headers)
    assert (answer.status_code, answer.content) in ((200, b"0123456789"), (206, b"0123"))
    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_an_unknown_query_is_not_read(api: BatchApi, path: str) -> None:
    assert api.client.get(path, params={"before": "x", "limit": 1}).status_code == 200


def test_a_deleted_file_is_gone_for_every_call(api: BatchApi) -> None:
    name = api.file()["id"]
    assert api.client.delete(f"/v1/files/{name}").json() == {"id": name, "object": "file", "deleted": True}
    is_error(api.client.get(f"/v1/files/{name}"), 404)
    is_error(api.client.get(f"/v1/files/{name}/content"), 404)
    is_error(api.client.delete(f"/v1/files/{name}"), 404)
    is_error(api.create(name), 400, "input_file_id")
    assert name not in [one["id"] for one in api.client.get("/v1/files", params={"limit": 50}).json()["data"]]


def test_output_files_are_files_too(api: BatchApi) -> None:
    batch = api.ended(api.chats(2))
    name = batch["output_file_id"]
    file = api.client.get(f"/v1/files/{name}").json()
    assert (file["purpose"], file["object"], file["status"]) == ("batch_output", "file", "processed")
    assert file["filename"] == f"{batch['id']}_output.jsonl" and file["bytes"] == len(api.content(name))
    assert file["expires_at"] - file["created_at"] == 30 * 86_400
    assert api.client.delete(f"/v1/files/{name}").json()["deleted"] is True
    is_error(api.client.get(f"/v1/files/{name}/content"), 404)
    assert api.get(batch["id"])["output_file_id"] == name  # the batch stays as it was


def test_a_list_goes_newest_first_and_on_behind_an_id(api: BatchApi) -> None:
    ids = [api.file()["id"] for _ in range(3)]
    page = api.client.get("/v1/files", params={"limit": 3}).json()
    assert set(page) == {"object", "data", "first_id", "last_id", "has_more"}
    assert page["object"] == "list" and [one["id"] for one in page["data"]] == ids[::-1]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[0], True)
    behind = api.client.get("/v1/files", params={"limit": 1, "after": ids[2]}).json()
    assert [one["id"] for one in behind["data"]] == [ids[1]]


def test_the_two_orders_are_each_other_reversed(api: BatchApi) -> None:
    for _ in range(3):
        api.file()
    downward = [one for page in api.pages("/v1/files", 10_000) for one in page]
    upward = [one for page in api.pages("/v1/files", 7, order="asc") for one in page]
    assert upward == downward[::-1] and len(set(upward)) == len(upward)


def test_a_list_without_a_limit_has_all(api: BatchApi) -> None:
    mine = {api.file()["id"] for _ in range(25)}
    page = api.client.get("/v1/files").json()
    assert mine <= {one["id"] for one in page["data"]} and page["has_more"] is False


def test_pages_keep_their_place_while_files_come_and_go(api: BatchApi) -> None:
    mine = [api.file()["id"] for _ in range(6)]
    seen: list[str] = []
    for page in api.pages("/v1/files", 2):
        seen += page
        if len(seen) > 6:
            break
        api.file()
        api.client.delete(f"/v1/files/{page[-1]}")  # the cursor of the next page
    assert seen[:6] == mine[::-1]


def test_a_list_of_one_purpose(api: BatchApi, done: dict[str, Any]) -> None:
    outputs = [one for page in api.pages("/v1/files", 50, purpose="batch_output") for one in page]
    inputs = [one for page in api.pages("/v1/files", 10_000, purpose="batch") for one in page]
    assert done["output_file_id"] in outputs and done["output_file_id"] not in inputs
    assert done["input_file_id"] in inputs and done["input_file_id"] not in outputs


def test_an_empty_list_has_no_ids(api: BatchApi) -> None:
    page = api.client.get("/v1/files", params={"purpose": "vision"}).json()
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize("limit", ["0", "-1", "10001", "x", "1.5", "", "9" * 30])
def test_a_wrong_limit_is_refused(api: BatchApi, limit: str) -> None:
    is_error(api.client.get("/v1/files", params={"limit": limit}), 400, "limit")


@pytest.mark.parametrize("order", ["up", "", "DESC"])
def test_a_wrong_order_is_refused(api: BatchApi, order: str) -> None:
    is_error(api.client.get("/v1/files", params={"order": order}), 400, "order")


def test_a_list_of_an_unknown_purpose_is_refused(api: BatchApi) -> None:
    is_error(api.client.get("/v1/files", params={"purpose": "nonsense"}), 400, "purpose")


@pytest.mark.parametrize("after", ["file-nope", "batch_x", "5", "\0"])
def test_an_unknown_cursor_is_refused(api: BatchApi, after: str) -> None:
    answer = api.client.get("/v1/files", params={"after": after})
    assert answer.status_code in (400, 404)
    is_error(answer, answer.status_code, "after")
