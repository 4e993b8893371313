"""What is known of a model, and how vLLM would serve it on an instance. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from gpu_runner.models.model_config import ModelConfig
from gpu_runner.models.quantization import online_quantization
from gpu_runner.models.sizing import (
    Serving,
    catalog_gpu,
    gpu_memory_needed,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    largest_stage,
    sequences_that_fit,
    tensor_parallel_sizes,
)
from gpu_runner.models.weights import active_parameters, weight_bytes
from gpu_runner.offers.gpus import WITHOUT_BFLOAT16, find_sheet
from gpu_runner.offers.speed import (
    GIB,
    Assumptions,
    LengthMix,
    ModelFacts,
    NoSpeed,
    Speed,
    default_slots,
    estimate_speed,
)

# Where the facts come from. `assumed`: nothing is known, and a stand-in is taken.
Knowledge = Literal["declared", "files", "built in", "assumed"]

STAND_IN = "meta-llama/Llama-3.1-8B"
# Quantization whose weights and activations are both FP8; other methods compute in bf16, or may.
_FP8 = ("fp8", "fbgemm_fp8", "modelopt")
_SLOTS = 256  # vLLM's max_num_seqs on a card without a datasheet here
_BLOCK = 16
_ASSUMED = Assumptions()
_PLAIN = Serving()


Server = Literal["vllm", "sglang"]
SLOTS_FLAG: Mapping[Server, str] = {"vllm": "--max-num-seqs", "sglang": "--max-running-requests"}


@dataclass(frozen=True, slots=True)
class ServedAs:
    """Arguments of `vllm serve` that change what a model needs; None: as vLLM decides. `loras`: adapters at once,
    each of `lora_rank` at most. `pipeline_parallel`: stages of the model's layers, each on GPUs of its own.
    """

    quantization: str | None = None
    kv_cache_dtype: str | None = None
    dtype: str | None = None
    max_num_seqs: int | None = None
    loras: int = 0
    lora_rank: int = 0
    pipeline_parallel: int = 1


AS_IT_IS = ServedAs()


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model's shapes (`config`) or its declared facts. `context`: most tokens of a row, None if not known.

    `where`: the file, address or key that says it; for an assumed model, why nothing better is known. `kv_fp8`: its KV
    cache is served in FP8. `max_num_seqs`: most rows at once of one copy, None: as vLLM has it on the card.
    """

    name: str
    knowledge: Knowledge
    where: str
    config: ModelConfig | None
    declared: ModelFacts | None = None
    context: int | None = None
    kv_fp8: bool = False
    max_num_seqs: int | None = None
    loras: int = 0
    lora_rank: int = 0
    pipeline_parallel: int = 1

    @property
    def serving(self) -> Serving:
        """How one GPU serves it, before it is known how many there are."""
        return Serving(kv_dtype="fp8" if self.kv_fp8 else "auto", loras=self.loras, lora_rank=self.lora_rank)

    def facts(self, tokens: float) -> ModelFacts:
        """Facts for rows of `tokens` tokens on average: with sliding windows a long row needs less KV per token. With
        stages `tensor_parallel` counts the GPUs of all of them.
        """
        found = self.declared
        if self.config is not None:
            found = facts_of(self.name, self.config, tokens, self.serving)
        assert found is not None
        if self.pipeline_parallel == 1:
            return found
        return replace(found, tensor_parallel=tuple(size * self.pipeline_parallel for size in found.tensor_parallel))


def of_config(name: str, config: ModelConfig, knowledge: Knowledge, where: str) -> KnownModel:
    """A model whose shapes are known."""
    return KnownModel(name, knowledge, where, config, None, config.max_tokens)


def of_declared(facts: ModelFacts, where: str, context: int | None = None) -> KnownModel:
    """A model of which somebody stated the facts."""
    return KnownModel(facts.model, "declared", where, None, facts, context)


