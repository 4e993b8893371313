"""What a model needs of a GPU: memory, tensor-parallel sizes, and how many sequences fit.

Pure functions over shapes; formulas and their sources are in docs/sizing.md. The KV cache follows vLLM's block
allocator exactly; activations, CUDA graphs and the CUDA runtime are estimates, said to be so where they stand.
All sizes are bytes on one GPU unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gpu_runner.models.model_config import LatentAttention, ModelConfig
from gpu_runner.models.weights import matrices, served_bytes, weight_bytes

GIB = 1 << 30

# CUDA context, NCCL, cuBLAS and attention workspaces that vLLM logs as non_torch_memory: 0.16 to 0.33 GiB in most
# logs (vllm#15039, vllm#14452), up to 2.6 GiB with 16 GPUs (vllm#13074). Estimate; one number for every group size.
RUNTIME_BYTES = 1 * GIB
# Graph pool as vLLM logs it: 0.09 to 0.73 GiB (vllm#39559, vllm#14696, club-3090#1087). Estimate, the upper end.
GRAPH_BYTES = 3 * GIB // 4
# Logits in the served dtype, their float32 copy and the sampler's sorted copy, per sequence and vocabulary entry.
LOGIT_BYTES = 12


@dataclass(frozen=True, slots=True)
class Serving:
    """How vLLM is started. Defaults are its own for the server on smaller GPUs, except `memory_utilization`.

    vLLM's default utilization moved from 0.90 to 0.92 in 2026; 0.90 is the careful one. `loras`: adapters in GPU memory
    at once, each with room for `lora_rank`.
    """

    tensor_parallel: int = 1
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    memory_utilization: float = 0.9
    kv_dtype: Literal["auto", "fp8"] = "auto"
    block_tokens: int = 16
    loras: int = 0
    lora_rank: int = 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and the memory that a program can see on it (less than the number it is sold with)."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """Memory of one GPU: what stays (weights, activations, graphs, runtime) and the sequences' KV cache."""

    weights: int
    activations: int
    graphs: int
    runtime: int
    kv_cache: int

    @property
    def total(self) -> int:
        """All of it, before the share that vLLM leaves free."""
        return self.weights + self.activations + self.graphs + self.runtime + self.kv_cache


# Cards that show less than the number they are sold with: GDDR with ECC, as the A40 with 46068 of 49152 MiB
# (guqiong96/Lvllm#35), and B200, sold as 180 or 192.
_SHOW_LESS = ("T4", "L4", "A2", "A10", "A10G", "A16", "A40", "L20", "L40", "L40S", "B200", "GB200")


def catalog_gpu(name: str, sold_gib: float) -> Gpu:
    """GPU as catalogs list it (80 for an H100, 24 for an L4), with the memory that torch sees on it, rounded down.

    Torch sees 79.22 of 80 GiB on an H100 (vllm#10511), 139.72 of 141 on an H20 (vllm#13074), 23.58 of 24 on an
    RTX 3090 (vllm#14447), 31.37 of 32 on an RTX 5090 (vllm#14452): at least 98 %. For the others we take 91 %.
    """
    key = name.upper().replace(" ", "").replace("-", "").removeprefix("NVIDIA").removeprefix("TESLA")
    return Gpu(name, int(sold_gib * GIB * (0.91 if key in _SHOW_LESS else 0.98)))


def kv_bytes_per_token(model: ModelConfig, serving: Serving = Serving()) -> int:
    """KV cache of one token while it lies inside every layer's window: all layers together."""
    return len(model.layers) * _kv_bytes_per_layer(model, serving)


def kv_bytes_per_sequence(model: ModelConfig, tokens: int, serving: Serving = Serving()) -> int:
    """KV cache of one sequence of `tokens` tokens (prompt and output) in whole blocks, as vLLM hands them out."""
    return _blocks(model, tokens, serving) * _block_bytes(model, serving)


