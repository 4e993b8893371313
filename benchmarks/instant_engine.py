"""An engine that answers at once: what is left of a request's time is the client's.

    python -m benchmarks.instant_engine [--model tiny] [--log FILE]

Chats get one sentence of 32 tokens, embeddings a vector of four numbers. Its first line is its address. `--log` gets a
line for each request, `{"event": "received", "t": SECONDS}`, as the simulator's has. Requests of one connection are
answered in order; a broken one ends its connection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, TextIO

import httptools

CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "It is as it was said. " * 6}}
    ],
    "usage": {"prompt_tokens": 8, "completion_tokens": 32, "total_tokens": 40},
}
EMBEDDINGS = {
    "object": "list",
    "model": "tiny",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 0.5, 0.5, 0.5]}],
    "usage": {"prompt_tokens": 4, "total_tokens": 4},
}
METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="{model}"}} 1
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{model_name="{model}"}} 0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{model_name="{model}"}} {tokens}
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{model_name="{model}"}} {tokens}
"""


def _answer(body: bytes, kind: str = "application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind.encode(), len(body)) + body


class Engine:
    """Answers by path, and counts tokens."""

    def __init__(self, model: str, log: TextIO | None) -> None:
        self._model, self._log, self._tokens = model, log, 0
        self._fixed = {
            "/v1/chat/completions": _answer(json.dumps({**CHAT, "model": model}).encode()),
            "/v1/embeddings": _answer(json.dumps({**EMBEDDINGS, "model": model}).encode()),
            "/v1/models": _answer(json.dumps({"object": "list", "data": [{"id": model, "object": "model"}]}).encode()),
            "/health": _answer(b""),
        }

    def answer(self, method: str, path: str) -> bytes:
        """The whole response."""
        if path == "/metrics":
            return _answer(METRICS.format(model=self._model, tokens=self._tokens).encode(), "text/plain")
        if method == "POST":
            self._tokens += 32
            if self._log is not None:
                self._log.write(json.dumps({"event": "received", "t": time.time()}) + "\n")
        return self._fixed.get(path) or b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


class Connection(asyncio.Protocol):
    """The callbacks of httptools' parser are named `on_…`."""

    def __init__(self, answer: Callable[[str, str], bytes]) -> None:
        self._answer = answer
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._path = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._path = url.decode("ascii", "replace")

    def on_message_complete(self) -> None:
        self._transport.write(self._answer(self._parser.get_method().decode(), self._path))


async def serve(engine: Engine) -> None:
    """Until the process is ended."""
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine.answer), "127.0.0.1", 0)
    print(json.dumps({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}), flush=True)
    await server.serve_forever()


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--log", type=argparse.FileType("w"))
    asked = parser.parse_args()
    if asked.log is not None:
        asked.log.reconfigure(line_buffering=True)
    asyncio.run(serve(Engine(asked.model, asked.log)))


if __name__ == "__main__":
    main()
