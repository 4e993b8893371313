"""The feed on engines that work: order, flow, reading ahead, back-pressure, sharing, cancelling."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches, counted, row
from support.timing import PATIENCE
from support.virtual_time import run

from gpu_runner.client.protocol import EngineLost, EngineRefused
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.inference.row_queue import ROWS_IN_TURN
from gpu_runner.inference.row_state import Item
from gpu_runner.inference.windows.concurrency_window import WindowPolicy
from gpu_runner.rows import Batch, Outcome, Urgency


def make_feed(source: Iterable[Batch], sink: Sink, **changes: Any) -> Feed:
    """A source that knows what it gives next is asked for it."""
    return Feed(
        iter(source),
        on_row=sink.on_row,
        on_batch=sink.on_batch,
        policy=FeedPolicy(**changes),
        rng=random.Random(0),
        next_urgency=source.next_urgency if isinstance(source, GrowingSource) else lambda: None,
    )


def others() -> set[asyncio.Task[Any]]:
    """Tasks besides the test's own."""
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


def test_every_row_gets_one_outcome_in_row_order() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine(slots=7)
        feed = make_feed(batches(260), sink)
        await feed.serve(engine, ORIGIN, 16)
        assert [o.row_id for key in sorted(sink.batches, key=lambda k: int(k[1:])) for o in sink.batches[key]] == [
            f"r{i}" for i in range(260)
        ]
        one = sink.outcomes()["r3"]
        assert (one.output, one.finish_reason, one.prompt_tokens, one.completion_tokens) == ("re: r3", "stop", 3, 5)
        assert (one.tries, one.row_key, one.origin, one.error) == (1, "key-r3", ORIGIN, None)
        assert one.started_at > 1e9 and one.seconds == pytest.approx(0.2)
        assert len(sink.rows) == 260
        assert feed.finished

    run(main)


def test_rows_flow_across_batch_borders() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine(slots=64)
        await make_feed(batches(200, size=10), sink).serve(engine, ORIGIN, 16)
        assert engine.most_open == 64

    run(main)


class GrowingSource:
    """Batches to read, the most urgent one at the front; more may come while there are some."""

    def __init__(self, first: Iterable[Batch]) -> None:
        self._waiting, self._lock = list(first), threading.Lock()
        self.reads = 0

    def add(self, batch: Batch) -> None:
        with self._lock:
            urgent_first = sorted([*self._waiting, batch], key=lambda one: (-one.urgency.priority, one.urgency.due))
            self._waiting = urgent_first

    def next_urgency(self) -> Urgency | None:
        with self._lock:
            return self._waiting[0].urgency if self._waiting else None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        with self._lock:
            if not self._waiting:
                raise StopIteration
            self.reads += 1
            return self._waiting.pop(0)


LATE, SOON = Urgency(0, "a", 900.0), Urgency(0, "a", 100.0)


async def passed_by(urgency: Urgency, *, sizes: Sequence[int] = (10,), told: bool = True) -> tuple[int, int]:
    """Rows of long batches that were asked between the coming of batches of these sizes and their last answer, and
    batches that were read when the last one had come.
    """
    sink, engine = Sink(), FakeEngine(slots=8)
    source = GrowingSource([replace(batch, urgency=LATE) for batch in batches(8000, size=250)])
    feed = make_feed(source, sink)
    serving = asyncio.create_task(feed.serve(engine, ORIGIN, 8))
    while len(sink.rows) < 300:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    asked, reads = engine.asked.total(), source.reads
    for number, size in enumerate(sizes):
        rows = tuple(row(f"new{number}", f"new{number}-{place}") for place in range(size))
        source.add(Batch(f"new{number}", rows, urgency=urgency))
    if told:
        feed.batch_came()
    await asyncio.sleep(0.1)
    reads = source.reads - reads
    while not {f"new{number}" for number in range(len(sizes))} <= set(sink.batches):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return engine.asked.total() - asked - sum(sizes), reads


@pytest.mark.slow
def test_a_batch_that_comes_later_and_is_due_sooner_passes_rows_that_were_read() -> None:
    async def main() -> None:
        passed, reads = await passed_by(SOON)
        assert passed < 64 and reads == 1, "those in flight, and what fills the window again"
        passed, _ = await passed_by(SOON, told=False)
        assert passed > 150, "it is read when few rows are ready"
        passed, _ = await passed_by(Urgency(1, "b", 900.0))
        assert passed < 64, "a higher priority"
        passed, _ = await passed_by(replace(SOON, owner="b"))
        assert passed < ROWS_IN_TURN + 64, "another owner has its turn"
        passed, reads = await passed_by(replace(SOON, due=950.0))
        assert passed > 400 and reads == 0, "one that is due later passes nobody"

    run(main)


