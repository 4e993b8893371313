"""Batches that come, go and come back to the feed of their model."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from support.api_service import CHAT, jsonl, line
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.timing import PATIENCE

from batch_assets.api.batches.snapshot import check_input
from batch_assets.api.billing.price_list import TokenPrices
from batch_assets.api.billing.spending import BatchBudget, BudgetHolds
from batch_assets.api.database.batch_records import BatchRecord, Held
from batch_assets.api.execution import model_feed
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.execution.engines import engine_slots
from batch_assets.api.execution.engines.engine_supply import (
    EndpointSupply,
    EngineAway,
    NobodyWaits,
    ServingEngine,
    Waits,
    for_ever,
)
from batch_assets.api.execution.local_journal import LocalJournal
from batch_assets.api.execution.model_feed import ModelFeed
from batch_assets.api.settings import ApiLimits
from gpu_runner.rows import Batch, Origin, Outcome, Task
from resources.objects.opening import LocalObjects, StoreError

ORIGIN = Origin("tiny", "e", "p", "i", False, "r")


def run_of(
    objects: LocalObjects, batch_id: str = "batch_1", epoch: int = 1, lines: int = 1, expires_at: int = 2
) -> BatchRun:
    """A batch of so many lines, `a` and others, held for the `epoch`th time."""
    record = BatchRecord(batch_id, "t", CHAT, "file-1", "24h", 1, expires_at, "d", epoch=epoch)
    if epoch == 1:
        objects.put("input", jsonl([line("a"), *(line(f"{number}") for number in range(1, lines))]))
        assert check_input(objects, "input", batch_id, CHAT, None, ApiLimits()).errors == []
    run = BatchRun(objects, record, Held(batch_id, epoch), "me")
    run.load()
    return run


def test_a_batch_whose_budget_is_used_up_keeps_no_engine(tmp_path: Path) -> None:
    """Its window may end in a week, and an engine is paid by the hour."""
    price = TokenPrices(input=Decimal(1), output=Decimal(1))
    feed, run = feed_of(), run_of(LocalObjects(tmp_path))
    run.budget = BatchBudget(1, price)

    async def reads() -> None:
        feed.add(run)
        assert not feed.idle, "nobody has seen yet what its lines may cost"
        with pytest.raises(BudgetHolds):
            next(run.batches())
        assert feed.idle
        other = run_of(LocalObjects(tmp_path / "other"), "batch_2")
        feed.add(other)
        assert not feed.idle
        feed.remove(other)
        feed.keep(math.inf)
        assert not feed.idle

    asyncio.run(reads())


class AwayStore(LocalObjects):
    """A store whose journal cannot be written while it is `away`."""

    away = True

    def put(self, path: str, data: bytes) -> None:
        if self.away and "/journal/" in path:
            raise StoreError("away")
        super().put(path, data)


def feed_of(local: Path | None = None) -> ModelFeed:
    supply = EndpointSupply("http://127.0.0.1:9", None)
    journal = LocalJournal(local, "me", lambda call: call())
    return ModelFeed("tiny", "chat", supply, lambda run, footer: None, journal)


def test_nobody_waits_for_batches_of_a_feed_that_ended_while_its_store_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader is a thread, and a process ends only when all its threads have ended."""
    feed = feed_of()
    reader = threading.Thread(target=lambda: list(feed._queue), daemon=True)

    async def ends() -> None:
        hangs = asyncio.Event()
        monkeypatch.setattr(feed, "flush", hangs.wait)
        serving = asyncio.create_task(feed.serve())
        await asyncio.sleep(0.01)
        for _ in range(2):  # by who drains it, and with the event loop
            serving.cancel()
            await asyncio.sleep(0.01)
        assert serving.done()

    reader.start()
    asyncio.run(ends())
    reader.join(20 * PATIENCE)
    assert not reader.is_alive()


