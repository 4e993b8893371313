"""Continuous batching as a pure model: slots, token budget, KV cache, and the seconds of a step.

What vLLM's V1 scheduler does, at the precision that throughput needs:

- One step computes one token for every decoding sequence and spends what is left of the token budget on
  prefill, in chunks. The first output token comes out of the step that ends the prefill.
- Waiting sequences are admitted first come, first served, while a slot is free and their tokens fit the KV cache. With
  priority scheduling the lowest number comes first, and among equals the one that arrived first.
- When the next step would overflow the KV cache, the sequence admitted last (with priority scheduling: the one with the
  highest number that arrived last) is preempted: it loses its KV, goes back to the head of its queue and recomputes
  prompt and output so far. A slot is never taken from a running sequence for the sake of a waiting one.

Not modelled: prefix caching, block granularity, the quadratic part of prefill attention, several GPUs.

Decoding sequences advance in lockstep, so a run of steps in which nobody joins or leaves is one closed
formula: cost grows with requests, not with tokens. All times are simulated seconds; no clock is read here.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepModel:
    """The size of an engine and the cost of one step. Defaults: an 8B bf16 model on one H200.

    A step takes `overhead + max(weights, tokens * per_token) + context * per_context_token` seconds.

    - weights_seconds: all weights are read once per step: 16 GB at 4.8 TB/s = 3.3 ms (H200 datasheet bandwidth).
    - token_seconds: 2 FLOP per weight and token = 16 GFLOP, at half of the 989 dense bf16 TFLOP/s of the
      datasheet = 32 us. So batches beyond about 100 tokens are bound by compute.
    - context_seconds: KV bytes read per token of context: 2 * 32 layers * 8 heads * 128 * 2 B = 131 kB
      (Llama-3.1-8B config) at 4.8 TB/s = 27 ns.
    - overhead_seconds: scheduling, sampling and detokenizing on the CPU; our estimate.
    - kv_tokens: 141 GB * 0.9 less weights and 4 GB of activations, at 131 kB each, rounded down.
    - max_num_seqs, max_batched_tokens: vLLM's defaults for smaller GPUs and for the server.
    - by_priority: vLLM's `--scheduling-policy priority`; without it the priority of a sequence says nothing.
    """

    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    kv_tokens: int = 800_000
    weights_seconds: float = 3.3e-3
    token_seconds: float = 32e-6
    context_seconds: float = 27e-9
    overhead_seconds: float = 0.5e-3
    by_priority: bool = False

    def compute_seconds(self, tokens: int) -> float:
        """Seconds of one step of `tokens` tokens, without the reading of KV."""
        return self.overhead_seconds + max(self.weights_seconds, tokens * self.token_seconds)


WAITING, PREFILL, DECODE, FINISHED, ABORTED = range(5)


class Sequence:
    """One prompt on its way: `output_tokens` are produced after `prompt_tokens` were read (0: an embedding)."""

    __slots__ = (
        "admitted_at",
        "arrived_at",
        "base",
        "finish_epoch",
        "finished_at",
        "first_token_at",
        "output_tokens",
        "preemptions",
        "prefill_left",
        "priority",
        "prompt_tokens",
        "start_epoch",
        "state",
        "waiter",
    )

    def __init__(self, prompt_tokens: int, output_tokens: int, arrived_at: float, priority: int = 0) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.arrived_at = arrived_at
        self.priority = priority
        self.admitted_at = -1.0
        self.first_token_at = -1.0
        self.finished_at = -1.0
        self.preemptions = 0
        self.state = WAITING
        self.prefill_left = 0
        self.base = 0  # tokens generated before start_epoch
        self.start_epoch = 0
        self.finish_epoch = 0
        self.waiter: object = None  # the engine's future; the model does not look at it


class Scheduler:
    """The state of one engine at simulated time `clock` (the end of the last finished step)."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.clock = 0.0
        self.epoch = 0  # decode steps so far
        self.waiting_count = 0
        self.kv_used = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self.steps = 0
        self._waiting: dict[int, deque[Sequence]] = {}  # by priority; in the order in which they are admitted
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        self._finish_heap: list[tuple[int, int, Sequence]] = []
        self._tie = 0
        self._step_end: float | None = None  # a step with prefill that is under way
        self._chunks: list[tuple[Sequence, int]] = []

    @property
    def running_count(self) -> int:
        """Sequences that hold a slot."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def busy(self) -> bool:
        """True while anything runs or waits."""
        return bool(self._decoding or self._prefilling or self.waiting_count)

    def submit(self, prompt_tokens: int, output_tokens: int, at: float, priority: int = 0) -> Sequence:
        """Queue a sequence that arrives at simulated time `at`; raises ValueError when it can never fit."""
        if prompt_tokens + output_tokens > self.model.kv_tokens:
            raise ValueError(f"{prompt_tokens} + {output_tokens} tokens do not fit {self.model.kv_tokens} of KV cache")
        sequence = Sequence(prompt_tokens, output_tokens, at, priority if self.model.by_priority else 0)
        self._waiting.setdefault(sequence.priority, deque()).append(sequence)
        self.waiting_count += 1
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence whose client is gone and free what it holds."""
        if sequence.state == WAITING:
            self.waiting_count -= 1  # the queue drops it when it reaches the head
        elif sequence.state in (PREFILL, DECODE):
            sequence.base = self.generated(sequence)
            self._release(sequence)
        else:
            return
        sequence.state = ABORTED

    def generated(self, sequence: Sequence) -> int:
        """Output tokens of a sequence so far."""
        if sequence.state == DECODE:
            return sequence.base + self.epoch - sequence.start_epoch
        return sequence.base

    def advance(self, until: float) -> list[Sequence]:
        """Finish every step that ends by `until`; returns the sequences that finished, in order."""
        finished: list[Sequence] = []
        while True:
            if self._step_end is not None:
                if self._step_end > until:
                    return finished
                self._end_step(finished)
            if not self._decoding and not self._prefilling:
                head = self._head()
                if head is None or head.arrived_at > until:
                    self.clock = max(self.clock, min(until, head.arrived_at) if head else until)
                    return finished
                self.clock = max(self.clock, head.arrived_at)
            preempted = self._make_room()
            if self._prefilling or (not preempted and self._head_fits()):
                self._begin_step(admit=not preempted)
            elif not self._decode_run(until, finished):
                return finished

    def next_event(self) -> float | None:
        """When the next step with news ends at the earliest; None while idle."""
        if self._step_end is not None:
            return self._step_end
        if self._decoding:
            steps = max(1, self._next_finish() - self.epoch)
            return self.clock + self._decode_seconds(steps)
        head = self._head()
        return None if head is None else max(self.clock, head.arrived_at)

    def _head(self) -> Sequence | None:
        """Whoever is admitted next: of those that have arrived by now the first in order, else the next to arrive."""
        heads = []
        for priority in sorted(self._waiting):
            queue = self._waiting[priority]
            while queue and queue[0].state != WAITING:
                queue.popleft()
            if not queue:
                del self._waiting[priority]
            elif queue[0].arrived_at <= self.clock:
                return queue[0]
            else:
                heads.append(queue[0])
        return min(heads, key=lambda head: head.arrived_at) if heads else None

    def _head_fits(self) -> bool:
        """True when the head of the queue has arrived and can be admitted now."""
        head = self._head()
        if head is None or head.arrived_at > self.clock or self.running_count >= self.model.max_num_seqs:
            return False
        # The prompt, what was generated before a preemption, and the token that the prefill ends with.
        needed = head.prompt_tokens + head.base + min(1, head.output_tokens)
        return self.kv_used + self.running_count + needed <= self.model.kv_tokens

    def _pop_head(self) -> Sequence:
        head = self._head()
        assert head is not None
        return self._waiting[head.priority].popleft()

    def _make_room(self) -> bool:
        """Preempt the sequences admitted last until one more token of each running one fits."""
        preempted = False
        while self.running_count > 1 and self.kv_used + self.running_count > self.model.kv_tokens:
            victim = self._victim()
            victim.base = self.generated(victim)
            self._release(victim)
            victim.state = WAITING
            victim.preemptions += 1
            self.preemptions += 1
            self.waiting_count += 1
            self._waiting.setdefault(victim.priority, deque()).appendleft(victim)
            preempted = True
        return preempted

    def _victim(self) -> Sequence:
        """The request that loses its place when the KV cache is full."""
        if not self.model.by_priority:
            return next(reversed(self._prefilling or self._decoding))
        return max((*self._prefilling, *self._decoding), key=lambda running: (running.priority, running.arrived_at))

    def _release(self, sequence: Sequence) -> None:
        """Take a running sequence out of its slot; `base` must be up to date."""
        self.kv_used -= sequence.prompt_tokens + sequence.base
        if sequence.state == DECODE:
            del self._decoding[sequence]
        else:
            del self._prefilling[sequence]

    def _begin_step(self, *, admit: bool) -> None:
        """Start a step that carries prefill: share the token budget out, admit whoever fits."""
        budget = self.model.max_batched_tokens - len(self._decoding)
        self._chunks = []
        for sequence in self._prefilling:
            budget = self._give_chunk(sequence, budget)
        while admit and budget > 0 and self._head_fits():
            sequence = self._pop_head()
            self.waiting_count -= 1
            if sequence.admitted_at < 0:
                sequence.admitted_at = self.clock
            sequence.state = PREFILL
            sequence.prefill_left = sequence.prompt_tokens + sequence.base
            self.kv_used += sequence.prefill_left
            self._prefilling[sequence] = None
            budget = self._give_chunk(sequence, budget)
        tokens = len(self._decoding) + sum(chunk for _, chunk in self._chunks)
        seconds = self.model.compute_seconds(tokens) + self.kv_used * self.model.context_seconds
        self._step_end = self.clock + seconds

    def _give_chunk(self, sequence: Sequence, budget: int) -> int:
        chunk = min(sequence.prefill_left, budget)
        if chunk > 0:
            self._chunks.append((sequence, chunk))
        return budget - chunk

    def _end_step(self, finished: list[Sequence]) -> None:
        assert self._step_end is not None
        self.clock, self._step_end = self._step_end, None
        self.steps += 1
        self._count_decoded(1)
        for sequence, chunk in self._chunks:
            if sequence.state == PREFILL:  # not aborted while the step ran
                sequence.prefill_left -= chunk
                if sequence.prefill_left == 0:
                    self._end_prefill(sequence, finished)
        self._collect(finished)

    def _end_prefill(self, sequence: Sequence, finished: list[Sequence]) -> None:
        if sequence.first_token_at < 0:
            sequence.first_token_at = self.clock
            self.prompt_tokens += sequence.prompt_tokens
        if sequence.output_tokens > 0:
            sequence.base += 1
            self.kv_used += 1
            self.generated_tokens += 1
        if sequence.base >= sequence.output_tokens:
            self._finish(sequence, finished)
            return
        del self._prefilling[sequence]
        sequence.state = DECODE
        sequence.start_epoch = self.epoch
        sequence.finish_epoch = self.epoch + sequence.output_tokens - sequence.base
        self._decoding[sequence] = None
        self._tie += 1
        heapq.heappush(self._finish_heap, (sequence.finish_epoch, self._tie, sequence))

    def _decode_run(self, until: float, finished: list[Sequence]) -> bool:
        """Run decode-only steps up to the next change or `until`; False when not even one step fits."""
        running = len(self._decoding)
        steps = self._steps_within(until - self.clock)
        if steps == 0:
            return False
        steps = min(steps, self._next_finish() - self.epoch)
        steps = min(steps, max(1, (self.model.kv_tokens - self.kv_used) // running))
        head = self._head()
        if head is not None and head.arrived_at > self.clock and running < self.model.max_num_seqs:
            wait = head.arrived_at - self.clock
            fitting = self._steps_within(wait)
            steps = min(steps, fitting if fitting and self._decode_seconds(fitting) == wait else fitting + 1)
        self.clock += self._decode_seconds(steps)
        self.steps += steps
        self._count_decoded(steps)
        self._collect(finished)
        return True

    def _count_decoded(self, steps: int) -> None:
        tokens = steps * len(self._decoding)
        self.epoch += steps
        self.kv_used += tokens
        self.generated_tokens += tokens

    def _collect(self, finished: list[Sequence]) -> None:
        heap = self._finish_heap
        while heap and heap[0][0] <= self.epoch:
            epoch, _, sequence = heapq.heappop(heap)
            if sequence.state == DECODE and sequence.finish_epoch == epoch:
                sequence.base = sequence.output_tokens
                self._finish(sequence, finished)

    def _finish(self, sequence: Sequence, finished: list[Sequence]) -> None:
        self._release(sequence)
        sequence.state = FINISHED
        sequence.finished_at = self.clock
        finished.append(sequence)

    def _next_finish(self) -> int:
        heap = self._finish_heap
        while heap[0][2].state != DECODE or heap[0][2].finish_epoch != heap[0][0]:
            heapq.heappop(heap)  # aborted, or preempted and admitted again since
        return heap[0][0]

    def _decode_seconds(self, steps: int) -> float:
        """Seconds of `steps` decode-only steps; each reads one more token of context per sequence."""
        running = len(self._decoding)
        context = steps * self.kv_used + running * steps * (steps - 1) / 2
        return steps * self.model.compute_seconds(running) + context * self.model.context_seconds

    def _steps_within(self, seconds: float) -> int:
        """How many decode-only steps end within `seconds`: the inverse of `_decode_seconds`."""
        if seconds <= 0:
            return 0
        running = len(self._decoding)
        a = self.model.context_seconds * running / 2
        b = self.model.compute_seconds(running) + self.model.context_seconds * self.kv_used - a
        steps = int(2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds)))
        # The root may be off by one step through rounding.
        if self._decode_seconds(steps + 1) <= seconds:
            return steps + 1
        return steps - 1 if steps and self._decode_seconds(steps) > seconds else steps