def test_each_part_of_a_batch_that_is_due_sooner_passes_them() -> None:
    async def main() -> None:
        passed, reads = await passed_by(SOON, sizes=[250] * 8)
        assert passed < 64 and reads == 2, "as many rows are read ahead as of any other batch"

    run(main)


def test_batches_that_come_together_and_are_due_sooner_all_pass_them() -> None:
    async def main() -> None:
        passed, reads = await passed_by(SOON, sizes=[10] * 20)
        assert passed < 64 and reads == 20

    run(main)


@pytest.mark.slow
def test_rows_of_an_engine_that_is_lost_do_not_go_before_those_that_are_due_sooner() -> None:
    async def main() -> None:
        sink, first, second = Sink(), FakeEngine(slots=600, seconds=1000.0), FakeEngine(slots=8)
        source = GrowingSource([replace(batch, urgency=LATE) for batch in batches(8000, size=250)])
        window = WindowPolicy(start=600)
        feed = make_feed(source, sink, window=window)
        serving = asyncio.create_task(feed.serve(first, ORIGIN, 600))
        while first.asked.total() < 500:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        new = [f"new{number}" for number in range(8)]
        for key in new:
            source.add(Batch(key, tuple(row(key, f"{key}-{place}") for place in range(250)), urgency=SOON))
        reads = source.reads
        feed.batch_came()
        while source.reads == reads:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        first.die()
        with pytest.raises(EngineLost):
            await serving
        assert source.reads < reads + 8, "the engine was lost while more was to be read"
        serving = asyncio.create_task(feed.serve(second, ORIGIN, 8))
        while not set(new) <= set(sink.batches):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert second.asked.total() - 2000 < 100, "two windows"

    run(main)


def test_however_urgent_not_more_rows_are_read_ahead_than_that() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine(slots=1, seconds=10.0)
        source = GrowingSource([replace(batch, urgency=LATE) for batch in batches(1000, size=50)])
        feed = make_feed(source, sink, ahead=100, urgent_factor=3)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 1))
        await asyncio.sleep(1)
        before = source.reads
        for number in range(20):  # each more urgent than those before
            rows = tuple(row(f"new{number}", f"new{number}-{place}") for place in range(50))
            source.add(Batch(f"new{number}", rows, urgency=replace(SOON, due=100.0 - number)))
            feed.batch_came()
            await asyncio.sleep(0.1)
        assert 300 <= source.reads * 50 - engine.asked.total() <= 350 and source.reads > before
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run(main)


def test_rows_that_are_tried_again_do_not_hide_what_is_due_sooner() -> None:
    """900 late rows come back at once while eight parts of an urgent batch are being read."""
    source = GrowingSource([replace(batch, urgency=LATE) for batch in batches(5000, size=250)])
    feed = make_feed(source, Sink())
    work, taken = feed._work, list[Item]()

    def read() -> None:
        while feed._has_room():
            work.open(next(source))
            work.look_again()

    def take() -> Item:
        item = work.take()
        assert item is not None
        read()
        return item

    read()
    taken = [take() for _ in range(900)]
    for number in range(8):
        rows = tuple(row(f"new{number}", f"new{number}-{place}") for place in range(250))
        source.add(Batch(f"new{number}", rows, urgency=SOON))
    feed.batch_came()
    read()
    for item in taken:
        item.send(1.0)
        item.fail()
        work.later(item, 2.0)
    work.promote(2.0)
    assert all(take().batch.urgency is SOON for _ in range(2000))


def test_large_prompts_are_not_read_far_ahead() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine(slots=8)
        source = GrowingSource(batches(2000, size=50))
        feed = make_feed(source, sink, ahead_bytes=400)  # prompts of 4 to 7 bytes
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 8))
        most = 0
        while not feed.finished:
            most = max(most, source.reads * 50 - engine.asked.total())
            await asyncio.sleep(0.1)
        await serving
        assert most <= 150 and len(sink.outcomes()) == 2000

    run(main)


def test_a_slow_row_holds_only_its_own_batch() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r0": "hang"}, slots=16)
        seen: list[str] = []

        async def on_batch(job: str, key: str, outcomes: list[Outcome]) -> None:
            seen.append(key)
            if len(seen) == 19:
                stop.set()

        stop = asyncio.Event()
        feed = make_feed(batches(200, size=10), sink)
        feed._on_batch = on_batch
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 4))
        await stop.wait()
        assert "b0" not in seen
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run(main)