def test_rows_of_a_batch_that_is_over_stay_on_this_disk_until_the_store_has_them(tmp_path: Path) -> None:
    async def ends() -> None:
        objects, feed, local = AwayStore(tmp_path / "store"), feed_of(tmp_path / "rows"), tmp_path / "rows"
        run = run_of(objects, lines=2)
        feed.add(run)
        (rows,) = run.batches()
        kept = [Outcome(row.row_id, row.row_key, "{}", "stop", 1, 1, 1, None, None, ORIGIN, 0, 1) for row in rows.rows]
        feed._worker._on_row(rows.job, rows.key, kept[0])
        feed.end(run)  # cancelled
        feed._worker._on_row(rows.job, rows.key, kept[1])
        await feed.flush()
        (file,) = local.iterdir()
        assert len(file.read_bytes().splitlines()) == 1
        objects.away = False
        await feed.flush()
        feed.remove(run)
        assert list(local.iterdir()) == [] and run.completed == 1

    asyncio.run(ends())


def test_rows_of_an_earlier_hold_write_nothing_for_the_later_one(tmp_path: Path) -> None:
    async def comes_back() -> None:
        objects, feed = LocalObjects(tmp_path), feed_of()
        first = run_of(objects)
        feed.add(first)
        rows = next(feed._queue)
        feed.remove(first)  # another worker has taken it over
        again = run_of(objects, epoch=2)
        feed.add(again)
        refused = Outcome("a", rows.rows[0].row_key, None, None, 0, 0, 1, "rejected_500", None, ORIGIN, 0.0, 0.0)
        feed._worker._on_row(rows.job, rows.key, refused)
        await feed._worker._on_part(rows.job, rows.key, [refused])
        assert next(iter(again.batches())).job != rows.job
        assert not again.done and not again.unwritten

    asyncio.run(comes_back())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30 * PATIENCE):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_nothing_is_read_of_a_batch_that_is_over(tmp_path: Path) -> None:
    async def ends() -> None:
        objects, feed = LocalObjects(tmp_path), feed_of()
        run = run_of(objects, lines=600)
        feed.add(run)
        parts = [next(feed._queue), next(feed._queue)]
        feed.end(run)  # cancelled
        feed.remove(run)
        feed._queue.close()
        assert list(feed._queue) == [] and [part.key for part in parts] == ["00000", "00001"]

    asyncio.run(ends())


