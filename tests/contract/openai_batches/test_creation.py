"""`POST /v1/batches`: the batch object, every refusal, and creates that arrive twice."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.batch_api import CHAT, TIMES, BatchApi, is_error

pytestmark = pytest.mark.slow

FIELDS = {
    "id",
    "object",
    "endpoint",
    "model",
    "errors",
    "input_file_id",
    "completion_window",
    "status",
    "output_file_id",
    "error_file_id",
    "created_at",
    "expires_at",
    "request_counts",
    "usage",
    "metadata",
    *TIMES,
}
JSON = {"content-type": "application/json"}


def test_the_batch_object_has_the_documented_fields(api: BatchApi) -> None:
    file = api.file()
    batch = api.create(file["id"], metadata={"k": "v"}).json()
    assert set(batch) >= FIELDS
    assert batch["id"].startswith("batch_") and batch["object"] == "batch" and batch["status"] == "validating"
    assert (batch["endpoint"], batch["input_file_id"], batch["metadata"]) == (CHAT, file["id"], {"k": "v"})
    assert batch["completion_window"] == "24h" and batch["expires_at"] == batch["created_at"] + 86_400
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert all(batch[name] is None for name in (*TIMES, "errors", "output_file_id", "error_file_id"))


@pytest.mark.parametrize("more", [{}, {"metadata": None}, {"metadata": {}}, {"output_expires_after": None}])
def test_what_may_be_left_out_may_be_null(api: BatchApi, more: dict[str, Any]) -> None:
    assert api.batch(**more)["metadata"] in (None, {})


@pytest.mark.parametrize("name", ["input_file_id", "endpoint", "completion_window"])
@pytest.mark.parametrize("value", ["missing", None, 5, ["x"]])
def test_a_field_that_is_missing_or_no_text_is_refused(api: BatchApi, name: str, value: Any) -> None:
    body: dict[str, Any] = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", name: value}
    if value == "missing":
        del body[name]
    error = is_error(api.client.post("/v1/batches", json=body), 400, name)
    assert value != "missing" or error["code"] == "missing_required_parameter"


def test_a_field_that_is_not_documented_is_refused(api: BatchApi) -> None:
    is_error(api.create(api.file()["id"], priority=5), 400, "priority", "unknown_parameter")


@pytest.mark.parametrize("file", ["file-nope", "", "x" * 2_000, "\0", "batch_1"])
def test_an_unknown_input_is_refused(api: BatchApi, file: str) -> None:
    is_error(api.create(file), 400, "input_file_id")


def test_an_output_file_is_no_input(api: BatchApi, done: dict[str, Any]) -> None:
    is_error(api.create(done["output_file_id"]), 400, "input_file_id")


@pytest.mark.parametrize("endpoint", ["/v1/nope", "", "/v1/chat/completions/", "v1/chat/completions", "/v1/batches"])
def test_an_unknown_endpoint_is_refused(api: BatchApi, endpoint: str) -> None:
    is_error(api.create(api.file()["id"], endpoint=endpoint), 400, "endpoint", "invalid_value")


@pytest.mark.parametrize(
    "window", ["0s", "-1h", "", "soon", "1x", "h", "24", "1e9h", "9" * 70 + "s", "24h\0", " 24h", "24h "]
)
def test_a_wrong_window_is_refused(api: BatchApi, window: str) -> None:
    is_error(api.create(api.file()["id"], window=window), 400, "completion_window")


@pytest.mark.parametrize(
    ("window", "seconds"), [("1s", 1), ("90s", 90), ("30m", 1_800), ("1h", 3_600), ("7d", 604_800)]
)
def test_windows(api: BatchApi, window: str, seconds: int) -> None:
    batch = api.batch(window=window)
    assert batch["completion_window"] == window and batch["expires_at"] - batch["created_at"] == seconds


@pytest.mark.parametrize(
    "metadata",
    [
        {str(one): "x" for one in range(17)},
        {"k" * 65: "v"},
        {"k": "v" * 513},
        {"k": 1},
        {"k": None},
        {"": "v"},
        {"query": 1},
        [],
        "x",
    ],
)
def test_metadata_beyond_its_limits_is_refused(api: BatchApi, metadata: Any) -> None:
    assert is_error(api.create(api.file()["id"], metadata=metadata), 400)["param"].startswith("metadata")


def test_metadata_at_its_limits_is_kept(api: BatchApi) -> None:
    metadata = {f"{one:02d}" + "ü" * 62: "😀" * 512 for one in range(16)}
    batch = api.batch(metadata=metadata)
    assert batch["metadata"] == metadata == api.get(batch["id"])["metadata"]


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000, b'{"input_file_id": "\\ud800"}']
)
def test_a_body_that_is_no_object_is_refused(api: BatchApi, body: bytes) -> None:
    is_error(api.client.post("/v1/batches", content=body, headers=JSON), 400)


def test_a_body_that_is_too_large_is_refused(api: BatchApi) -> None:
    answer = api.client.post("/v1/batches", content=b'{"a": "' + b"x" * (2 << 20) + b'"}', headers=JSON)
    assert answer.status_code in (400, 413)
    is_error(answer, answer.status_code)


def test_a_form_is_no_create(api: BatchApi) -> None:
    answer = api.client.post("/v1/batches", data={"input_file_id": "file-x", "endpoint": CHAT})
    is_error(answer, 400, None, "unsupported_content_type")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_json_under_another_name_is_refused_by_it(api: BatchApi, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    error = is_error(api.client.post("/v1/batches", content=b"{}", headers=headers), 400, None)
    assert error["code"] == "unsupported_content_type" and "application/json" in error["message"]


def test_json_with_a_charset_is_json(api: BatchApi) -> None:
    asked = {"input_file_id": api.file()["id"], "endpoint": CHAT, "completion_window": "24h"}
    headers = {"content-type": "application/json; charset=utf-8"}
    assert api.client.post("/v1/batches", content=json.dumps(asked), headers=headers).status_code == 200


@pytest.mark.parametrize(
    "life",
    [
        {"anchor": "created_at", "seconds": 3_599},
        {"anchor": "created_at", "seconds": 2_592_001},
        {"anchor": "created_at", "seconds": "3600"},
        {"anchor": "created_at", "seconds": 3600.5},
        {"anchor": "now", "seconds": 3_600},
        {"anchor": "created_at"},
        {"seconds": 3_600},
        3,
    ],
)
def test_a_wrong_life_of_outputs_is_refused(api: BatchApi, life: Any) -> None:
    answer = api.create(api.file()["id"], output_expires_after=life)
    assert is_error(answer, 400)["param"].startswith("output_expires_after")


@pytest.mark.parametrize("seconds", [3_600, 2_592_000])
def test_outputs_live_as_long_as_it_is_said(api: BatchApi, seconds: int) -> None:
    life = {"anchor": "created_at", "seconds": seconds}
    batch = api.ended(output_expires_after=life)
    file = api.client.get(f"/v1/files/{batch['output_file_id']}").json()
    assert file["expires_at"] - file["created_at"] == seconds


def test_a_create_with_the_same_key_makes_one_batch(api: BatchApi) -> None:
    file, key = api.file()["id"], {"Idempotency-Key": uuid.uuid4().hex}
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: api.create(file, headers=key).json()["id"], range(8)))
    assert len(set(made)) == 1
    api.until(made[0])
    api.client.delete(f"/v1/files/{file}")
    assert api.create(file, headers=key).json()["id"] == made[0]


def test_a_key_belongs_to_one_request(api: BatchApi) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}
    assert api.create(api.file()["id"], headers=key).status_code == 200
    is_error(api.create(api.file()["id"], headers=key), 400)


def test_a_create_that_a_stock_client_repeats_makes_one_batch(api: BatchApi) -> None:
    file = api.file()["id"]
    first = api.create(file, headers={"x-stainless-retry-count": "0"}).json()["id"]
    again = api.create(file, headers={"x-stainless-retry-count": "1"}).json()["id"]
    assert again == first


def test_two_creates_make_two_batches(api: BatchApi) -> None:
    file = api.file()["id"]
    assert api.create(file).json()["id"] != api.create(file).json()["id"]
