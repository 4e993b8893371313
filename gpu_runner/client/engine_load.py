"""The load of an engine, as its Prometheus page tells it. vLLM, SGLang and llama.cpp name the same things differently.

Sources: vLLM's v1/metrics/loggers.py; SGLang's documentation, references/production_metrics; llama.cpp's
tools/server/README.md. llama.cpp serves the page when it was started with `--metrics`, SGLang with `--enable-metrics`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpu_runner.client.answers import answer_numbers


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's own view of its load. `kv_usage` is 0..1, and 0 where the page does not tell.

    `generated_tokens`, `preemptions` and `steps` are counters since its start. `steps` grows with everything that the
    engine computes; None where the page has no such counter. `started_at` differs from process to process on one
    machine: Unix seconds of vLLM's start, seconds of the machine's steady clock for llama.cpp; None where the page does
    not tell (several API servers of one vLLM show a page of their sums). `is_vllm`: the figures are named as vLLM's.
    """

    running: int
    waiting: int
    kv_usage: float
    generated_tokens: int
    preemptions: int
    started_at: float | None = None
    steps: int | None = None
    is_vllm: bool = False

    @property
    def progress(self) -> int:
        """A counter that stands still when the engine does. llama.cpp counts tokens only when their answer ends."""
        return self.generated_tokens if self.steps is None else self.steps


class MalformedMetrics(ValueError):
    """A page of an engine's metrics in which a figure is none."""


@dataclass(frozen=True, slots=True)
class _Names:
    """What an engine calls its figures; empty: it has no such figure. `kv_usage`: several names are versions of one."""

    prefix: str
    running: str
    waiting: str
    generated: str
    kv_usage: tuple[str, ...] = ()
    preemptions: str = ""
    steps: str = ""

    def figures(self, page: bytes) -> dict[str, float]:
        """Sums over the labels of each figure; the largest of `kv_usage`. Raises MalformedMetrics."""
        names = [self.running, self.waiting, self.generated, self.preemptions, self.steps, *self.kv_usage]
        wanted = "|".join(re.escape(name) for name in names if name)
        line = re.compile(rf"^{self.prefix}:({wanted})(?:\{{[^\n]*\}})? (\S+)".encode(), re.MULTILINE)
        found: dict[str, float] = {}
        for raw, value in line.findall(page):
            name = raw.decode()
            try:
                figure = answer_numbers.metric(value)
            except ValueError:
                raise MalformedMetrics(f"{self.prefix}:{name}: expected a number of 0 or more") from None
            known = found.get(name, 0.0)
            found[name] = max(known, figure) if name in self.kv_usage else known + figure
        return found


_VLLM = _Names(
    prefix="vllm",
    running="num_requests_running",
    waiting="num_requests_waiting",
    generated="generation_tokens_total",
    kv_usage=("kv_cache_usage_perc", "gpu_cache_usage_perc"),  # the second before 0.9
    preemptions="num_preemptions_total",
)
_SGLANG = _Names(
    prefix="sglang",
    running="num_running_reqs",
    waiting="num_queue_reqs",
    generated="generation_tokens_total",  # grows when a request ends
    kv_usage=("token_usage",),
    steps="realtime_tokens_total",  # of newer versions, as it computes
)
_LLAMA_CPP = _Names(
    prefix="llamacpp",
    running="requests_processing",
    waiting="requests_deferred",
    generated="tokens_predicted_total",
    steps="n_decode_total",
)

# Of Prometheus' own client library, on Linux.
_STARTED = re.compile(rb"^process_start_time_seconds (\S+)", re.MULTILINE)
# llama.cpp's, in microseconds of the machine's steady clock, whatever it is called.
_LLAMA_STARTED = "Process-Start-Time-Unix"


def parse_metrics(page: bytes, headers: Mapping[str, str] | None = None) -> EngineLoad | None:
    """The load in a Prometheus page, summed over data-parallel engines; None when it is of none of them.

    Raises MalformedMetrics for figures that cannot be: NaN, negative, beyond 2^53, no number. The page then says
    nothing: a counter that was left out would look like an engine that began anew.
    """
    for names in (_VLLM, _SGLANG, _LLAMA_CPP):
        found = names.figures(page)
        if names.running in found:
            return EngineLoad(
                running=int(found[names.running]),
                waiting=int(found.get(names.waiting, 0)),
                kv_usage=max([found.get(name, 0.0) for name in names.kv_usage], default=0.0),
                generated_tokens=int(found.get(names.generated, 0)),
                preemptions=int(found.get(names.preemptions, 0)),
                started_at=_started(page, headers or {}),
                steps=int(found[names.steps]) if names.steps in found else None,
                is_vllm=names is _VLLM,
            )
    return None


def _started(page: bytes, headers: Mapping[str, str]) -> float | None:
    if found := _STARTED.search(page):
        return answer_numbers.unix_seconds(found[1])
    told = headers.get(_LLAMA_STARTED, "")
    return int(told) / 1e6 if told.isdecimal() and len(told) <= 16 else None