def activation_bytes(model: ModelConfig, serving: Serving = Serving()) -> int:
    """Peak of one step of `max_batched_tokens` tokens and `max_num_seqs` rows of logits. Estimate.

    Four hidden states, and the MLP's gate, up and product (or the same per chosen expert with its input); then the
    logits of the whole vocabulary, which every GPU gathers. vLLM measured 1.26 GiB for Llama-3-8B (vllm#10511),
    this gives 1.27.
    """
    number = served_bytes(model)
    mlp = 3 * model.width // serving.tensor_parallel
    if model.experts is not None:
        experts = model.experts
        mlp = max(mlp, experts.active * (model.hidden + 3 * experts.width // serving.tensor_parallel))
    step = serving.max_batched_tokens * (4 * model.hidden + mlp) * number
    return step + serving.max_num_seqs * model.vocabulary * LOGIT_BYTES


def adapter_bytes(model: ModelConfig, serving: Serving) -> int:
    """Room for LoRA adapters: for each linear layer a matrix of `rank` x inputs, on every GPU, and one of outputs x
    `rank`, split as the layer is. An upper bound: vLLM leaves layers out that no adapter may change.
    """
    if not serving.loras:
        return 0
    sides = sum(
        matrix.copies * (matrix.inputs + -(-matrix.outputs // min(serving.tensor_parallel, matrix.shards)))
        for matrix in matrices(model)
        if matrix.linear
    )
    return serving.loras * serving.lora_rank * sides * served_bytes(model)


def need(model: ModelConfig, sequences: int, tokens: int, serving: Serving = Serving()) -> Need:
    """Memory of one GPU for `sequences` sequences of `tokens` tokens at once."""
    cache = sequences * kv_bytes_per_sequence(model, tokens, serving) + _prefill_reserve(model, tokens, serving)
    return Need(
        weights=weight_bytes(model, serving.tensor_parallel) + adapter_bytes(model, serving),
        activations=activation_bytes(model, serving),
        graphs=GRAPH_BYTES,
        runtime=RUNTIME_BYTES,
        kv_cache=cache,
    )


def gpu_memory_needed(model: ModelConfig, sequences: int, tokens: int, serving: Serving = Serving()) -> int:
    """Memory that each GPU must have, with the share that vLLM leaves free."""
    return int(need(model, sequences, tokens, serving).total / serving.memory_utilization) + 1


def kv_cache_bytes(model: ModelConfig, gpu: Gpu, serving: Serving = Serving()) -> int:
    """Memory left for the KV cache on each GPU; 0 when not even the weights fit."""
    fixed = need(model, 0, 1, serving).total
    return max(0, int(gpu.memory_bytes * serving.memory_utilization) - fixed)


def kv_tokens(model: ModelConfig, cache_bytes: int, serving: Serving = Serving()) -> int:
    """Tokens that a KV cache of `cache_bytes` holds: vLLM's "GPU KV cache size", for models without windows."""
    return cache_bytes // (serving.block_tokens * kv_bytes_per_token(model, serving)) * serving.block_tokens


def sequences_that_fit(model: ModelConfig, gpu: Gpu, tokens: int, serving: Serving = Serving()) -> int:
    """Sequences of `tokens` tokens that the KV cache holds at once, whatever `max_num_seqs` says.

    0: the model, or one such sequence, does not fit. `tokens` beyond the model's own context never fit.
    """
    if tokens > model.max_tokens:
        return 0
    left = kv_cache_bytes(model, gpu, serving) - _prefill_reserve(model, tokens, serving)
    return max(0, left // kv_bytes_per_sequence(model, tokens, serving))


def tensor_parallel_sizes(model: ModelConfig, most: int = 8) -> tuple[int, ...]:
    """Group sizes up to `most` that vLLM accepts for this model.

    The attention heads must divide; KV heads divide, or are copied when the group is a multiple of them; MLP and
    expert widths divide, in whole scale blocks where the weights are quantized in blocks (vllm#17569).
    """
    return tuple(size for size in range(1, most + 1) if _splits(model, size))


def largest_stage(model: ModelConfig, stages: int) -> ModelConfig:
    """The shapes of the largest of so many stages of a model's layers, as vLLM's pipeline parallelism has them.

    An upper bound: each stage counts with the embedding and the head, which only the first and the last one have, and
    of layers of different kinds the first ones count.
    """
    if stages == 1:
        return model
    stage = replace(model, layers=model.layers[: -(-len(model.layers) // stages)], checkpoint_bytes=None)
    if model.checkpoint_bytes is None:
        return stage
    whole = replace(model, checkpoint_bytes=None)
    return replace(stage, checkpoint_bytes=model.checkpoint_bytes * weight_bytes(stage) // weight_bytes(whole))


def _splits(model: ModelConfig, size: int) -> bool:
    attention = model.attention
    if attention.heads % size:
        return False
    if not isinstance(attention, LatentAttention) and attention.kv_heads % size and size % attention.kv_heads:
        return False
    scheme = model.quantization
    block = 1
    if scheme is not None and size > 1 and not scheme.only_experts:  # vLLM pads the experts of mxfp4 models
        block = max(scheme.block_in or 1, scheme.block_out or 1)
    return all(width % size == 0 and (width // size) % block == 0 for width in _widths(model))


def _widths(model: ModelConfig) -> Iterator[int]:
    if any(not layer.experts for layer in model.layers):
        yield model.width
    if model.experts is not None:
        yield model.experts.width
        if model.experts.shared_width:
            yield model.experts.shared_width


def _kv_bytes_per_layer(model: ModelConfig, serving: Serving) -> int:
    """KV bytes of one token in one layer. Latent attention is copied to every GPU, KV heads are split."""
    fp8 = serving.kv_dtype == "fp8" or (model.quantization is not None and model.quantization.kv_bits == 8)
    number = 1 if fp8 else served_bytes(model)
    attention = model.attention
    if isinstance(attention, LatentAttention):
        return (attention.kv_rank + attention.rope_dim) * number
    heads = max(1, attention.kv_heads // serving.tensor_parallel)
    return 2 * heads * attention.head_dim * number


def _groups(model: ModelConfig) -> tuple[int, int, int]:
    """(layers per group, groups with full attention, groups with a window) as vLLM's hybrid allocator forms them.

    All groups have one size, that of the rarer kind, and the last group of a kind is padded; kinds of nearly equal
    number (less than 1.5 to 1) form one group each.
    """
    full = sum(layer.window is None for layer in model.layers)
    sliding = len(model.layers) - full
    if not full or not sliding:
        return len(model.layers), int(full > 0), int(sliding > 0)
    fewer, more = sorted((full, sliding))
    size = more if more < 1.5 * fewer else fewer
    return size, -(-full // size), -(-sliding // size)


def _block_bytes(model: ModelConfig, serving: Serving) -> int:
    return serving.block_tokens * _groups(model)[0] * _kv_bytes_per_layer(model, serving)


def _window(model: ModelConfig) -> int:
    return max(layer.window or 0 for layer in model.layers)


def _blocks(model: ModelConfig, tokens: int, serving: Serving) -> int:
    """Blocks of one decoding sequence. A window needs one block more, as it need not start at a block's edge."""
    if tokens < 1:
        raise ValueError(f"a sequence has at least one token, not {tokens}")
    _, full, sliding = _groups(model)
    whole = -(-tokens // serving.block_tokens)
    kept = min(whole, -(-_window(model) // serving.block_tokens) + 1)
    return full * whole + sliding * kept


def _prefill_reserve(model: ModelConfig, tokens: int, serving: Serving) -> int:
    """Blocks outside the windows that the step under way still holds: once per engine, not per sequence."""
    _, _, sliding = _groups(model)
    if not sliding or tokens <= _window(model):
        return 0
    return sliding * -(-serving.max_batched_tokens // serving.block_tokens) * _block_bytes(model, serving)
