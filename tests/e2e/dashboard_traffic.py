"""Who uses the services that the dashboard looks at: batches of all states, chats, online requests, and failures."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import random
import ssl
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from support.api_service import CHAT, jsonl, line

from e2e.dashboard_sources import BATCH_MODEL, CHAT_MODEL, FAULTS, POISON, UNLUCKY, DashboardSources

EMBEDDINGS = "/v1/embeddings"
TIMEOUT = aiohttp.ClientTimeout(total=60)
CLOSE_SECONDS = 1.0  # aiohttp closes connections with TLS in the background, and does not say when


@dataclass
class Traffic:
    """For `seconds`. What is refused or lost is part of the play: nobody here asks twice."""

    site: DashboardSources
    seconds: float
    session: aiohttp.ClientSession
    seed: int = 7
    statuses: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._services: Iterator[Any] = itertools.cycle(self.site.services)

    async def play(self) -> None:
        """All of it, then nothing more."""
        parts = [self._every(0.4, self._chat), self._every(0.25, self._online), self._every(1.0, self._wrong)]
        parts += [self._batches(), self._an_engine_fails(), self._a_service_is_killed()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.seconds), asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(part)
                await asyncio.sleep(self.seconds)

    async def ask(self, method: str, path: str, *, key: str | None = "acme", **options: Any) -> Any:
        """The answer's JSON, or its text; None where nobody answers. `key`: whose."""
        headers = {**options.pop("headers", {})}
        if key is not None:
            headers["Authorization"] = f"Bearer {self.site.keys[key]}"
        url = next(self._services).url + path
        try:
            async with self.session.request(method, url, headers=headers, **options) as answer:
                self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return None
        return json.loads(text) if answer.content_type == "application/json" else text

    async def _every(self, mean: float, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(call())
                await asyncio.sleep(self._random.expovariate(1 / mean))

    async def _chat(self) -> None:
        words = " ".join(["word"] * self._random.choice((5, 40, 400)))
        body = {"model": CHAT_MODEL, "stream": True, "messages": [{"role": "user", "content": words}]}
        targets = {"X-Target-TTFT-Seconds": "0.001"} if self._random.random() < 0.1 else {}
        await self.ask("POST", CHAT, json=body, headers=targets)

    async def _online(self) -> None:
        number = self._random.randrange(10**6)
        words = UNLUCKY if number % 20 == 0 else "again" if number % 3 == 0 else f"say {number}"
        body = {"input": f"{words}", "client_id": "shop", "model": CHAT_MODEL, "params": {"temperature": 0}}
        accepted = await self.ask("POST", "/v1/inference", json=body)
        if accepted and "task_id" in accepted:
            await self.ask("GET", f"/v1/result/{accepted['task_id']}?wait=20")

    async def _wrong(self) -> None:
        """An unknown model, no key, and more than the small tenant may."""
        messages = [{"role": "user", "content": "hi"}]
        await self.ask("POST", CHAT, json={"model": "nobody/has-it", "messages": messages})
        await self.ask("GET", "/v1/models", key=None)
        await self.ask("GET", "/v1/models", key="small")
        await self.ask("POST", EMBEDDINGS, json={"model": CHAT_MODEL, "input": "a text"})

    async def _batches(self) -> None:
        """Windows that need several instances; lines that are refused; a failed, an expired and a cancelled batch."""
        await self._batch(BATCH_MODEL, 6000, "100s")
        await asyncio.sleep(self.seconds * 0.1)
        poison = [line(f"p{number}", model=CHAT_MODEL, messages=_says(POISON)) for number in range(30)]
        await self._batch(CHAT_MODEL, 900, "1h", poison)
        await asyncio.sleep(self.seconds * 0.2)
        await self._batch(CHAT_MODEL, 3, "1h", [b"no json"])
        await self._batch(CHAT_MODEL, 2500, "8s")
        cancelled = await self._batch(CHAT_MODEL, 3000, "24h")
        await asyncio.sleep(self.seconds * 0.15)
        if cancelled:
            await self.ask("POST", f"/v1/batches/{cancelled}/cancel")
        await self._batch(BATCH_MODEL, 5000, "90s")

    async def _batch(self, model: str, lines: int, window: str, more: Any = ()) -> str | None:
        named = [line(f"r{number}", model=model, max_tokens=256) for number in range(lines)]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", io.BytesIO(jsonl([*named, *more])), filename="in.jsonl")
        file = await self.ask("POST", "/v1/files", data=form)
        asked = {"input_file_id": file and file.get("id"), "endpoint": CHAT, "completion_window": window}
        batch = await self.ask("POST", "/v1/batches", json=asked)
        return batch.get("id") if batch else None

    async def _an_engine_fails(self) -> None:
        """For a tenth of the time."""
        await asyncio.sleep(self.seconds * 0.35)
        engine = self.site.engines[0]
        await asyncio.to_thread(engine.set_faults, {"kind": "http_500"})
        await asyncio.sleep(self.seconds * 0.1)
        await asyncio.to_thread(engine.set_faults, *FAULTS)

    async def _a_service_is_killed(self) -> None:
        """And started again after a while."""
        await asyncio.sleep(self.seconds * 0.55)
        service = self.site.services[1]
        await asyncio.to_thread(service.kill)
        await asyncio.sleep(self.seconds * 0.05)
        service.start()


def _says(words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": words}]


async def play(site: DashboardSources, seconds: float) -> dict[int, int]:
    """Use the services for so long; returns how many answers of each status there were."""
    context = ssl.create_default_context(cadata=site.authority)
    connector = aiohttp.TCPConnector(ssl=context, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as session:
        traffic = Traffic(site, seconds, session)
        await traffic.play()
    await asyncio.sleep(CLOSE_SECONDS)
    return traffic.statuses
