"""Rows beside interactive requests are sent one by one over time, and as fast as they end."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches
from support.virtual_time import run

from gpu_runner.bounded_http.bounded_read import Admit
from gpu_runner.client.protocol import Completion, Repair
from gpu_runner.inference.feed import Feed
from gpu_runner.inference.windows.concurrency_window import Window, WindowPolicy
from gpu_runner.inference.windows.first_token_window import FirstTokenPolicy, FirstTokenSample, InteractiveShare
from gpu_runner.inference.windows.row_pacing import SHORTEST_WAIT, PacingPolicy, RowPacing
from gpu_runner.simulator.scheduler import Scheduler, Sequence, StepModel

ASKED = InteractiveShare(lambda: FirstTokenSample((0.1,)), FirstTokenPolicy(standing=True))


def sent_times(pacing: RowPacing, window: int, seconds: Callable[[], float], until: float) -> list[float]:
    """When rows are sent by a feed that keeps a window full, of rows that take so many seconds."""
    now, times = 0.0, []
    ends: list[float] = []
    while now < until:
        while len(ends) < window and not pacing.wait(now, window):
            pacing.on_sent()
            times.append(now)
            heapq.heappush(ends, now + seconds())
        wait = pacing.wait(now, window) if len(ends) < window else float("inf")
        now = min([now + wait + 1e-9, *ends[:1]])
        while ends and ends[0] <= now:
            began = heapq.heappop(ends)
            pacing.on_answer(now - began + seconds())
    return times


def busiest(times: list[float], within: float, since: float) -> int:
    """The most rows that were sent within so many seconds."""
    late = [time for time in times if time >= since]
    return max(sum(1 for other in late if time <= other < time + within) for time in late)


def test_nothing_is_held_back_before_the_first_answer() -> None:
    pacing = RowPacing()
    for _ in range(1000):
        assert pacing.wait(0.0, 256) == 0.0
        pacing.on_sent()


def test_rows_of_one_length_that_began_together_are_apart_after_some_rounds() -> None:
    times = sent_times(RowPacing(), 100, lambda: 10.0, 100.0)
    assert busiest(times, 0.5, since=0.0) == 100
    assert busiest(times, 0.5, since=30.0) <= 10  # 5 when perfectly spread


def test_a_window_is_kept_nearly_full() -> None:
    draw = random.Random(3)
    times = sent_times(RowPacing(), 100, lambda: draw.uniform(2.0, 18.0), 400.0)
    assert len([time for time in times if time >= 100.0]) >= 0.95 * 100 * 300 / 10


@given(st.lists(st.floats(0.0, 1e4), max_size=100), st.integers(0, 10_000))
@settings(max_examples=200, deadline=None)
def test_a_row_waits_for_at_most_the_time_of_a_row(answers: list[float], window: int) -> None:
    pacing = RowPacing(PacingPolicy(excess=1.0))
    for seconds in answers:
        pacing.on_answer(seconds)
    for _ in range(10):
        pacing.on_sent()
    assert 0.0 <= pacing.wait(5.0, window) <= max([SHORTEST_WAIT, *answers]) * 1.0000001


def test_a_clock_that_stands_or_goes_back_lets_nothing_through_twice() -> None:
    pacing = RowPacing()
    pacing.on_answer(10.0)
    assert pacing.wait(100.0, 10) == 0.0
    pacing.on_sent()
    assert pacing.wait(100.0, 10) > 0.0
    assert pacing.wait(50.0, 10) > 0.0


def test_without_interactive_requests_rows_are_not_held_back() -> None:
    window = Window(WindowPolicy(), 10)
    window.on_answer(1000.0)
    window.on_sent()
    window.on_sent()
    assert window.wait_to_send(1.0) == 0.0
    asked = Window(WindowPolicy(), 10, share=ASKED)
    asked.on_answer(1000.0)
    asked.on_sent()
    assert asked.wait_to_send(1.0) > 0.0


def first_tokens(*, paced: bool, window: int = 96, until: float = 600.0) -> tuple[float, int]:
    """Beside rows of one length on a modelled engine: the 95th percentile of first tokens, and tokens generated."""
    slow = 10.0  # an eighth of an H200 and less, so that chats come seldom enough to be told apart
    model = StepModel(
        weights_seconds=3.3e-3 * slow,
        token_seconds=32e-6 * slow,
        context_seconds=27e-9 * slow,
        overhead_seconds=0.5e-3 * slow,
        by_priority=True,
    )
    scheduler, draw, pacing, now = Scheduler(model), random.Random(1), RowPacing(), 0.0
    rows: set[Sequence] = set()
    chats: list[tuple[Sequence, float]] = []
    next_chat = draw.expovariate(0.7)
    while now < until:
        while len(rows) < window and not (paced and pacing.wait(now, window)):
            pacing.on_sent()
            rows.add(scheduler.submit(100, 128, now, 100))
        wait = pacing.wait(now, window) if paced and len(rows) < window else float("inf")
        event = scheduler.next_event()
        assert event is not None
        now = min(next_chat, max(event, now + 1e-9), now + wait + 1e-9)
        for ended in scheduler.advance(now):
            if ended in rows:
                rows.discard(ended)
                pacing.on_answer(now - ended.arrived_at)
        if now >= next_chat:
            chats.append((scheduler.submit(1000, 64, now), now))
            next_chat = now + draw.expovariate(0.7)
    seen = sorted(chat.first_token_at - began for chat, began in chats if chat.first_token_at >= 0 and began > 60)
    return seen[int(0.95 * len(seen))], scheduler.generated_tokens


def test_spread_rows_delay_first_tokens_less_at_the_same_throughput() -> None:
    together, tokens_together = first_tokens(paced=False)
    spread, tokens_spread = first_tokens(paced=True)
    assert spread < 0.6 * together
    assert tokens_spread > 0.98 * tokens_together


class TimedEngine(FakeEngine):
    """Writes down when each row was sent."""

    def __init__(self, *, slots: int, seconds: float) -> None:
        super().__init__(slots=slots, seconds=seconds)
        self.times: list[float] = []

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
        self.times.append(asyncio.get_running_loop().time())
        return await super().generate(prompt, repair=repair, admit=admit)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "at_once"), [(None, 90), (ASKED, 20)])
def test_a_feed_spreads_its_rows_only_while_somebody_asks(share: InteractiveShare | None, at_once: int) -> None:
    """Of 2,000 rows at 100 slots, each of 10 s, the most that were sent within a second of the second half."""

    async def main() -> None:
        sink, engine = Sink(), TimedEngine(slots=100, seconds=10.0)
        feed = Feed(iter(batches(2000)), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0))
        await feed.serve(engine, ORIGIN, 100, share=share)
        assert len(sink.outcomes()) == 2000 == len(engine.times)
        most = busiest(engine.times[1000:1900], 1.0, since=0.0)
        assert most >= at_once if share is None else most <= at_once

    run(main)


def test_rows_are_sent_at_once_when_nobody_asks_any_more() -> None:
    """18 rows of 100 s end together: the next ones are to be 3.7 s apart, but for the callers, who are gone by then."""
    asking = True
    policy = FirstTokenPolicy(quiet=1)

    def look() -> FirstTokenSample:
        return FirstTokenSample((0.1,)) if asking else FirstTokenSample()

    async def main() -> None:
        nonlocal asking
        sink, engine = Sink(), TimedEngine(slots=20, seconds=100.0)
        feed = Feed(iter(batches(100)), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0))
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 20, share=InteractiveShare(look, policy)))
        await asyncio.sleep(100.1)
        asking = False
        await asyncio.sleep(3.5)
        ended = engine.times[0] + 100.0
        assert len([time for time in engine.times if ended <= time <= ended + 3.0]) > 60, "places, and the queue"
        await serving
        assert len(sink.outcomes()) == 100

    run(main)
