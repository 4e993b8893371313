"""What a language model is made of: its shapes, from a parsed Hugging Face `config.json` and safetensors index.

Nothing of torch or transformers is imported: this runs on the control side. `files.py` fetches the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpu_runner.models.quantization import ModelConfigError, Quantization, read_quantization

Dtype = Literal["float32", "float16", "bfloat16"]
CONFIG, INDEX = "config.json", "model.safetensors.index.json"


class MissingKey(ModelConfigError):
    """A key that sizing needs is absent or not what it should be."""


class UnknownArchitecture(ModelConfigError):
    """An architecture, or a kind of layer, whose memory nobody described here."""


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Attention with `kv_heads` key and value heads: all heads (MHA), fewer (GQA) or one (MQA)."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): the cache holds one latent and one rotary key for all heads."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts MLP; `shared_width` is the width of the experts that every token passes."""

    count: int
    active: int
    width: int
    shared_width: int = 0
    bias: bool = False
    router_bias: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: attention over the last `window` tokens (None: over all), with experts or a dense MLP."""

    window: int | None
    experts: bool


@dataclass(frozen=True, slots=True)
class VisionTower:
    """A SigLIP image encoder as in Gemma 3; engines load it also when only text is asked for."""

    hidden: int
    width: int
    layers: int
    patch: int
    image: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes of a model. `checkpoint_bytes` is the safetensors index's total_size, None without an index.

    `full_precision`: it is served in float32, which vLLM does only where it is told to.
    """

    where: str
    architecture: str
    hidden: int
    width: int
    vocabulary: int
    tied_embeddings: bool
    max_tokens: int
    norms: int
    attention: GroupedAttention | LatentAttention
    layers: tuple[Layer, ...]
    experts: Experts | None
    dtype: Dtype
    quantization: Quantization | None
    vision: VisionTower | None
    checkpoint_bytes: int | None
    full_precision: bool = False


@dataclass(frozen=True, slots=True)
class _Family:
    """What the config.json of an architecture leaves unsaid. `pattern` n: each n-th layer sees the full context."""

    windows: Literal["none", "all", "pattern", "upper"] = "none"
    pattern: int = 0
    moe: Literal["", "mixtral", "qwen", "deepseek", "gpt_oss"] = ""
    latent: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    norms: int = 2
    defaults: Mapping[str, Any] = field(default_factory=dict)


# Defaults as in transformers' configuration classes of these models: a hub config may leave them out.
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192, "vocab_size": 256000}
_GEMMA2 = {**_GEMMA, "sliding_window": 4096}
_GEMMA3 = {**_GEMMA2, "vocab_size": 262208, "max_position_embeddings": 131072, "num_attention_heads": 8,
           "num_key_value_heads": 4}  # fmt: skip
FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(windows="all"),
    "MixtralForCausalLM": _Family(windows="all", moe="mixtral"),
    "Phi3ForCausalLM": _Family(windows="all"),
    "Qwen2ForCausalLM": _Family(windows="upper", qkv_bias=True),
    "Qwen3ForCausalLM": _Family(windows="upper", qk_norm=True, defaults={"head_dim": 128}),
    "Qwen3MoeForCausalLM": _Family(windows="upper", qk_norm=True, moe="qwen", defaults={"head_dim": 128}),
    "DeepseekV2ForCausalLM": _Family(latent=True, moe="deepseek"),
    "DeepseekV3ForCausalLM": _Family(latent=True, moe="deepseek"),
    "GemmaForCausalLM": _Family(defaults=_GEMMA),
    "Gemma2ForCausalLM": _Family(windows="pattern", pattern=2, norms=4, defaults=_GEMMA2),
    "Gemma3ForCausalLM": _Family(windows="pattern", pattern=6, norms=4, qk_norm=True, defaults=_GEMMA3),
    "Gemma3ForConditionalGeneration": _Family(windows="pattern", pattern=6, norms=4, qk_norm=True, defaults=_GEMMA3),
    "GptOssForCausalLM": _Family(
        windows="pattern", pattern=2, moe="gpt_oss", qkv_bias=True, output_bias=True, sinks=True
    ),
}


