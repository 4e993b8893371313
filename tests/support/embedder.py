"""An engine for embeddings that knows which lists it was asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web


class Embedder:
    """An engine that embeds a text as its length, and refuses lists with a text that begins with "bad" by `refusal`."""

    def __init__(self, refusal: int = 400) -> None:
        self.refusal = refusal
        self.lists: list[list[str]] = []
        self.asked: list[dict[str, Any]] = []
        self.counts = True
        self.gate = asyncio.Event()
        self.gate.set()

    async def answer(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        self.lists.append(texts)
        self.asked.append(body)
        await asyncio.sleep(0.01)
        await self.gate.wait()
        if any(text.startswith("bad") for text in texts):
            said = "cannot be embedded" if self.refusal == 400 else f"no model for {texts}"
            error = {"error": {"message": said, "type": "BadRequestError", "param": None, "code": self.refusal}}
            return web.Response(status=self.refusal, body=orjson.dumps(error), content_type="application/json")
        data = [
            {"index": place, "object": "embedding", "embedding": [float(len(text))]} for place, text in enumerate(texts)
        ]
        usage = {"prompt_tokens": sum(map(len, texts)), "total_tokens": sum(map(len, texts))}
        found = {"id": "embd-1", "object": "list", "model": "m", "data": data[::-1], "usage": usage}
        if not self.counts:
            del found["usage"]
        return web.Response(body=orjson.dumps(found), content_type="application/json")
