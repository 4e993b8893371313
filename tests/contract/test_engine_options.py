"""The arguments that a dataset writes under `engine:`, on a real vLLM and on the simulator: both start with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.contract_engines import CONTEXT, VLLM_ALIKE, Served
from support.simulated_engine import simulated_engine
from support.vllm_server import vllm_server

from resources.engine_options import EngineOptions

TEXT = "Hello there"
OPTIONS = EngineOptions.model_validate(
    {
        "reasoning_parser": "qwen3",
        "tool_call_parser": "hermes",
        "dtype": "float32",
        "chat_template": "-{% for one in messages %}{{ one.content }}{% endfor %}",
        "enable_prefix_caching": False,
    }
)


@pytest.fixture(params=VLLM_ALIKE)
def started(request: pytest.FixtureRequest) -> Iterator[Served]:
    """An engine that was started with these arguments."""
    words = ["--max-model-len", str(CONTEXT), "--max-num-seqs", "8", *OPTIONS.arguments()]
    with ExitStack() as stack:
        if request.param == "simulator":
            engine = stack.enter_context(simulated_engine(*words))
            yield Served("simulator", engine.url, "tiny", engine.process.pid)
        else:
            files = request.getfixturevalue("vllm_files")
            server = stack.enter_context(vllm_server(files.python, files.models / "llama", "tiny", *words))
            yield Served("vllm", server.url, "tiny", server.process.pid)


def test_an_engine_starts_with_the_arguments_of_a_dataset(started: Served) -> None:
    answer = started.chat(TEXT, max_tokens=4, ignore_eos=True)
    assert answer.status == 200, answer.body
    if started.kind == "vllm":
        alone = started.complete(f"-{TEXT}", max_tokens=1).json["usage"]["prompt_tokens"]
        assert answer.json["usage"]["prompt_tokens"] == alone, "the dataset's template, which begins with -, is in use"
