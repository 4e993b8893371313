"""Batch objects that are damaged or gone are made again; a store that does not answer is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import orjson
import pytest
from support.api_service import CHAT, jsonl, line
from support.open_batch import answered
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE

from batch_assets.api.batches.snapshot import check_input
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords, Held
from batch_assets.api.database.file_records import content_path
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.states import ACCEPT
from batch_assets.api.execution import batch_lifecycle, worker
from batch_assets.api.execution.batch_lifecycle import BatchLifecycle, Carried, WorkerContext
from batch_assets.api.execution.batch_run import GENERATIONS, BatchRun
from batch_assets.api.execution.catalog import missing
from batch_assets.api.execution.engines.engine_supply import EndpointSupply
from batch_assets.api.execution.results import ResultsLost, write_results
from batch_assets.api.execution.worker import Worker
from batch_assets.api.settings import ApiLimits
from gpu_runner.rows import Batch
from resources.objects.opening import CorruptObject, LocalObjects
from resources.store.dataset_store import BatchObject

from .test_catalog import ended
from .test_worker import added, claimed, site_of

FIRST, SECOND = "00000", "00001"
LINES = 251


class FailingObjects(LocalObjects):
    """A store that raises for objects of a kind, `failures` times."""

    kind, failures = "/batches/0", 0
    error: OSError = OSError(errno.EIO, "Input/output error")

    def _use(self, path: str) -> None:
        if self.failures and self.kind in path:
            self.failures -= 1
            raise self.error

    def get(self, path: str, most: int = 1 << 30) -> bytes:
        self._use(path)
        return super().get(path, most)

    def open(self, path: str) -> BinaryIO:
        self._use(path)
        return super().open(path)


def run_of(objects: LocalObjects, epoch: int = 1) -> BatchRun:
    record = BatchRecord("batch_1", "t", CHAT, "file-1", "24h", 1, 2, "d", epoch=epoch)
    if epoch == 1:
        objects.put("input", jsonl([line(f"{number}") for number in range(LINES)]))
        assert check_input(objects, "input", record.id, CHAT, None, ApiLimits()).errors == []
    run = BatchRun(objects, record, Held(record.id, epoch), f"worker{epoch}")
    run.load()
    return run


def key_of(part: Batch) -> str:
    return part.key


def commit(run: BatchRun, parts: Sequence[Batch]) -> None:
    for part in parts:
        run.commit(key_of(part), [replace(answered(row.row_id), row_key=row.row_key) for row in part.rows])


def torn(objects: LocalObjects, path: str) -> None:
    objects.put(path, objects.get(path)[:-20])


def gone(objects: LocalObjects, path: str) -> None:
    objects.delete([path])


LOSSES = pytest.mark.parametrize("lose", [torn, gone])
Lose = Callable[[LocalObjects, str], None]


def test_of_one_damaged_object_only_its_rows_are_left_to_who_takes_the_batch_over(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    first = run_of(objects)
    commit(first, list(first.batches()))
    torn(objects, first.store.batch_path(first.objects[FIRST]))
    again = run_of(objects, epoch=2)
    assert list(again.objects) == [SECOND] and (again.completed, again.failed) == (1, 0) and not again.done
    (left,) = again.batches()
    assert key_of(left) == FIRST and len(left.rows) == 250
    commit(again, [left])
    assert again.objects[FIRST].generation == 1 and again.done and again.completed == LINES
    assert (found := write_results(run_of(objects, epoch=3), "", 1, 2)).completed == LINES and found.failed == 0


def test_rows_of_a_damaged_object_that_the_journal_has_are_not_asked_for_again(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    first = run_of(objects)
    parts = list(first.batches())
    first.note(FIRST, replace(answered("7"), row_key=parts[0].rows[7].row_key))
    first.write_journal()
    commit(first, parts)
    torn(objects, first.store.batch_path(first.objects[FIRST]))
    again = run_of(objects, epoch=2)
    assert again.completed == 2, "the object of the second part, and the row in the journal"
    assert list(next(again.batches()).known) == ["7"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_take_over_waits_for_a_store_that_does_not_answer(tmp_path: Path, code: int) -> None:
    objects = FailingObjects(tmp_path)
    first = run_of(objects)
    commit(first, list(first.batches()))
    objects.failures, objects.error = 1, OSError(code, "away")
    with pytest.raises(OSError, match="away"):
        run_of(objects, epoch=2)
    assert run_of(objects, epoch=2).done, "all is as it was"


def test_a_misread_object_is_read_once_more_before_it_counts_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = LocalObjects(tmp_path)
    run = run_of(objects)
    commit(run, list(run.batches()))
    read = run.store.outcomes
    misreads = [FIRST, SECOND]

    def misread(batch: BatchObject) -> object:
        if batch.key in misreads:
            misreads.remove(batch.key)
            raise CorruptObject("misread")
        return read(batch)

    monkeypatch.setattr(run.store, "outcomes", misread)
    assert write_results(run, "", 1, 2).completed == LINES and not misreads


def test_a_row_group_is_committed_beside_a_damaged_object_of_its_name(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    first = run_of(objects)
    parts = list(first.batches())
    commit(first, parts)
    torn(objects, first.store.batch_path(first.objects[FIRST]))
    rival = BatchRun(objects, first.record, first.held, "rival")
    rival.load()  # nothing was counted yet: it does not look for objects
    commit(rival, parts)
    assert {key: batch.generation for key, batch in rival.objects.items()} == {FIRST: 1, SECOND: 0}
    with pytest.raises(CorruptObject, match="other rows"):
        rival.commit(FIRST, [answered("x")])


@LOSSES
@pytest.mark.parametrize("rest", ["batch_expired", "batch_cancelled"])
def test_once_a_batch_is_over_lines_of_a_lost_object_are_errors(tmp_path: Path, lose: Lose, rest: str) -> None:
    objects = LocalObjects(tmp_path)
    run = run_of(objects)
    commit(run, list(run.batches()))
    lose(objects, run.store.batch_path(run.objects[FIRST]))
    with pytest.raises(ResultsLost):
        write_results(run, rest, 1, 2)
    found = write_results(run, rest, 1, 2, without_lost=True)
    assert (found.completed, found.failed) == (1, 250) and found.error is not None and found.output is not None
    assert objects.get(found.error.path).count(b'"code":"result_damaged"') == 250


@contextlib.contextmanager
def under_way(folder: Path, window: int = 3_600, **body: object) -> Iterator[tuple[WorkerContext, BatchRecord, Held]]:
    """A batch of 251 lines that was accepted, in a store that fails as it is told."""
    with site_of(folder) as made:
        site = replace(made, objects=FailingObjects(folder / "store"))
        batch = added(site, jsonl([line(f"{number}", **body) for number in range(LINES)]), window)
        held = claimed(site, batch, "me")
        assert check_input(site.objects, content_path("file-1"), batch.id, CHAT, None, site.limits).errors == []
        assert site.batches.move(held, ACCEPT, 1, total=LINES, model="tiny")
        record = site.batches.current(held)
        assert record is not None
        yield site, record, held


def finished(site: WorkerContext, record: BatchRecord, held: Held, parts: int = 2) -> BatchRun:
    run = BatchRun(site.objects, record, held, "me")
    run.load()
    commit(run, list(run.batches())[:parts])
    return run


def ids(site: WorkerContext, file_id: str | None) -> list[str]:
    lines = b"" if file_id is None else site.objects.get(content_path(file_id))
    return [orjson.loads(one)["custom_id"] for one in lines.splitlines()]


async def carry(site: WorkerContext, carried: Carried) -> None:
    worker = Worker(site)
    try:
        await worker._carry(carried)
    finally:
        await worker._end()


@LOSSES
def test_what_is_lost_when_a_batch_is_done_is_asked_for_again(tmp_path: Path, lose: Lose) -> None:
    with under_way(tmp_path) as (site, record, held):
        run = finished(site, record, held)
        assert isinstance(site.objects, LocalObjects)
        lose(site.objects, run.store.batch_path(run.objects[FIRST]))
        carried, lifecycle = Carried(held, record), BatchLifecycle(site)
        assert not asyncio.run(lifecycle.deliver(carried, run, ""))
        (left,) = run.batches()
        assert key_of(left) == FIRST and not run.done and not run.over and run.completed == 1
        commit(run, [left])
        assert asyncio.run(lifecycle.deliver(carried, run, ""))
        found = site.batches.get("t", record.id)
        assert found is not None and (found.status, found.completed, found.failed) == ("completed", LINES, 0)
        assert sorted(ids(site, found.output_file_id)) == sorted(f"{number}" for number in range(LINES))


def test_results_that_are_lost_each_time_are_asked_for_three_times_and_then_fail(tmp_path: Path) -> None:
    lost: list[tuple[int, int]] = []
    with under_way(tmp_path) as (made, record, held):
        site = replace(made, lost=lambda run, again, given_up: lost.append((again, given_up)))
        run, lifecycle, asked = BatchRun(site.objects, record, held, "me"), BatchLifecycle(site), 0
        run.load()
        while left := list(run.batches()):
            asked += sum(key_of(part) == FIRST for part in left)
            commit(run, left)
            assert isinstance(site.objects, LocalObjects)
            torn(site.objects, run.store.batch_path(run.objects[FIRST]))
            delivered = asyncio.run(lifecycle.deliver(Carried(held, record), run, ""))
        found = site.batches.get("t", record.id)
        assert delivered and asked == GENERATIONS and lost == [(1, 0), (1, 0), (0, 1)]
        assert found is not None and (found.status, found.completed, found.failed) == ("completed", 1, 250)
        assert found.error_file_id is not None
        assert site.objects.get(content_path(found.error_file_id)).count(b'"code":"result_damaged"') == 250


def test_who_takes_over_a_batch_asks_no_more_for_results_that_were_lost_each_time(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    run = run_of(objects)
    parts = list(run.batches())
    run.note(FIRST, replace(answered("7"), row_key=parts[0].rows[7].row_key))
    run.write_journal()
    for _ in range(GENERATIONS):
        commit(run, [part for part in parts if key_of(part) not in run.objects])
        torn(objects, run.store.batch_path(run.objects[FIRST]))
        with contextlib.suppress(ResultsLost):
            write_results(run, "", 1, 2)
        run.ask_again([FIRST])
    again = run_of(objects, epoch=2)
    assert again.done and list(again.batches()) == [] and (again.completed, again.failed) == (2, 249)
    again.tidy()
    assert write_results(run_of(objects, epoch=3), "", 1, 2).completed == 2, "the journal has a line of it"


def test_results_that_are_lost_are_asked_for_again_after_longer_and_longer_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LOST_SECONDS", (1.0, 4.0))

    async def carries(site: WorkerContext, record: BatchRecord, held: Held) -> list[float]:
        working, pauses, rounds = Worker(site), [], iter([False] * 5 + [True])
        monkeypatch.setattr(working, "_loop", loop := Soon(asyncio.get_running_loop(), pauses))

        async def served(carried: Carried, run: BatchRun) -> bool:
            return next(rounds)

        monkeypatch.setattr(working, "_served_and_delivered", served)
        await working._carry(Carried(held, record))
        working._loop = loop.loop
        await working._end()
        return pauses

    with under_way(tmp_path) as (site, record, held):
        assert asyncio.run(carries(site, record, held)) == [1.0, 2.0, 4.0, 4.0, 4.0]


class Soon:
    """A loop whose timers end at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pauses: list[float]) -> None:
        self.loop, self.pauses = loop, pauses

    def call_later(self, seconds: float, call: Callable[[], object]) -> asyncio.Handle:
        self.pauses.append(seconds)
        return self.loop.call_soon(call)


