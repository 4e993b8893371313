"""The engines under contract: the simulator and llama.cpp always, real vLLM under the marker `vllm`."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_runner.client.engine_load import EngineLoad, parse_metrics
from support import tiny_gguf
from support.llama_cpp import llama_cpp_server
from support.simulated_engine import simulated_engine
from support.vllm_server import make_models, vllm_server

API_KEY = "contract-key"
CONTEXT = 1024
EMBEDDING_CONTEXT = 512
DIMENSIONS = 64
SLOTS = "64"
# Shorter than vLLM's default of 5 s, so that the tests of it are not slow.
IDLE_SECONDS = 1


@dataclass(frozen=True)
class Answer:
    """An HTTP answer with its body read."""

    status: int
    headers: Message
    body: bytes

    @cached_property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """Payloads of a stream of server-sent events."""
        return [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]


@dataclass(frozen=True)
class Served:
    """One server and the model it serves; every call uses a connection of its own."""

    kind: str
    url: str
    model: str
    pid: int
    api_key: str | None = None

    def call(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """GET, or POST when there is a body (bytes go as they are); no status is an error."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"}
        if self.api_key:
            sent["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url + path, data, {**sent, **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())

    def chat(self, content: str = "Hello there", **fields: Any) -> Answer:
        """A chat completion; greedy unless the fields say otherwise."""
        messages = [{"role": "user", "content": content}]
        return self.call(
            "/v1/chat/completions", {"model": self.model, "messages": messages, "temperature": 0, **fields}
        )

    def complete(self, prompt: Any = "Hello there", **fields: Any) -> Answer:
        """A text completion; greedy unless the fields say otherwise."""
        return self.call("/v1/completions", {"model": self.model, "prompt": prompt, "temperature": 0, **fields})

    def embed(self, text: Any = "Hello there", **fields: Any) -> Answer:
        """An embedding."""
        return self.call("/v1/embeddings", {"model": self.model, "input": text, **fields})

    def metrics(self) -> dict[str, float]:
        """Series of /metrics as they are named there, with their labels."""
        rows = self.call("/metrics").body.decode().splitlines()
        return {name: float(value) for name, value in (r.rsplit(" ", 1) for r in rows if r and not r.startswith("#"))}

    def total(self, metric: str) -> float:
        """A vLLM metric, summed over its labels."""
        return sum(value for name, value in self.metrics().items() if name.split("{")[0] == f"vllm:{metric}")

    def load(self) -> EngineLoad:
        """What the client reads in /metrics."""
        answer = self.call("/metrics")
        found = parse_metrics(answer.body, dict(answer.headers))
        assert found is not None
        return found

    def prompt_tokens(self) -> float:
        """Tokens of prompts that were computed since the start."""
        name = "llamacpp:prompt_tokens_total" if self.kind == "llama_cpp" else "vllm:prompt_tokens_total"
        return sum(value for series, value in self.metrics().items() if series.split("{")[0] == name)

    def processes(self) -> list[psutil.Process]:
        """The processes of the server."""
        parent = psutil.Process(self.pid)
        return [parent, *parent.children(recursive=True)]


@dataclass(frozen=True)
class VllmFiles:
    """Where vLLM and its models are."""

    python: str
    models: Path


@pytest.fixture(scope="session")
def vllm_files(tmp_path_factory: pytest.TempPathFactory) -> VllmFiles:
    """The tiny models, written by the Python that VLLM_PYTHON names."""
    python = os.environ.get("VLLM_PYTHON")
    assert python, "expected VLLM_PYTHON to name the Python of an environment with vLLM: see .ci/install-vllm-cpu"
    folder = tmp_path_factory.mktemp("models")
    make_models(python, folder)
    return VllmFiles(python, folder)


@contextmanager
def chat_engine(kind: str, request: pytest.FixtureRequest, api_key: str | None) -> Iterator[Served]:
    """A chat model of either engine."""
    variables = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(IDLE_SECONDS)}
    with ExitStack() as stack:
        if kind == "simulator":
            flags = ["--max-model-len", str(CONTEXT), "--max-num-seqs", SLOTS, "--speed", "5"]
            flags += ["--keep-alive-timeout", str(IDLE_SECONDS)]
            if api_key:
                stack.enter_context(_environment("CONTRACT_API_KEY", api_key))
                flags += ["--api-key-env", "CONTRACT_API_KEY"]
            engine = stack.enter_context(simulated_engine(*flags))
            yield Served(kind, engine.url, "tiny", engine.process.pid, api_key)
        elif kind == "llama_cpp":
            flags = ["--context", str(CONTEXT), "--slots", "16"]
            if api_key:
                stack.enter_context(_environment("CONTRACT_API_KEY", api_key))
                flags += ["--api-key-env", "CONTRACT_API_KEY"]
            file = request.getfixturevalue("gguf_files") / "llama.gguf"
            process = stack.enter_context(llama_cpp_server(file, "tiny", *flags))
            yield Served(kind, process.endpoint, "tiny", process.pid, api_key)
        else:
            files = request.getfixturevalue("vllm_files")
            if api_key:
                variables["VLLM_API_KEY"] = api_key
            flags = ["--max-model-len", str(CONTEXT), "--max-num-seqs", SLOTS]
            # A random model would fill JSON with white space until it is cut off.
            flags += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
            server = stack.enter_context(vllm_server(files.python, files.models / "llama", "tiny", *flags, **variables))
            yield Served(kind, server.url, "tiny", server.process.pid, api_key)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models for llama.cpp: `llama.gguf` and `bert.gguf`."""
    folder = tmp_path_factory.mktemp("gguf")
    tiny_gguf.write_llama(folder / "llama.gguf")
    tiny_gguf.write_bert(folder / "bert.gguf")
    return folder


# A time-out as that of test_real_models.py, so that these are begun before it: together they take longest.
VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(600)])
VLLM_ALIKE = ["simulator", VLLM]  # llama.cpp has the same API, in words of its own
ALL = ["simulator", "llama_cpp", VLLM]


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Served]]:
    """The chat model of each kind, behind an API key: started when it is first asked for, once."""
    with ExitStack() as stack:
        running: dict[str, Served] = {}

        def of(kind: str) -> Served:
            if kind not in running:
                running[kind] = stack.enter_context(chat_engine(kind, request, API_KEY))
            return running[kind]

        yield of


@pytest.fixture(scope="session", params=ALL)
def any_engine(request: pytest.FixtureRequest, served: Callable[[str], Served]) -> Served:
    """A chat model behind an API key, of every kind."""
    return served(request.param)


@pytest.fixture(scope="session", params=VLLM_ALIKE)
def engine(request: pytest.FixtureRequest, served: Callable[[str], Served]) -> Served:
    """A chat model behind an API key, of the kinds that answer in vLLM's words."""
    return served(request.param)


