"""Jobs that end while their rows are in a feed: no request of theirs begins, and other jobs' rows lose nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import strategies as st
from support.examples import property_test
from support.fake_engine import GENERATION, ORIGIN, FakeEngine, row
from support.virtual_time import run

from gpu_runner.bounded_http.bounded_read import FREE_BYTES
from gpu_runner.client.protocol import Completion, EngineLost, RequestDenied, RowRejected, Transient
from gpu_runner.cost_meter import TokenMeter
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.inference.late_rows import HedgePolicy
from gpu_runner.micro_batches.list_limits import ListLimits
from gpu_runner.rows import Batch, Outcome
from gpu_runner.token_price import TokenPrice

LISTS = replace(GENERATION, task="embedding")
LARGE = "x" * (FREE_BYTES + 1)


def part(job: str, number: int, size: int = 10) -> Batch:
    """`size` rows of a job, of names that no other row has."""
    names = [f"{job}{number * size + i}" for i in range(size)]
    return Batch(f"{number}", tuple(row(f"{number}", name) for name in names), job=job)


class JobSink:
    """What a feed handed on, and which jobs have ended. Hears nothing of those."""

    def __init__(self) -> None:
        self.ended: set[str] = set()
        self.rows: Counter[tuple[str, str]] = Counter()
        self.parts: dict[tuple[str, str], list[Outcome]] = {}

    def on_row(self, job: str, key: str, outcome: Outcome) -> None:
        assert job not in self.ended
        self.rows[job, outcome.row_id] += 1

    async def on_batch(self, job: str, key: str, outcomes: list[Outcome]) -> None:
        assert job not in self.ended and (job, key) not in self.parts
        self.parts[job, key] = outcomes

    def outcomes(self, job: str) -> dict[str, Outcome]:
        return {one.row_id: one for (its, _), outcomes in self.parts.items() if its == job for one in outcomes}


class CheckedEngine(FakeEngine):
    """Notes requests for rows of jobs that have ended."""

    def __init__(self, ended: set[str], *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self._ended, self.late = ended, list[str]()
        self._listed: Counter[str] = Counter()

    def _note(self, prompts: Sequence[bytes]) -> None:
        self.late += [text for prompt in prompts if (text := orjson.loads(prompt))[0] in self._ended]

    async def generate(self, prompt: bytes, **words: Any) -> Completion:
        if not self._listed[orjson.loads(prompt)]:
            self._note([prompt])
        return await super().generate(prompt, **words)

    async def generate_list(self, prompts: Sequence[bytes], **words: Any) -> list[Completion]:
        self._note(prompts)
        texts = [orjson.loads(prompt) for prompt in prompts]
        self._listed.update(texts)
        try:
            return await super().generate_list(prompts, **words)
        finally:
            self._listed.subtract(texts)


def make_feed(source: Iterator[Batch], sink: JobSink, **changes: Any) -> Feed:
    policy = replace(FeedPolicy(), **changes)
    return Feed(source, on_row=sink.on_row, on_batch=sink.on_batch, policy=policy, rng=random.Random(0))


def assert_empty(feed: Feed) -> None:
    """Nothing of any job is left in the feed, nor counted as left."""
    progress, work = feed.progress(), feed._work
    assert (progress.in_flight, progress.queued, progress.open_batches, progress.late) == (0, 0, 0, 0)
    memory, ready = work.memory, work.ready
    assert (memory.held, memory.reading, memory._open, memory._waiting) == (0, 0, {}, [])
    assert (work.open_rows, ready.prompt_bytes, ready.unsent, len(ready)) == (0, 0, 0, 0)
    assert (work.suspects.size, bool(work.suspects), work._trial) == (0, False, None)


def of(kind: str) -> object:
    return {
        "kill": "kill",
        "hang": "hang",
        "once late": ["hang"],
        "rejected": RowRejected("rejected_400"),
        "denied": RequestDenied("rejected_403", "check the key"),
        "fails": [Transient("http_500")],
        "always": Transient("http_502"),
        "busy": [Transient("http_429", retry_after=2.0, taken=False)],
        "large": LARGE,
    }[kind]


KINDS = ("kill", "hang", "once late", "rejected", "denied", "fails", "always", "busy", "large")


@pytest.mark.slow
@property_test(
    25,
    400,
    bad=st.dictionaries(st.tuples(st.sampled_from("abc"), st.integers(0, 29)), st.sampled_from(KINDS), max_size=12),
    ends=st.dictionaries(
        st.sampled_from("abc"), st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 2.1, 5.0, 70.0]), max_size=2
    ),
    deaths=st.lists(st.floats(0.0, 3.0), max_size=3),
    seqs=st.sampled_from([1, 4, 32]),
    lists=st.booleans(),
    engines=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_jobs_that_end_at_any_moment_are_asked_for_no_more_and_cost_others_nothing(
    bad: dict[tuple[str, int], str],
    ends: dict[str, float],
    deaths: list[float],
    seqs: int,
    lists: bool,
    engines: int,
    seed: int,
) -> None:
    rules = {f"{job}{number}": of(kind) for (job, number), kind in bad.items()}
    parts = [part(job, number) for job in "abc" for number in range(3)]
    random.Random(seed).shuffle(parts)
    sink, made = JobSink(), list[CheckedEngine]()

    async def main() -> None:
        feed = make_feed(
            (one for one in parts if one.job not in sink.ended),
            sink,
            stall_seconds=30,
            open_bytes=3 * FREE_BYTES,
            batch_bytes=3 * FREE_BYTES,
            lists=ListLimits(inputs=8),
            hedging=HedgePolicy(floor_seconds=0.5, samples=2, factor=1.5),
        )
        loop, fates = asyncio.get_running_loop(), list(deaths)

        def end(job: str) -> None:
            sink.ended.add(job)
            feed.end_job(job)
            assert not any(item.batch.job == job for worker in feed._workers for item in worker.in_flight)
            assert not any(item.batch.job == job for item in feed._work.ready)

        for job, at in ends.items():
            loop.call_later(at, end, job)

        async def serve() -> None:
            while not feed.finished:
                assert len(made) < 100
                engine = CheckedEngine(sink.ended, rules, slots=8, generation=LISTS if lists else GENERATION)
                made.append(engine)
                if fates:
                    loop.call_later(fates.pop(), engine.die)
                with suppress(EngineLost):
                    await feed.serve(engine, ORIGIN, seqs)
                assert engine.open == 0

        await asyncio.gather(*(serve() for _ in range(engines)))
        assert_empty(feed)

    run(main)
    assert [engine.late for engine in made] == [[] for _ in made]
    for job in "abc":
        wanted = {f"{job}{number}" for number in range(30)}
        counted = {row_id: count for (its, row_id), count in sink.rows.items() if its == job}
        if job not in sink.ended:
            assert set(sink.outcomes(job)) == wanted and counted == dict.fromkeys(wanted, 1)
        else:
            assert set(sink.outcomes(job)) <= set(counted) <= wanted and set(counted.values()) <= {1}


@pytest.mark.parametrize("lists", [False, True])
def test_rows_of_others_in_a_broken_off_request_are_asked_again_and_not_charged(lists: bool) -> None:
    async def main() -> None:
        sink = JobSink()
        engine = CheckedEngine(sink.ended, generation=LISTS if lists else GENERATION, slots=64)
        feed = make_feed(iter([]), sink, lists=ListLimits(inputs=20))
        feed._work.open(part("a", 0))
        feed._work.open(part("b", 0))
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 64))
        await asyncio.sleep(0.1)
        assert feed.progress().in_flight == 20 and len(engine.lists) == int(lists)
        sink.ended.add("a")
        feed.end_job("a")
        assert feed.progress().open_batches == 1
        await serving
        assert_empty(feed)
        assert {one.tries for one in sink.outcomes("b").values()} == {1} and len(sink.outcomes("b")) == 10
        counts = feed.counts
        assert (counts.failures, counts.charged, counts.voided, counts.dead, counts.ok) == (0, 0, 0, 0, 10)
        assert [len(texts) for texts in engine.lists] == ([20, 10] if lists else [])
        assert engine.asked.total() == (30 if lists else 20)

    run(main)


def test_a_second_request_for_a_late_row_is_broken_off_with_its_job() -> None:
    async def main() -> None:
        sink, rules = JobSink(), dict[str, object](a3="hang")
        engine = CheckedEngine(sink.ended, rules, slots=64)
        feed = make_feed(iter([part("a", 0), part("b", 0, 30)]), sink)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 64))
        await asyncio.sleep(70)
        assert engine.asked["a3"] == 2 and engine.open == 2
        sink.ended.add("a")
        feed.end_job("a")
        await serving
        assert_empty(feed)
        assert engine.open == 0 and len(sink.outcomes("b")) == 30

    run(main)


def test_an_answer_that_waits_for_room_is_given_up_with_its_job() -> None:
    async def main() -> None:
        sink = JobSink()
        rules: dict[str, object] = {"a0": "hang"} | {f"b{number}": LARGE for number in range(10)}
        engine = CheckedEngine(sink.ended, rules, slots=64)
        feed = make_feed(iter([part("a", 0), part("b", 0)]), sink)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 64))
        await asyncio.sleep(0.1)
        feed._work.memory._limit = 0
        await asyncio.sleep(5)
        assert len(feed._work.memory._waiting) == 10
        sink.ended.add("b")
        feed.end_job("b")
        sink.ended.add("a")
        await asyncio.sleep(1)
        assert engine.open == 1 and feed._work.memory.reading == 0 and not feed._work.memory._waiting
        feed.end_job("a")
        await serving
        assert_empty(feed)

    run(main)


def test_suspects_of_a_job_leave_their_group_and_the_others_are_tried_on() -> None:
    async def main() -> None:
        sink = JobSink()
        rules: dict[str, object] = {"a4": "kill", "b4": "kill"}
        feed = make_feed(iter([part("a", 0), part("b", 0)]), sink)
        engines = 0
        while not feed.finished:
            engines += 1
            engine = CheckedEngine(sink.ended, rules, slots=64)
            if engines == 4:
                assert feed._work.suspects
                sink.ended.add("a")
                feed.end_job("a")
                assert 0 < feed.progress().queued <= 10
            with suppress(EngineLost):
                await feed.serve(engine, ORIGIN, 64)
            assert engine.late == []
        assert_empty(feed)
        assert {row_id for row_id, one in sink.outcomes("b").items() if not one.ok} == {"b4"}

    run(main)


def test_a_batch_that_is_read_while_its_job_ends_is_left_out_and_what_is_read_later_is_not() -> None:
    async def main() -> None:
        sink = JobSink()

        def source() -> Iterator[Batch]:
            yield part("b", 0)
            loop.call_soon(feed.end_job, "a")  # before the feed sees what it reads now
            yield part("a", 0)
            yield part("c", 0)
            yield part("a", 1)

        loop, feed = asyncio.get_running_loop(), make_feed(source(), sink)
        await feed.serve(FakeEngine(), ORIGIN, 4)
        assert set(sink.parts) == {("b", "0"), ("c", "0"), ("a", "1")}
        assert_empty(feed)

    run(main)


def test_a_batch_that_is_handed_on_when_its_job_ends_is_not_handed_on_again() -> None:
    async def main() -> None:
        sink, calls, blocked = JobSink(), list[str](), asyncio.Event()

        async def on_batch(job: str, key: str, outcomes: list[Outcome]) -> None:
            calls.append(job)
            if job == "a":
                await blocked.wait()

        feed = Feed(iter([part("a", 0), part("b", 0)]), on_row=sink.on_row, on_batch=on_batch)
        serving = asyncio.create_task(feed.serve(FakeEngine(), ORIGIN, 64))
        await asyncio.sleep(5)
        feed.end_job("a")
        assert feed.progress().open_batches == 1 and not serving.done()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert feed.finished and sorted(calls) == ["a", "b"]
        assert_empty(feed)

    run(main)


def test_what_was_broken_off_counts_against_what_is_granted() -> None:
    """The server may have worked on it: who pays by the token may have to pay for it."""

    async def main() -> None:
        sink, meter = JobSink(), TokenMeter(TokenPrice(1.0, 1.0), 1.0)
        feed = make_feed(iter([part("a", 0)]), sink)
        serving = asyncio.create_task(feed.serve(FakeEngine(), ORIGIN, 64, spending=meter))
        await asyncio.sleep(0.1)
        feed.end_job("a")
        await serving
        assert meter._given_up == 10 and meter._flying == 0

    run(main)


def test_each_request_is_made_in_the_context_of_its_jobs() -> None:
    async def main() -> None:
        sink, entered, inside = JobSink(), list[list[str]](), 0

        @contextmanager
        def context(jobs: Sequence[str]) -> Iterator[None]:
            nonlocal inside
            entered.append(list(jobs))
            inside += 1
            try:
                yield
            finally:
                inside -= 1

        feed = make_feed(iter([]), sink, lists=ListLimits(inputs=20))
        feed._work.open(part("a", 0))
        feed._work.open(part("b", 0))
        await feed.serve(FakeEngine(generation=LISTS), ORIGIN, 64, context=context)
        feed = make_feed(iter([part("a", 1), part("b", 1)]), sink)
        await feed.serve(FakeEngine(), ORIGIN, 64, context=context)
        assert entered == [["a", "b"], *([["a"]] * 10), *([["b"]] * 10)] and inside == 0

    run(main)
