"""The arguments that a dataset writes under `engine:`, on a real vLLM and on the simulator: both start with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.contract_engines import CONTEXT, VLLM_ALIKE, Served
from support.simulated_engine import simulated_engine
from support.vllm_server import vllm_server

from gpu_runner.client.engine_client import EngineClient
from gpu_runner.rows import Generation
from resources.engine_options import EngineOptions

TEXT = "Hello there"


def written(adapter: str) -> EngineOptions:
    return EngineOptions.model_validate(
        {
            "reasoning_parser": "qwen3",
            "tool_call_parser": "hermes",
            "dtype": "float32",
            "chat_template": "-{% for one in messages %}{{ one.content }}{% endfor %}",
            "enable_prefix_caching": False,
            "lora": {"name": "sql", "path": adapter},
            "lora_modules": [{"name": "again", "path": adapter}],
            "max_lora_rank": 8,
        }
    )


@pytest.fixture(scope="module", params=VLLM_ALIKE)
def started(request: pytest.FixtureRequest) -> Iterator[Served]:
    """An engine that was started with these arguments."""
    words = ["--max-model-len", str(CONTEXT), "--max-num-seqs", "8"]
    with ExitStack() as stack:
        if request.param == "simulator":
            engine = stack.enter_context(simulated_engine(*words, *written("/adapter").arguments()))
            yield Served("simulator", engine.url, "tiny", engine.process.pid)
        else:
            files = request.getfixturevalue("vllm_files")
            words += written(str(files.models / "adapter")).arguments()
            server = stack.enter_context(vllm_server(files.python, files.models / "llama", "tiny", *words))
            yield Served("vllm", server.url, "tiny", server.process.pid)


def test_an_engine_starts_with_the_arguments_of_a_dataset(started: Served) -> None:
    answer = started.chat(TEXT, max_tokens=4, ignore_eos=True)
    assert answer.status == 200, answer.body
    if started.kind == "vllm":
        alone = started.complete(f"-{TEXT}", max_tokens=1).json["usage"]["prompt_tokens"]
        assert answer.json["usage"]["prompt_tokens"] == alone, "the dataset's template, which begins with -, is in use"


def test_an_adapter_answers_in_place_of_the_model(started: Served) -> None:
    async def ask(engine: dict[str, object] | None) -> tuple[str, str | None, int | None]:
        sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        generation = Generation("completion", "tiny", sampling, engine=engine)
        async with EngineClient(started.url, generation) as client:
            info = await client.info()
            answer = await client.generate(b'"Hello there"')
            return str(answer.output), answer.model, info.max_model_len

    def asked(name: str | None) -> tuple[str, str | None, int | None]:
        return asyncio.run(ask(None if name is None else {"lora": {"name": name, "path": "/adapter"}}))

    plain, adapted, again = asked(None), asked("sql"), asked("again")
    assert (plain[1:], adapted[1:], again[1:]) == (("tiny", CONTEXT), ("sql", CONTEXT), ("again", CONTEXT))
    assert plain[0] != adapted[0]
    assert started.kind != "vllm" or adapted[0] == again[0], "the same weights"
