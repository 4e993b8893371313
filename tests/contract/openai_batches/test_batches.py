"""Retrieve, list, cancel, expiry, and which batch comes first."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.batch_api import BatchApi, is_error

from .test_files import UNKNOWN

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["batch_nope", *UNKNOWN])
def test_an_unknown_batch_is_status_404_for_every_call(api: BatchApi, name: str) -> None:
    is_error(api.client.get(f"/v1/batches/{name}"), 404)
    is_error(api.cancel(name), 404)


def test_a_list_goes_newest_first_and_on_behind_an_id(api: BatchApi) -> None:
    ids = [api.batch()["id"] for _ in range(3)]
    page = api.client.get("/v1/batches", params={"limit": 2}).json()
    assert set(page) == {"object", "data", "first_id", "last_id", "has_more"} and page["object"] == "list"
    assert [one["id"] for one in page["data"]] == ids[::-1][:2] and page["has_more"] is True
    assert (page["first_id"], page["last_id"]) == (ids[2], ids[1])
    behind = api.client.get("/v1/batches", params={"limit": 1, "after": ids[1]}).json()
    assert [one["id"] for one in behind["data"]] == [ids[0]]
    assert behind["data"][0].keys() == api.get(ids[0]).keys()


def test_a_page_has_twenty_batches(api: BatchApi) -> None:
    file = api.file()["id"]
    for _ in range(22):
        api.create(file)
    assert len(api.client.get("/v1/batches").json()["data"]) == 20
    assert len(api.client.get("/v1/batches", params={"limit": 100}).json()["data"]) >= 22


def test_pages_have_each_batch_once_while_others_are_created(api: BatchApi) -> None:
    before = [one for page in api.pages("/v1/batches", 100) for one in page]
    seen: list[str] = []
    for page in api.pages("/v1/batches", 25):
        seen += page
        api.batch()
    assert seen == before


def test_behind_the_last_batch_is_nothing(api: BatchApi) -> None:
    last = [one for page in api.pages("/v1/batches", 100) for one in page][-1]
    page = api.client.get("/v1/batches", params={"after": last}).json()
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize("limit", ["0", "101", "x", "-3", "1.5", ""])
def test_a_wrong_limit_is_refused(api: BatchApi, limit: str) -> None:
    is_error(api.client.get("/v1/batches", params={"limit": limit}), 400, "limit")


@pytest.mark.parametrize("after", ["batch_nope", "file-x", "7", "\0"])
def test_an_unknown_cursor_is_refused(api: BatchApi, after: str) -> None:
    answer = api.client.get("/v1/batches", params={"after": after})
    assert answer.status_code in (400, 404)
    is_error(answer, answer.status_code, "after")


def test_a_completed_batch_cannot_be_cancelled(api: BatchApi, done: dict[str, Any]) -> None:
    error = is_error(api.cancel(done["id"]), 400)
    assert "completed" in error["message"]
    assert api.get(done["id"]) == done


def test_a_cancelled_batch_delivers_what_is_finished(api: BatchApi) -> None:
    batch = api.batch(api.chats(5_000, max_tokens=200, ignore_eos=True))
    api.until(batch["id"], ("in_progress",))
    while api.get(batch["id"])["request_counts"]["completed"] < 20:
        time.sleep(0.05)
    answer = api.cancel(batch["id"])
    assert answer.status_code == 200 and answer.json()["status"] in ("cancelling", "cancelled")
    assert isinstance(answer.json()["cancelling_at"], int)
    batch = api.until(batch["id"], ("cancelled",))
    assert batch["cancelled_at"] >= batch["cancelling_at"] and batch["completed_at"] is None
    output, errors = api.results(batch)
    assert output and errors and len(output) + len(errors) == 5_000
    assert {one["custom_id"] for one in output + errors} == {f"r-{number}" for number in range(5_000)}
    assert len({one["id"] for one in output + errors}) == 5_000
    assert all(one["response"] is None and one["error"]["code"] == "batch_cancelled" for one in errors)
    assert all(set(one["error"]) == {"code", "message"} and one["error"]["message"] for one in errors)
    assert batch["request_counts"] == {"total": 5_000, "completed": len(output), "failed": len(errors)}
    assert batch["usage"]["output_tokens"] == 200 * len(output)
    assert "cancelled" in is_error(api.cancel(batch["id"]), 400)["message"]
    assert api.cancel(batch["id"], **{"x-stainless-retry-count": "1"}).json() == batch  # its answer was lost


def test_a_batch_is_cancelled_while_it_is_validated(api: BatchApi) -> None:
    batch = api.batch(api.chats(2_000))
    assert api.cancel(batch["id"]).status_code == 200
    batch = api.until(batch["id"], ("cancelled",))
    output, errors = api.results(batch)
    assert len(output) + len(errors) in (0, 2_000)


def test_at_the_end_of_its_window_a_batch_delivers_what_is_finished(api: BatchApi) -> None:
    batch = api.ended(api.chats(8_000, max_tokens=400, ignore_eos=True), window="3s")
    assert batch["status"] == "expired" and batch["expired_at"] >= batch["expires_at"]
    assert batch["completed_at"] is None and batch["failed_at"] is None and batch["errors"] is None
    output, errors = api.results(batch)
    assert {one["custom_id"] for one in output + errors} == {f"r-{number}" for number in range(8_000)}
    assert len(output) + len(errors) == 8_000 and errors
    assert all(one["response"] is None and one["error"]["code"] == "batch_expired" for one in errors)
    assert batch["request_counts"] == {"total": 8_000, "completed": len(output), "failed": len(errors)}
    assert "expired" in is_error(api.cancel(batch["id"]), 400)["message"]


def test_a_short_window_overtakes_lines_that_are_not_sent(api: BatchApi) -> None:
    large = api.batch(api.chats(5_000, max_tokens=100, ignore_eos=True))
    api.until(large["id"], ("in_progress",))
    small = api.ended(api.chats(50), window="60s")
    assert small["status"] == "completed" and api.get(large["id"])["status"] == "in_progress"
    api.cancel(large["id"])
