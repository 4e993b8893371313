"""The front door for tests: the application in this process, with its worker, and calls without a network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from batch_assets.api import service
from batch_assets.api.app import create_app
from batch_assets.api.billing.price_list import PriceList
from batch_assets.api.requests.callers import ALL_SCOPES, Caller
from batch_assets.api.settings import ApiLimits, ApiSettings, ModelSettings
from support.timing import PATIENCE

ENDED = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"


async def tenant_of_header(request: Any) -> Caller:
    """The tenant that a test's header names."""
    return Caller(request.headers.get("x-tenant", "default"), None, ALL_SCOPES)


def line(name: str, url: str = CHAT, /, **body: Any) -> dict[str, Any]:
    """One line of an input file."""
    prompt = {CHAT: {"messages": [{"role": "user", "content": f"say {name}"}]}, "/v1/completions": {"prompt": name}}
    asked = {"model": "tiny", **prompt.get(url, {"input": name}), **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def jsonl(lines: Sequence[Any]) -> bytes:
    """Lines as a file; bytes are taken as they are."""
    return b"\n".join(one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines)


def no_instance(home: Path) -> Any:
    """Tests of requests have no catalog: an instance of Dagster costs more than all of them."""
    raise RuntimeError("no catalog here")


@dataclass
class ApiService:
    """Calls of the application."""

    app: FastAPI
    client: httpx.AsyncClient

    async def upload(self, lines: Sequence[Any], **headers: str) -> str:
        """Id of a new input file."""
        files = {"file": ("in.jsonl", jsonl(lines))}
        answer = await self.client.post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def create(self, lines: Sequence[Any], endpoint: str = CHAT, window: str = "24h", **more: Any) -> Any:
        """A new batch of these lines."""
        body = {
            "input_file_id": await self.upload(lines),
            "endpoint": endpoint,
            "completion_window": window,
            **more,
        }
        answer = await self.client.post("/v1/batches", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def get(self, batch_id: str) -> Any:
        """The batch as it is now."""
        answer = await self.client.get(f"/v1/batches/{batch_id}")
        assert answer.status_code == 200
        return answer.json()

    async def until(self, batch_id: str, *states: str) -> Any:
        """The batch once it is in one of these states, or has ended."""
        deadline = time.monotonic() + 30 * PATIENCE
        while True:
            batch = await self.get(batch_id)
            if batch["status"] in (states or ENDED) or batch["status"] in ENDED:
                return batch
            assert time.monotonic() < deadline, batch
            await asyncio.sleep(0.02)

    async def lines_of(self, file_id: str | None) -> list[Any]:
        """The lines of a file; none where there is no file."""
        if file_id is None:
            return []
        answer = await self.client.get(f"/v1/files/{file_id}/content")
        assert answer.status_code == 200
        return [json.loads(one) for one in answer.content.splitlines()]

    async def results(self, batch: Any) -> tuple[list[Any], list[Any]]:
        """(lines of the output file, lines of the error file)."""
        return await self.lines_of(batch["output_file_id"]), await self.lines_of(batch["error_file_id"])


def settings_of(home: Path, endpoint: str | Sequence[str] | None, limits: ApiLimits | None = None) -> ApiSettings:
    """Settings with everything below one folder."""
    home.mkdir(parents=True, exist_ok=True)
    return ApiSettings(
        home=home,
        store_root=str(home / "store"),
        database=f"sqlite:///{home / 'api.db'}",
        endpoints=(endpoint,) if isinstance(endpoint, str) else tuple(endpoint or ()),
        limits=limits or ApiLimits(),
    )


@contextlib.asynccontextmanager
async def api_service(
    home: Path,
    endpoint: str | Sequence[str] | None,
    limits: ApiLimits | None = None,
    store_root: str | None = None,
    prices: PriceList | None = None,
    models: ModelSettings | None = None,
) -> AsyncIterator[ApiService]:
    """The application with its worker, ended in order."""
    settings = replace(settings_of(home, endpoint, limits), prices=prices or PriceList())
    settings = replace(settings, models=models or ModelSettings())
    if store_root is not None:
        settings = replace(settings, store_root=store_root)
    before, service._open_instance = service._open_instance, no_instance
    try:
        app = create_app(settings, tenant_of_header)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                yield ApiService(app, client)
    finally:
        service._open_instance = before
