"""More than a hundred named attacks of one tenant on another: forged and replayed proofs, odd paths, fields, sizes.

Each is one request of somebody who is not the victim, or not any more. None may show, change, end or make anything of
the victim's, and none may end in a 500.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import jwt
import orjson
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from support.api_service import jsonl, line
from support.tenant_service import AUDIENCE, ISSUER, SECRET, TenantService, bearer, tenant_service

BATCH = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
SCOPES = "files.read files.write batches.read batches.write models.read inference"
ATTACKER = "attacker"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantService]:
    with tenant_service(tmp_path_factory.mktemp("attacks")) as made:
        yield made


@dataclass(frozen=True)
class Attack:
    """A request. `headers` of None: those of the attacker's own key. `{file}`, `{batch}`: the victim's ids."""

    method: str
    path: str
    headers: Callable[[TenantService], dict[str, str]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    allowed: tuple[int, ...] = ()  # of what does something harmless with the attacker's own things


def segment(part: object) -> str:
    return base64.urlsafe_b64encode(orjson.dumps(part)).rstrip(b"=").decode()


def claims(**changes: Any) -> dict[str, Any]:
    now = int(time.time())
    return {"iss": ISSUER, "aud": AUDIENCE, "exp": now + 600, "tenant": "victim", "scope": SCOPES} | changes


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in claims().items() if key != name}


def signed(site: TenantService, found: dict[str, Any], **headers: Any) -> dict[str, str]:
    return bearer(jwt.encode(found, site.private, "RS256", headers={"kid": "one", **headers}))


def own_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def confused(site: TenantService) -> dict[str, str]:
    """HMAC with the public key as its secret."""
    import hashlib
    import hmac

    public = site.private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    text = f"{segment({'alg': 'HS256', 'kid': 'one', 'typ': 'JWT'})}.{segment(claims())}"
    mac = hmac.new(public, text.encode(), hashlib.sha256).digest()
    return bearer(f"{text}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}")


def tampered(site: TenantService) -> dict[str, str]:
    head, _, signature = jwt.encode(claims(tenant=ATTACKER), site.private, "RS256", headers={"kid": "one"}).split(".")
    return bearer(f"{head}.{segment(claims())}.{signature}")


def cut(site: TenantService) -> dict[str, str]:
    return {"Authorization": signed(site, claims())["Authorization"][:-3]}


now = time.time
PROOFS: dict[str, Callable[[TenantService], dict[str, str]]] = {
    "token that has ended": lambda s: signed(s, claims(exp=int(now()) - 31)),
    "token that ended long ago, sent again": lambda s: signed(s, claims(exp=1_700_000_000, iat=1_699_999_000)),
    "token that never ends": lambda s: signed(s, without("exp")),
    "token that ends in years": lambda s: signed(s, claims(exp=int(now()) + 10**8)),
    "token whose end is text": lambda s: signed(s, claims(exp="tomorrow")),
    "token that is not valid yet": lambda s: signed(s, claims(nbf=int(now()) + 3600)),
    "token from the future": lambda s: signed(s, claims(iat=int(now()) + 3600)),
    "token without issuer": lambda s: signed(s, without("iss")),
    "token of another issuer": lambda s: signed(s, claims(iss=ISSUER + "/")),
    "token without audience": lambda s: signed(s, without("aud")),
    "token for another audience": lambda s: signed(s, claims(aud=["other", "batch-assets-2"])),
    "token without tenant": lambda s: signed(s, without("tenant")),
    "token whose tenant is a list": lambda s: signed(s, claims(tenant=["victim"])),
    "token whose tenant is an object": lambda s: signed(s, claims(tenant={"name": "victim"})),
    "token whose tenant is null": lambda s: signed(s, claims(tenant=None)),
    "token whose tenant has a line break": lambda s: signed(s, claims(tenant="victim\n")),
    "token whose tenant is a pattern": lambda s: signed(s, claims(tenant="%")),
    "token whose tenant is a path": lambda s: signed(s, claims(tenant="../victim")),
    "token whose tenant looks alike": lambda s: signed(s, claims(tenant="viсtim")),
    "token whose tenant is in other case": lambda s: signed(s, claims(tenant="VICTIM")),
    "token with scopes of no meaning": lambda s: signed(s, claims(scope="admin root *")),
    "token with scopes as a number": lambda s: signed(s, claims(scope=7)),
    "token signed by the attacker": lambda s: bearer(jwt.encode(claims(), own_key(), "RS256", headers={"kid": "one"})),
    "token of an unknown key": lambda s: signed(s, claims(), kid="two"),
    "token whose key is a path": lambda s: signed(s, claims(), kid="../../etc/passwd"),
    "token whose key is SQL": lambda s: signed(s, claims(), kid="one' OR '1'='1"),
    "token that brings an address of keys": lambda s: bearer(
        jwt.encode(claims(), own_key(), "RS256", headers={"kid": "one", "jku": "http://127.0.0.1:1/keys"})
    ),
    "token with critical extensions": lambda s: signed(s, claims(), crit=["b64"], b64=False),
    "token without algorithm": lambda s: bearer(f"{segment({'alg': 'none', 'kid': 'one'})}.{segment(claims())}."),
    "token with algorithm None": lambda s: bearer(f"{segment({'alg': 'None', 'kid': 'one'})}.{segment(claims())}.x"),
    "token by HMAC with the public key": confused,
    "token with another payload": tampered,
    "token cut short": cut,
    "token with two signatures": lambda s: {"Authorization": signed(s, claims())["Authorization"] + ".x"},
    "key revoked": lambda s: bearer(s.keys["revoked"]),
    "key that has ended": lambda s: bearer(s.keys["expired"]),
    "key's digest in place of the key": lambda s: bearer("sk-" + "0" * 43),
    "key with a line break": lambda s: {"Authorization": f"Bearer {s.keys['victim'][:20]} {s.keys['victim'][20:]}"},
    "key of letters outside ASCII": lambda s: {"Authorization": "Bearer sk-ÄÖÜ"},
    "key of 100 KB": lambda s: bearer("sk-" + "a" * 100_000),
}
IDS = {
    "percent-encoded letters": "%66ile-",
    "a null byte": "{file}%00",
    "a line break": "{file}%0a",
    "a blank before": "%20{file}",
    "a slash after": "{file}/",
    "a dot after": "{file}.",
    "a parameter after": "{file};tenant=victim",
    "a fragment": "{file}%23x",
    "upper case": "{FILE}",
    "a wildcard": "%25",
    "an underscore wildcard": "file-________________________",
    "SQL": "x'%20OR%20'1'='1",
    "an absolute path": "%2fetc%2fpasswd",
    "a way up": "..%2f..%2fapi.db",
    "a doubled way up": "%252e%252e%252fapi.db",
    "the path in the store": "api%2ffiles%2f{file}",
    "10 KB": "f" * 10_000,
    "letters outside ASCII": "file-%C3%A4",
    "broken UTF-8": "file-%ff%fe",
    "the victim's batch as a file": "{batch}",
}
CALLS = {
    "lists behind the victim's file": Attack("GET", "/v1/files?after={file}&order=asc"),
    "lists behind the victim's batch": Attack("GET", "/v1/batches?after={batch}&limit=100"),
    "lists with a limit below 0": Attack("GET", "/v1/batches?limit=-1"),
    "lists with a limit of 10^18": Attack("GET", "/v1/files?limit=1000000000000000000"),
    "lists with two tenants": Attack("GET", "/v1/batches?tenant=victim&tenant=attacker", allowed=(200,)),
    "lists with another organization": Attack(
        "GET",
        "/v1/files",
        lambda s: {**bearer(s.keys[ATTACKER]), "OpenAI-Organization": "victim", "OpenAI-Project": "victim"},
        allowed=(200,),
    ),
    "cancels": Attack("POST", "/v1/batches/{batch}/cancel"),
    "cancels with a body": Attack("POST", "/v1/batches/{batch}/cancel", options={"json": {"tenant": "victim"}}),
    "cancels by GET": Attack("GET", "/v1/batches/{batch}/cancel"),
    "cancels by method override": Attack(
        "GET", "/v1/batches/{batch}", lambda s: {**bearer(s.keys[ATTACKER]), "X-HTTP-Method-Override": "DELETE"}
    ),
    "deletes a batch": Attack("DELETE", "/v1/batches/{batch}"),
    "replaces a file": Attack("PUT", "/v1/files/{file}", options={"content": b"{}"}),
    "changes a file": Attack("PATCH", "/v1/files/{file}", options={"json": {"expires_at": 1}}),
    "changes a batch": Attack("POST", "/v1/batches/{batch}", options={"json": {"metadata": {}}}),
    "writes content": Attack("POST", "/v1/files/{file}/content", options={"content": b"x"}),
    "reads content in parts": Attack(
        "GET", "/v1/files/{file}/content", lambda s: {**bearer(s.keys[ATTACKER]), "Range": "bytes=0-10"}
    ),
    "asks whether it changed": Attack(
        "GET", "/v1/files/{file}", lambda s: {**bearer(s.keys[ATTACKER]), "If-None-Match": "*"}
    ),
    "another version of the path": Attack("GET", "/V1/files/{file}"),
    "a doubled slash": Attack("GET", "//v1//files/{file}"),
    "a path that goes up": Attack("GET", "/v1/models/../files/{file}"),
    "a file as a model": Attack("GET", "/v1/models/{file}"),
    "metrics without the scope": Attack("GET", "/metrics"),
    "inference without an engine": Attack("POST", "/v1/chat/completions", options={"json": {"model": "m"}}),
}
BODIES: dict[str, object] = {
    "the victim's file": {**BATCH, "input_file_id": "{file}"},
    "the victim's file and tenant": {**BATCH, "input_file_id": "{file}", "tenant": "victim"},
    "the victim's file in a list": {**BATCH, "input_file_id": ["{file}"]},
    "the victim's file as an object": {**BATCH, "input_file_id": {"$ne": ""}},
    "the victim's batch as its file": {**BATCH, "input_file_id": "{batch}"},
    "a file by its path": {**BATCH, "input_file_id": "../{file}"},
    "a file that is null": {**BATCH, "input_file_id": None},
    "an address for an endpoint": {**BATCH, "input_file_id": "{file}", "endpoint": "http://127.0.0.1/v1/chat"},
    "a window of 10^20 hours": {**BATCH, "input_file_id": "{file}", "completion_window": "1" + "0" * 20 + "h"},
    "a window below 0": {**BATCH, "input_file_id": "{file}", "completion_window": "-1h"},
    "17 pairs of metadata": {**BATCH, "input_file_id": "{file}", "metadata": {str(n): "" for n in range(17)}},
    "metadata of 100 KB": {**BATCH, "input_file_id": "{file}", "metadata": {"n": "x" * 100_000}},
    "metadata that nests": {**BATCH, "input_file_id": "{file}", "metadata": {"a": {"tenant": "victim"}}},
    "a life of 100 years": {
        **BATCH,
        "input_file_id": "{file}",
        "output_expires_after": {"anchor": "created_at", "seconds": 3_153_600_000},
    },
    "an id of its own": {**BATCH, "input_file_id": "{file}", "id": "{batch}"},
    "a holder": {**BATCH, "input_file_id": "{file}", "holder": "me", "epoch": 99},
    "a list": [BATCH],
    "text": "batch",
    "nothing": {},
}


def create(body: object, **headers: str) -> Attack:
    return Attack(
        "POST", "/v1/batches", lambda s: {**bearer(s.keys[ATTACKER]), **headers}, {"json": body} if body else {}
    )


ATTACKS: dict[str, Attack] = {
    **{f"read with a {name}": Attack("GET", "/v1/files/{file}/content", proof) for name, proof in PROOFS.items()},
    **{
        f"cancel with a {name}": Attack("POST", "/v1/batches/{batch}/cancel", proof)
        for name, proof in list(PROOFS.items())[:6] + list(PROOFS.items())[28:36]
    },
    **{f"an id with {name}": Attack("GET", f"/v1/files/{path}/content") for name, path in IDS.items()},
    **{f"delete an id with {name}": Attack("DELETE", f"/v1/files/{path}") for name, path in IDS.items()},
    **CALLS,
    **{f"a batch of {name}": create(body) for name, body in BODIES.items()},
    "the victim's create sent again": create({**BATCH, "input_file_id": "{file}", "metadata": {"name": SECRET}}),
    "the victim's create sent again as a retry": create(
        {**BATCH, "input_file_id": "{file}", "metadata": {"name": SECRET}}, **{"x-stainless-retry-count": "1"}
    ),
    "the victim's create sent again with its key": create(
        {**BATCH, "input_file_id": "{file}", "metadata": {"name": SECRET}}, **{"Idempotency-Key": "victims-key"}
    ),
    "an Idempotency-Key of 300 letters": create({**BATCH, "input_file_id": "{file}"}, **{"Idempotency-Key": "k" * 300}),
}


def filled(found: Any, site: TenantService) -> Any:
    """The same with the victim's ids."""
    if isinstance(found, dict):
        return {key: filled(value, site) for key, value in found.items()}
    if isinstance(found, list):
        return [filled(value, site) for value in found]
    if not isinstance(found, str):
        return found
    named = found.replace("{file}", site.file_id).replace("{batch}", site.batch_id)
    return named.replace("{FILE}", site.file_id.upper())


