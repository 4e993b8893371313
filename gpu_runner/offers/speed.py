"""How many tokens a second an instance will do for a model: measured where we can, a roofline estimate where not. Pure.

A speed counts all tokens of a row, prompt and completion, at a given length mix, so embeddings have one too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gpu_runner.offers.gpus import GpuSheet, find_sheet

Basis = Literal["measured", "scaled", "estimate"]

GIB = 2**30


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What sizing knows of a model. Bytes are of the whole model, over all GPUs.

    `weight_bytes`: all weights as they lie in GPU memory, every expert included. `active_parameters`: used for one
    token. `tensor_parallel`: over how many GPUs one engine may be split. `fp8`: weights and activations are FP8, so
    the FP8 units compute; weight-only quantization computes in bf16.
    """

    model: str
    weight_bytes: float
    active_parameters: float
    kv_bytes_per_token: float
    tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)
    fp8: bool = False


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Mean tokens of a row: prompt and completion (0 for embeddings)."""

    prompt_tokens: float
    output_tokens: float

    def __post_init__(self) -> None:
        if not (self.prompt_tokens >= 0 and self.output_tokens >= 0 and 1 <= self.tokens < math.inf):
            raise ValueError(f"length mix: expected tokens of 0 or more, together 1 or more, found {self}")

    @property
    def tokens(self) -> float:
        """Prompt and completion together."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of a whole instance, and how we know.

    `measured`: on rows of about these lengths. `scaled`: measured on rows of other lengths, carried over with the
    estimate's ratio where the GPU has a datasheet. `estimate`: roofline; expect it to be off by a factor of 2, and more
    on cards that their power limit slows down. `rows`: on how many it was measured.
    """

    tokens_per_second: float
    basis: Basis
    rows: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class NoSpeed:
    """The instance cannot serve the model, or nothing is known of its speed.

    `permanent`: it follows from the model, the instance and the settings alone, and no later moment changes it.
    """

    reason: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What datasheets do not say.

    - compute: share of the dense FLOP/s that an engine reaches; the engine simulator's StepModel uses the same.
    - bandwidth: share of the datasheet bandwidth reached while weights and KV are read; ours.
    - split: what is left of each further doubling of tensor parallelism, for communication; ours.
    - overhead_seconds: scheduling and sampling per step; as in StepModel.
    - memory: vLLM's default gpu_memory_utilization; reserve_gib per GPU for activations and CUDA graphs, ours.
    - batched_tokens: vLLM's default max_num_batched_tokens of the server.
    """

    compute: float = 0.5
    bandwidth: float = 0.8
    split: float = 0.9
    overhead_seconds: float = 0.5e-3
    memory: float = 0.9
    reserve_gib: float = 2.0
    batched_tokens: int = 8192


def default_slots(sheet: GpuSheet, memory_gib: float) -> int:
    """vLLM's own default of max_num_seqs: 1024 from 70 GiB on, but not on an A100; 256 elsewhere."""
    return 1024 if memory_gib >= 70 and not sheet.name.startswith("A100") else 256


