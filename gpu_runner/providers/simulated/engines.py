"""The engine simulator as the engine of a rented GPU: its arguments from datasheet and model. Pure."""

from __future__ import annotations

import math
import sys

from gpu_runner.market.gpus import find_sheet
from gpu_runner.market.offers import Offer
from gpu_runner.market.speed import GIB, Assumptions, ModelFacts, default_slots
from gpu_runner.providers.base import EngineOrder, ProviderError

ASSUMED = Assumptions()


def slots(offer: Offer, order: EngineOrder) -> int:
    """max_num_seqs of the engine: as ordered, or vLLM's default for the GPU."""
    sheet = find_sheet(offer.gpu, offer.gpu_memory_gib)
    if sheet is None:
        raise ProviderError(f"no datasheet for {offer.gpu} with {offer.gpu_memory_gib:g} GiB: it cannot be simulated")
    return order.max_num_seqs or default_slots(sheet, offer.gpu_memory_gib)


def engine_command(
    offer: Offer,
    order: EngineOrder,
    facts: ModelFacts,
    max_model_len: int,
    clock: float,
    assumed: Assumptions = ASSUMED,
) -> tuple[str, ...]:
    """Command line with `{model}` and `{port}` open.

    One engine over the largest split s the instance allows, worth s × 0.9^log2(s) single GPUs. Seconds of a step, as
    in `gpu_runner.market.speed.estimate_speed`: weights = bytes / (0.8 bandwidth), a token = 2 active / (0.5 FLOP/s), a
    token of context = KV bytes / (0.8 bandwidth). KV cache: what 0.9 of the memory less 2 GiB per GPU leaves beside the
    weights; the context is no longer than that. A model that does not fit gets an engine that ends at its start, as
    vLLM does.
    """
    running = slots(offer, order)
    sheet = find_sheet(offer.gpu, offer.gpu_memory_gib)
    assert sheet is not None
    split = max((size for size in facts.tensor_parallel if size <= offer.gpus), default=0)
    room = split * (offer.gpu_memory_gib * assumed.memory - assumed.reserve_gib) * GIB - facts.weight_bytes
    kv_tokens = max(0, int(room / facts.kv_bytes_per_token))
    worth = split * assumed.split ** math.log2(split) if split else 1.0
    bandwidth = sheet.bandwidth * 1e9 * assumed.bandwidth * worth
    flops = (sheet.fp8 if facts.fp8 and sheet.fp8 else sheet.half) * 1e12 * assumed.compute * worth
    options = {
        "--model": "{model}",
        "--port": "{port}",
        "--speed": f"{clock:g}",
        "--max-num-seqs": str(running),
        "--max-num-batched-tokens": str(assumed.batched_tokens),
        "--max-model-len": str(min(max_model_len, kv_tokens) if kv_tokens else max_model_len),
        "--kv-tokens": str(kv_tokens),
        "--weights-ms": f"{facts.weight_bytes / bandwidth * 1e3:.6g}",
        "--token-us": f"{2 * facts.active_parameters / flops * 1e6:.6g}",
        "--context-ns": f"{facts.kv_bytes_per_token / bandwidth * 1e9:.6g}",
        "--overhead-ms": f"{assumed.overhead_seconds * 1e3:g}",
    }
    words = [word for option in options.items() for word in option]
    return (sys.executable, "-m", "gpu_runner.simulator", *words, *order.arguments)
