"""More than a hundred tries to read, list, cancel or change what another tenant has: none succeeds, nothing changes.

One application for all of them. Every way to show who one is meets every call that names somebody else's file or batch.
"""

from __future__ import annotations

import base64
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.api_service import jsonl, line
from support.tenant_service import AUDIENCE, ISSUER, SECRET, TenantService, bearer, tenant_service


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantService]:
    with tenant_service(tmp_path_factory.mktemp("tenants")) as made:
        yield made


def operations(site: TenantService) -> list[tuple[str, str, dict[str, Any]]]:
    """Every call that names the victim's file or batch, spelled in several ways."""
    batch = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return [
        ("GET", f"/v1/files/{site.file_id}", {}),
        ("GET", f"/v1/files/{site.file_id}/content", {}),
        ("DELETE", f"/v1/files/{site.file_id}", {}),
        ("GET", f"/v1/batches/{site.batch_id}", {}),
        ("POST", f"/v1/batches/{site.batch_id}/cancel", {}),
        ("POST", "/v1/batches", {"json": {**batch, "input_file_id": site.file_id}}),
        ("GET", f"/v1/files?after={site.file_id}", {}),
        ("GET", f"/v1/batches?after={site.batch_id}", {}),
        ("GET", f"/v1/files/{site.file_id}?tenant=victim", {}),
        ("GET", f"/v1/files/x/../{site.file_id}", {}),
        ("GET", f"/v1/files/%2e%2e%2f{site.file_id}/content", {}),
        ("HEAD", f"/v1/files/{site.file_id}/content", {}),
    ]


FORGED: dict[str, Callable[[TenantService], Any]] = {
    "another tenant's key": lambda site: bearer(site.keys["attacker"]),
    "another tenant's token": lambda site: bearer(site.token()),
    "headers that name the victim": lambda site: {
        **bearer(site.keys["attacker"]),
        "X-Tenant": "victim",
        "X-MaaS-Username": "victim",
        "X-Forwarded-User": "victim",
        "OpenAI-Organization": "victim",
        "OpenAI-Project": "victim",
    },
    "no key": lambda site: {},
    "an empty key": lambda site: bearer(""),
    "a revoked key": lambda site: bearer(site.keys["revoked"]),
    "an expired key": lambda site: bearer(site.keys["expired"]),
    "a key without the scope": lambda site: bearer(site.keys["unscoped"]),
    "a key cut short": lambda site: bearer(site.keys["victim"][:-1]),
    "a key with one more character": lambda site: bearer(site.keys["victim"] + "A"),
    "a key in other case": lambda site: bearer(site.keys["victim"].swapcase()),
    "a key in another scheme": lambda site: {"Authorization": f"Token {site.keys['victim']}"},
    "a key as a password": lambda site: {
        "Authorization": "Basic " + base64.b64encode(f"victim:{site.keys['victim']}".encode()).decode()
    },
    "a key in a cookie": lambda site: {"Cookie": f"Authorization=Bearer {site.keys['victim']}"},
    "a key in another header": lambda site: {"X-Api-Key": site.keys["victim"], "Api-Key": site.keys["victim"]},
    "two keys": lambda site: [
        ("Authorization", f"Bearer {site.keys['attacker']}"),
        ("Authorization", f"Bearer {site.keys['victim']}"),
    ],
    "an expired token": lambda site: bearer(site.token(tenant="victim", exp=int(time.time()) - 3600)),
    "a token for somebody else": lambda site: bearer(site.token(tenant="victim", aud="other")),
    "a token of another issuer": lambda site: bearer(site.token(tenant="victim", iss="https://evil.example")),
    "a token without scopes": lambda site: bearer(site.token(tenant="victim", scope="")),
    "an unsigned token": lambda site: bearer(
        ".".join(
            base64.urlsafe_b64encode(orjson.dumps(part)).rstrip(b"=").decode()
            for part in (
                {"alg": "none", "kid": "one"},
                {"iss": ISSUER, "aud": AUDIENCE, "exp": 9999999999, "tenant": "victim"},
            )
        )
        + "."
    ),
    "a token with a changed tenant": lambda site: bearer(changed_tenant(site.token())),
    "an oversized key": lambda site: bearer("sk-" + "a" * 100_000),
    "an oversized token": lambda site: bearer("a" * 50_000 + ".b.c"),
    "SQL": lambda site: bearer("sk-' OR tenant='victim' --"),
}


def changed_tenant(token: str) -> str:
    head, payload, signature = token.split(".")
    claims = orjson.loads(base64.urlsafe_b64decode(payload + "=="))
    changed = base64.urlsafe_b64encode(orjson.dumps({**claims, "tenant": "victim"})).rstrip(b"=").decode()
    return f"{head}.{changed}.{signature}"