def parse(config: Mapping[str, Any], index: Mapping[str, Any] | None = None, *, where: str = CONFIG) -> ModelConfig:
    """Shapes from a parsed config.json and index; raises a ModelConfigError that says what is missing."""
    architecture = _architecture(config, where)
    family = FAMILIES[architecture]
    nested = config.get("text_config")
    text = _Keys({**family.defaults, **_stated(config), **_stated(nested or {})}, where, nested is not None)
    hidden = text.number("hidden_size")
    quantization = text.get("quantization_config")
    return ModelConfig(
        where=where,
        architecture=architecture,
        hidden=hidden,
        width=text.number("intermediate_size"),
        vocabulary=text.number("vocab_size"),
        tied_embeddings=bool(text.get("tie_word_embeddings", False)),
        max_tokens=_context(text),
        norms=family.norms,
        attention=_latent(text) if family.latent else _grouped(text, family, hidden),
        layers=_layers(text, family),
        experts=_experts(text, family),
        dtype=_dtype(text),
        quantization=read_quantization(quantization, where) if quantization else None,
        vision=_vision(config, where),
        checkpoint_bytes=_total_size(index, where) if index is not None else None,
    )


class _Keys:
    """The keys of a text model, with an error that names the missing one."""

    def __init__(self, values: Mapping[str, Any], where: str, nested: bool) -> None:
        self._values = values
        self.where = f"{where} text_config" if nested else where

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def number(self, *names: str) -> int:
        """Positive integer under the first of `names` that is there."""
        name = next((name for name in names if self._values.get(name) is not None), names[0])
        value = self._values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        found = "nothing" if value is None else repr(value)[:80]
        advice = "Take the config.json of the original model; sizing does not guess shapes."
        raise MissingKey(f"a positive integer {' or '.join(names)}", found, self.where, advice)