def test_known_rows_meet_no_engine() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine()
        first, second = batches(20, size=10)
        old = Outcome("r1", "key-r1", "old", "stop", 1, 1, 1, None, None, ORIGIN, 1.0, 1.0)
        dead = replace(old, row_id="r2", output=None, error="http_500")
        feed = make_feed([replace(first, known={"r1": old, "r2": dead}), second], sink)
        await feed.serve(engine, ORIGIN, 4)
        assert sink.batches["b0"][1] is old and sink.batches["b0"][2] is dead
        assert len(sink.rows) == 18
        assert "r1" not in engine.asked
        progress = feed.progress()
        assert (progress.known, progress.ok, progress.dead, progress.rows_done) == (2, 18, 0, 20)

    run(main)


def known_batch(key: str, rows: int = 5) -> Batch:
    made = tuple(row(key, f"{key}-{i}") for i in range(rows))
    return Batch(
        key,
        made,
        {r.row_id: Outcome(r.row_id, r.row_key, "x", "stop", 1, 1, 1, None, None, ORIGIN, 1.0, 1.0) for r in made},
    )


def test_batches_that_are_known_whole_need_no_engine() -> None:
    async def main() -> None:
        sink = Sink()
        feed = make_feed([known_batch(f"k{i}") for i in range(50)], sink)
        assert await feed.prepare() is False
        assert len(sink.batches) == 50 and sink.rows == []
        assert feed.finished
        await feed.serve(FakeEngine(), ORIGIN, 4)

    run(main)


def test_preparing_stops_at_the_first_row_that_needs_an_engine() -> None:
    async def main() -> None:
        sink, seen = Sink(), list[str]()
        source = [known_batch("k0"), *batches(10, size=5), known_batch("k1")]
        feed = make_feed(counted(source, seen), sink)
        assert await feed.prepare() is True
        assert seen == ["k0", "b0"] and list(sink.batches) == ["k0"]
        await feed.serve(FakeEngine(), ORIGIN, 4)
        assert set(sink.batches) == {"k0", "b0", "b1", "k1"}

    run(main)


def test_known_batches_are_handed_on_while_the_source_waits_for_an_engine() -> None:
    """More of them than are handed on at once: who asks for an engine waits until all are handed on."""

    async def main() -> None:
        sink, known, loop = Sink(), 3 * FeedPolicy().commits, asyncio.get_running_loop()
        read, handed_on = asyncio.Event(), asyncio.Event()

        async def on_batch(job: str, key: str, outcomes: list[Outcome]) -> None:
            await read.wait()
            await sink.on_batch(job, key, outcomes)
            if len(sink.batches) == known:
                handed_on.set()

        def source() -> Iterator[Batch]:
            yield from [known_batch(f"k{i}") for i in range(known)]
            loop.call_soon_threadsafe(read.set)
            engine_there.wait()

        engine_there = threading.Event()
        feed = Feed(source(), on_row=sink.on_row, on_batch=on_batch)
        preparing = asyncio.create_task(feed.prepare())
        try:
            async with asyncio.timeout(10 * PATIENCE):
                await handed_on.wait()
        finally:
            engine_there.set()
            assert await preparing is False
        assert feed.progress().batches_done == known

    asyncio.run(main())


def test_an_empty_source_is_finished_at_once() -> None:
    async def main() -> None:
        feed = make_feed([], Sink())
        assert await feed.prepare() is False
        await feed.serve(FakeEngine(), ORIGIN, 4)

    run(main)


def test_a_dataset_of_many_rows_is_read_only_as_far_as_the_window_needs() -> None:
    async def main() -> None:
        sink, engine, seen = Sink(), FakeEngine({f"r{i}": "hang" for i in range(10_000)}), list[str]()
        feed = make_feed(counted(batches(10_000, size=10), seen), sink, ahead=20)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 8))
        await asyncio.sleep(5)
        assert engine.open == 32
        assert 32 + 20 <= 10 * len(seen) <= 32 + 20 + 10
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run(main)


def test_open_rows_are_bounded_while_one_row_hangs() -> None:
    async def main() -> None:
        # Every batch has a row that hangs, so that none is ever complete.
        sink, engine, seen = Sink(), FakeEngine({f"r{i}": "hang" for i in range(0, 4000, 10)}, slots=500), list[str]()
        feed = make_feed(counted(batches(4000, size=10), seen), sink, open_rows=300, open_windows=1, ahead=10)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 16))
        await asyncio.sleep(20)
        assert len(seen) == 30
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run(main)


