"""A server with OpenAI's chat API that does not say of itself that it is simulated: a thread of the test's process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class PlainEngine:
    """`requests`: bodies of the chats so far. `text`: what it answers, or makes that of a request (None: it refuses).
    `answer`: fields of the choice of the next answers. `model`: what these name as the model that wrote them.
    `cached_tokens`: that these say of their prompt. `replies`: what other endpoints answer to a body, by path."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    answer: Mapping[str, Any] = field(default_factory=lambda: {"finish_reason": "stop"})
    text: str | Callable[[dict[str, Any]], str | None] = "a real answer"
    cached_tokens: int | None = None
    model: str | None = None
    replies: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)


class _Server(ThreadingHTTPServer):
    request_queue_size = (
        1024  # of five, a run's hundreds of connections at once are refused, and tried again after 31 s
    )


@contextmanager
def plain_engine(model: str) -> Iterator[PlainEngine]:
    """Serves one model on a free port of 127.0.0.1."""
    engine = PlainEngine()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._say(200, {"object": "list", "data": [{"id": model, "object": "model", "owned_by": "us"}]})
            else:
                self._say(404, {})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            engine.requests.append(asked)
            if self.path in engine.replies:
                self._say(200, engine.replies[self.path](asked))
                return
            text = engine.text(asked) if callable(engine.text) else engine.text
            if text is None:
                self._say(400, {"error": {"message": f"not allowed: {asked['messages'][-1]['content']}"}})
                return
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, **engine.answer}
            usage: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
            if engine.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": engine.cached_tokens}
            named = {} if engine.model is None else {"model": engine.model}
            self._say(200, {"id": "c", "object": "chat.completion", **named, "choices": [choice], "usage": usage})

        def _say(self, status: int, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    engine.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
