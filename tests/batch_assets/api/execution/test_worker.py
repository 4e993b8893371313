"""What a worker does with a batch that it holds, that it has lost, or that cannot be carried on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.api_service import CHAT, jsonl, line
from support.front_doors import NamedModels
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE

from batch_assets.api.batches.snapshot import Checked, check_input
from batch_assets.api.billing.batch_usage import BatchCharges, BatchUsage
from batch_assets.api.billing.price_list import PriceList
from batch_assets.api.billing.spending import SpendingRecords
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords, Held
from batch_assets.api.database.file_records import FileRecord, FileRecords, content_path
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.states import ACCEPT
from batch_assets.api.database.tables import BATCHES
from batch_assets.api.execution import batch_lifecycle, model_feed, worker
from batch_assets.api.execution.batch_lifecycle import BatchLifecycle, Carried, InputAway, WorkerContext
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.execution.engines.engine_supply import Awaited, EndpointSupply, ServingEngine, Waits, for_ever
from batch_assets.api.execution.engines.fleet_engines import FleetSupply
from batch_assets.api.execution.results import Results
from batch_assets.api.execution.worker import Worker
from batch_assets.api.settings import ApiLimits
from gpu_runner.rows import Origin, Outcome, Task
from resources.fleet.resource import GpuFleet
from resources.objects.opening import LocalObjects, StoreError
from resources.store.journal import Journal

NOBODY = "http://127.0.0.1:9"
ORIGIN = Origin("tiny", "e", "p", "i", False, "r")
KEY = "00000"


@contextlib.contextmanager
def site_of(folder: Path) -> Iterator[WorkerContext]:
    """Records and a store of their own, and no engine."""
    records = Records(f"sqlite:///{folder}/api.db")
    try:
        yield WorkerContext(
            BatchRecords(records),
            FileRecords(records),
            LocalObjects(folder / "store"),
            NamedModels(["tiny"], 0),
            EndpointSupply(NOBODY, None),
            ApiLimits(),
            lambda run, footer: None,
            BatchUsage(UsageLedger(records), BatchCharges(PriceList()), SpendingRecords(records), time.time),
        )
    finally:
        records.close()


def added(site: WorkerContext, content: bytes, window: int = 3_600) -> BatchRecord:
    """A batch whose input file is in the store."""
    now = int(site.clock())
    file = FileRecord("file-1", "t", "batch", "in.jsonl", len(content), now)
    site.files.add(file)
    site.objects.put(content_path(file.id), content)
    return site.batches.create(BatchRecord("batch_1", "t", CHAT, file.id, "1h", now, now + window, "d"))


def claimed(site: WorkerContext, batch: BatchRecord, holder: str, now: float = 0.0) -> Held:
    """Taken, if nobody has it at this time."""
    held = site.batches.claim(batch.id, holder, now, 5.0)
    assert held is not None
    return held


def checked(site: WorkerContext, batch: BatchRecord) -> Checked:
    async def check() -> Checked:
        return BatchLifecycle(site)._check(batch, None, {})

    return asyncio.run(check())


def held_until(site: WorkerContext, batch: BatchRecord) -> float | None:
    with site.batches._records.reading() as connection:
        return connection.scalar(sa.select(BATCHES.c.held_until).where(BATCHES.c.id == batch.id))


def answered(name: str) -> Outcome:
    return Outcome(name, f"key-{name}", "{}", "stop", 1, 1, 1, None, None, ORIGIN, 0.0, 1.0)


def test_a_worker_that_lost_its_batch_leaves_the_journal_to_the_next(tmp_path: Path) -> None:
    async def lost(site: WorkerContext) -> int:
        batch = added(site, jsonl([line("a"), line("b")]))
        held = claimed(site, batch, "old")
        assert check_input(site.objects, content_path("file-1"), batch.id, CHAT, None, site.limits).errors == []
        assert site.batches.move(held, ACCEPT, 1, total=2, model="tiny")
        record = site.batches.current(held)
        assert record is not None
        run = BatchRun(site.objects, record, held, "old")
        run.load()
        run.note(KEY, answered("a"))
        run.write_journal()
        claimed(site, batch, "new", 10.0)
        await BatchLifecycle(site).deliver(Carried(held, record), run, "batch_expired")
        return len(list(run.store.journal.segments((KEY, KEY))))

    with site_of(tmp_path) as site:
        assert asyncio.run(lost(site)) == 1


def test_a_batch_that_is_done_completes_whatever_an_older_look_has_seen(tmp_path: Path) -> None:
    async def delivered(site: WorkerContext) -> None:
        batch = added(site, jsonl([line("a")]))
        held = claimed(site, batch, "me")
        assert check_input(site.objects, content_path("file-1"), batch.id, CHAT, None, site.limits).errors == []
        assert site.batches.move(held, ACCEPT, 1, total=1, model="tiny")
        record = site.batches.current(held)
        assert record is not None
        run = BatchRun(site.objects, record, held, "me")
        run.load()
        (rows,) = run.batches()
        run.commit(KEY, [replace(answered("a"), row_key=rows.rows[0].row_key)])
        await BatchLifecycle(site).deliver(Carried(held, batch), run, "")  # `batch`: as before its validation
        found = site.batches.get("t", batch.id)
        assert found is not None and (found.status, found.completed) == ("completed", 1)

    with site_of(tmp_path) as site:
        asyncio.run(delivered(site))


@pytest.mark.parametrize(("end", "status"), [("cancel", "cancelled"), ("expire", "expired"), ("", "validating")])
def test_a_batch_whose_validation_raises_ends_when_it_is_cancelled_or_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, status: str
) -> None:
    def defect(*arguments: object) -> None:
        raise TypeError("defect")

    async def carried(site: WorkerContext) -> None:
        batch = added(site, jsonl([line("a")]), window=0 if end == "expire" else 3_600)
        held = claimed(site, batch, "me")
        if end == "cancel":
            site.batches.cancel("t", batch.id, 1)
        with contextlib.nullcontext() if end else pytest.raises(TypeError):
            await Worker(site)._carry(Carried(held, batch))
        found = site.batches.get("t", batch.id)
        assert found is not None and found.status == status and (found.errors is not None) == bool(end)

    monkeypatch.setattr(batch_lifecycle, "check_input", defect)
    with site_of(tmp_path) as site:
        asyncio.run(carried(site))


def test_a_batch_waits_for_a_store_that_is_away_and_is_refused_once_its_file_is_gone(tmp_path: Path) -> None:
    with site_of(tmp_path) as site:
        batch = added(site, jsonl([line("a")]))
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        with pytest.raises(StoreError, match="is it mounted"):
            checked(site, batch)
        (tmp_path / "elsewhere").rename(tmp_path / "store")
        site.objects.delete([content_path(batch.input_file_id)])
        with pytest.raises(InputAway):
            checked(site, batch)
        site.files.forget(batch.input_file_id)
        assert [error.code for error in checked(site, batch).errors] == ["invalid_input_file"]


def test_a_feed_in_place_of_one_that_failed_keeps_the_reserve_of_its_model(tmp_path: Path) -> None:
    async def fails(site: WorkerContext) -> None:
        working = Worker(replace(site, reserve={"tiny": 1}))
        first = working._feed("tiny", "chat")
        working._feeds["tiny", "chat"][1].cancel()
        await asyncio.gather(working._feeds["tiny", "chat"][1], return_exceptions=True)
        second = working._feed("tiny", "chat")
        other = working._feed("tiny", "embedding")
        assert second is not first and not first.idle and not second.idle and other.idle
        await working._end()

    with site_of(tmp_path) as site:
        asyncio.run(fails(site))


def test_feeds_follow_the_plan_and_keep_it_while_it_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PLAN_SECONDS", 0.01)
    asked: list[tuple[list[str], list[str]]] = []

    def planned(found: Sequence[BatchRecord], mine: Collection[str]) -> Mapping[tuple[str, Task], int]:
        asked.append(([one.id for one in found], list(mine)))
        if len(asked) % 2 == 0:
            raise StoreError("away")
        return {("tiny", "chat"): 3} if mine else {}

    async def works(site: WorkerContext) -> list[int]:
        working = Worker(replace(site, capacity=planned, reserve={"tiny": 2}))
        seen, running = [2], asyncio.create_task(working.run())
        try:
            async with asyncio.timeout(10 * PATIENCE):
                while len(asked) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                batch = added(site, jsonl([line("a")]))
                while seen[-1] != 3 or len(asked) % 2:
                    seen.append(working._feeds["tiny", "chat"][0]._slots.wanted)
                    await asyncio.sleep(0.005)
            assert ([batch.id], [batch.id]) in asked
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return seen

    with site_of(tmp_path) as site:
        assert set(asyncio.run(works(site))) == {2, 3}


def test_a_worker_shows_that_it_lives_while_its_look_and_its_plan_wait_for_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RENEW_SECONDS", 0.01)
    go, waiting = threading.Event(), [threading.Event(), threading.Event()]

    def waits(number: int) -> None:
        waiting[number].set()
        go.wait()

    async def works(site: WorkerContext) -> set[float | None]:
        batch = added(site, jsonl([line("a")]))
        working = Worker(replace(site, capacity=lambda found, mine: {}, clock=itertools.count(1_000).__next__))
        assert site.batches.claim(batch.id, working._name, 0.0, 5.0) is not None
        monkeypatch.setattr(site.batches, "open_batches", lambda: waits(0))
        monkeypatch.setattr(site.batches, "open_records", lambda: waits(1))
        running = asyncio.create_task(working.run())
        try:
            async with asyncio.timeout(4 * PATIENCE):
                while not all(one.is_set() for one in waiting):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                seen = {held_until(site, batch)}
                while len(seen) < 4:
                    await asyncio.sleep(0.01)
                    seen.add(held_until(site, batch))
        finally:
            go.set()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return seen

    with site_of(tmp_path) as site:
        assert len(asyncio.run(works(site))) == 4


def test_a_worker_shows_that_it_lives_while_calls_of_the_store_hold_all_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RENEW_SECONDS", 0.01)
    go = threading.Event()

    async def works(site: WorkerContext) -> set[float | None]:
        batch = added(site, jsonl([line("a")]))
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        stuck = loop.run_in_executor(None, go.wait)
        working = asyncio.create_task(Worker(replace(site, clock=itertools.count(1_000).__next__)).run())
        try:
            async with asyncio.timeout(4 * PATIENCE):
                seen: set[float | None] = {None}
                while len(seen) < 3:  # claimed, and renewed
                    await asyncio.sleep(0.01)
                    seen.add(held_until(site, batch))
        finally:
            working.cancel()
            go.set()
            await asyncio.gather(working, stuck, return_exceptions=True)
        return seen

    with site_of(tmp_path) as site:
        assert len(asyncio.run(works(site))) == 3


def test_a_batch_that_is_cancelled_while_its_files_are_written_ends_as_cancelled_with_all_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = batch_lifecycle.write_results

    async def delivered(site: WorkerContext) -> None:
        batch = added(site, jsonl([line("a")]))
        held = claimed(site, batch, "me")
        assert check_input(site.objects, content_path("file-1"), batch.id, CHAT, None, site.limits).errors == []
        assert site.batches.move(held, ACCEPT, 1, total=1, model="tiny")
        record = site.batches.current(held)
        assert record is not None
        run = BatchRun(site.objects, record, held, "me")
        run.load()
        (rows,) = run.batches()
        run.commit(KEY, [replace(answered("a"), row_key=rows.rows[0].row_key)])

        def cancelled(*arguments: Any, **named: Any) -> Results:
            answer = site.batches.cancel("t", batch.id, 2)
            assert answer is not None and answer.status == "cancelling"
            return written(*arguments, **named)

        monkeypatch.setattr(batch_lifecycle, "write_results", cancelled)
        assert await BatchLifecycle(site).deliver(Carried(held, record), run, "")
        found = site.batches.get("t", batch.id)
        assert found is not None and (found.status, found.completed, found.failed) == ("cancelled", 1, 0)
        assert found.output_file_id is not None and found.error_file_id is None

    with site_of(tmp_path) as site:
        asyncio.run(delivered(site))


@pytest.mark.parametrize("store", ["answers", "hangs"])
def test_rows_that_finished_last_are_in_the_journal_when_requests_outlast_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    monkeypatch.setattr(model_feed, "FLUSH_SECONDS", 3_600.0)  # nothing is written but at the end
    monkeypatch.setattr(worker, "DRAIN_SECONDS", 0.05)
    monkeypatch.setattr(worker, "KEEP_SECONDS", 0.05 if store == "hangs" else 60.0)
    go = threading.Event()

    async def ends(site: WorkerContext) -> BatchRecord:
        batch = added(site, jsonl([line("short", max_tokens=1), line("long", max_tokens=3_000)]))
        working = Worker(site)
        running = asyncio.create_task(working.run())
        async with asyncio.timeout(20 * PATIENCE):
            while not any(one.run is not None and one.run.unwritten for one in working._carried.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if store == "hangs":
                monkeypatch.setattr(Journal, "append", lambda *arguments: go.wait())
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        found = site.batches.get("t", batch.id)
        assert found is not None
        return found

    with simulated_engine("--weights-ms", "100", "--output-tokens", "fixed:3000") as engine, site_of(tmp_path) as site:
        try:
            record = asyncio.run(ends(replace(site, engines=EndpointSupply(engine.url, None))))
        finally:
            go.set()
        assert (record.status, record.holder) == ("in_progress", None)
        again = BatchRun(site.objects, replace(record, epoch=2), Held(record.id, 2), "next")
        again.load()
        assert (again.completed, again.failed) == ((1, 0) if store == "answers" else (0, 0))


def test_the_records_of_a_batch_are_written_while_the_store_hangs(tmp_path: Path) -> None:
    go = threading.Event()

    async def moves(site: WorkerContext) -> BatchRecord | None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        batch = added(site, jsonl([line("a")]))
        held, lifecycle = claimed(site, batch, "me"), BatchLifecycle(site)
        stuck = [asyncio.create_task(lifecycle.patiently(go.wait)) for _ in range(40)]
        try:
            async with asyncio.timeout(4 * PATIENCE):
                await asyncio.sleep(0.01)
                assert await lifecycle._move(Carried(held, batch), ACCEPT, 1, total=1, model="tiny")
        finally:
            go.set()
            await asyncio.gather(*stuck)
            lifecycle.close()
        return site.batches.get("t", batch.id)

    with site_of(tmp_path) as site:
        found = asyncio.run(moves(site))
        assert found is not None and found.status == "in_progress"


def test_a_batch_of_a_model_that_nothing_can_ever_serve_fails_with_the_reason(tmp_path: Path) -> None:
    async def validated(site: WorkerContext) -> None:
        batch = added(site, jsonl([line("a")]))
        carried = Carried(claimed(site, batch, "me"), batch)
        assert not await BatchLifecycle(site).validated(carried)
        found = site.batches.get("t", batch.id)
        assert found is not None and found.status == "failed" and found.errors is not None
        (error,) = json.loads(found.errors)
        assert error["code"] == "model_unavailable" and error["message"].endswith("It needs 900 GiB.")

    with site_of(tmp_path) as site:
        engines = FleetSupply(GpuFleet(database="sqlite://", home=str(tmp_path), config_path="none"))  # none runs
        asyncio.run(validated(replace(site, engines=engines, never_served=lambda model, task: "It needs 900 GiB.")))


class NoOffer:
    """A supply that waits for an offer."""

    @contextlib.asynccontextmanager
    async def engine(self, model: str, task: Task, waits: Waits = for_ever) -> AsyncIterator[ServingEngine]:
        await asyncio.Event().wait()
        raise AssertionError
        yield

    def running(self, model: str) -> list[ServingEngine]:
        return []

    def awaited(self, model: str, task: Task) -> Awaited | None:
        return Awaited.OFFER


def test_a_batch_under_way_fails_when_it_is_found_that_nothing_can_ever_serve_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider that kept silent at its validation has said what it offers."""
    for name in ("WAITING_SECONDS", "COUNT_SECONDS", "NEVER_SECONDS"):
        monkeypatch.setattr(worker, name, 0.0)
    known = threading.Event()

    async def works(site: WorkerContext) -> None:
        working = Worker(
            replace(site, engines=NoOffer(), never_served=lambda *_: "No GPU." if known.is_set() else None)
        )
        running = asyncio.create_task(working.run())
        batch = added(site, jsonl([line("a")]))
        try:
            async with asyncio.timeout(20 * PATIENCE):
                while (site.batches.get("t", batch.id) or batch).waiting_for is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                known.set()
                while (found := site.batches.get("t", batch.id) or batch).status != "failed" or working._carried:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert found.failed_at is not None and "No GPU." in str(found.errors)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    with site_of(tmp_path) as site:
        asyncio.run(works(site))