def test_batches_are_read_in_another_thread() -> None:
    def source() -> Iterator[Batch]:
        for batch in batches(50):
            threads.add(threading.current_thread())
            yield batch

    threads: set[threading.Thread] = set()
    asyncio.run(make_feed(source(), Sink()).serve(FakeEngine(), ORIGIN, 4))
    assert threads and threading.main_thread() not in threads


def test_a_cancel_in_the_middle_of_a_read_loses_no_batch() -> None:
    reading, go_on = threading.Event(), threading.Event()

    def source() -> Iterator[Batch]:
        for batch in batches(50):
            if batch.key == "b1":
                reading.set()
                assert go_on.wait(10)
            yield batch

    async def main() -> None:
        sink = Sink()
        feed = make_feed(source(), sink)
        serving = asyncio.create_task(feed.serve(FakeEngine(seconds=0.001), ORIGIN, 4))
        await asyncio.to_thread(reading.wait, 10)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert others() == set()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        await feed.serve(FakeEngine(seconds=0.001), ORIGIN, 4)
        assert len(sink.outcomes()) == 50

    asyncio.run(main())


def test_a_slow_consumer_stops_the_reading_and_not_the_loop() -> None:
    async def main() -> None:
        sink, engine, seen = Sink(), FakeEngine(), list[str]()
        gate, running, most = asyncio.Event(), 0, 0

        async def slowly(job: str, key: str, outcomes: list[Outcome]) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await gate.wait()
            running -= 1
            await sink.on_batch(job, key, outcomes)

        feed = make_feed(counted(batches(2000, size=10), seen), sink, commits=3, commit_backlog=6, ahead=20)
        feed._on_batch = slowly
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 8))
        await asyncio.sleep(20)
        read = len(seen)
        assert most == 3
        assert 6 <= read <= 6 + (32 + 20) // 10 + 2
        assert feed.progress().open_batches == read
        gate.set()
        await serving
        assert len(sink.outcomes()) == 2000

    run(main)


def test_a_failing_consumer_ends_the_feed_with_its_error() -> None:
    async def main() -> None:
        feed = make_feed(batches(100, size=10), Sink())

        async def fail(job: str, key: str, outcomes: list[Outcome]) -> None:
            if key == "b2":
                raise RuntimeError("store is gone")
            await asyncio.sleep(1e6)

        feed._on_batch = fail
        for _ in range(2):
            with pytest.raises(RuntimeError, match="store is gone"):
                await feed.serve(FakeEngine(), ORIGIN, 4)

    run(main)


def test_a_failing_source_ends_the_feed_with_its_error() -> None:
    def source() -> Iterator[Batch]:
        yield from batches(10)
        raise OSError("shard is gone")

    async def main() -> None:
        with pytest.raises(OSError, match="shard is gone"):
            await make_feed(source(), Sink()).serve(FakeEngine(), ORIGIN, 4)

    run(main)


def test_a_failing_journal_ends_the_feed_with_its_error() -> None:
    async def main() -> None:
        feed = make_feed(batches(10), Sink())

        def fail(job: str, key: str, outcome: Outcome) -> None:
            raise OSError("disk full")

        feed._work._on_row = fail
        with pytest.raises(OSError, match="disk full"):
            await feed.serve(FakeEngine(), ORIGIN, 4)

    run(main)


def test_a_wrong_engine_ends_serving_and_harms_no_row() -> None:
    async def main() -> None:
        sink = Sink()
        feed = make_feed(batches(100), sink)
        with pytest.raises(EngineRefused):
            await feed.serve(FakeEngine({"r9": EngineRefused("wrong key")}), ORIGIN, 4)
        await feed.serve(FakeEngine(), ORIGIN, 4)
        assert sink.dead() == {}
        assert {outcome.tries for outcome in sink.outcomes().values()} == {1}

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 0.1, 0.4, 2.0, 5.0])
def test_cancelling_leaves_nothing_and_serving_goes_on_later(after: float) -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine(seconds=1)
        feed = make_feed(batches(600), sink)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 32))
        await asyncio.sleep(after)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert others() == set()
        assert engine.open == 0
        assert feed.progress().in_flight == 0
        done = set(sink.outcomes()) | {outcome.row_id for _, outcome in sink.rows}
        again = FakeEngine()
        await feed.serve(again, ORIGIN, 32)
        assert len(sink.outcomes()) == 600 and sink.dead() == {}
        assert not done & set(again.asked)  # nothing finished is asked twice
        assert feed.counts.engine_deaths == 0

    run(main)


