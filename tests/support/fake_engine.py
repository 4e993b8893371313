"""An engine without network for tests of the feed: same calls as EngineClient, behaviour by prompt.

A prompt is a JSON string. `rules` maps a prompt to what happens instead of an answer: an exception to raise, a
list of them (used up one per request), "hang", or "kill" (the engine dies, with everything in flight).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import orjson

from gpu_runner.bounded_http.bounded_read import FREE_BYTES, Admit
from gpu_runner.client.engine_load import EngineLoad
from gpu_runner.client.protocol import Completion, Repair, RowRejected, Transient
from gpu_runner.reachability import Reachability
from gpu_runner.rows import Batch, Generation, Origin, Outcome, Row

GENERATION = Generation("completion", "m")
ORIGIN = Origin("m", "fake", "test", "cpu", False, "run")


class FakeEngine:
    """`slots` rows run at once, each for `seconds`; the rest waits, as in vLLM."""

    def __init__(
        self,
        rules: Mapping[str, object] | None = None,
        *,
        generation: Generation = GENERATION,
        slots: int = 64,
        seconds: float = 0.2,
        metrics: bool = True,
    ) -> None:
        self.generation = generation
        self.rules = dict(rules or {})
        self.seconds, self.metrics = seconds, metrics
        self.slots = asyncio.Semaphore(slots)
        self.alive = True
        self.way = Reachability.OPEN
        self.death = asyncio.Event()
        self.outage: Transient | None = None
        self.running = self.open = self.most_open = self.tokens = self.canaries = 0
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.together: list[set[str]] = []
        self._here: set[str] = set()
        self.repairs: list[Repair] = []
        self.lists: list[list[str]] = []
        self.most_inputs = 0
        self.kv_usage, self.preemptions = 0.1, 0
        self.started_at: float | None = None

    def die(self) -> None:
        self.alive = False
        self.death.set()

    def revive(self) -> None:
        """A supervisor started it anew at the same address."""
        self.alive, self.death, self.tokens = True, asyncio.Event(), 0

    async def generate(
        self,
        prompt: bytes,
        *,
        repair: Repair | None = None,
        admit: Admit | None = None,
        fields: bytes = b"",
        max_tokens: int | None = None,
        free: bool = False,
        user: bool = False,
    ) -> Completion:
        text = orjson.loads(prompt)
        if not self.alive:
            raise Transient("connect_failed", taken=False)
        self.asked[text] += 1
        if repair is not None:
            self.repairs.append(repair)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self._here.add(text)
        try:
            work = asyncio.ensure_future(self._run(text, repair, admit))
            dead = asyncio.ensure_future(self.death.wait())
            try:
                await asyncio.wait((work, dead), return_when=asyncio.FIRST_COMPLETED)
                if not self.alive:
                    raise Transient("connection_lost")
                self.answered[text] += 1
                return work.result()
            finally:
                work.cancel()
                dead.cancel()
                await asyncio.gather(work, dead, return_exceptions=True)
        finally:
            self.open -= 1
            self._here.discard(text)

    @property
    def takes_lists(self) -> bool:
        return self.generation.task == "embedding"

    def list_kind(self, prompt: bytes) -> object:
        return "any"

    async def generate_list(self, prompts: Sequence[bytes], *, admit: Admit | None = None) -> list[Completion]:
        """As vLLM: a list is refused, or fails, as a whole. A rule that is a list is used up by each request."""
        self.lists.append([orjson.loads(prompt) for prompt in prompts])
        if 0 < self.most_inputs < len(prompts):
            raise RowRejected("rejected_413", "too many inputs")
        asked = [asyncio.ensure_future(self.generate(prompt)) for prompt in prompts]
        try:
            answers = list(await asyncio.gather(*asked))
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        size = sum(len(answer.output) for answer in answers)
        if admit is not None and size > FREE_BYTES:
            await admit(size)
        return answers

    async def _run(self, text: str, repair: Repair | None, admit: Admit | None) -> Completion:
        rule = self.rules.get(text)
        if isinstance(rule, list):
            rule = rule.pop(0) if rule else None
        if self.outage is not None:
            raise self.outage
        if isinstance(rule, Exception):
            raise rule
        async with self.slots:
            self.running += 1
            try:
                if rule == "hang":
                    await asyncio.sleep(1e6)
                await asyncio.sleep(self.seconds)
                if rule == "kill":
                    self.together.append(set(self._here))
                    self.die()
                    await asyncio.sleep(1e6)
                self.tokens += 5
                answer = rule if isinstance(rule, str) else f"re: {text}"
                if admit is not None and len(answer) > FREE_BYTES:
                    await admit(len(answer))
                return Completion(answer, "stop", 3, 5)
            finally:
                self.running -= 1

    async def canary(self, prompt: bytes | None = None) -> None:
        self.canaries += 1
        await asyncio.sleep(self.seconds)
        if not self.alive:
            raise Transient("connect_failed", taken=False)
        if self.outage is not None:
            raise self.outage
        self.tokens += 1

    async def probe(self, prompt: bytes, *, content: bool, fields: bytes = b"") -> None:
        await self.canary(prompt if content else None)

    async def load(self) -> EngineLoad | None:
        if not self.alive:
            raise Transient("connect_failed", taken=False)
        if not self.metrics:
            return None
        waiting = self.open - self.running
        return EngineLoad(self.running, waiting, self.kv_usage, self.tokens, self.preemptions, self.started_at)

    async def healthy(self) -> bool:
        return self.alive and self.way is Reachability.OPEN

    def reachability(self) -> Reachability:
        return self.way

    def cut(self, way: Reachability = Reachability.RESTORING) -> None:
        """The way to it breaks: rows in flight are lost, the engine lives."""
        self.way, self.alive = way, False
        self.death.set()

    def heal(self) -> None:
        """The way stands again, to the same engine."""
        self.way, self.alive, self.death = Reachability.OPEN, True, asyncio.Event()


def row(batch: str, text: str) -> Row:
    return Row(batch, text, f"key-{text}", orjson.dumps(text))


def batches(rows: int, size: int = 25, start: int = 0) -> list[Batch]:
    """`rows` rows named r0, r1, … in batches b0, b1, …"""
    names = [f"r{i}" for i in range(start, start + rows)]
    parts = [names[i : i + size] for i in range(0, rows, size)]
    return [Batch(f"b{n}", tuple(row(f"b{n}", name) for name in part)) for n, part in enumerate(parts)]


class Sink:
    """What a feed handed on."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Outcome]] = []
        self.batches: dict[str, list[Outcome]] = {}

    def on_row(self, job: str, key: str, outcome: Outcome) -> None:
        self.rows.append((key, outcome))

    async def on_batch(self, job: str, key: str, outcomes: list[Outcome]) -> None:
        assert key not in self.batches
        self.batches[key] = outcomes

    def outcomes(self) -> dict[str, Outcome]:
        """By row id; a row with two outcomes fails."""
        every = [outcome for outcomes in self.batches.values() for outcome in outcomes]
        found = {outcome.row_id: outcome for outcome in every}
        assert len(found) == len(every)
        return found

    def dead(self) -> dict[str, str]:
        return {row_id: outcome.error or "" for row_id, outcome in self.outcomes().items() if not outcome.ok}


def counted(source: Iterable[Batch], seen: list[str]) -> Iterator[Batch]:
    """The source, noting every batch that was read."""
    for batch in source:
        seen.append(batch.key)
        yield batch
