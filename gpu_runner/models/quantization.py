"""How many bytes a quantized weight matrix takes, from the `quantization_config` of a config.json."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class ModelConfigError(ValueError):
    """A model's files do not say what sizing needs: what was expected and found, where, and what to do."""

    def __init__(self, expected: str, found: str, where: str, advice: str) -> None:
        super().__init__(f"{where}: expected {expected}, found {found}. {advice}")
        self.expected = expected
        self.found = found
        self.where = where
        self.advice = advice


class UnknownQuantization(ModelConfigError):
    """A quantization method, format or width without a size formula."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Weights of `bits` bits, plus one scale per block of `block_in` inputs times `block_out` outputs.

    `block_in` or `block_out` None: the whole dimension (both None: one scale per tensor). `zero_bits` is the
    zero point's size per scale. `skipped` are names of modules that keep the model's dtype; `kv_bits` is 8 where
    the checkpoint asks for an FP8 KV cache.
    """

    method: str
    bits: int
    scale_bytes: int = 0
    block_in: int | None = None
    block_out: int | None = None
    zero_bits: int = 0
    skipped: tuple[str, ...] = ()
    only_experts: bool = False
    kv_bits: int | None = None

    def matrix_bytes(self, inputs: int, outputs: int) -> int:
        """Bytes of one `inputs` x `outputs` matrix with its scales and zero points."""
        scales = math.ceil(inputs / (self.block_in or inputs)) * math.ceil(outputs / (self.block_out or outputs))
        return math.ceil(inputs * outputs * self.bits / 8) + math.ceil(scales * (self.scale_bytes + self.zero_bits / 8))

    def covers(self, module: str, *, expert: bool) -> bool:
        """Whether the linear layer `module` (dotted name) is quantized."""
        if self.only_experts and not expert:
            return False
        return not any(_names(entry, module) for entry in self.skipped)


def online_quantization(method: str | None) -> Quantization | None:
    """What vLLM makes of weights that are not quantized when it is started with this `--quantization`; None: nothing,
    or what has no formula here.
    """
    if method in ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"):
        block = 128 if method == "fp8_per_block" else None
        return Quantization("fp8", 8, 4, block, 1 if method == "fp8_per_channel" else block)
    if method in ("int8_per_channel_weight_only", "experts_int8"):
        return Quantization(method, 8, 4, None, 1, only_experts=method == "experts_int8")
    if method == "mxfp8":
        return Quantization(method, 8, 1, 32, 1)
    if method == "nvfp4_per_token":
        return Quantization(method, 4, 1, 16, 1)
    if method == "bitsandbytes":  # NF4, an fp32 scale for each 64 weights
        return Quantization(method, 4, 4, 64, 1)
    return None


def read_quantization(stated: Mapping[str, Any], where: str) -> Quantization:
    """Quantization from a `quantization_config`; raises UnknownQuantization for one without a formula."""
    where = f"{where} quantization_config"
    method = str(stated.get("quant_method", "")).lower()
    skipped = tuple(str(name) for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
                    for name in stated.get(key) or ())  # fmt: skip
    if method in ("awq", "gptq"):
        bits = _positive(stated, "bits", where)
        group = int(stated.get("group_size", 128))
        return Quantization(method, bits, 2, group if group > 0 else None, 1, bits, skipped)
    if method in ("fp8", "fbgemm_fp8"):
        block = stated.get("weight_block_size")
        if block:  # one fp32 scale per block (DeepSeek-V3, Qwen3 FP8)
            return Quantization(method, 8, 4, int(block[1]), int(block[0]), skipped=skipped)
        return Quantization(method, 8, 4, None, 1 if method == "fbgemm_fp8" else None, skipped=skipped)
    if method == "mxfp4":
        return Quantization(method, 4, 1, 32, 1, skipped=skipped, only_experts=True)  # gpt-oss
    if method == "compressed-tensors":
        return _compressed_tensors(stated, skipped, where)
    if method == "modelopt":
        return _modelopt(stated, skipped, where)
    if method == "bitsandbytes":
        return _bitsandbytes(stated, skipped)
    known = "awq, gptq, fp8, fbgemm_fp8, mxfp4, compressed-tensors, modelopt or bitsandbytes"
    raise UnknownQuantization(
        known, repr(method), where, "Add its bits per weight to gpu_runner/models/quantization.py."
    )