def served_as(model: KnownModel, how: ServedAs) -> KnownModel:
    """The model as it is served with these arguments. Facts that somebody declared are facts: only slots change them.

    Weights that are quantized already stay as they are: vLLM's argument then only names the kernel.
    """
    if how == AS_IT_IS:
        return model
    config, kv_fp8 = model.config, (how.kv_cache_dtype or "").startswith("fp8")
    if config is not None:
        config = _in_dtype(config, how.dtype)
        if config.quantization is None and (scheme := online_quantization(how.quantization)) is not None:
            config = replace(config, quantization=scheme, checkpoint_bytes=None)
    return replace(
        model,
        config=config,
        kv_fp8=kv_fp8,
        max_num_seqs=how.max_num_seqs,
        loras=how.loras,
        lora_rank=how.lora_rank,
        pipeline_parallel=how.pipeline_parallel,
    )


def _in_dtype(config: ModelConfig, dtype: str | None) -> ModelConfig:
    """The shapes in another dtype; bytes are then computed from them."""
    if dtype in ("float", "float32"):
        return replace(config, dtype="float32", full_precision=True, checkpoint_bytes=None)
    if dtype in ("half", "float16"):
        plain = config.dtype == "float32" and config.quantization is None
        return replace(config, dtype="float16", checkpoint_bytes=None if plain else config.checkpoint_bytes)
    return config


