"""Lines of a batch under way that are damaged or gone: written again from its input file, and nothing is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.api_service import jsonl, line
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE

from batch_assets.api.batches.snapshot import SNAPSHOT, batch_store
from batch_assets.api.database.batch_records import BatchRecord
from batch_assets.api.database.file_records import content_path
from batch_assets.api.execution import batch_lifecycle, batch_queue
from batch_assets.api.execution.batch_lifecycle import BatchLifecycle, Carried, WorkerContext
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.execution.engines.engine_supply import EndpointSupply
from batch_assets.api.execution.worker import Worker
from gpu_runner.client.protocol import Completion
from gpu_runner.client.verbatim_client import VerbatimClient
from resources.objects.opening import LocalObjects

from .test_lost_results import LINES, LOSSES, Lose, ids, under_way
from .test_worker import added, site_of

ANSWERED = 100
ENDED = ("completed", "expired", "cancelled", "failed")


class Asked:
    """What an engine was asked for; from line `until` on it never answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int = LINES) -> None:
        self.lines: list[int] = []
        ask = VerbatimClient.generate

        async def generate(client: VerbatimClient, prompt: bytes, **named: Any) -> Completion:
            found = re.search(rb"say (\d+)", prompt)
            assert found is not None
            self.lines.append(number := int(found[1]))
            if number >= until:
                await asyncio.Event().wait()
            return await ask(client, prompt, **named)

        monkeypatch.setattr(VerbatimClient, "generate", generate)


def content() -> bytes:
    return jsonl([line(f"{number}", max_tokens=2) for number in range(LINES)])


@contextlib.contextmanager
def answering(site: WorkerContext) -> Iterator[WorkerContext]:
    with simulated_engine("--speed", "50", "--output-tokens", "fixed:2") as engine:
        yield replace(site, engines=EndpointSupply(engine.url, None))


@contextlib.asynccontextmanager
async def working(site: WorkerContext) -> AsyncIterator[Worker]:
    worker = Worker(site)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def becomes(site: WorkerContext, batch_id: str, found: Callable[[BatchRecord], bool]) -> BatchRecord:
    async with asyncio.timeout(20 * PATIENCE):
        while (record := site.batches.get("t", batch_id)) is None or not found(record):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return record


@pytest.mark.slow
@LOSSES
@pytest.mark.parametrize("status", ["cancelled", "expired"])
def test_lines_that_a_worker_has_finished_are_delivered_although_its_batch_s_lines_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Lose, status: str
) -> None:
    passed = [0.0]

    async def works(site: WorkerContext) -> None:
        batch = added(site, content())
        async with working(site) as worker:
            before = await becomes(site, batch.id, lambda found: found.completed >= ANSWERED)
            assert isinstance(site.objects, LocalObjects)
            lose(site.objects, batch_store(site.objects, batch.id).snapshot_path("input", "prompts-00000.parquet"))
            if status == "cancelled":
                site.batches.cancel("t", batch.id, int(time.time()))
            else:
                passed[0] = 3_600.0
                worker._carried[batch.id].news.set()
            found = await becomes(site, batch.id, lambda record: record.status in ENDED)
        assert (found.status, found.completed, found.failed) == (status, before.completed, LINES - before.completed)
        assert found.errors is None and len(ids(site, found.output_file_id)) == ANSWERED

    asked = Asked(monkeypatch, until=ANSWERED)
    with site_of(tmp_path) as made, answering(made) as site:
        asyncio.run(works(replace(site, clock=lambda: time.time() + passed[0])))
    assert len(asked.lines) == len(set(asked.lines))


@pytest.mark.slow
@LOSSES
@pytest.mark.parametrize("name", ["prompts-00000.parquet", "manifest.json"])
def test_a_batch_under_way_goes_on_when_its_lines_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Lose, name: str
) -> None:
    async def works(site: WorkerContext, record: BatchRecord) -> None:
        async with working(site):
            found = await becomes(site, record.id, lambda found: found.status in ENDED)
        assert (found.status, found.completed, found.failed) == ("completed", LINES, 0)

    monkeypatch.setattr(batch_queue, "RETRY_SECONDS", 0.01)
    asked = Asked(monkeypatch)
    with under_way(tmp_path, max_tokens=2) as (made, record, _), answering(made) as site:
        assert isinstance(site.objects, LocalObjects)
        lose(site.objects, batch_store(site.objects, record.id).snapshot_path("input", name))
        asyncio.run(works(site, record))
    assert sorted(asked.lines) == list(range(LINES))


def test_damaged_lines_are_written_again_once_a_lost_input_file_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def works(site: WorkerContext, record: BatchRecord) -> None:
        async with working(site):
            while "restore" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            site.objects.put(content_path(record.input_file_id), content())
            found = await becomes(site, record.id, lambda found: found.status in ENDED)
        assert (found.status, found.completed, found.failed) == ("completed", LINES, 0)

    monkeypatch.setattr(batch_queue, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(batch_lifecycle, "AGAIN_SECONDS", (0.01, 0.02))
    with under_way(tmp_path, max_tokens=2) as (made, record, _), answering(made) as site:
        shard = batch_store(site.objects, record.id).snapshot_path("input", "prompts-00000.parquet")
        site.objects.delete([content_path(record.input_file_id), shard])
        asyncio.run(works(site, record))


def test_lines_that_cannot_be_mended_are_written_again_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a disk that damages whatever is written."""
    now, written = [0.0], []

    async def works(site: WorkerContext, carried: Carried, run: BatchRun) -> None:
        lifecycle = BatchLifecycle(site)

        async def write(_: Carried) -> bool:
            written.append(now[0])
            return True

        async def wait(events: object, **named: Any) -> None:
            now[0] += named["timeout"] if run.lines_damaged else 0.0
            run.lines_damaged = True  # the feed has met them again

        monkeypatch.setattr(lifecycle, "lines_written_again", write)
        with monkeypatch.context() as patch:
            patch.setattr(batch_lifecycle.time, "monotonic", lambda: now[0])
            patch.setattr(batch_lifecycle.asyncio, "wait", wait)
            assert await lifecycle.until_over(carried, asyncio.Event()) == "batch_expired"
        lifecycle.close()

    with under_way(tmp_path) as (made, record, held):
        site = replace(made, clock=lambda: record.expires_at - 200 + now[0])
        run = BatchRun(site.objects, record, held, "me")
        run.lines_damaged = True
        asyncio.run(works(site, Carried(held, record, run=run), run))
    assert written == [0, 1, 3, 7, 15, 31, 63, 123, 183]


def test_an_input_file_with_fewer_lines_than_the_batch_does_not_take_their_place(tmp_path: Path) -> None:
    with under_way(tmp_path, max_tokens=2) as (site, record, held):
        site.objects.put(path := content_path(record.input_file_id), content().rpartition(b"\n")[0])
        lifecycle, store = BatchLifecycle(site), batch_store(site.objects, record.id)
        assert not asyncio.run(lifecycle.lines_written_again(Carried(held, record)))
        assert sum(entry.rows for entry in store.entries(SNAPSHOT)) == LINES
        site.objects.put(path, content())
        assert asyncio.run(lifecycle.lines_written_again(Carried(held, record)))