def test_a_part_that_is_read_while_its_batch_ends_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reading thread has taken from the store when the batch ends would else be asked for."""
    reading, goes_on = threading.Event(), threading.Event()
    batches = BatchRun.batches

    def slowly(run: BatchRun) -> Iterator[Batch]:
        for part in batches(run):
            reading.set()
            assert goes_on.wait(20 * PATIENCE)
            yield part

    async def ends() -> None:
        with simulated_engine("--output-tokens", "fixed:2") as engine:
            supply = EndpointSupply(engine.url, None)
            local = LocalJournal(None, "me", lambda call: call())
            feed = ModelFeed("tiny", "chat", supply, lambda run, footer: None, local)
            serving = asyncio.create_task(feed.serve())
            try:
                run, other = run_of(LocalObjects(tmp_path)), run_of(LocalObjects(tmp_path / "2"), "batch_2")
                feed.add(run)
                await until(reading.is_set)
                feed.end(run)
                goes_on.set()
                done = feed.add(other)
                await done.wait()
                assert other.completed == 1 and not run.unwritten and not run.completed
                assert engine.get("/simulator/stats")["requests"] == 1
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    monkeypatch.setattr(BatchRun, "batches", slowly)
    asyncio.run(asyncio.wait_for(ends(), 30 * PATIENCE))


def test_cancelled_batches_leave_nothing_in_a_feed_that_goes_on(tmp_path: Path) -> None:
    async def cancelled() -> None:
        with simulated_engine("--max-num-seqs", "2", "--weights-ms", "50", "--output-tokens", "fixed:4") as engine:
            supply = EndpointSupply(engine.url, None)
            local = LocalJournal(None, "me", lambda call: call())
            feed = ModelFeed("tiny", "chat", supply, lambda run, footer: None, local)
            serving = asyncio.create_task(feed.serve())
            try:
                run = run_of(LocalObjects(tmp_path), lines=600)
                feed.add(run)
                await until(lambda: run.unwritten or run.completed > 0)
                assert feed._worker.progress().open_batches > 0
                feed.end(run)
                feed.remove(run)
                progress = feed._worker.progress()
                assert (progress.open_batches, progress.in_flight, progress.queued) == (0, 0, 0)
                await until(lambda: engine.get("/simulator/stats")["in_flight"] == 0)
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(cancelled(), 30 * PATIENCE))


@pytest.mark.slow
def test_lines_of_a_shorter_window_pass_those_that_were_read_and_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: Counter[str] = Counter()

    async def passes() -> None:
        with simulated_engine("--max-num-seqs", "4", "--weights-ms", "3", "--output-tokens", "fixed:2") as engine:
            local = LocalJournal(None, "me", lambda call: call())
            monkeypatch.setattr(local, "note", lambda batch, part, outcome: answered.update([batch]))
            feed = ModelFeed("tiny", "chat", EndpointSupply(engine.url, None, 4), lambda run, footer: None, local)
            serving = asyncio.create_task(feed.serve())
            try:
                feed.add(run_of(LocalObjects(tmp_path / "1"), "batch_long", lines=2000, expires_at=900))
                await until(lambda: answered["batch_long"] > 20)
                short = run_of(LocalObjects(tmp_path / "2"), "batch_short", lines=600, expires_at=100)
                before, done = answered["batch_long"], feed.add(short)
                await done.wait()
                passed = answered["batch_long"] - before
                assert short.completed == 600 and passed < 150
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(passes(), 30 * PATIENCE))


class SimulatedSupply:
    """Leases each of its engines once at a time. `held`: those that somebody has now."""

    def __init__(self, engines: list[SimulatedEngine]) -> None:
        self.free = list(engines)
        self.held: dict[str, ServingEngine] = {}
        self.most_held = 0

    @contextlib.asynccontextmanager
    async def engine(self, model: str, task: Task, waits: Waits = for_ever) -> AsyncIterator[ServingEngine]:
        while not self.free:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        own = self.free.pop(0)
        if own.process.returncode is not None:
            raise EngineAway("it was killed")
        self.held[own.url] = engine = ServingEngine(own.url, None, 4, "sim", "h100", leased=True)
        self.most_held = max(self.most_held, len(self.held))
        try:
            yield engine
        finally:
            del self.held[own.url]
            self.free.append(own)


class WaitingSupply:
    """There is an engine when the test says so. `asked`: how many were wanted; `waits`: whether one still is."""

    def __init__(self, own: bool = False) -> None:
        self.there, self.asked, self.given_up, self.held = asyncio.Event(), 0, 0, 0
        self.own = own

    @contextlib.asynccontextmanager
    async def engine(self, model: str, task: Task, waits: Waits = for_ever) -> AsyncIterator[ServingEngine]:
        self.asked += 1
        while not self.there.is_set():
            await asyncio.sleep(0.005)
            if not waits():
                self.given_up += 1
                raise NobodyWaits
        self.held += 1
        try:
            yield ServingEngine("http://127.0.0.1:9", None, 4, "sim", "h100", leased=True, own=self.own)
        finally:
            self.held -= 1


@contextlib.asynccontextmanager
async def a_feed(supply: WaitingSupply, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelFeed]:
    """It is served, and its engines answer nothing and are never lost."""

    async def serves(feed: ModelFeed, engine: ServingEngine, slot: object) -> None:
        await feed._stop_in_time(engine, slot, asyncio.Event())  # type: ignore[arg-type]

    monkeypatch.setattr(ModelFeed, "_on_engine", serves)
    monkeypatch.setattr(model_feed, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(model_feed, "AWAY_SECONDS", (0.01, 0.01))
    feed = ModelFeed("tiny", "chat", supply, lambda run, footer: None, LocalJournal(None, "me", lambda call: call()))
    serving = asyncio.create_task(feed.serve())
    try:
        yield feed
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def test_an_engine_is_waited_for_only_as_long_as_somebody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another replica may hold it for days; when it ends, nothing is to be rented for a request of long ago."""
    monkeypatch.setattr(model_feed, "IDLE_SECONDS", 0.05)

    async def steps() -> None:
        supply = WaitingSupply()
        async with a_feed(supply, monkeypatch) as feed:
            feed.keep(0.0)
            await until(lambda: supply.given_up == 1)
            await asyncio.sleep(0.1)
            assert supply.asked == 1
            feed.keep(math.inf)
            await until(lambda: supply.asked == 2)
            await asyncio.sleep(0.1)
            assert supply.given_up == 1

    asyncio.run(steps())


