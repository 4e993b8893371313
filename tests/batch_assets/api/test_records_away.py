"""While the database is away every route that needs it answers 503, with Retry-After, and goes on when it is back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from support.api_service import CHAT, ApiService, api_service, line
from support.simulated_engine import simulated_engine

from batch_assets.api.database.batch_records import BatchRecords
from batch_assets.api.database.service_database import Records, is_records_trouble

BATCH = {"endpoint": CHAT, "completion_window": "24h"}
ROUTES = [
    ("GET", "/v1/files", {}),
    ("GET", "/v1/files/FILE", {}),
    ("GET", "/v1/files/FILE/content", {}),
    ("DELETE", "/v1/files/FILE", {}),
    ("POST", "/v1/files", {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}),
    ("GET", "/v1/batches", {}),
    ("GET", "/v1/batches/BATCH", {}),
    ("POST", "/v1/batches/BATCH/cancel", {}),
    ("POST", "/v1/batches", {"json": {"input_file_id": "FILE", **BATCH}}),
    ("GET", "/v1/organization/usage/completions?start_time=1700000000", {}),
    ("GET", "/v1/organization/costs?start_time=1700000000", {}),
]


class Database:
    """The file of the records, which may be away: then a folder has its name, and nothing can be opened there."""

    def __init__(self, site: ApiService, home: Path) -> None:
        self._records: Records = site.app.state.batches._records
        self._path, self._kept = home / "api.db", home / "kept"

    def leave(self) -> None:
        self._records.close()
        self._path.rename(self._kept)
        while not self._path.is_dir():
            try:
                self._path.mkdir()
            except FileExistsError:  # a thread of the service has opened a new file meanwhile
                self._path.unlink(missing_ok=True)
        self._records.close()  # a thread may have opened the old file just before it was renamed

    def come_back(self) -> None:
        self._path.rmdir()
        self._kept.rename(self._path)


async def ask(
    site: ApiService, method: str, path: str, options: dict[str, Any], names: dict[str, str]
) -> httpx.Response:
    for word, name in names.items():
        path = path.replace(word, name)
        if "json" in options:
            options = {"json": {key: value.replace(word, name) for key, value in options["json"].items()}}
    return await site.client.request(method, path, **options)


def test_every_route_says_so_and_goes_on_afterwards(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with api_service(tmp_path, "http://127.0.0.1:9") as site:
            made = await site.create([line("a")])
            names = {"FILE": made["input_file_id"], "BATCH": made["id"]}
            database = Database(site, tmp_path)
            database.leave()
            try:
                answers = [await ask(site, *route, names) for route in ROUTES]
            finally:
                database.come_back()
            for route, answer in zip(ROUTES, answers, strict=True):
                assert answer.status_code == 503, (route, answer.text)
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("server_error", "records_unavailable")
                assert str(tmp_path) not in answer.text and "sqlite" not in answer.text
            assert (await site.client.get(f"/v1/batches/{made['id']}")).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("header", [{"Idempotency-Key": "k"}, {"x-stainless-retry-count": "1"}])
def test_a_create_whose_commit_had_no_answer_makes_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: dict[str, str]
) -> None:
    create = BatchRecords.create

    def lost(*arguments: Any, **named: Any) -> None:
        create(*arguments, **named)
        raise sa.exc.OperationalError("COMMIT", None, Exception("server closed the connection unexpectedly"))

    async def scenario() -> None:
        with simulated_engine("--speed", "20") as engine:
            async with api_service(tmp_path, engine.url) as site:
                body = {"input_file_id": await site.upload([line("a")]), **BATCH}
                first = {key: value for key, value in header.items() if key != "x-stainless-retry-count"}
                with monkeypatch.context() as patched:
                    patched.setattr(BatchRecords, "create", lost)
                    answer = await site.client.post("/v1/batches", json=body, headers=first)
                    assert answer.status_code == 503 and "retry-after" in answer.headers
                again = await site.client.post("/v1/batches", json=body, headers=header)
                assert again.status_code == 200
                listed = (await site.client.get("/v1/batches")).json()["data"]
                assert [batch["id"] for batch in listed] == [again.json()["id"]]

    asyncio.run(scenario())


def test_a_defect_is_not_taken_for_a_database_that_is_away() -> None:
    cause = Exception("cause")
    assert is_records_trouble(sa.exc.OperationalError("SELECT 1", None, cause))
    assert is_records_trouble(sa.exc.InterfaceError("SELECT 1", None, cause))
    assert is_records_trouble(sa.exc.TimeoutError("QueuePool limit"))
    assert is_records_trouble(sa.exc.DatabaseError("SELECT 1", None, cause, connection_invalidated=True))
    for wrong in (sa.exc.ProgrammingError, sa.exc.IntegrityError, sa.exc.DataError):
        assert not is_records_trouble(wrong("SELECT 1", None, cause))
    assert not is_records_trouble(sa.exc.ArgumentError("wrong"))