def test_there_are_more_than_a_hundred_attacks() -> None:
    assert len(ATTACKS) >= 100, len(ATTACKS)


def test_what_is_forged_here_would_let_somebody_in_if_it_were_right(site: TenantService) -> None:
    assert site.ask("GET", f"/v1/files/{site.file_id}/content", signed(site, claims())).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_shows_and_changes_nothing(site: TenantService, name: str) -> None:
    attack, before = ATTACKS[name], site.kept()
    headers = (attack.headers or (lambda s: bearer(s.keys[ATTACKER])))(site)
    raw = {key.encode(): value.encode() for key, value in headers.items()}
    answer = site.ask(attack.method, filled(attack.path, site), raw, **filled(attack.options, site))
    assert 400 <= answer.status_code < 500 or answer.status_code in attack.allowed, answer.text[:300]
    assert SECRET not in answer.text and "custom_id" not in answer.text
    assert not any(secret in answer.text for secret in site.keys.values())
    if answer.status_code in attack.allowed:
        assert answer.json()["data"] == []
    assert site.kept() == before


def multipart(parts: bytes, boundary: str = "b", **headers: str) -> Callable[[TenantService], httpx.Response]:
    def send(site: TenantService) -> httpx.Response:
        kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return site.ask("POST", "/v1/files", {**bearer(site.keys[ATTACKER]), **kind, **headers}, content=parts)

    return send


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