class TornFirst(LocalObjects):
    """A store that has lost the end of the first object of the first part."""

    def get(self, path: str, most: int = 1 << 30) -> bytes:
        data = super().get(path, most)
        return data[:-20] if f"/batches/{FIRST}/" in path and path.endswith("-g0.parquet") else data


@pytest.mark.slow
def test_a_worker_asks_its_engine_again_for_what_the_store_has_lost(tmp_path: Path) -> None:
    async def works(site: WorkerContext) -> BatchRecord:
        batch = added(site, jsonl([line(f"{number}", max_tokens=2) for number in range(LINES)]))
        working = asyncio.create_task(Worker(site).run())
        try:
            async with asyncio.timeout(20 * PATIENCE):
                while (found := site.batches.get("t", batch.id)) is None or found.status != "completed":  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        return found

    with simulated_engine("--speed", "50", "--output-tokens", "fixed:2") as engine, site_of(tmp_path) as made:
        site = replace(made, objects=TornFirst(tmp_path / "store"), engines=EndpointSupply(engine.url, None))
        found = asyncio.run(works(site))
        assert (found.completed, found.failed, found.error_file_id) == (LINES, 0, None)
        assert sorted(ids(site, found.output_file_id)) == sorted(f"{number}" for number in range(LINES))


@pytest.mark.parametrize(("end", "status"), [("cancel", "cancelled"), ("expire", "expired")])
@pytest.mark.parametrize("kind", ["/batches/0", "/snapshots/"])
def test_a_batch_that_is_over_ends_with_its_finished_lines_once_the_store_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, status: str, kind: str
) -> None:
    monkeypatch.setattr(batch_lifecycle, "RETRY_SECONDS", 0.0)
    with under_way(tmp_path, window=0 if end == "expire" else 3_600) as (site, record, held):
        run = finished(site, record, held, parts=1)
        site.batches.count(held, run.completed, run.failed)
        if end == "cancel":
            site.batches.cancel("t", record.id, 1)
        current = site.batches.current(held)
        objects = site.objects
        assert current is not None and isinstance(objects, FailingObjects)
        objects.kind, objects.failures = kind, 7
        current = replace(current, epoch=2)  # taken over: objects are looked for
        asyncio.run(carry(site, Carried(held, current)))
        found = site.batches.get("t", record.id)
        assert found is not None and objects.failures == 0
        assert (found.status, found.completed, found.failed, found.errors) == (status, 250, 1, None)
        assert len(ids(site, found.output_file_id)) == 250 and ids(site, found.error_file_id) == ["250"]