def test_there_are_more_than_a_hundred_tries(site: TenantService) -> None:
    assert len(FORGED) * len(operations(site)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", FORGED)
def test_no_try_reads_or_changes_anything(site: TenantService, name: str) -> None:
    before = site.state()
    for method, path, options in operations(site):
        answer = site.ask(method, path, FORGED[name](site), **options)
        assert 400 <= answer.status_code < 500, (method, path, answer.status_code)
        assert SECRET not in answer.text and "custom_id" not in answer.text
        for secret in site.keys.values():
            assert secret not in answer.text
        if method != "HEAD":
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert site.state() == before


def test_lists_have_the_callers_own_things_only(site: TenantService) -> None:
    for headers in (bearer(site.keys["attacker"]), bearer(site.token())):
        for path in ("/v1/files", "/v1/batches", "/v1/files?limit=100&purpose=batch", "/v1/batches?limit=100"):
            answer = site.ask("GET", path, headers)
            assert answer.status_code == 200 and answer.json()["data"] == []


def test_what_is_not_there_and_what_is_anothers_look_the_same(site: TenantService) -> None:
    key = bearer(site.keys["attacker"])
    for kind, name in (("files", site.file_id), ("batches", site.batch_id)):
        missing = name[:-4] + ("aaaa" if name[-4:] != "aaaa" else "bbbb")
        theirs, nothing = (site.ask("GET", f"/v1/{kind}/{one}", key) for one in (name, missing))
        assert (theirs.status_code, theirs.text.replace(name, "X")) == (404, nothing.text.replace(missing, "X"))


def test_a_key_that_may_read_changes_nothing(site: TenantService) -> None:
    key, before = bearer(site.keys["reader"]), site.state()
    for method, path, options in operations(site):
        if method in ("POST", "DELETE"):
            assert site.ask(method, path, key, **options).status_code == 403
    assert site.ask("GET", f"/v1/files/{site.file_id}", key).status_code == 200
    assert site.state() == before


def test_a_key_of_one_tenant_sent_again_to_another_does_nothing_there(site: TenantService) -> None:
    """The same Idempotency-Key of two tenants makes two batches: neither sees the other's."""
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    mine = site.ask(
        "POST",
        "/v1/batches",
        {**bearer(site.keys["victim"]), "Idempotency-Key": "one"},
        json={**body, "input_file_id": site.file_id},
    )
    files = {"file": ("in.jsonl", jsonl([line("a")]))}
    key = bearer(site.keys["attacker"])
    own = site.ask("POST", "/v1/files", key, files=files, data={"purpose": "batch"}).json()["id"]
    theirs = site.ask("POST", "/v1/batches", {**key, "Idempotency-Key": "one"}, json={**body, "input_file_id": own})
    assert mine.status_code == theirs.status_code == 200
    assert theirs.json()["id"] != mine.json()["id"] and theirs.json()["input_file_id"] == own
    listed = site.ask("GET", "/v1/batches", key).json()["data"]
    assert [batch["id"] for batch in listed] == [theirs.json()["id"]]
    site.ask("POST", f"/v1/batches/{theirs.json()['id']}/cancel", key)
    site.ask("DELETE", f"/v1/files/{own}", key)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/batches", b"[" * 100_000),
        ("/v1/batches", b'{"metadata":' * 20_000),
        ("/v1/batches", b"x" * (2 << 20)),
        ("/v1/chat/completions", b"[" * 100_000),
        ("/v1/chat/completions", b"x" * (2 << 20)),
        ("/v1/chat/completions", b'{"model": "m", "max_tokens": ' + b"9" * 100_000 + b"}"),
        ("/v1/files", b"x" * 2_000_000),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_oversized_and_deep_bodies_are_refused(site: TenantService, path: str, body: bytes) -> None:
    headers = {**bearer(site.keys["attacker"]), "Content-Type": "application/json"}
    assert 400 <= site.ask("POST", path, headers, content=body).status_code < 500


def test_quotas_refuse_one_tenant_and_not_the_others(site: TenantService) -> None:
    small = bearer(site.keys["small"])
    big = {"file": ("in.jsonl", b"x" * 5000)}
    answer = site.ask("POST", "/v1/files", small, files=big, data={"purpose": "batch"})
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "quota_exceeded"
    assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers
    files = {"file": ("in.jsonl", jsonl([line("a")]))}
    own = site.ask("POST", "/v1/files", small, files=files, data={"purpose": "batch"}).json()["id"]
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": own}
    assert site.ask("POST", "/v1/batches", small, json=body).status_code == 200
    again = site.ask("POST", "/v1/batches", {**small, "Idempotency-Key": "one"}, json=body)
    assert again.status_code == 429, "a key that was never used makes a new batch"
    refused = site.ask("POST", "/v1/batches", small, json={**body, "metadata": {"n": "2"}})
    assert refused.status_code == 429 and "open batches" in refused.json()["error"]["message"]
    assert site.ask("POST", "/v1/files", bearer(site.keys["attacker"]), files=big, data={"purpose": "batch"}).is_success


def test_a_repeat_is_answered_when_the_quota_is_used_up_and_a_new_batch_is_not(site: TenantService) -> None:
    key = bearer(site.keys["single"])
    files = {"file": ("in.jsonl", jsonl([line("a")]))}
    own = site.ask("POST", "/v1/files", key, files=files, data={"purpose": "batch"}).json()["id"]
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": own}
    once = {**key, "Idempotency-Key": "once"}
    made = site.ask("POST", "/v1/batches", once, json=body)
    assert made.status_code == 200
    for headers in (once, {**key, "x-stainless-retry-count": "1"}):
        repeat = site.ask("POST", "/v1/batches", headers, json=body)
        assert (repeat.status_code, repeat.json()["id"]) == (200, made.json()["id"])
    for headers in ({**key, "Idempotency-Key": "other"}, key):
        assert site.ask("POST", "/v1/batches", headers, json=body).status_code == 429
    assert len(site.ask("GET", "/v1/batches", key).json()["data"]) == 1


def test_a_file_that_comes_in_chunks_is_cut_off_at_the_quota_of_its_tenant(site: TenantService) -> None:
    sent = []

    async def chunks() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        for number in range(50):
            sent.append(number)
            yield b"x" * 500
        yield b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'

    headers = {**bearer(site.keys["small"]), "Content-Type": "multipart/form-data; boundary=x"}
    answer = site.ask("POST", "/v1/files", headers, content=chunks())
    assert answer.status_code == 429 and "bytes of files: limit 1,000" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false" and len(sent) < 5
    headers["Authorization"] = bearer(site.keys["queue"])["Authorization"]
    assert site.ask("POST", "/v1/files", headers, content=chunks()).status_code == 200 and len(sent) > 50


def test_a_batch_counts_with_all_its_lines_from_its_creation(site: TenantService) -> None:
    key = bearer(site.keys["queue"])
    form = {"files": {"file": ("in.jsonl", jsonl([line(name) for name in "abc"]))}, "data": {"purpose": "batch"}}
    file = site.ask("POST", "/v1/files", key, **form).json()
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": file["id"]}
    with contextlib.closing(sqlite3.connect(site.home / "api.db")) as connection, connection:
        assert connection.execute("SELECT lines FROM api_files WHERE id = ?", (file["id"],)).fetchone() == (3,)
        connection.execute("UPDATE api_files SET lines = NULL WHERE id = ?", (file["id"],))  # of the version before
    assert site.ask("POST", "/v1/batches", key, json=body).status_code == 200
    refused = site.ask("POST", "/v1/batches", key, json={**body, "metadata": {"n": "2"}})
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
    assert "queued lines: limit 5, held 3, requested 3" in refused.json()["error"]["message"]


def test_the_audit_log_names_the_refused_and_no_secret(site: TenantService) -> None:
    for key, status in (("revoked", 401), ("unscoped", 403), ("attacker", 404)):
        answer = site.ask("GET", f"/v1/batches/{site.batch_id}", bearer(site.keys[key]))
        assert answer.status_code == status
    audit = Path(site.run(_audit_path(site))).read_text()
    events = [orjson.loads(one) for one in audit.splitlines()]
    assert {401, 403, 404} <= {event["status"] for event in events}
    assert all(event["reason"] for event in events if event["status"] >= 400 and event["route"].startswith("/v1/"))
    assert any(event["tenant"] == "attacker" and event["status"] == 404 for event in events)
    assert SECRET not in audit
    for secret in site.keys.values():
        assert secret not in audit


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"iss": "https://elsewhere.example"}, "token: issuer"),
        ({"aud": "somebody"}, "token: audience"),
        ({"exp": 1}, "token: expired"),
        ({"tenant": "no tenant!"}, "token: tenant"),
        ({"tenant": None}, "token: a claim is missing"),
    ],
)
def test_why_a_token_is_refused_is_in_the_audit_log_and_not_in_the_answer(
    site: TenantService, claims: dict[str, Any], reason: str
) -> None:
    answer = site.ask("GET", "/v1/batches", bearer(site.token(**claims)))
    assert answer.status_code == 401 and answer.json()["error"]["message"] == "Incorrect API key provided."
    assert last_reason(site) == reason


@pytest.mark.parametrize(
    ("key", "reason"), [("expired", "is expired"), ("revoked", "is revoked"), (None, "neither a key"), ("", "Bearer")]
)
def test_why_a_key_is_refused_is_in_the_audit_log_and_not_in_the_answer(
    site: TenantService, key: str | None, reason: str
) -> None:
    headers = bearer(site.keys[key] if key else "sk-nobody") if key != "" else {"Authorization": "Basic x"}
    answer = site.ask("GET", "/v1/batches", headers)
    assert answer.status_code == 401 and answer.json()["error"]["message"] == "Incorrect API key provided."
    assert reason in last_reason(site)


def last_reason(site: TenantService) -> str:
    events = [orjson.loads(one) for one in Path(site.run(_audit_path(site))).read_bytes().splitlines()]
    return str(events[-1]["reason"])


async def _audit_path(site: TenantService) -> str:
    transport: Any = site.client._transport
    return str(transport.app._audit._path)