PURPOSE, END = part("purpose", b"batch"), b"--b--\r\n"
FILE = part("file", b"{}", '; filename="f"')
UPLOADS: dict[str, Callable[[TenantService], httpx.Response]] = {
    "two files": multipart(PURPOSE + FILE + FILE + END),
    "no file": multipart(PURPOSE + END),
    "no purpose": multipart(FILE + END),
    "10,000 parts": multipart(PURPOSE + part("x", b"") * 10_000 + END),
    "a header of 100 KB": multipart(part("file", b"{}", f'; filename="{"f" * 100_000}"') + PURPOSE + END),
    "a boundary of 10 KB": multipart(PURPOSE + FILE + END, boundary="b" * 10_000),
    "no boundary": multipart(PURPOSE + FILE + END, boundary=""),
    "another purpose": multipart(part("purpose", b"batch_output") + FILE + END),
    "a purpose of 1 MB": multipart(part("purpose", b"b" * (1 << 20)) + FILE + END),
    "more than a file may have": multipart(PURPOSE + part("file", b"x" * 200_000, '; filename="f"') + END),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_an_upload_that_is_not_one_makes_nothing(site: TenantService, name: str) -> None:
    before = site.kept()
    own = site.ask("GET", "/v1/files", bearer(site.keys[ATTACKER])).json()["data"]
    answer = UPLOADS[name](site)
    assert 400 <= answer.status_code < 500, answer.text[:300]
    assert site.ask("GET", "/v1/files", bearer(site.keys[ATTACKER])).json()["data"] == own
    assert site.kept() == before


def test_fields_that_name_the_victim_are_refused(site: TenantService) -> None:
    before = site.kept()
    for name, value in (("tenant", "victim"), ("id", site.file_id), ("created_at", "1")):
        answer = multipart(PURPOSE + part(name, value.encode()) + FILE + END)(site)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "unknown_parameter"
    assert site.kept() == before


def test_a_name_of_a_file_that_is_a_path_is_only_a_name(site: TenantService) -> None:
    before = site.kept()
    for number, name in enumerate(("../../api.db", "/etc/passwd", f"../files/{site.file_id}", "a\x00b")):
        body = PURPOSE + part("file", jsonl([line("a")]), f'; filename="{name}"') + END
        answer = multipart(body)(site)
        assert answer.status_code in (200, 400), (number, answer.text)
        if answer.status_code == 200:
            deleted = site.ask("DELETE", f"/v1/files/{answer.json()['id']}", bearer(site.keys[ATTACKER]))
            assert deleted.status_code == 200
    assert site.kept() == before