def estimate_speed(
    facts: ModelFacts,
    sheet: GpuSheet,
    memory_gib: float,
    gpus: int,
    mix: LengthMix,
    assumed: Assumptions = Assumptions(),
) -> Speed | NoSpeed:
    """Roofline of continuous batching on the best split of the instance into engines of equal size.

    A small split leaves more engines, a large one more KV cache per engine; pass one size in `facts.tensor_parallel`
    where it is fixed. Per step an engine computes T tokens: one for each of its B sequences, and the prompt tokens
    that replace them (P/D each): T = B (1 + P/D). The step takes overhead + max(weights / bandwidth, 2 active T /
    FLOPs) + the reading of B (P + D/2) tokens of KV. B is what the KV cache holds, at most max_num_seqs, and T at
    most the token budget. Engines that share an instance are taken not to slow each other down.
    Roofline: Williams, Waterman, Patterson, CACM 52(4), 2009. The step is gpu_runner.simulator.scheduler.StepModel.
    """
    sizes = [size for size in facts.tensor_parallel if size <= gpus]
    if not sizes:
        least = min(facts.tensor_parallel)
        return NoSpeed(f"{facts.model} runs on {least} GPUs or more, the instance has {gpus}", permanent=True)
    best = 0.0
    for split in sizes:
        room = split * (memory_gib * assumed.memory - assumed.reserve_gib) * GIB - facts.weight_bytes
        if room >= facts.kv_bytes_per_token * mix.tokens:
            tokens, seconds = _step(facts, sheet, memory_gib, split, room, mix, assumed)
            best = max(best, (gpus // split) * tokens / seconds)
    if best > 0:
        return Speed(best, "estimate")
    return NoSpeed(
        f"{facts.model} does not fit: {facts.weight_bytes / GIB:.0f} GiB of weights and the KV cache of a row "
        f"in {max(sizes)} × {memory_gib:g} GiB",
        permanent=True,
    )


def _step(
    facts: ModelFacts,
    sheet: GpuSheet,
    memory_gib: float,
    split: int,
    room: float,
    mix: LengthMix,
    assumed: Assumptions,
) -> tuple[float, float]:
    """Tokens and seconds of one step of one engine in steady state."""
    parallel = split * assumed.split ** math.log2(split)
    bandwidth = sheet.bandwidth * 1e9 * assumed.bandwidth * parallel
    flops = (sheet.fp8 if facts.fp8 and sheet.fp8 else sheet.half) * 1e12 * assumed.compute * parallel
    context = mix.prompt_tokens + mix.output_tokens / 2
    sequence_bytes = facts.kv_bytes_per_token * context
    held = room / sequence_bytes if sequence_bytes > 0 else math.inf
    running = min(held, default_slots(sheet, memory_gib), assumed.batched_tokens)
    step_tokens = float(assumed.batched_tokens)
    if mix.output_tokens > 0:
        step_tokens = min(step_tokens, running * mix.tokens / mix.output_tokens)
        running = step_tokens * mix.output_tokens / mix.tokens
    else:
        running = min(running, step_tokens / mix.prompt_tokens)
    compute = max(facts.weight_bytes / bandwidth, 2 * facts.active_parameters * step_tokens / flops)
    reading = running * sequence_bytes / bandwidth
    return step_tokens, assumed.overhead_seconds + compute + reading


@dataclass(frozen=True, slots=True)
class Measurement:
    """What an instance did: `tokens` (prompt and completion) in `seconds` of useful time, on rows of this mix."""

    model: str
    gpu: str
    memory_gib: float
    gpus: int
    mix: LengthMix
    tokens: float
    seconds: float

    def __post_init__(self) -> None:
        if not (0 < self.tokens < math.inf and 0 < self.seconds < math.inf):
            raise ValueError(f"measurement: expected tokens and seconds above 0, found {self}")


class Throughput:
    """The throughput catalog: measured speeds per model, GPU and length mix. They beat the estimate."""

    def __init__(
        self,
        measurements: Iterable[Measurement] = (),
        *,
        similar: float = 1.5,
        assumed: Assumptions = Assumptions(),
    ) -> None:
        """`similar`: two mixes count as the same while their mean lengths differ by no more than this factor."""
        self._similar = similar
        self._assumed = assumed
        self._measured: dict[tuple[str, str, int, int], list[Measurement]] = {}
        for one in measurements:
            self._measured.setdefault((one.model, one.gpu, round(one.memory_gib), one.gpus), []).append(one)

    def speed(self, facts: ModelFacts, gpu: str, memory_gib: float, gpus: int, mix: LengthMix) -> Speed | NoSpeed:
        """Best known speed of an instance with `gpus` GPUs of this name for rows of this mix."""
        sheet = find_sheet(gpu, memory_gib)
        seen = self._measured.get((facts.model, gpu, round(memory_gib), gpus), [])
        alike = [one for one in seen if self._alike(one.mix, mix)]
        if alike:
            speed = sum(one.tokens for one in alike) / sum(one.seconds for one in alike)
            return Speed(speed, "measured", _rows(alike))
        if seen:
            return Speed(self._scale(seen, facts, sheet, mix), "scaled", _rows(seen))
        if sheet is None:
            return NoSpeed(f"no datasheet for {gpu} with {memory_gib:g} GiB, and no measured speed of {facts.model}")
        return estimate_speed(facts, sheet, memory_gib, gpus, mix, self._assumed)

    def _alike(self, one: LengthMix, other: LengthMix) -> bool:
        pairs = ((one.prompt_tokens, other.prompt_tokens), (one.output_tokens, other.output_tokens))
        # A token more or less decides nothing; it also keeps embeddings (0) apart from completions.
        return all(max(a, b) + 1 <= self._similar * (min(a, b) + 1) for a, b in pairs)

    def _scale(self, seen: list[Measurement], facts: ModelFacts, sheet: GpuSheet | None, mix: LengthMix) -> float:
        """Measured over estimated seconds, applied to the estimate of this mix; without a datasheet, unchanged."""
        seconds = sum(one.seconds for one in seen)
        plain = sum(one.tokens for one in seen) / seconds
        if sheet is None:
            return plain
        memory, gpus = seen[0].memory_gib, seen[0].gpus
        wanted = estimate_speed(facts, sheet, memory, gpus, mix, self._assumed)
        expected = 0.0
        for one in seen:
            estimate = estimate_speed(facts, sheet, memory, gpus, one.mix, self._assumed)
            if isinstance(estimate, NoSpeed):
                return plain  # it ran where the estimate says it cannot: the facts are off, the measurement is not
            expected += one.tokens / estimate.tokens_per_second
        return plain if isinstance(wanted, NoSpeed) else wanted.tokens_per_second * expected / seconds


def _rows(measured: Iterable[Measurement]) -> int:
    return round(sum(one.tokens / one.mix.tokens for one in measured))