@pytest.mark.parametrize("own", [False, True])
def test_a_feed_without_lines_leaves_its_engine_to_one_that_has_some(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is a process that would end with the lease: others cannot share it."""

    async def steps() -> None:
        supply = WaitingSupply(own)
        async with a_feed(supply, monkeypatch) as feed:
            supply.there.set()
            feed.keep(math.inf)
            await until(lambda: supply.held == 1)
            feed.want_engines(0)
            if own:
                await asyncio.sleep(0.1)
                assert supply.held == 1
                return
            await until(lambda: supply.held == 0)
            await asyncio.sleep(0.1)
            assert supply.asked == 1, "nor does it wait for one"
            feed.want_engines(1)
            await until(lambda: supply.held == 1)

    asyncio.run(steps())


def test_a_feed_that_waits_for_an_engine_stops_when_another_one_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps() -> None:
        supply = WaitingSupply()
        async with a_feed(supply, monkeypatch) as feed:
            feed.keep(math.inf)
            await until(lambda: supply.asked == 1)
            feed.want_engines(0)
            await until(lambda: supply.given_up == 1)
            assert supply.held == 0

    asyncio.run(steps())


def test_a_feed_with_lines_has_an_engine_whatever_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that were lost are asked for again, and are in no plan."""

    async def steps() -> None:
        supply = WaitingSupply()
        async with a_feed(supply, monkeypatch) as feed:
            supply.there.set()
            feed.want_engines(0)
            run = run_of(LocalObjects(tmp_path))
            feed.add(run)
            await until(lambda: supply.held == 1)
            feed.want_engines(0)
            await asyncio.sleep(0.1)
            assert (supply.held, supply.asked) == (1, 1)
            feed.remove(run)

    asyncio.run(steps())


@pytest.mark.slow
def test_a_feed_takes_more_engines_loses_one_and_gives_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_slots, "SURPLUS_SECONDS", 0.0)
    answered: Counter[str] = Counter()

    async def works(engines: list[SimulatedEngine]) -> None:
        supply, local = SimulatedSupply(engines), LocalJournal(None, "me", lambda call: call())
        monkeypatch.setattr(local, "note", lambda batch, part, outcome: answered.update([outcome.row_id]))
        feed = ModelFeed("tiny", "chat", supply, lambda run, footer: None, local)
        run = run_of(LocalObjects(tmp_path), lines=700)
        serving, done = asyncio.create_task(feed.serve()), feed.add(run)
        await until(lambda: len(answered) > 20)
        assert len(supply.held) == 1
        feed.want_engines(3)
        await until(lambda: len(supply.held) == 3)
        engines[0].process.kill()
        await until(lambda: engines[0].url not in supply.held and len(answered) > 200)
        feed.want_engines(1)
        await until(lambda: len(supply.held) == 1)
        assert not done.is_set(), "engines were given back while there was work"
        await done.wait()
        assert run.completed == 700 and run.failed == 0
        feed.drain()
        await serving
        assert supply.held == {} and supply.most_held == 3

    with contextlib.ExitStack() as stack:
        options = ("--speed", "5", "--max-num-seqs", "4")
        asyncio.run(works([stack.enter_context(simulated_engine(*options)) for _ in range(3)]))
    assert set(answered.values()) == {1} and len(answered) == 700
