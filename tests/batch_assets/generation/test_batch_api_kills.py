"""A worker that is killed at any moment of a batch's life: each row is paid once, and none is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support import batch_worker
from support.batch_worker import LISTED_SECONDS
from support.fake_batch_api import MOMENTS, FakeBatchApi, fake_batch_api
from support.snapshots import MODEL, questions, write_snapshot
from support.timing import PATIENCE

from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

pytestmark = pytest.mark.slow

ROWS = 60
TESTS = Path(__file__).parent.parent.parent


async def start(root: str, url: str, run_id: str) -> Process:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    return await asyncio.create_subprocess_exec(
        sys.executable, batch_worker.__file__, root, url, run_id, env=environment, stderr=asyncio.subprocess.PIPE
    )


async def end(process: Process) -> None:
    async with asyncio.timeout(60 * PATIENCE):
        _, said = await process.communicate()
    assert process.returncode == 0, said.decode()[-3000:]


async def killed_and_continued(root: str, moment: str, **provider: Any) -> FakeBatchApi:
    """One worker that is killed at this moment, and one that does the rest."""
    async with fake_batch_api(MODEL, halves=True, **provider) as api:
        processes: list[Process] = []
        killed = asyncio.Event()

        def at(now: str) -> None:
            if now == moment and not killed.is_set():
                killed.set()
                os.kill(processes[0].pid, signal.SIGKILL)
                if now in ("uploads", "creates"):
                    raise web.HTTPServiceUnavailable  # what it asks for has not reached the provider

        api.at = at
        processes.append(await start(root, api.url, "run-1"))
        async with asyncio.timeout(60 * PATIENCE):
            await killed.wait()
            await processes[0].communicate()
        assert processes[0].returncode == -signal.SIGKILL
        processes.append(await start(root, api.url, "run-2"))
        await end(processes[1])
        return api


def check(root: str, api: FakeBatchApi) -> None:
    store = DatasetStore(open_objects(root), "d")
    snapshot = store.current_snapshot()
    assert snapshot is not None
    entries = store.entries(snapshot)
    current = store.current_objects(entries)
    outcomes = [one for batch in current.values() for one in store.outcomes(batch)]
    assert len(current) == len(entries) and sum(one.output is not None for one in outcomes) == ROWS
    asked = Counter(one["custom_id"] for one in api.asked)
    assert len(asked) == ROWS and set(asked.values()) == {1}, "each row is paid once"


@pytest.mark.parametrize(
    "moment",
    [one if one == "created" else pytest.param(one, marks=pytest.mark.soak("losses")) for one in MOMENTS],
)
def test_a_worker_that_is_killed_at_any_moment_costs_no_row_and_no_file(tmp_path: Path, moment: str) -> None:
    root = str(tmp_path / "store")
    write_snapshot(DatasetStore(open_objects(root), "d"), questions(ROWS))
    api = asyncio.run(killed_and_continued(root, moment))
    check(root, api)
    if moment != "settles":  # all rows are committed then: nobody comes to the provider again
        assert set(api.files) == api.deleted, "nothing of ours is left at the provider"
        assert not list(open_objects(root).list("d/submitted_batches/"))


@pytest.mark.soak("losses")
@pytest.mark.parametrize("moment", ["creates", "created"])
@pytest.mark.parametrize(
    "provider",
    [{"listed_after": 0.7 * LISTED_SECONDS}, {"keeps_metadata": False}, {"lists": False}],
    ids=lambda one: next(iter(one)),
)
def test_providers_that_list_late_or_little_or_nothing_are_paid_once(
    tmp_path: Path, moment: str, provider: dict[str, Any]
) -> None:
    root = str(tmp_path / "store")
    write_snapshot(DatasetStore(open_objects(root), "d"), questions(ROWS))
    check(root, asyncio.run(killed_and_continued(root, moment, **provider)))
