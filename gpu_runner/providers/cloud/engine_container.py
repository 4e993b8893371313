"""vLLM's container, the same at every cloud that runs one: its command line, its environment, and whether it answers.

The words follow the image's entry point, which is `vllm serve` or the server's module; both take `--model`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from gpu_runner.providers.base import EngineOrder, ProviderError
from gpu_runner.providers.engine_keys import engine_key
from gpu_runner.providers.sglang_server import SGLANG_WORDS

ENGINE_PORT = 8000
WORDS = ("--model", "{model}", "--host", "0.0.0.0", "--port", "{port}")

# vLLM closes idle connections after 5 s by default; a client that reuses one then meets a reset.
_KEEP_ALIVE = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120"}


def container_words(words: Sequence[str], order: EngineOrder, port: int = ENGINE_PORT) -> tuple[str, ...]:
    """What follows the image's name: `{model}` and `{port}` filled in, then what sizing decided. `words`: of vLLM;
    SGLang has its own.
    """
    words = words if order.server == "vllm" else SGLANG_WORDS
    filled = [word.replace("{port}", str(port)).replace("{model}", order.model) for word in words]
    return (*filled, *order.words)


def container_image(image: str, sglang_image: str | None, order: EngineOrder) -> str:
    """The image that an order needs. Raises ProviderError where there is none."""
    if order.server == "vllm":
        return image
    if sglang_image is None:
        raise ProviderError("sglang_image: expected an image of SGLang for `engine.server: sglang`, found none")
    return sglang_image


def container_environment(own: Mapping[str, str], from_ours: Sequence[str], secret: str, name: str) -> dict[str, str]:
    """Variables of the engine of the machine `name`, its API key among them.

    `from_ours`: names of variables of our environment. Raises ProviderError for one that is not set.
    """
    if missing := [variable for variable in from_ours if variable not in os.environ]:
        raise ProviderError(f"environment_from: expected {', '.join(missing)} in our environment, found nothing")
    ours = {variable: os.environ[variable] for variable in from_ours}
    return {**_KEEP_ALIVE, **own, **ours, "VLLM_API_KEY": engine_key(secret, name)}
