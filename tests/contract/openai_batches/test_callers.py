"""Keys, tenants and limits, as a stock client meets them: 401, 403, 404, 429, before anything that was sent is read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from support.batch_api import BatchApi, is_error
from support.served_door import ServedDoor
from support.simulated_engine import simulated_engine

from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.requests.callers import Scope

pytestmark = pytest.mark.slow

READS = [
    "/v1/files",
    "/v1/files/file-x",
    "/v1/files/file-x/content",
    "/v1/batches",
    "/v1/batches/batch_x",
    "/v1/models",
    "/v1/models/tiny",
]
WRITES = [("POST", "/v1/files"), ("POST", "/v1/batches"), ("POST", "/v1/batches/b/cancel"), ("DELETE", "/v1/files/f")]
LIMITS = "default: {requests_per_minute: 1000000}\ntenants: {slow: {requests_per_minute: 1}, "
LIMITS += "small: {requests_per_minute: 1000, open_batches: 1, storage_bytes: 1000}}\n"


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, BatchApi]]:
    """Calls of one service that asks for keys, by who makes them."""
    home = tmp_path_factory.mktemp("keyed")
    (home / "home").mkdir()
    (home / "home" / "limits.yaml").write_text(LIMITS)
    with contextlib.closing(KeyStore(f"sqlite:///{home}/home/api.db", time.time)) as store:
        tenants = ("one", "other", "empty", "slow", "small")
        keys = {tenant: store.create(tenant, frozenset(Scope))[1] for tenant in tenants}
        keys["reader"] = store.create("one", frozenset({Scope.FILES_READ}))[1]
        revoked, keys["revoked"] = store.create("one", frozenset(Scope))
        store.revoke(revoked.key_id)
    keys |= {"unknown": "sk-nobody", "none": ""}
    with simulated_engine() as engine, contextlib.ExitStack() as stack:
        door = ServedDoor(home, engine.url)
        stack.callback(door.close)
        door.start()
        found = {name: BatchApi(door.url, key=key) for name, key in keys.items()}
        for api in found.values():
            stack.callback(api.close)
        del found["none"].client.headers["Authorization"]
        yield found


@pytest.mark.parametrize("path", READS)
def test_without_a_key_nothing_is_shown(callers: Mapping[str, BatchApi], path: str) -> None:
    error = is_error(callers["none"].client.get(path), 401, None, None)
    assert "API key" in error["message"]


@pytest.mark.parametrize(("method", "path"), WRITES)
def test_without_a_key_nothing_is_done(callers: Mapping[str, BatchApi], method: str, path: str) -> None:
    is_error(callers["none"].client.request(method, path), 401, None, None)


@pytest.mark.parametrize("who", ["unknown", "revoked"])
def test_a_wrong_key_is_said_to_be_one(callers: Mapping[str, BatchApi], who: str) -> None:
    answer = callers[who].client.get("/v1/batches")
    error = is_error(answer, 401, None, "invalid_api_key")
    assert callers[who].key not in error["message"]
    assert answer.headers["www-authenticate"].startswith("Bearer") and answer.headers["x-request-id"]


@pytest.mark.parametrize("value", ["Basic abc", "Bearer", "sk-nobody"])
def test_another_authorization_is_no_key(callers: Mapping[str, BatchApi], value: str) -> None:
    answer = httpx.get(f"{callers['none'].base}/v1/files", headers={"Authorization": value})
    is_error(answer, 401)


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
@pytest.mark.parametrize(("who", "status"), [("none", 401), ("reader", 403)])
def test_a_body_is_judged_after_its_caller(callers: Mapping[str, BatchApi], who: str, status: int, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = callers[who].client.post("/v1/batches", content=body, headers=headers)
    is_error(answer, status, kind="permission_error" if status == 403 else "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1/files?limit=0", "/v1/batches?limit=x", "/v1/files?order=up"])
def test_a_query_is_judged_after_its_caller(callers: Mapping[str, BatchApi], path: str) -> None:
    is_error(callers["none"].client.get(path), 401)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_the_list_of_a_new_tenant_is_empty(callers: Mapping[str, BatchApi], path: str) -> None:
    page = callers["empty"].client.get(path).json()
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_what_is_anothers_is_not_there(callers: Mapping[str, BatchApi]) -> None:
    one, other = callers["one"], callers["other"]
    batch = one.batch()
    for path in (f"/v1/files/{batch['input_file_id']}", f"/v1/files/{batch['input_file_id']}/content"):
        is_error(other.client.get(path), 404, "id")
    is_error(other.client.delete(f"/v1/files/{batch['input_file_id']}"), 404, "id")
    is_error(other.client.get(f"/v1/batches/{batch['id']}"), 404)
    is_error(other.cancel(batch["id"]), 404)
    is_error(other.create(batch["input_file_id"]), 400, "input_file_id")
    is_error(other.client.get("/v1/batches", params={"after": batch["id"]}), 404, "after")
    is_error(other.client.get("/v1/files", params={"after": batch["input_file_id"]}), 404, "after")
    unknown = is_error(other.client.get("/v1/files/file-x"), 404)
    found = is_error(other.client.get(f"/v1/files/{batch['input_file_id']}"), 404)
    assert found["message"] == unknown["message"].replace("file-x", batch["input_file_id"])
    assert one.get(batch["id"])["status"] not in ("cancelling", "cancelled")


def test_too_many_requests_are_told_when_to_come_again(callers: Mapping[str, BatchApi]) -> None:
    answers = [callers["slow"].client.get("/v1/models") for _ in range(2)]
    assert answers[0].status_code == 200
    is_error(answers[1], 429, None, "rate_limit_exceeded", "requests")
    assert int(answers[1].headers["retry-after"]) > 0 and int(answers[1].headers["retry-after-ms"]) > 0
    assert answers[1].headers["x-ratelimit-remaining-requests"] == "0"


def test_what_waiting_does_not_help_is_not_sent_again_by_the_stock_client(callers: Mapping[str, BatchApi]) -> None:
    import openai

    small, asked = callers["small"], []
    answer = small.upload(b"x" * 1_001)
    is_error(answer, 429, None, "quota_exceeded", "insufficient_quota")
    assert "retry-after" not in answer.headers
    counted = httpx.Client(event_hooks={"request": [asked.append]})
    with (
        openai.OpenAI(base_url=f"{small.base}/v1", api_key=small.key, http_client=counted) as stock,
        pytest.raises(openai.RateLimitError, match="bytes of files"),
    ):
        stock.files.create(file=("in.jsonl", b"x" * 1_001), purpose="batch")
    assert len(asked) == 1


def test_a_long_file_in_chunks_is_cut_off_and_its_sender_told_why(callers: Mapping[str, BatchApi]) -> None:
    sent = []

    def chunks() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        for number in range(400):
            sent.append(number)
            yield b"x" * 100_000

    kind = {"content-type": "multipart/form-data; boundary=x"}
    answer = callers["small"].client.post("/v1/files", content=chunks(), headers=kind)
    is_error(answer, 429, None, "quota_exceeded", "insufficient_quota")
    assert answer.headers["x-should-retry"] == "false" and len(sent) < 400


def is_typed(kind: Any, found: Mapping[str, Any]) -> bool:
    """Exactly the fields that the stock client knows, each of its type, with null where it has nothing to say."""
    typed = kind.model_validate(found, strict=True)
    return not typed.model_extra and set(found) == set(kind.model_fields)


def test_every_object_has_the_fields_of_the_stock_clients_types(callers: Mapping[str, BatchApi]) -> None:
    from openai.types import Batch, FileDeleted, FileObject, Model

    api = callers["one"]
    made = api.batch(api.chats(2), metadata={"a": "b"})
    done = api.until(made["id"])
    failed = api.ended(b"{\n")
    cancelled = api.batch(api.chats(900, max_tokens=200, ignore_eos=True))
    api.until(cancelled["id"], ("in_progress",))
    cancelling = api.cancel(cancelled["id"]).json()
    for batch in (made, done, failed, cancelling, api.until(cancelled["id"])):
        assert is_typed(Batch, batch), batch
    for name in (done["input_file_id"], done["output_file_id"]):
        assert is_typed(FileObject, api.client.get(f"/v1/files/{name}").json())
    assert is_typed(FileDeleted, api.client.delete(f"/v1/files/{done['input_file_id']}").json())
    assert is_typed(Model, api.client.get("/v1/models/tiny").json())
