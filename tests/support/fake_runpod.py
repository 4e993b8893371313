"""A server of the shape of RunPod's REST API (version 1), with the faults of the simulated provider and a late list.

Its pods run engines that want the key of their environment. Times are real.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import pytest

from gpu_runner.providers.runpod.config import RunPodConfig
from gpu_runner.providers.runpod.provider import RunPodProvider
from gpu_runner.providers.simulated.config import FaultRule
from support.guarded_engine import GuardedEngine

KEY = "rpa_TEST"
GPU = {"gpu_type": "NVIDIA L40S", "gpu": "L40S", "gpu_memory_gib": 48, "price_per_hour": 3.6}


class Engine(Protocol):
    """What runs in a pod."""

    url: str

    def close(self) -> None: ...


def engine_words(body: dict[str, Any]) -> list[str]:
    """Of an order: what follows the engine's command."""
    words: list[str] = body["dockerStartCmd"]
    return words[words.index("--model") :]


def guarded_engine(body: dict[str, Any]) -> Engine:
    """A small engine that wants its key."""
    return GuardedEngine(body["env"]["VLLM_API_KEY"], engine_words(body)[1])


@dataclass
class Pod:
    """What the cloud has of a pod. `shown_at`: from when on lists have it."""

    id: str
    body: dict[str, Any]
    created_at: float
    shown_at: float
    engine: Engine
    ended_at: float | None = None


@dataclass
class FakeRunPod:
    """The cloud. `rules`: what goes wrong, as in the simulated one. `now` may be moved by tests with `skip`.

    `most`: pods at once, for which it has room. `boot`: starts a pod's engine from the body of its order.
    """

    home: Path
    url: str = ""
    lag_seconds: float = 0.0
    usd_per_hour: float = 3.6
    most: int | None = None
    boot: Callable[[dict[str, Any]], Engine] = guarded_engine
    pods: list[Pod] = field(default_factory=list)
    rules: list[FaultRule] = field(default_factory=list)
    hits: dict[int, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    skipped: float = 0.0
    guard: threading.RLock = field(default_factory=threading.RLock)
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def now(self) -> float:
        return time.time() + self.skipped

    def skip(self, seconds: float) -> None:
        """Time goes on for the cloud and for providers that were made here."""
        self.skipped += seconds

    def provider(self, **settings: Any) -> RunPodProvider:
        given = {"api": f"{self.url}/v1", "gpus": [GPU], "engine_image": "vllm@sha256:" + "0" * 64, **settings}
        listed = {"listed": given.pop("listed")} if "listed" in given else {}
        config = RunPodConfig.model_validate(given)
        return RunPodProvider(self.home, config, proxy=self.engine_url, now=self.now, **listed)

    def engine_url(self, pod_id: str) -> str:
        return next(pod.engine.url for pod in self.pods if pod.id == pod_id)

    def fault(self, kind: str, *calls: str, times: int | None = 1) -> None:
        self.rules.append(FaultRule.model_validate({"kind": kind, "calls": calls, "times": times}))

    def named(self, name: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.body["name"] == name]

    def running(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.ended_at is None]

    def hit(self, call: str) -> str | None:
        """The fault that hits this call."""
        with self.guard:
            self.calls.append(call)
            for number, rule in enumerate(self.rules):
                count = self.hits.get(number, 0)
                if rule.concerns(call) and (rule.times is None or count < rule.times):
                    self.hits[number] = count + 1
                    return rule.kind
        return None

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.guard:
            engine = self.boot(body)
            at = self.now()
            pod = Pod(f"pod{next(self.ids):04}", body, at, at + self.lag_seconds, engine)
            self.pods.append(pod)
            return self.shown(pod)

    def shown(self, pod: Pod) -> dict[str, Any]:
        """As the API shows it."""
        port = int(pod.engine.url.rsplit(":", 1)[1])
        return {
            "id": pod.id,
            "name": pod.body["name"],
            "desiredStatus": "RUNNING",
            "createdAt": dt.datetime.fromtimestamp(pod.created_at, dt.UTC).strftime("%Y-%m-%d %H:%M:%S.%f +0000 UTC"),
            "costPerHr": str(self.usd_per_hour),
            "publicIp": "127.0.0.1",
            "portMappings": {"8000": port},
            "env": pod.body["env"],
        }

    def listed(self) -> list[dict[str, Any]]:
        """What a list shows now: nothing that is younger than its lag, and no pod that has ended."""
        with self.guard:
            now = self.now()
            return [self.shown(pod) for pod in self.pods if pod.shown_at <= now and pod.ended_at is None]

    def end(self, pod_id: str) -> bool:
        with self.guard:
            for pod in self.pods:
                if pod.id == pod_id and pod.ended_at is None:
                    pod.ended_at = self.now()
                    pod.engine.close()
                    return True
        return False

    def close(self) -> None:
        for pod in self.running():
            pod.engine.close()


def _handler(site: FakeRunPod) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._serve("create", lambda: (201, site.create(body)))

        def do_GET(self) -> None:
            self._serve("list", lambda: (200, site.listed()))

        def do_DELETE(self) -> None:
            found = re.fullmatch(r"/v1/pods/(\w+)", self.path)
            self._serve("terminate", lambda: (204 if found and site.end(found.group(1)) else 404, None))

        def _serve(self, call: str, act: Any) -> None:
            if self.headers["Authorization"] != f"Bearer {KEY}" or not self.path.startswith("/v1/pods"):
                return self._answer(401, {"error": "unauthorized"})
            kind = site.hit(call)
            if kind is None and call == "create" and site.most is not None and len(site.running()) >= site.most:
                kind = "no_capacity"
            if kind == "error":
                return self._answer(400, {"error": "bad request"})
            if kind == "no_capacity":
                words = "There are no longer any instances available with the requested specifications."
                return self._answer(500, {"error": words})
            if kind == "time_out":
                return self._hang_up()
            if kind == "empty_list":
                return self._answer(200, [])
            if kind == "deaf_terminate":
                return self._answer(204, None)
            status, body = act()
            return self._hang_up() if kind == "lost_reply" else self._answer(status, body)

        def _hang_up(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        def _answer(self, status: int, body: Any) -> None:
            page = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def fake_runpod(home: Path) -> Iterator[FakeRunPod]:
    """An empty account, and its key in the environment."""
    site = FakeRunPod(home)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(site))
    server.daemon_threads = True
    thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNPOD_API_KEY", KEY)
        try:
            yield site
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
            site.close()
