"""Two runs of one range, killed with `kill -9` again and again: nothing is lost, and little is asked twice."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import range_worker
from support.simulated_engine import simulated_engine
from support.snapshots import MODEL, SourceRow, questions, write_snapshot
from support.timing import PATIENCE

from batch_assets.generation.range_run import Intent, plan_range
from gpu_runner.fleet_database.database import FleetDatabase
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

ROWS, BATCH = 600, 20
KILLS = 6
RATE = 2 * range_worker.SLOTS / (128 * 0.0038)  # rows a second: of two runs, 128 tokens each, one a step of 3.8 ms


def eventually(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + PATIENCE * seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def scattered_documents() -> list[SourceRow]:
    """Rows that a run sends in another order than that of the source: 100 documents, six questions each."""
    return [
        SourceRow(f"id-{i:06d}", f"document {i % 100:04d} {'x' * 1500} What is {i}?", {"level": i % 5})
        for i in range(ROWS)
    ]


@pytest.mark.soak("losses")
@pytest.mark.parametrize("rows", [questions(ROWS), scattered_documents()], ids=["questions", "documents"])
def test_six_kills_of_two_runs_of_one_range_repeat_only_rows_in_flight(tmp_path: Path, rows: list[SourceRow]) -> None:
    root, database = str(tmp_path / "store"), f"sqlite:///{tmp_path}/fleet.db"
    store = DatasetStore(open_objects(root), "d")
    manifest = write_snapshot(store, rows, batch_rows=BATCH)
    numbers, rng = itertools.count(), random.Random(1)
    workers: dict[str, subprocess.Popen[bytes]] = {}
    in_flight = 0
    with (
        simulated_engine("--speed", "1", model=MODEL) as engine,
        contextlib.closing(FleetDatabase(database)) as fleet_db,
    ):

        def start() -> None:
            run_id = f"run-{next(numbers)}"
            command = [sys.executable, range_worker.__file__, root, database, engine.url, run_id]
            workers[run_id] = subprocess.Popen(command)

        def busy() -> list[str]:
            return [beat.run_id for beat in fleet_db.runs() if beat.run_id in workers and beat.rows_done >= 8]

        def over() -> bool:
            return any(worker.poll() is not None for worker in workers.values())

        try:
            start()
            start()
            for _ in range(KILLS):
                eventually(lambda: bool(busy()) or over())
                assert not over(), "the work was done before the kills were"
                victim = workers.pop(rng.choice(busy()))
                in_flight += int(engine.get("/simulator/stats")["in_flight"])
                victim.kill()
                victim.wait()
                start()
            for worker in workers.values():
                assert worker.wait(PATIENCE * 90) == 0
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()
        requests = int(engine.get("/simulator/stats")["requests"])
    assert plan_range(store, store.entries(manifest.snapshot), Intent("x")).todo == []
    # In flight, of both runs, and what was answered since the last segment of the journal: on a busy machine a process
    # may not get to write for a second or more.
    allowed = in_flight + KILLS * (range_worker.SLOTS + PATIENCE * RATE)
    print(f"{requests} requests for {ROWS} rows, {in_flight} in flight at {KILLS} kills")
    assert ROWS <= requests <= ROWS + allowed
