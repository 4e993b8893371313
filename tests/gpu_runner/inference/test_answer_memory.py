"""What a feed holds in memory: back pressure without a deadlock, and batches that do not grow without end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches
from support.virtual_time import run

from gpu_runner.client.protocol import Completion, EngineLost, EngineRefused, Transient
from gpu_runner.client.vector_length import VectorLength
from gpu_runner.inference.answer_memory import AnswerMemory, bytes_of
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.rows import Generation

KB, MB = 1 << 10, 1 << 20
LARGE = "x" * (100 * KB)


def make_feed(rows: int, sink: Sink, *, size: int = 10, on_batch: Any = None, **policy: Any) -> Feed:
    changed = FeedPolicy(**({"open_bytes": 2 * MB, "batch_bytes": 2 * MB, "commit_bytes": MB} | policy))
    return Feed(
        iter(batches(rows, size)),
        on_row=sink.on_row,
        on_batch=on_batch or sink.on_batch,
        policy=changed,
        rng=random.Random(0),
    )


class Watching(FakeEngine):
    """Notes the most bytes that its feed held. Rows take different times, so that batches overtake each other."""

    feed: Feed
    most = 0

    async def generate(self, prompt: bytes, **options: Any) -> Completion:
        await asyncio.sleep(random.Random(prompt).uniform(0, 20))
        memory = self.feed._work.memory
        self.most = max(self.most, memory.held + memory.reading)
        return await super().generate(prompt, **options)


def large_answers(rows: int, changed: Mapping[str, object]) -> dict[str, object]:
    return {f"r{i}": LARGE for i in range(rows)} | dict(changed)


def test_answers_in_memory_stay_below_the_limit_while_every_row_gets_through() -> None:
    async def main() -> None:
        sink = Sink()
        fails = {f"r{i}": [Transient("http_500"), LARGE] for i in range(0, 600, 7)}
        engine = Watching(large_answers(600, fails), slots=256)
        engine.feed = make_feed(600, sink)
        await engine.feed.serve(engine, ORIGIN, 64)
        assert sink.dead() == {} and len(sink.outcomes()) == 600
        assert MB < engine.most < 5 * MB  # of 60 MB

    run(main)


def test_without_back_pressure_they_would_not() -> None:
    async def main() -> None:
        sink, engine = Sink(), Watching(large_answers(600, {}), slots=256)
        engine.feed = make_feed(600, sink, open_bytes=1 << 40)
        await engine.feed.serve(engine, ORIGIN, 64)
        assert engine.most > 10 * MB

    run(main)


def test_a_store_that_is_slow_holds_the_engine_back_and_not_the_memory_up() -> None:
    async def main() -> None:
        sink, engine = Sink(), Watching(large_answers(300, {}), slots=256)

        async def slowly(job: str, key: str, outcomes: Any) -> None:
            await asyncio.sleep(100)
            await sink.on_batch(job, key, outcomes)

        engine.feed = make_feed(300, sink, on_batch=slowly)
        await engine.feed.serve(engine, ORIGIN, 64)
        assert len(sink.outcomes()) == 300
        assert engine.most < 5 * MB

    run(main)


@pytest.mark.parametrize("poison", [{"r3": "kill"}, {"r3": "hang"}, {f"r{i}": "kill" for i in (1, 55, 199)}])
def test_full_memory_stops_neither_the_search_for_poison_nor_a_drain(poison: dict[str, object]) -> None:
    async def main() -> None:
        sink, engines = Sink(), 0
        feed = make_feed(200, sink, stall_seconds=40)
        loop = asyncio.get_running_loop()
        while not feed.finished:
            engines += 1
            assert engines < 80
            engine, stop = Watching(large_answers(200, poison), slots=64), asyncio.Event()
            engine.feed = feed
            if engines % 4 == 0:
                loop.call_later(15, stop.set)
            with suppress(EngineLost):
                await asyncio.wait_for(feed.serve(engine, ORIGIN, 16, stop=stop), 3000)
        assert len(sink.outcomes()) == 200
        assert sink.dead().keys() == poison.keys()

    run(main)


@pytest.mark.slow
def test_two_engines_share_one_memory() -> None:
    async def main() -> None:
        sink = Sink()
        feed = make_feed(400, sink)
        engines = [Watching(large_answers(400, {}), slots=64) for _ in range(2)]
        for engine in engines:
            engine.feed = feed
        await asyncio.gather(*(feed.serve(engine, ORIGIN, 32) for engine in engines))
        assert len(sink.outcomes()) == 400 and max(engine.most for engine in engines) < 6 * MB

    run(main)


def test_a_batch_that_would_grow_too_large_has_dead_letters() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine(large_answers(100, {}))
        await make_feed(100, sink, size=50).serve(engine, ORIGIN, 8)
        dead = sink.dead()
        assert set(dead.values()) == {"answer_too_large"} and 30 < len(dead) < 40  # 64 KiB a row: 32 of 50 fit
        assert "lower batch_rows" in (sink.outcomes()[next(iter(dead))].error_message or "")

    run(main)


def test_waiting_for_room_ends_with_a_cancel_and_leaves_nothing() -> None:
    async def main() -> None:
        memory = AnswerMemory(MB, MB)
        first, second = memory.open(1), memory.open(1)
        await memory.admit(first, MB)
        waiting = asyncio.create_task(memory.admit(second, MB))
        await asyncio.sleep(0)
        assert memory.full and not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        memory.done_reading(first, MB)
        assert (memory.reading, memory.full) == (0, False)

    run(main)


def test_bytes_in_memory_and_in_the_store() -> None:
    assert bytes_of(Completion("é" * 1000, "stop", 1, 1))[0] >= 1000
    assert bytes_of(Completion((1.0,) * 1000, "stop", 1, 1)) == (32_000, 4_000)


class Vectors(FakeEngine):
    """Answers with vectors of a length by row."""

    lengths: Mapping[str, int] = {}

    async def _run(self, text: str, repair: Any, admit: Any) -> Completion:
        await super()._run(text, repair, admit)
        return Completion((0.5,) * self.lengths.get(text, 8), "stop", 1, 0)


def vector_feed(rows: int, sink: Sink, known: int | None = None) -> Feed:
    vectors = VectorLength(known)
    return Feed(iter(batches(rows)), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0), vectors=vectors)


def test_a_vector_of_another_length_is_a_dead_letter() -> None:
    async def main() -> None:
        sink, engine = Sink(), Vectors(generation=Generation("embedding", "m"))
        engine.lengths = {"r7": 9, "r50": 1}
        await vector_feed(100, sink).serve(engine, ORIGIN, 8)
        assert sink.dead() == {"r7": "vector_length", "r50": "vector_length"}
        assert sink.outcomes()["r7"].error_message == "expected 8 numbers, as the vectors before it have, found 9"

    run(main)


def test_the_length_of_committed_vectors_holds_and_an_engine_of_another_is_refused() -> None:
    async def main() -> None:
        sink, engine = Sink(), Vectors(generation=Generation("embedding", "m"), slots=4)
        feed = vector_feed(100, sink, known=16)
        with pytest.raises(EngineRefused, match="20 vectors in a row: expected 16 numbers"):
            await feed.serve(engine, ORIGIN, 1)
        engine.lengths = {f"r{i}": 16 for i in range(100)}
        await feed.serve(engine, ORIGIN, 1)
        assert len(sink.outcomes()) == 100 and len(sink.dead()) == 19

    run(main)