def test_cancelling_while_the_consumer_blocks_hands_the_batch_on_again() -> None:
    async def main() -> None:
        sink = Sink()
        feed = make_feed(batches(50), sink)

        async def block(job: str, key: str, outcomes: list[Outcome]) -> None:
            await asyncio.sleep(1e6)

        feed._on_batch = block
        serving = asyncio.create_task(feed.serve(FakeEngine(), ORIGIN, 16))
        await asyncio.sleep(5)
        assert feed.progress().ok == 50
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert others() == set()
        feed._on_batch = sink.on_batch
        await feed.serve(FakeEngine(), ORIGIN, 16)
        assert len(sink.outcomes()) == 50 and len(sink.rows) == 50

    run(main)


def test_two_engines_share_the_work() -> None:
    async def main() -> None:
        sink, one, two = Sink(), FakeEngine(slots=4), FakeEngine(slots=4)
        feed = make_feed(batches(400), sink)
        await asyncio.gather(feed.serve(one, ORIGIN, 4), feed.serve(two, ORIGIN, 4))
        assert len(sink.outcomes()) == 400
        assert min(len(one.asked), len(two.asked)) > 100
        assert not one.asked.keys() & two.asked.keys()

    run(main)


def test_one_of_two_engines_may_die() -> None:
    async def main() -> None:
        sink, one, two = Sink(), FakeEngine(slots=4), FakeEngine(slots=4)
        feed = make_feed(batches(600), sink)
        both = [asyncio.create_task(feed.serve(engine, ORIGIN, 4)) for engine in (one, two)]
        await asyncio.sleep(5)
        one.die()
        with pytest.raises(EngineLost):
            await both[0]
        await both[1]
        assert len(sink.outcomes()) == 600 and sink.dead() == {}
        assert {outcome.tries for outcome in sink.outcomes().values()} == {1}

    run(main)


def test_a_stopped_engine_finishes_what_it_has_while_the_next_one_goes_on() -> None:
    async def main() -> None:
        sink, old, new = Sink(), FakeEngine(slots=8, seconds=1), FakeEngine(slots=8)
        feed, stop = make_feed(batches(400), sink), asyncio.Event()
        serving = asyncio.create_task(feed.serve(old, ORIGIN, 8, stop=stop))
        await asyncio.sleep(3)
        following = asyncio.create_task(feed.serve(new, ORIGIN, 8))
        await asyncio.sleep(0)
        stop.set()
        await serving
        asked = len(old.asked)
        assert old.answered.total() == asked < 400
        await following
        assert len(old.asked) == asked
        assert len(sink.outcomes()) == 400
        assert feed.counts.requests == 400

    run(main)


def test_an_engine_that_is_stopped_alone_leaves_the_rest_for_later() -> None:
    async def main() -> None:
        sink, stop = Sink(), asyncio.Event()
        feed = make_feed(batches(400), sink)
        stop.set()
        await feed.serve(FakeEngine(), ORIGIN, 8, stop=stop)
        assert not feed.finished and others() == set()
        await feed.serve(FakeEngine(), ORIGIN, 8)
        assert len(sink.outcomes()) == 400

    run(main)


@pytest.mark.slow
def test_the_window_finds_an_unknown_engine_s_slots() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine(slots=100, seconds=0.5)
        await make_feed(batches(6000, size=250), sink).serve(engine, ORIGIN)
        assert 300 <= engine.most_open <= 400

    run(main)


@pytest.mark.slow
def test_a_large_window_is_opened_in_bursts() -> None:
    async def main() -> None:
        engine = FakeEngine(slots=4096, seconds=100)
        feed = make_feed(batches(5000, size=250), Sink())
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 1024))
        opened = []
        for _ in range(40):
            await asyncio.sleep(0.02)
            opened.append(engine.open)
        assert max(later - earlier for earlier, later in pairwise(opened)) <= 512
        assert opened[-1] == 4096
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run(main)


def test_an_engine_without_metrics_gets_the_fixed_window() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine(slots=500, metrics=False)
        await make_feed(batches(1000), sink).serve(engine, ORIGIN)
        assert engine.most_open == FeedPolicy().window.blind

    run(main)


def test_progress_counts_what_happens() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({f"r{i}": "hang" for i in range(40, 100)})
        feed = make_feed(batches(100), sink)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 4))
        await asyncio.sleep(5)
        progress = feed.progress()
        assert (progress.rows_done, progress.in_flight, progress.queued) == (40, 16, 44)
        assert (progress.batches_done, progress.open_batches) == (1, 3)
        assert (progress.prompt_tokens, progress.completion_tokens, progress.window) == (120, 200, 16)
        assert not progress.finished
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run(main)
