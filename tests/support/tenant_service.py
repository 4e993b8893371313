"""A service with several tenants, for tests of what one may do to another: the victim's things, keys of everybody."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jwt
import orjson
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from batch_assets.api import service
from batch_assets.api.access.authentication import JwtSettings
from batch_assets.api.access.jwt_tokens import JwtPolicy
from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.execution import worker
from batch_assets.api.execution.engines.engine_supply import Awaited
from batch_assets.api.front_door import build_front_door
from batch_assets.api.requests.callers import Scope
from batch_assets.api.settings import ApiLimits, ApiSettings
from support.api_service import jsonl, line, no_instance
from support.timing import PATIENCE

SECRET = "very-secret-name"
ISSUER, AUDIENCE = "https://issuer.example", "batch-assets"
SCOPES = frozenset(Scope) - {Scope.METRICS_READ}


@dataclass
class TenantService:
    """The service, the victim's things, and keys of everybody."""

    run: Callable[[Any], Any]
    client: httpx.AsyncClient
    keys: dict[str, str]
    private: rsa.RSAPrivateKey
    home: Path
    file_id: str = ""
    batch_id: str = ""

    def ask(self, method: str, path: str, headers: Any = (), **options: Any) -> httpx.Response:
        answer: httpx.Response = self.run(self.client.request(method, path, headers=headers, **options))
        return answer

    def victim(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.ask(method, path, bearer(self.keys["victim"]), **options)

    def state(self) -> tuple[Any, ...]:
        """All that the victim has."""
        file, batch = (
            self.victim("GET", f"/v1/files/{self.file_id}"),
            self.victim("GET", f"/v1/batches/{self.batch_id}"),
        )
        content = self.victim("GET", f"/v1/files/{self.file_id}/content")
        lists = [self.victim("GET", path).json() for path in ("/v1/files", "/v1/batches")]
        return file.json(), batch.json(), content.content, lists

    def kept(self) -> tuple[Any, ...]:
        """Every row of the victim's in the service's database, and the names in the store: cheaper than `state`."""
        with contextlib.closing(sqlite3.connect(self.home / "api.db")) as connection:
            rows = [
                connection.execute(f"SELECT * FROM {table} WHERE tenant = 'victim' ORDER BY 1").fetchall()
                for table in ("api_files", "api_keys")
            ]
            columns = "id, status, cancelling_at, input_file_id, metadata, expires_at, total"
            rows.append(connection.execute(f"SELECT {columns} FROM api_batches WHERE tenant = 'victim'").fetchall())
        content = (self.home / "store" / "api" / "files" / self.file_id).read_bytes()
        return (*rows, content)

    def token(self, **changes: Any) -> str:
        claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 600, "tenant": "attacker"}
        claims |= {"scope": " ".join(SCOPES)} | changes
        return jwt.encode(claims, self.private, "RS256", headers={"kid": "one"})


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@contextlib.contextmanager
def tenant_service(home: Path) -> Iterator[TenantService]:
    """The service below this folder, with its worker."""
    (home / "limits.yaml").write_text(
        "default: {requests_per_minute: 1000000}\n"
        "tenants: {small: {requests_per_minute: 1000000, open_batches: 1, storage_bytes: 1000},\n"
        "  single: {requests_per_minute: 1000000, open_batches: 1},\n"
        "  queue: {requests_per_minute: 1000000, queued_lines: 5}}"
    )
    private = rsa.generate_private_key(65537, 2048)
    key_set = {"keys": [{**RSAAlgorithm.to_jwk(private.public_key(), as_dict=True), "kid": "one"}]}
    (home / "jwks.json").write_bytes(orjson.dumps(key_set))
    database = f"sqlite:///{home / 'api.db'}"
    keys = make_keys(database)
    settings = ApiSettings(
        home, str(home / "store"), database, endpoints=("http://127.0.0.1:1",), limits=ApiLimits(file_bytes=100_000)
    )
    tokens = JwtSettings(JwtPolicy(ISSUER, AUDIENCE), str(home / "jwks.json"))
    before, service._open_instance = service._open_instance, no_instance
    patience, worker.WAITING_SECONDS = worker.WAITING_SECONDS, 0.0
    with asyncio.Runner() as runner:
        door = build_front_door(settings, tokens=tokens)
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(door.app, raise_app_exceptions=False), base_url="http://127.0.0.1:8080"
        )
        stack = contextlib.AsyncExitStack()
        runner.run(stack.enter_async_context(door.inner.router.lifespan_context(door.inner)))
        try:
            made = TenantService(runner.run, client, keys, private, home)
            make_victim(made)
            yield made
        finally:
            runner.run(client.aclose())
            runner.run(stack.aclose())
            service._open_instance = before
            worker.WAITING_SECONDS = patience


def make_keys(database: str) -> dict[str, str]:
    clock = [time.time()]
    with contextlib.closing(KeyStore(database, lambda: clock[0])) as store:
        keys = {name: store.create(name, SCOPES)[1] for name in ("victim", "attacker", "small", "single", "queue")}
        revoked, keys["revoked"] = store.create("victim", SCOPES)
        store.revoke(revoked.key_id)
        keys["unscoped"] = store.create("victim", frozenset({Scope.MODELS_READ}))[1]
        keys["reader"] = store.create("victim", frozenset({Scope.FILES_READ, Scope.BATCHES_READ}))[1]
        clock[0] -= 100
        keys["expired"] = store.create("victim", SCOPES, lifetime=50)[1]
    return keys


def make_victim(site: TenantService) -> None:
    lines = jsonl([line("a"), line("b")])
    files = {"file": (f"{SECRET}.jsonl", lines)}
    site.file_id = site.victim("POST", "/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
    body = {"input_file_id": site.file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    asked = {**body, "metadata": {"name": SECRET}}
    headers = {**bearer(site.keys["victim"]), "Idempotency-Key": "victims-key"}
    answer = site.ask("POST", "/v1/batches", headers, json=asked)
    assert answer.status_code == 200, answer.text
    site.batch_id = answer.json()["id"]
    deadline = time.monotonic() + 30 * PATIENCE
    while site.victim("GET", f"/v1/batches/{site.batch_id}").json()["metadata"].get("waiting_for") != Awaited.ANSWER:
        assert time.monotonic() < deadline
        site.run(asyncio.sleep(0.02))  # what the worker changes is no attack
