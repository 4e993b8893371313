"""What a run has journaled is not asked again, whatever became of the writes; and segments do not pile up."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.range_runs import a_run, first_committed, generate, journaled, leased
from support.simulated_engine import simulated_engine
from support.snapshots import MODEL, outcome, questions, write_snapshot

from batch_assets.generation.range_run import RangeRun
from batch_assets.worker import part_journal
from batch_assets.worker.part_journal import JournalWriter, PartJournal
from gpu_runner.rows import Row
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore


@pytest.mark.slow
def test_what_a_stopped_run_had_journaled_is_not_asked_again(local_objects: Objects) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(300), batch_rows=100)

    async def stop_in_the_middle(run: RangeRun, url: str) -> None:
        serving = asyncio.create_task(run.serve(leased(url)))
        while run.progress().rows_done < 120:  # noqa: ASYNC110  (progress has no event)
            await asyncio.sleep(0.01)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await run.flush()

    with simulated_engine("--speed", "10", model=MODEL) as engine:
        first = a_run(store, manifest, "run-1")
        asyncio.run(stop_in_the_middle(first, engine.url))
        first.close()
        done = first.progress().rows_done
        second = a_run(store, manifest, "run-2")
        asyncio.run(generate(second, engine.url))
        second.close()
        assert second.progress().known + first_committed(store, manifest) >= done
        assert second.progress().ok <= 300 - done
    assert second.missing() == []
    assert not list(local_objects.list("d/journal/"))


def test_a_journal_write_that_fails_costs_no_journal(local_objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(300), batch_rows=150)
    put, failures = local_objects.put, iter(range(3))

    def fails_at_first(path: str, data: bytes) -> None:
        if "/journal/" in path and next(failures, None) is not None:
            raise OSError("the store is away")
        put(path, data)

    monkeypatch.setattr(local_objects, "put", fails_at_first)

    async def stop_in_the_middle(run: RangeRun, url: str) -> int:
        serving = asyncio.create_task(run.serve(leased(url)))
        while run.progress().rows_done < 100:  # noqa: ASYNC110  (progress has no event)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while len(journaled(store)) < 64:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return len(journaled(store))

    with simulated_engine("--speed", "2", model=MODEL) as engine:
        run = a_run(store, manifest, "run-1")
        before_the_end = asyncio.run(stop_in_the_middle(run, engine.url))
        asyncio.run(run.flush())
        run.close()
    assert next(failures, None) is None
    assert before_the_end >= 64
    assert len(journaled(store)) + first_committed(store, manifest) >= run.progress().rows_done


@pytest.mark.slow
def test_segments_go_while_the_run_goes_on_when_their_batches_are_committed(local_objects: Objects) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(800), batch_rows=20)
    most = 0

    async def watched(run: RangeRun, url: str) -> None:
        nonlocal most
        serving = asyncio.create_task(generate(run, url))
        while not serving.done():
            most = max(most, len(list(local_objects.list("d/journal/"))))
            await asyncio.sleep(0.02)
        await serving

    with simulated_engine("--speed", "5", model=MODEL) as engine:
        run = a_run(store, manifest, "run-1")
        asyncio.run(watched(run, engine.url))
        written = run._job.journal.sequence
        run.close()
    assert written > most > 0


def test_a_process_that_starts_again_under_its_run_id_overwrites_no_segment(local_objects: Objects) -> None:
    """Kubernetes starts the Job of a run again: the run id stays, and the segments are the paid rows of before."""
    store = DatasetStore(local_objects, "d")
    writer = JournalWriter("run-1", ("00000", "00001"))
    rows = [Row("00000", f"id-{number}", f"key-{number}", b'"q"') for number in range(3)]
    first = PartJournal(store, writer, "chat", closed=lambda key: False)
    first.note("00000", outcome(rows[0]))
    first.flush()
    again = PartJournal(store, writer, "chat", closed=lambda key: False)
    (path,) = again.unread()
    again.take_in(path, store.journal.read(path))
    again.note("00000", outcome(rows[1]))
    again.flush()
    assert journaled(store) == {"id-0", "id-1"}
    assert again.unread() == []


def test_rows_that_a_flush_has_just_taken_are_pending(local_objects: Objects) -> None:
    """Who believes that nothing is pending deletes what this computer keeps of the rows."""
    seen: list[bool] = []
    looks: list[threading.Thread] = []

    def closed(key: str) -> bool:
        """Called when the rows have left what waits, and are not yet on their way."""
        looks.append(threading.Thread(target=lambda: seen.append(journal.pending)))
        looks[-1].start()
        looks[-1].join(0.1)
        return False

    journal = PartJournal(DatasetStore(local_objects, "d"), JournalWriter("run-1", ("0", "1")), "chat", closed=closed)
    journal.note("0", outcome(Row("0", "id-0", "key-0", b'"q"')))
    put = local_objects.put

    def slowly(path: str, data: bytes) -> None:
        looks[0].join()
        put(path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_objects, "put", slowly)
        journal.flush()
    assert seen == [True] and not journal.pending


def test_of_a_flush_that_fails_what_is_written_stays_and_the_rest_waits(
    local_objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DatasetStore(local_objects, "d")
    monkeypatch.setattr(part_journal, "SEGMENT_BYTES", 1)  # a segment for each row
    put, left = local_objects.put, iter([True, False])
    monkeypatch.setattr(local_objects, "put", lambda path, data: put(path, data) if next(left, True) else 1 / 0)
    journal = PartJournal(store, JournalWriter("run-1", ("00000", "00001")), "chat", closed=lambda key: key == "00001")
    rows = [Row("00000", f"id-{number}", f"key-{number}", b'"q"') for number in range(3)]
    for row in rows:
        journal.note("00000", outcome(row))
    journal.note("00001", outcome(Row("00001", "committed", "committed", b'"q"')))
    with pytest.raises(ZeroDivisionError):
        journal.flush()
    assert journaled(store) == {"id-0"}
    assert [one.row_id for one in journal.unwritten("00000")] == ["id-1", "id-2"]
    journal.flush()
    assert journaled(store) == {"id-0", "id-1", "id-2"} and not journal.pending
    journal.drop_finished(lambda key: True)
    assert journaled(store) == set()
