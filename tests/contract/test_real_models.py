"""Small real models through llama.cpp and through vLLM: what a tiny random one cannot show, namely sense.

pytest -m slow tests/contract/test_real_models.py       llama.cpp
VLLM_PYTHON=… pytest -m vllm tests/contract/test_real_models.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import orjson
import pytest
from support.contract_engines import Served
from support.fake_engine import ORIGIN, Sink
from support.llama_cpp import llama_cpp_server
from support.real_models import minilm, smollm2, write_minilm, write_smollm2
from support.vllm_server import vllm_server

from gpu_runner.client.engine_client import EngineClient
from gpu_runner.inference.feed import Feed
from gpu_runner.rows import Batch, Generation, Row, WrittenUser

KINDS = [
    pytest.param("llama_cpp", marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(600)]),
]
CITIES = ["Paris", "Rome", "Tokyo", "Nairobi", "Lima", "Oslo", "Cairo", "Delhi", "Quito", "Hanoi"]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["city", "river", "mountain"]},
        "large": {"type": "boolean"},
        "score": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["kind", "large", "score"],
    "additionalProperties": False,
}


@contextmanager
def chat_server(kind: str, python: str | None, folder: Path) -> Iterator[Served]:
    if kind == "llama_cpp":
        with llama_cpp_server(smollm2(), "smollm2", "--context", "512") as process:
            yield Served(kind, process.endpoint, "smollm2", process.pid)
        return
    assert python is not None
    write_smollm2(smollm2(), folder / "smollm2")
    flags = ["--max-model-len", "512", "--max-num-seqs", "64"]
    # So small a model fills JSON with white space now and then, until it is cut off.
    flags += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    with vllm_server(python, folder / "smollm2", "smollm2", *flags) as server:
        yield Served(kind, server.url, "smollm2", server.process.pid)


@contextmanager
def embedding_server(kind: str, python: str | None, folder: Path) -> Iterator[Served]:
    if kind == "llama_cpp":
        write_minilm(minilm(), folder / "minilm.gguf")
        with llama_cpp_server(folder / "minilm.gguf", "minilm", "--embedding", "--context", "512") as process:
            yield Served(kind, process.endpoint, "minilm", process.pid)
        return
    assert python is not None
    with vllm_server(python, minilm(), "minilm", "--runner", "pooling", "--max-model-len", "256") as server:
        yield Served(kind, server.url, "minilm", server.process.pid)


@pytest.fixture(scope="module", params=KINDS)
def writer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """SmolLM2-135M-Instruct."""
    python = request.getfixturevalue("vllm_files").python if request.param == "vllm" else None
    with chat_server(request.param, python, tmp_path_factory.mktemp("writer")) as served:
        yield served


@pytest.fixture(scope="module", params=KINDS)
def embedder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """all-MiniLM-L6-v2."""
    python = request.getfixturevalue("vllm_files").python if request.param == "vllm" else None
    with embedding_server(request.param, python, tmp_path_factory.mktemp("embedder")) as served:
        yield served


def generate(served: Served, prompts: list[Any], task: Any, **changes: Any) -> list[Any]:
    """The answers to all prompts, asked for at once after the hand shake."""

    async def run() -> list[Any]:
        async with EngineClient(served.url, Generation(task, served.model, **changes)) as client:
            await client.info()
            return await asyncio.gather(*[client.generate(orjson.dumps(prompt)) for prompt in prompts])

    return asyncio.run(run())


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_capital_of_france_is_paris(writer: Served) -> None:
    greedy = {"temperature": 0, "max_tokens": 8}
    (answer,) = generate(writer, ["The capital of France is"], "completion", sampling=greedy)
    assert "Paris" in answer.output
    (answer,) = generate(writer, [chat("What is the capital of France? Say its name.")], "chat", sampling=greedy)
    assert "Paris" in answer.output


def test_a_conversation_goes_on_from_what_was_said_and_only_its_last_answer_has_the_form(writer: Served) -> None:
    said = ("What is the capital of France? Say its name.", "And of Italy?", "Describe it in JSON.")
    row = Row("b", "r", "k", orjson.dumps(chat(said[0])), turns=said)
    sink, generation = Sink(), Generation("chat", writer.model, {"temperature": 0, "max_tokens": 40}, SCHEMA)

    async def run() -> None:
        async with EngineClient(writer.url, generation) as client:
            await client.info()
            feed = Feed(iter([Batch("b", (row,))]), on_row=sink.on_row, on_batch=sink.on_batch)
            await feed.serve(client, ORIGIN, 2)

    asyncio.run(run())
    first, second, last = sink.outcomes()["r"].turns
    assert "Paris" in first.output and not second.output.startswith("{")
    assert not list(jsonschema_rs.validator_for(SCHEMA).iter_errors(orjson.loads(last.output)))
    assert first.prompt_tokens + first.completion_tokens < second.prompt_tokens
    assert second.prompt_tokens + second.completion_tokens < last.prompt_tokens


def test_the_same_model_plays_the_user_with_words_of_its_own(writer: Served) -> None:
    user = WrittenUser("You are a child who asks short questions about animals.", "Hello! What do you want to know?", 3)
    asked = {"turns": 3, "opening": user.opening, "sampling": {"temperature": 0.7, "max_tokens": 30, "seed": 3}}
    rows = [
        Row("b", f"r{n}", f"k{n}", orjson.dumps(chat(said)), turns=(said,), user=user)
        for n, said in enumerate(["What does a cow eat?", "Why do birds sing?", "Can a fish sleep?"])
    ]
    sink, generation = Sink(), Generation("chat", writer.model, {"temperature": 0, "max_tokens": 40}, user_model=asked)

    async def run() -> None:
        async with EngineClient(writer.url, generation) as client:
            await client.info()
            feed = Feed(iter([Batch("b", tuple(rows))]), on_row=sink.on_row, on_batch=sink.on_batch)
            await feed.serve(client, ORIGIN, 3)

    asyncio.run(run())
    for one in sink.outcomes().values():
        assert one.error is None and [turn.user_model is not None for turn in one.turns] == [False, True, True]
        assert all(turn.user.strip() and turn.output for turn in one.turns)
        written = [turn.user_model for turn in one.turns if turn.user_model is not None]
        assert all(0 < turn.completion_tokens <= 30 and turn.prompt_tokens > 40 for turn in written)
        assert one.completion_tokens == sum(asked.completion_tokens for turn in one.turns for asked in turn.requests)


@pytest.mark.soak("rows")
def test_a_json_schema_holds_over_fifty_rows(writer: Served) -> None:
    asked = [chat(f"Tell me about {city}, as JSON. Number {n}.") for n in range(5) for city in CITIES]
    sampling = {"temperature": 1.0, "max_tokens": 80, "seed": 1}
    answers = generate(writer, asked, "chat", json_schema=SCHEMA, sampling=sampling)
    assert len(answers) == 50
    assert [answer.finish_reason for answer in answers] == ["stop"] * 50
    wrong = [answer.output for answer in answers if not jsonschema_rs.is_valid(SCHEMA, orjson.loads(answer.output))]
    assert wrong == []


def test_paraphrases_are_nearer_than_strangers(embedder: Served) -> None:
    texts = ["A man is eating food.", "Somebody has a meal.", "The stock market fell sharply on Monday."]
    one, same, other = (np.array(found.output) for found in generate(embedder, texts, "embedding"))
    assert len(one) == 384 and np.linalg.norm(one) == pytest.approx(1, abs=1e-3)
    assert one @ same > 0.5 > 0.2 > one @ other
