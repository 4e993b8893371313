"""Scores, classes, ranked lists and vectors of tokens by a real vLLM: what it answers is what the table gets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.vllm_server import make_models, vllm_server

from gpu_runner.client.engine_client import EngineClient, RequestDenied
from gpu_runner.rows import Generation, Task

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
FLAGS = ("--max-model-len", "512")
PAIRS = [{"text_1": "apples", "text_2": text} for text in ("apples", "a farmer sells 3 apples", "weeks")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("needs VLLM_PYTHON: the Python of an environment with vLLM")
    folder = tmp_path_factory.mktemp("models")
    make_models(python, folder)
    return python, folder


@asynccontextmanager
async def client(
    url: str, task: Task, model: str, sampling: dict[str, Any] | None = None
) -> AsyncIterator[EngineClient]:
    async with EngineClient(url, Generation(task, model, sampling or {})) as engine:
        await engine.info()
        await engine.canary()
        yield engine


def test_a_scorer_scores_pairs_and_ranks_documents(models: tuple[str, Path]):
    asyncio.run(_scored(*models))


async def _scored(python: str, folder: Path) -> None:
    with vllm_server(python, folder / "scorer", "scorer", *FLAGS) as server:
        prompts = [orjson.dumps(pair) for pair in PAIRS]
        async with client(server.url, "score", "scorer") as engine:
            assert engine.takes_lists
            found = await engine.generate_list(prompts)
            alone = [await engine.generate(prompt) for prompt in prompts]
            await engine.probe(prompts[0], content=False)
        scores = [orjson.loads(str(one.output))["score"] for one in found]
        assert scores == pytest.approx([orjson.loads(str(one.output))["score"] for one in alone], abs=1e-5)
        assert all(0.0 <= score <= 1.0 for score in scores) and len(set(scores)) > 1
        assert sum(one.prompt_tokens for one in found) == sum(one.prompt_tokens for one in alone) > 0
        documents = [pair["text_2"] for pair in PAIRS]
        asked = orjson.dumps({"documents": documents, "query": "apples"})
        async with client(server.url, "rerank", "scorer") as engine:
            assert not engine.takes_lists
            ranked = orjson.loads(str((await engine.generate(asked)).output))["results"]
        async with client(server.url, "rerank", "scorer", {"top_n": 2}) as engine:
            assert len(orjson.loads(str((await engine.generate(asked)).output))["results"]) == 2
        best = sorted(range(3), key=lambda place: -scores[place])
        assert [one["index"] for one in ranked] == best
        assert [one["relevance_score"] for one in ranked] == pytest.approx([scores[i] for i in best], abs=1e-5)


def test_a_classifier_names_classes_and_pools_tokens(models: tuple[str, Path]):
    asyncio.run(_classified(*models))


async def _classified(python: str, folder: Path) -> None:
    with vllm_server(python, folder / "classifier", "classifier", *FLAGS) as server:
        texts = [b'"apples"', b'"a farmer sells 3 apples in 2 weeks"']
        async with client(server.url, "classify", "classifier") as engine:
            found = [orjson.loads(str(one.output)) for one in await engine.generate_list(texts)]
        for one in found:
            assert one["label"] in ("calm", "glad", "sad")
            assert sum(one["probs"]) == pytest.approx(1.0, abs=1e-4) and len(one["probs"]) == 3
            assert one["label"] == ("calm", "glad", "sad")[one["probs"].index(max(one["probs"]))]
        async with client(server.url, "pooling", "classifier", {"task": "classify"}) as engine:
            pooled = [orjson.loads(str(one.output))["data"] for one in await engine.generate_list(texts)]
        assert [one[0] for one in pooled] == [pytest.approx(one["probs"], abs=1e-4) for one in found]
    by_token = ("--pooler-config.task", "token_embed")  # vLLM 0.32 has one pooling task a server
    with vllm_server(python, folder / "bert", "bert", *FLAGS, *by_token) as server:
        async with client(server.url, "pooling", "bert", {"task": "token_embed"}) as engine:
            tokens = orjson.loads(str((await engine.generate(texts[1])).output))["data"]
        assert len(tokens) > 5 and {len(vector) for vector in tokens} == {64}
        async with EngineClient(server.url, Generation("classify", "bert")) as engine:
            with pytest.raises(RequestDenied):
                await engine.generate(texts[0])