@pytest.mark.slow
@LOSSES
@pytest.mark.parametrize("name", ["batches.parquet", "prompts-00000.parquet", "manifest.json"])
def test_lines_that_the_store_has_lost_are_read_from_the_input_file_again(
    tmp_path: Path, lose: Lose, name: str
) -> None:
    with under_way(tmp_path, window=0) as (site, record, held):
        run = finished(site, record, held)
        site.batches.count(held, run.completed, run.failed)
        current = site.batches.current(held)
        assert current is not None and isinstance(site.objects, LocalObjects)
        lose(site.objects, run.store.snapshot_path("input", name))
        asyncio.run(carry(site, Carried(held, current)))
        found = site.batches.get("t", record.id)
        assert found is not None and (found.completed, found.failed, found.errors) == (LINES, 0, None)


def test_an_object_that_is_gone_holds_up_the_report_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Records(f"sqlite:///{tmp_path}/api.db")) as records:
        batches, objects = BatchRecords(records), LocalObjects(tmp_path / "store")
        run = ended(batches, objects, "batch_1")
        listed = run.store.current_objects(run.entries)
        gone(objects, run.store.batch_path(run.objects[FIRST]))
        monkeypatch.setattr("resources.store.dataset_store.DatasetStore.current_objects", lambda *_: listed)
        assert [footer.key for _, footer in missing(lambda named: (), objects, run.record)] == [SECOND]