def _compressed_tensors(stated: Mapping[str, Any], skipped: tuple[str, ...], where: str) -> Quantization:
    """The widest of the config groups: a safe upper bound when groups differ."""
    groups = [group["weights"] for group in (stated.get("config_groups") or {}).values() if group.get("weights")]
    if not groups:
        advice = "Weights that are not quantized need no quantization_config; otherwise state config_groups."
        raise UnknownQuantization("config_groups.*.weights", "none", where, advice)
    weights = max(groups, key=lambda group: _positive(group, "num_bits", where))
    bits = int(weights["num_bits"])
    strategy, group = weights.get("strategy"), weights.get("group_size")
    cache = stated.get("kv_cache_scheme") or {}
    kv_bits = int(cache["num_bits"]) if "num_bits" in cache else None
    zero_bits = 0 if weights.get("symmetric", True) else bits
    tiny = bits == 4 and weights.get("type") == "float"  # NVFP4, MXFP4: 1-byte scales
    if strategy == "block" and weights.get("block_structure"):
        rows, columns = weights["block_structure"]
        return Quantization("compressed-tensors", bits, 4, int(columns), int(rows), 0, skipped, kv_bits=kv_bits)
    block_in = int(group) if group and int(group) > 0 else None
    block_out = None if strategy == "tensor" else 1
    scale = 1 if tiny else 2
    return Quantization("compressed-tensors", bits, scale, block_in, block_out, zero_bits, skipped, kv_bits=kv_bits)


def _modelopt(stated: Mapping[str, Any], skipped: tuple[str, ...], where: str) -> Quantization:
    inner = stated.get("quantization") or stated
    skipped += tuple(str(name) for name in inner.get("exclude_modules") or ()) if inner is not stated else ()
    algorithm = str(inner.get("quant_algo", "")).upper()
    kv_bits = 8 if str(inner.get("kv_cache_quant_algo", "")).upper() == "FP8" else None
    if algorithm == "FP8":
        return Quantization("modelopt", 8, 4, skipped=skipped, kv_bits=kv_bits)
    if algorithm == "NVFP4":
        group = int(inner.get("group_size") or 16)
        return Quantization("modelopt", 4, 1, group, 1, skipped=skipped, kv_bits=kv_bits)
    advice = "Add its bits per weight to gpu_runner/models/quantization.py."
    raise UnknownQuantization("quant_algo FP8 or NVFP4", repr(algorithm), where, advice)


def _bitsandbytes(stated: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantization:
    skipped += tuple(str(name) for name in stated.get("llm_int8_skip_modules") or ())
    if stated.get("load_in_4bit"):  # one fp32 absmax per 64 weights
        return Quantization("bitsandbytes", 4, 4, 64, 1, skipped=skipped)
    return Quantization("bitsandbytes", 8, 4, None, 1, skipped=skipped)


def _positive(stated: Mapping[str, Any], key: str, where: str) -> int:
    value = stated.get(key)
    if isinstance(value, int) and value > 0:
        return value
    advice = "Take the config.json that belongs to the quantized weights."
    raise UnknownQuantization(f"a positive {key}", repr(value), where, advice)


def _names(entry: str, module: str) -> bool:
    """Whether an ignore entry (name, dotted part of a name, `*` pattern or `re:` expression) means the module."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    pattern = re.escape(entry.strip(".*")).replace(r"\*", ".*")
    return bool(pattern) and re.search(rf"(^|\.){pattern}(\.|$)", module) is not None
