"""A service that asks for no key lets programs in, and no web pages."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.responses import PlainTextResponse

from batch_assets.api.access.browser_guard import BrowserGuard


def status(headers: dict[str, str], port: int = 8080) -> int:
    async def ask() -> int:
        guard = BrowserGuard(PlainTextResponse("in"), port)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://unused") as client:
            return (await client.post("/v1/batches", headers=headers)).status_code

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:8080"},
        {"Host": "localhost:8080"},
        {"Host": "[::1]:8080"},
        {"Host": "LOCALHOST:8080", "User-Agent": "OpenAI/Python"},
        {"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:8080", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_programs_and_its_own_page_of_docs_are_let_in(headers: dict[str, str]) -> None:
    assert status(headers) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example:8080"},
        {"Host": "127.0.0.1:8081"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1.evil.example:8080"},
        {"Host": "127.0.0.1:8080", "Origin": "https://evil.example"},
        {"Host": "127.0.0.1:8080", "Origin": "null"},
        {"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:3000"},
        {"Host": "127.0.0.1:8080", "Origin": "http://localhost:8080"},
        {"Host": "127.0.0.1:8080", "Sec-Fetch-Site": "cross-site"},
        {"Host": "127.0.0.1:8080", "Sec-Fetch-Site": "same-site"},
    ],
)
def test_web_pages_are_kept_out(headers: dict[str, str]) -> None:
    assert status(headers) == 403