def facts_of(name: str, config: ModelConfig, tokens: float, serving: Serving = _PLAIN) -> ModelFacts:
    """Facts of a model for rows of `tokens` tokens on average."""
    per_token = float(kv_bytes_per_token(config, serving))
    if any(layer.window is not None for layer in config.layers):
        whole = max(1, math.ceil(tokens))
        per_token = min(per_token, kv_bytes_per_sequence(config, whole, serving) / whole)
    scheme = config.quantization
    return ModelFacts(
        model=name,
        weight_bytes=weight_bytes(config),
        active_parameters=active_parameters(config),
        kv_bytes_per_token=per_token,
        tensor_parallel=tensor_parallel_sizes(config),
        fp8=scheme is not None and scheme.method in _FP8 and scheme.bits == 8,
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """How an instance serves a model: `engines` copies of it, each of whose stages is over `tensor_parallel` GPUs.

    `max_num_seqs` is per copy: vLLM's default, or fewer where the KV cache holds fewer mean rows. `max_model_len`
    None: a row may fill the model's whole context.
    """

    tensor_parallel: int
    engines: int
    max_num_seqs: int
    max_model_len: int | None

    @property
    def slots(self) -> int:
        """Rows that the whole instance works on at once."""
        return self.engines * self.max_num_seqs

    def arguments(self, server: Server = "vllm") -> tuple[str, ...]:
        """Words for the server's command line; copies of one instance share an address (data parallel)."""
        stated = (
            ("--tensor-parallel-size", self.tensor_parallel if self.tensor_parallel > 1 else None),
            ("--data-parallel-size", self.engines if self.engines > 1 else None),
            (SLOTS_FLAG[server], self.max_num_seqs),
            ("--max-model-len" if server == "vllm" else "--context-length", self.max_model_len),
        )
        return tuple(word for name, value in stated if value is not None for word in (name, str(value)))


@lru_cache(maxsize=4096)
def place(
    model: KnownModel,
    gpu: str,
    memory_gib: float,
    gpus: int,
    mix: LengthMix,
    longest: int,
    max_model_len: int | None = None,
) -> Placement | NoSpeed:
    """The fastest way to serve the model on an instance by the roofline estimate, or why it cannot.

    Every copy must hold one row of `longest` tokens (of `max_model_len`, where that is set). Rows beyond the model's
    own context are the engine's to refuse, and no reason against an instance.
    """
    if model.config is not None and model.config.dtype == "bfloat16" and gpu in WITHOUT_BFLOAT16:
        return NoSpeed(f"{gpu} has no bfloat16, in which {model.name} is served", permanent=True)
    card = _Card(gpu, memory_gib, model.max_num_seqs)
    row = min(max_model_len or max(longest, math.ceil(mix.tokens)), model.context or 1 << 40)
    facts = model.facts(mix.tokens)
    sizes = [size for size in facts.tensor_parallel if size <= gpus]
    if not sizes:
        least = min(facts.tensor_parallel)
        nodes = "; no engine is rented over several machines" if model.pipeline_parallel > 1 else ""
        return NoSpeed(f"{model.name} runs on {least} GPUs or more, the instance has {gpus}{nodes}", permanent=True)
    fitting = [size for size in sizes if _rows_that_fit(model, facts, card, size, row) >= 1]
    if not fitting:
        return NoSpeed(_too_large(model, facts, card, max(sizes), row), permanent=True)
    paced = {size: _pace(facts, card, size, gpus, mix) for size in fitting}
    size = max(fitting, key=lambda size: (paced[size], -size))
    slots = min(card.slots, _rows_that_fit(model, facts, card, size, max(1, min(row, math.ceil(mix.tokens)))))
    return Placement(
        size // model.pipeline_parallel, gpus // size, max(1, slots), max_model_len or _length(model, facts, card, size)
    )


@dataclass(frozen=True, slots=True)
class _Card:
    gpu: str
    memory_gib: float
    stated_slots: int | None = None

    @property
    def slots(self) -> int:
        if self.stated_slots is not None:
            return self.stated_slots
        sheet = find_sheet(self.gpu, self.memory_gib)
        return default_slots(sheet, self.memory_gib) if sheet else _SLOTS


def _rows_that_fit(model: KnownModel, facts: ModelFacts, card: _Card, size: int, tokens: int) -> int:
    """Rows of `tokens` tokens that the KV cache of one copy, on `size` GPUs in all, holds at once."""
    if model.config is not None:
        stages = model.pipeline_parallel
        serving = replace(model.serving, tensor_parallel=size // stages, max_num_seqs=card.slots)
        return sequences_that_fit(
            largest_stage(model.config, stages), catalog_gpu(card.gpu, card.memory_gib), tokens, serving
        )
    room = size * (card.memory_gib * _ASSUMED.memory - _ASSUMED.reserve_gib) * GIB - facts.weight_bytes
    if room < 0:
        return 0
    return int(room // (facts.kv_bytes_per_token * tokens)) if facts.kv_bytes_per_token > 0 else card.slots


def _too_large(model: KnownModel, facts: ModelFacts, card: _Card, size: int, tokens: int) -> str:
    """`Qwen3-8B does not fit: …`"""
    if model.config is not None:
        stages = model.pipeline_parallel
        serving = replace(model.serving, tensor_parallel=size // stages, max_num_seqs=card.slots)
        needed = gpu_memory_needed(largest_stage(model.config, stages), 1, tokens, serving) / GIB
    else:
        whole = facts.weight_bytes + facts.kv_bytes_per_token * tokens
        needed = (whole / size / GIB + _ASSUMED.reserve_gib) / _ASSUMED.memory
    return (
        f"{model.name} does not fit: with a row of {tokens:,} tokens it needs {needed:.1f} GiB on "
        f"{'the GPU' if size == 1 else f'each of {size} GPUs'}, {card.gpu} has {card.memory_gib:g}"
    )


def _pace(facts: ModelFacts, card: _Card, size: int, gpus: int, mix: LengthMix) -> float:
    """Estimated tokens per second with this split; 0 where there is no estimate."""
    sheet = find_sheet(card.gpu, card.memory_gib)
    if sheet is None:
        return 0.0
    found = estimate_speed(replace(facts, tensor_parallel=(size,)), sheet, card.memory_gib, gpus, mix)
    return found.tokens_per_second if isinstance(found, Speed) else 0.0


def _length(model: KnownModel, facts: ModelFacts, card: _Card, size: int) -> int | None:
    """Longest row that one copy holds, in whole blocks; None where the model's whole context fits.

    vLLM does not start when its KV cache is smaller than one row of the model's context.
    """
    if model.context is None or _rows_that_fit(model, facts, card, size, model.context) >= 1:
        return None
    low, high = 0, model.context // _BLOCK
    while low < high:
        middle = (low + high + 1) // 2
        if _rows_that_fit(model, facts, card, size, middle * _BLOCK) >= 1:
            low = middle
        else:
            high = middle - 1
    return max(1, low) * _BLOCK
