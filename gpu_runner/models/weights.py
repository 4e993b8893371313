"""Parameters and bytes of a model's weights, matrix by matrix, whole and on one GPU of a tensor-parallel group.

Shapes are those of the checkpoints; how matrices are split follows vLLM's layers: vocabulary, attention heads and
MLP width are split over all GPUs; key and value projections over at most as many GPUs as there are KV heads; norms,
routers and the down-projections of latent attention are copied to every GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from gpu_runner.models.model_config import Experts, GroupedAttention, LatentAttention, ModelConfig, VisionTower

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
EVERYWHERE = 1  # shards of a matrix that every GPU holds whole
ALL_GPUS = 1 << 30


@dataclass(frozen=True, slots=True)
class Matrix:
    """`copies` equal matrices of a model, of which one token uses `active`; split over at most `shards` GPUs."""

    name: str
    inputs: int
    outputs: int
    shards: int = ALL_GPUS
    copies: int = 1
    active: int = 1
    linear: bool = True

    @property
    def parameters(self) -> int:
        """Numbers in all copies."""
        return self.inputs * self.outputs * self.copies


def matrices(model: ModelConfig) -> Iterator[Matrix]:
    """Every weight matrix and vector of the model, without multi-token prediction layers."""
    yield Matrix("model.embed_tokens", model.hidden, model.vocabulary, linear=False)
    if not model.tied_embeddings:
        yield Matrix("lm_head", model.hidden, model.vocabulary, linear=False)
    yield _vector("model.norm", model.hidden)
    for i, layer in enumerate(model.layers):
        name = f"model.layers.{i}"
        yield _vector(f"{name}.norms", model.norms * model.hidden)
        if isinstance(model.attention, LatentAttention):
            yield from _latent(f"{name}.self_attn", model.attention, model.hidden)
        else:
            yield from _grouped(f"{name}.self_attn", model.attention, model.hidden)
        if layer.experts and model.experts is not None:
            yield from _experts(f"{name}.mlp", model.experts, model.hidden)
        else:
            yield from _mlp(f"{name}.mlp", model.hidden, model.width)
    if model.vision is not None:
        yield from _vision(model.vision, model.hidden)


def parameters(model: ModelConfig) -> int:
    """All parameters, as a model card counts them."""
    return sum(matrix.parameters for matrix in matrices(model))


def active_parameters(model: ModelConfig) -> int:
    """Parameters that one token passes: of a mixture of experts only the chosen ones."""
    return sum(matrix.inputs * matrix.outputs * matrix.active for matrix in matrices(model))


@lru_cache(maxsize=1024)
def weight_bytes(model: ModelConfig, tensor_parallel: int = 1) -> int:
    """Bytes of the weights on one GPU as vLLM holds them.

    The whole is the safetensors index's total_size when there is one, else computed; one GPU's part of it is
    computed from the shapes. Weights stored as float32 are served as bfloat16 (vLLM's `dtype=auto`).
    """
    part = _computed(model, tensor_parallel)
    if model.checkpoint_bytes is not None:
        part = _stored(model) * part // _computed(model, 1)
    return part + _absorbed(model, tensor_parallel)


def _computed(model: ModelConfig, tensor_parallel: int) -> int:
    return sum(
        -(-_matrix_bytes(model, matrix) * matrix.copies // min(tensor_parallel, matrix.shards))
        for matrix in matrices(model)
    )


def _stored(model: ModelConfig) -> int:
    total = model.checkpoint_bytes or 0
    return total // 2 if model.dtype == "float32" and model.quantization is None else total


def _matrix_bytes(model: ModelConfig, matrix: Matrix) -> int:
    """Bytes of one copy."""
    scheme = model.quantization
    if scheme is None or not matrix.linear or not scheme.covers(matrix.name, expert=matrix.copies > 1):
        return matrix.inputs * matrix.outputs * served_bytes(model)
    return scheme.matrix_bytes(matrix.inputs, matrix.outputs)


def served_bytes(model: ModelConfig) -> int:
    """Bytes of one number that is not quantized, in the dtype that vLLM serves."""
    return 4 if model.full_precision else min(2, DTYPE_BYTES[model.dtype])


def _absorbed(model: ModelConfig, tensor_parallel: int) -> int:
    """vLLM keeps the up-projection of latent attention a second time, unquantized, as W_UK and W_UV."""
    attention = model.attention
    if not isinstance(attention, LatentAttention):
        return 0
    numbers = attention.kv_rank * attention.heads * (attention.nope_dim + attention.value_dim)
    return len(model.layers) * numbers * served_bytes(model) // tensor_parallel


def _vector(name: str, size: int, shards: int = EVERYWHERE, copies: int = 1, active: int = 1) -> Matrix:
    return Matrix(name, 1, size, shards, copies, active, linear=False)


def _grouped(name: str, attention: GroupedAttention, hidden: int) -> Iterator[Matrix]:
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    yield Matrix(f"{name}.q_proj", hidden, queries)
    yield Matrix(f"{name}.k_proj", hidden, keys, attention.kv_heads)
    yield Matrix(f"{name}.v_proj", hidden, keys, attention.kv_heads)
    yield Matrix(f"{name}.o_proj", queries, hidden)
    if attention.qkv_bias:
        yield _vector(f"{name}.qkv_bias", queries + 2 * keys)
    if attention.output_bias:
        yield _vector(f"{name}.o_bias", hidden)
    if attention.qk_norm:
        yield _vector(f"{name}.qk_norm", 2 * attention.head_dim)
    if attention.sinks:
        yield _vector(f"{name}.sinks", attention.heads)


def _latent(name: str, attention: LatentAttention, hidden: int) -> Iterator[Matrix]:
    queries = attention.heads * (attention.nope_dim + attention.rope_dim)
    if attention.q_rank is None:
        yield Matrix(f"{name}.q_proj", hidden, queries)
    else:
        yield Matrix(f"{name}.q_a_proj", hidden, attention.q_rank, EVERYWHERE)
        yield _vector(f"{name}.q_a_layernorm", attention.q_rank)
        yield Matrix(f"{name}.q_b_proj", attention.q_rank, queries)
    yield Matrix(f"{name}.kv_a_proj_with_mqa", hidden, attention.kv_rank + attention.rope_dim, EVERYWHERE)
    yield _vector(f"{name}.kv_a_layernorm", attention.kv_rank)
    yield Matrix(f"{name}.kv_b_proj", attention.kv_rank, attention.heads * (attention.nope_dim + attention.value_dim))
    yield Matrix(f"{name}.o_proj", attention.heads * attention.value_dim, hidden)


def _mlp(name: str, hidden: int, width: int, copies: int = 1, active: int = 1) -> Iterator[Matrix]:
    for part in ("gate_proj", "up_proj"):
        yield Matrix(f"{name}.{part}", hidden, width, copies=copies, active=active)
    yield Matrix(f"{name}.down_proj", width, hidden, copies=copies, active=active)


def _experts(name: str, experts: Experts, hidden: int) -> Iterator[Matrix]:
    yield Matrix(f"{name}.gate", hidden, experts.count, EVERYWHERE, linear=False)
    if experts.router_bias:
        yield _vector(f"{name}.gate_bias", experts.count)
    yield from _mlp(f"{name}.experts.0", hidden, experts.width, experts.count, experts.active)
    if experts.bias:
        size = 2 * experts.width + hidden
        yield _vector(f"{name}.experts.bias", size, copies=experts.count, active=experts.active)
    if experts.shared_width:
        yield from _mlp(f"{name}.shared_experts", hidden, experts.shared_width)


def _vision(vision: VisionTower, hidden: int) -> Iterator[Matrix]:
    """SigLIP tower and projector, counted as copied to every GPU: small, and engines differ in how they split it."""
    size, width = vision.hidden, vision.width
    patches = (vision.image // vision.patch) ** 2
    yield _vector("vision.embeddings", (3 * vision.patch**2 + 1 + patches) * size)
    layer = 4 * (size * size + size) + 2 * size * width + width + size + 4 * size
    yield _vector("vision.layers", vision.layers * layer + 2 * size)
    yield _vector("vision.projector", size * hidden + size)
