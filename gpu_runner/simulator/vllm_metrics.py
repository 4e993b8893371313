"""/metrics under vLLM's names, with its label `model_name`, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from gpu_runner.simulator.scheduler import Scheduler, Sequence

# Bucket borders of vLLM 0.32; token counts run in steps of 1, 2, 5 up to the context, here to 20,000.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)


class Histogram:
    """Counts by upper border, as Prometheus wants them."""

    def __init__(self, borders: tuple[float, ...]) -> None:
        self.borders = borders
        self.counts = [0] * (len(borders) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self.counts[bisect_left(self.borders, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> list[str]:
        """The series of this histogram."""
        totals = list(accumulate(self.counts))
        borders = [*map(float, self.borders), "+Inf"]
        rows = [f'{name}_bucket{{{labels},le="{le}"}} {n}.0' for le, n in zip(borders, totals, strict=True)]
        return [*rows, f"{name}_count{{{labels}}} {totals[-1]}.0", f"{name}_sum{{{labels}}} {self.sum}"]


@dataclass(slots=True)
class Histograms:
    """What is measured of each finished sequence; seconds are simulated ones."""

    first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN))
    latency: Histogram = field(default_factory=lambda: Histogram(_LATENCY))
    queue: Histogram = field(default_factory=lambda: Histogram(_LATENCY))
    prefill: Histogram = field(default_factory=lambda: Histogram(_LATENCY))
    decode: Histogram = field(default_factory=lambda: Histogram(_LATENCY))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(_PER_TOKEN))
    prompt: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    generation: Histogram = field(default_factory=lambda: Histogram(_TOKENS))

    def observe(self, sequence: Sequence) -> None:
        """Add one finished sequence."""
        decode = sequence.finished_at - sequence.first_token_at
        self.first_token.observe(sequence.first_token_at - sequence.arrived_at)
        self.latency.observe(sequence.finished_at - sequence.arrived_at)
        self.queue.observe(sequence.admitted_at - sequence.arrived_at)
        self.prefill.observe(sequence.first_token_at - sequence.admitted_at)
        self.decode.observe(decode)
        if sequence.output_tokens > 1:
            gaps = sequence.output_tokens - 1
            self.between_tokens.observe(decode / gaps, gaps)
        self.prompt.observe(sequence.prompt_tokens)
        self.generation.observe(sequence.output_tokens)


_HISTOGRAM_NAMES = {
    "time_to_first_token_seconds": "first_token",
    "e2e_request_latency_seconds": "latency",
    "request_queue_time_seconds": "queue",
    "request_prefill_time_seconds": "prefill",
    "request_decode_time_seconds": "decode",
    "inter_token_latency_seconds": "between_tokens",
    "request_prompt_tokens": "prompt",
    "request_generation_tokens": "generation",
}


def render(
    model: str, scheduler: Scheduler, histograms: Histograms, reasons: Mapping[str, int], started_at: float
) -> bytes:
    """The whole page. `reasons` counts finished requests by vLLM's finished_reason; `started_at` in Unix seconds."""
    labels = f'engine="0",model_name="{model}"'
    size = scheduler.model
    gauges = {
        "num_requests_running": scheduler.running_count,
        "num_requests_waiting": scheduler.waiting_count,
        "kv_cache_usage_perc": scheduler.kv_used / size.kv_tokens,
    }
    counters = {
        "prompt_tokens": scheduler.prompt_tokens,
        "generation_tokens": scheduler.generated_tokens,
        "num_preemptions": scheduler.preemptions,
        "prefix_cache_queries": scheduler.prompt_tokens,
        "prefix_cache_hits": 0,
    }
    lines = ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {started_at}"]
    for name, value in gauges.items():
        lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{labels}}} {float(value)}"]
    lines.append("# TYPE vllm:num_requests_waiting_by_reason gauge")
    for reason, waiting in (("capacity", scheduler.waiting_count), ("deferred", 0)):
        lines.append(f'vllm:num_requests_waiting_by_reason{{{labels},reason="{reason}"}} {float(waiting)}')
    for name, value in counters.items():
        lines += [f"# TYPE vllm:{name} counter", f"vllm:{name}_total{{{labels}}} {float(value)}"]
    lines.append("# TYPE vllm:request_success counter")
    for reason in ("stop", "length", "abort", "error", "repetition"):
        lines.append(
            f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(reasons.get(reason, 0))}'
        )
    blocks = f'block_size="16",num_gpu_blocks="{size.kv_tokens // 16}",kv_cache_size_tokens="{size.kv_tokens}"'
    lines += [
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{{labels},{blocks},simulated="True"}} 1.0',
    ]
    for name, attribute in _HISTOGRAM_NAMES.items():
        lines.append(f"# TYPE vllm:{name} histogram")
        lines += getattr(histograms, attribute).lines(f"vllm:{name}", labels)
    return ("\n".join(lines) + "\n").encode()
