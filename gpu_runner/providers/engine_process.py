"""Engines as processes of this machine: the simulator, `vllm serve`, or any OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpu_runner.bounded_http.addresses import AddressRefused, connect, direct, engine_url, host_and_port
from gpu_runner.bounded_http.bounded_read import PAGE_BYTES, check_values
from gpu_runner.bounded_http.small_pages import read_page
from gpu_runner.client.answers.answer_numbers import context_length
from gpu_runner.client.llama_cpp import LlamaCppCard
from gpu_runner.providers.process_guard import GRACE_SECONDS


class EngineStartError(Exception):
    """The engine did not become ready: says why, and where its log is."""


def free_port() -> int:
    """A TCP port on loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _harmless(environment: Mapping[str, str]) -> dict[str, str]:
    """What an engine may see of our environment: not the keys of the store, nor where our databases are."""
    ours = ("AWS_", "DAGSTER_", "BATCH_ASSETS_")
    return {name: value for name, value in environment.items() if not name.startswith(ours)}


def answers(endpoint: str) -> bool:
    """Whether the engine's /health answers 200."""
    try:
        with direct.open(f"{endpoint}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def served_length(endpoint: str, api_key: str | None = None) -> int | None:
    """Most tokens of a row as the engine's /v1/models says (vLLM's max_model_len, llama.cpp's n_ctx), or None."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with direct.open(urllib.request.Request(f"{endpoint}/v1/models", headers=headers), timeout=2) as answer:
            page = read_page(answer, PAGE_BYTES, 2)
        check_values(page, PAGE_BYTES)
        entry = json.loads(page)["data"][0]
        card = LlamaCppCard.read(entry)
        return context_length(entry.get("max_model_len")) if card is None else card.context
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def wait_reachable(endpoint: str, seconds: float, pause: Callable[[float], None] = time.sleep) -> None:
    """Wait until something accepts connections at the address.

    Raises EngineStartError when the time is over, and AddressRefused for an address that is no engine's.
    """
    try:
        address = host_and_port(engine_url(endpoint))
    except ValueError as error:
        raise EngineStartError(str(error)) from None
    deadline = time.monotonic() + seconds
    while True:
        try:
            connect(*address, 5).close()
            return
        except AddressRefused:
            raise
        except OSError as error:
            if time.monotonic() >= deadline:
                raise EngineStartError(
                    f"nobody answers at {address[0]}:{address[1]} for {seconds:.0f} s ({type(error).__name__}); "
                    "expected an OpenAI-compatible server there"
                ) from None
        pause(0.5)


class EngineProcess:
    """One engine as a child process group under the guard: it ends when this object is closed, or when we die.

    `command` may contain `{port}` and `{model}`. The engine's output goes to `log`, never to ours.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        model: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.port = port or free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        words = [word.replace("{port}", str(self.port)).replace("{model}", model) for word in command]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu_runner.providers.process_guard", "--", *words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**_harmless(os.environ), **(environment or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    def alive(self) -> bool:
        """False once the engine's process has ended."""
        return self._process.poll() is None

    def wait_ready(self, seconds: float, pause: Callable[[float], None] = time.sleep) -> None:
        """Wait until /health answers 200. Raises EngineStartError when the process ends or the time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.alive():
                raise EngineStartError(
                    f"the engine ended with status {self._process.returncode} before it was ready; its log: {self.log}"
                )
            if answers(self.endpoint):
                return
            pause(0.05)
        raise EngineStartError(f"the engine was not ready after {seconds:.0f} s; its log: {self.log}")

    def close(self) -> None:
        """End the engine and everything it started."""
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=GRACE_SECONDS + 2)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(timeout=GRACE_SECONDS + 2)
