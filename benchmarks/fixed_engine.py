"""A fixed batch API for embeddings: lists of up to 64 texts, each list in 200 ms, so many of them at a time.

    python -m benchmarks.fixed_engine [--model tiny] [--list-seconds 0.2] [--lists 16]

Stands for `--lists` engines that do one list at a time; further lists wait in order. Its first line is its address.
`GET /simulator/stats` says how many tokens of prompts (one per text) it was asked for, as the simulator does, and in
how many lists.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import threading
from collections.abc import Iterator

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

MOST_TEXTS = 64
VECTOR = [0.1, 0.2, 0.3, 0.4]


class FixedEngine:
    """The endpoints. Lives on one event loop."""

    def __init__(self, model: str, seconds: float, lists: int) -> None:
        self._model, self._seconds = model, seconds
        self._places = asyncio.Semaphore(lists)
        self._running = self._waiting = self._texts = self._lists = 0

    async def embed(self, request: Request) -> Response:
        """A list, or one text."""
        asked = orjson.loads(await request.body())["input"]
        texts = asked if isinstance(asked, list) else [asked]
        if len(texts) > MOST_TEXTS:
            said = f"expected at most {MOST_TEXTS} texts, found {len(texts)}"
            return _json({"error": {"message": said, "type": "invalid_request_error"}}, 400)
        self._texts += len(texts)
        self._lists += 1
        self._waiting += 1
        async with self._places:
            self._waiting -= 1
            self._running += 1
            try:
                await asyncio.sleep(self._seconds)
            finally:
                self._running -= 1
        data = [{"object": "embedding", "index": place, "embedding": VECTOR} for place in range(len(texts))]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        return _json({"object": "list", "model": self._model, "data": data, "usage": usage})

    async def models(self, request: Request) -> Response:
        """What it serves."""
        return _json({"object": "list", "data": [{"id": self._model, "object": "model", "max_model_len": 512}]})

    async def metrics(self, request: Request) -> Response:
        """Lists that run and wait, under vLLM's names."""
        label = f'{{model_name="{self._model}"}}'
        running = (
            f"vllm:num_requests_running{label} {self._running}\nvllm:num_requests_waiting{label} {self._waiting}\n"
        )
        return Response(f"{running}vllm:kv_cache_usage_perc{label} 0\n", media_type="text/plain")

    async def stats(self, request: Request) -> Response:
        """What it was asked for."""
        return _json({"prompt_tokens": self._texts, "lists": self._lists})

    async def health(self, request: Request) -> Response:
        """It lives."""
        return Response()

    def routes(self) -> Iterator[Route]:
        """All of them."""
        yield Route("/v1/embeddings", self.embed, methods=["POST"])
        for path, answer in {
            "/v1/models": self.models,
            "/metrics": self.metrics,
            "/simulator/stats": self.stats,
            "/health": self.health,
        }.items():
            yield Route(path, answer)


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def main() -> None:
    """Entry point. Ends with its parent: at the end of standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--list-seconds", type=float, default=0.2)
    parser.add_argument("--lists", type=int, default=16)
    asked = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    engine = FixedEngine(asked.model, asked.list_seconds, asked.lists)
    config = uvicorn.Config(Starlette(routes=list(engine.routes())), log_level="warning", loop="uvloop")
    server = uvicorn.Server(config)

    def end() -> None:
        with open(0, "rb") as parent:
            parent.read()
        server.should_exit = True

    threading.Thread(target=end, daemon=True).start()
    print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