def _stated(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _architecture(config: Mapping[str, Any], where: str) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        advice = "An adapter or a tokenizer has no config of its own: name the base model."
        raise MissingKey("a list under architectures", repr(names)[:80], where, advice)
    known = next((name for name in names if name in FAMILIES), None)
    if known is None:
        advice = "Describe it in FAMILIES of gpu_runner/models/model_config.py, or state the memory it needs by hand."
        raise UnknownArchitecture(f"one of {', '.join(FAMILIES)}", ", ".join(map(str, names)), where, advice)
    return str(known)


def _grouped(text: _Keys, family: _Family, hidden: int) -> GroupedAttention:
    heads = text.number("num_attention_heads")
    return GroupedAttention(
        heads=heads,
        kv_heads=text.number("num_key_value_heads") if text.get("num_key_value_heads") is not None else heads,
        head_dim=text.number("head_dim") if text.get("head_dim") is not None else hidden // heads,
        qkv_bias=bool(text.get("attention_bias", family.qkv_bias)),
        output_bias=bool(text.get("attention_bias", family.output_bias)),
        qk_norm=family.qk_norm,
        sinks=family.sinks,
    )


def _latent(text: _Keys) -> LatentAttention:
    return LatentAttention(
        heads=text.number("num_attention_heads"),
        q_rank=text.number("q_lora_rank") if text.get("q_lora_rank") is not None else None,
        kv_rank=text.number("kv_lora_rank"),
        nope_dim=text.number("qk_nope_head_dim"),
        rope_dim=text.number("qk_rope_head_dim"),
        value_dim=text.number("v_head_dim"),
    )


def _experts(text: _Keys, family: _Family) -> Experts | None:
    if not family.moe:
        return None
    count = text.number("num_local_experts", "num_experts", "n_routed_experts")
    active = text.number("num_experts_per_tok")
    if family.moe in ("mixtral", "gpt_oss"):
        bias = family.moe == "gpt_oss"
        return Experts(count, active, text.number("intermediate_size"), bias=bias, router_bias=bias)
    width = text.number("moe_intermediate_size")
    shared = width * int(text.get("n_shared_experts", 0))
    return Experts(count, active, width, shared, router_bias=text.get("topk_method") == "noaux_tc")


def _layers(text: _Keys, family: _Family) -> tuple[Layer, ...]:
    count = text.number("num_hidden_layers")
    return tuple(Layer(window, _has_experts(text, family, i)) for i, window in enumerate(_windows(text, family, count)))


def _windows(text: _Keys, family: _Family, count: int) -> list[int | None]:
    """The attention window of each layer; None for the whole context."""
    kinds = text.get("layer_types")
    if family.windows == "none" or (kinds is None and text.get("sliding_window") is None):
        return [None] * count
    if kinds is not None:
        unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != count:
            expected = f"{count} layer_types, each full_attention or sliding_attention"
            advice = "Layers that keep a state instead of a KV cache are not described here; state the memory by hand."
            raise UnknownArchitecture(expected, f"{len(kinds)} with {', '.join(unknown)}", text.where, advice)
        sliding = [kind == "sliding_attention" for kind in kinds]
    elif family.windows == "pattern":
        full_each = int(text.get("sliding_window_pattern", text.get("_sliding_window_pattern", family.pattern)))
        sliding = [(i + 1) % full_each != 0 for i in range(count)]
    elif family.windows == "upper":  # Qwen: only when switched on, and from max_window_layers upwards
        first = int(text.get("max_window_layers", count)) if text.get("use_sliding_window", False) else count
        sliding = [i >= first for i in range(count)]
    else:
        sliding = [True] * count
    window = text.number("sliding_window") if any(sliding) else None
    return [window if slides else None for slides in sliding]


def _has_experts(text: _Keys, family: _Family, layer: int) -> bool:
    if family.moe == "qwen":
        sparse = (layer + 1) % int(text.get("decoder_sparse_step", 1)) == 0
        return sparse and layer not in text.get("mlp_only_layers", ())
    if family.moe == "deepseek":
        first, every = int(text.get("first_k_dense_replace", 0)), int(text.get("moe_layer_freq", 1))
        return layer >= first and layer % every == 0
    return bool(family.moe)


def _context(text: _Keys) -> int:
    """Tokens that the model was made for, stretched where the config switches YaRN on, as vLLM does."""
    stated = text.number("max_position_embeddings")
    rope = text.get("rope_scaling", text.get("rope_parameters", {}))
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if rope.get("rope_type", rope.get("type")) == "yarn" and original and factor:
        return max(stated, int(original * factor))
    return stated


def _dtype(text: _Keys) -> Dtype:
    stated = str(text.get("dtype", text.get("torch_dtype", "bfloat16"))).removeprefix("torch.")
    for known in ("float32", "float16", "bfloat16"):
        if stated == known:
            return known
    advice = "Quantized weights state their width in quantization_config, not in the dtype."
    raise MissingKey("dtype float32, float16 or bfloat16", stated, text.where, advice)


def _vision(config: Mapping[str, Any], where: str) -> VisionTower | None:
    if config.get("vision_config") is None:
        return None
    keys = _Keys(config["vision_config"], f"{where} vision_config", False)
    return VisionTower(*(keys.number(name) for name in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "patch_size", "image_size")))  # fmt: skip


def _total_size(index: Mapping[str, Any], where: str) -> int:
    total = (index.get("metadata") or {}).get("total_size")
    if isinstance(total, int | float) and total > 0:
        return int(total)
    advice = "Remove the index to have the size computed from the architecture."
    raise MissingKey("a positive metadata.total_size", repr(total)[:80], f"{INDEX} beside {where}", advice)