@pytest.fixture(scope="module", params=VLLM_ALIKE)
def mortal_engine(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A chat model that its tests may stop and kill."""
    with chat_engine(request.param, request, None) as served:
        yield served


@contextmanager
def embedding_engine(kind: str, request: pytest.FixtureRequest) -> Iterator[Served]:
    """An embedding model of any kind."""
    if kind == "simulator":
        flags = ["--max-model-len", str(EMBEDDING_CONTEXT), "--embedding-dim", str(DIMENSIONS), "--speed", "5"]
        with simulated_engine(*flags, model="tiny-bert") as engine:
            yield Served(kind, engine.url, "tiny-bert", engine.process.pid)
    elif kind == "llama_cpp":
        file = request.getfixturevalue("gguf_files") / "bert.gguf"
        with llama_cpp_server(file, "tiny-bert", "--embedding", "--context", str(EMBEDDING_CONTEXT)) as process:
            yield Served(kind, process.endpoint, "tiny-bert", process.pid)
    else:
        files = request.getfixturevalue("vllm_files")
        context = ["--max-model-len", str(EMBEDDING_CONTEXT)]
        with vllm_server(files.python, files.models / "bert", "tiny-bert", *context) as server:
            yield Served(kind, server.url, "tiny-bert", server.process.pid)


@pytest.fixture(scope="session")
def embedders(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Served]]:
    """The embedding model of each kind: started when it is first asked for, once."""
    with ExitStack() as stack:
        running: dict[str, Served] = {}

        def of(kind: str) -> Served:
            if kind not in running:
                running[kind] = stack.enter_context(embedding_engine(kind, request))
            return running[kind]

        yield of


@pytest.fixture(scope="session", params=ALL)
def any_embedder(request: pytest.FixtureRequest, embedders: Callable[[str], Served]) -> Served:
    """An embedding model, of every kind."""
    return embedders(request.param)


@pytest.fixture(scope="session", params=VLLM_ALIKE)
def embedder(request: pytest.FixtureRequest, embedders: Callable[[str], Served]) -> Served:
    """An embedding model, of the kinds that answer in vLLM's words."""
    return embedders(request.param)
