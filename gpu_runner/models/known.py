"""Shapes of a few well-known models, as their public config.json states them: known without files or a network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from gpu_runner.models.model_config import ModelConfig, parse


def _shapes(
    architecture: str, hidden: int, width: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **more,
    }


_LLAMA3 = {"max_position_embeddings": 131_072}
_QWEN3 = {"max_position_embeddings": 40_960, "head_dim": 128}
_GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
}

# Each with the names under which the same shapes are published. docs/sizing.md compares them with public figures.
_MODELS: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...] = (
    (
        ("Qwen/Qwen3-0.6B",),
        _shapes("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 151_936, **_QWEN3 | {"tie_word_embeddings": True}),
    ),
    (
        ("Qwen/Qwen3-8B",),
        _shapes("Qwen3ForCausalLM", 4096, 12_288, 36, 32, 8, 151_936, **_QWEN3),
    ),
    (
        ("Qwen/Qwen3-30B-A3B",),
        _shapes(
            "Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, 151_936,
            **_QWEN3, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        ),
    ),
    (
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        _shapes("LlamaForCausalLM", 4096, 14_336, 32, 32, 8, 128_256, **_LLAMA3),
    ),
    (
        ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"),
        _shapes("LlamaForCausalLM", 8192, 28_672, 80, 64, 8, 128_256, **_LLAMA3),
    ),
    (
        ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        _shapes(
            "MixtralForCausalLM", 4096, 14_336, 32, 32, 8, 32_000,
            max_position_embeddings=32_768, num_local_experts=8, num_experts_per_tok=2,
        ),
    ),
    (("google/gemma-3-27b-it", "google/gemma-3-27b-pt"), _GEMMA3),
)  # fmt: skip
_BY_NAME = {name.lower(): shapes for names, shapes in _MODELS for name in names}

NAMES = tuple(name for names, _ in _MODELS for name in names)


@cache
def built_in(model: str) -> ModelConfig | None:
    """Shapes of a model of NAMES (letter case does not matter), None for others."""
    shapes = _BY_NAME.get(model.lower())
    return parse(shapes, where=f"built-in shapes of {model}") if shapes is not None else None
