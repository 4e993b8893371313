"""A store that is away is waited for: nothing that was generated counts as absent meanwhile, and no run ends of it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from support.snapshots import commit, outcome, questions, write_snapshot
from support.timing import PATIENCE

from batch_assets.generation.range_run import Intent, RangeRun, RunClaims, RunIdentity, plan_range
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.rows import Batch, Outcome
from resources.objects.opening import LocalObjects, Objects, S3Objects, StoreError
from resources.store.dataset_store import DatasetStore, SnapshotManifest

SILENT = 1000.0
AWAY_SECONDS = 0.7
Result = TypeVar("Result")


@pytest.fixture
def fleet_db(tmp_path: Path) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db:
        yield fleet_db


def a_run(
    store: DatasetStore, manifest: SnapshotManifest, run_id: str, fleet_db: FleetDatabase | None = None
) -> RangeRun:
    entries = store.entries(manifest.snapshot)
    keys = (entries[0].key, entries[-1].key)
    if fleet_db is not None:
        fleet_db.begin_run(run_id, "d", *keys)
    claims = RunClaims(fleet_db, run_id, "d", SILENT) if fleet_db is not None else None
    plan = plan_range(store, entries, Intent(run_id))
    return RangeRun(store, manifest, plan, RunIdentity(run_id, Intent(run_id), keys), claims=claims)


@contextlib.contextmanager
def away(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder that is renamed; an S3 server that takes no connection."""
    if isinstance(objects, LocalObjects):
        elsewhere = objects.folder.with_name("elsewhere")
        objects.folder.rename(elsewhere)
        yield
        elsewhere.rename(objects.folder)
        return
    assert isinstance(objects, S3Objects)
    there = objects._store
    with socket.socket() as nobody, monkeypatch.context() as environment:
        nobody.bind(("127.0.0.1", 0))
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        gone = S3Objects(objects.bucket, objects.prefix, retry_seconds=0.05)._store
    objects._store_handle = gone
    yield
    objects._store_handle = there


def asked_while_away(objects: Objects, monkeypatch: pytest.MonkeyPatch, question: Callable[[], Result]) -> Result:
    """The answer to a question that is asked while the store is away, for longer than one more try."""
    found: list[Result | Exception] = []

    def ask() -> None:
        try:
            found.append(question())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    with away(objects, monkeypatch):
        thread.start()
        time.sleep(AWAY_SECONDS)
    thread.join(20 * PATIENCE)
    (answer,) = found
    if isinstance(answer, Exception):
        raise answer
    return answer


def journal(store: DatasetStore, manifest: SnapshotManifest, run_id: str, key: str, count: int) -> None:
    """What a run leaves that has answered some rows of a batch when it dies."""
    entries = store.entries(manifest.snapshot)
    (rows,) = (rows for entry, rows in store.rows(manifest, entries) if entry.key == key)
    outcomes = {key: [outcome(row, i) for i, row in enumerate(rows[:count])]}
    store.journal.append((entries[0].key, entries[-1].key), "", run_id, 1, outcomes, "chat")


def test_rows_of_an_earlier_object_are_kept_though_the_store_was_away_when_it_was_read(
    any_objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DatasetStore(any_objects, "d")
    commit(store, write_snapshot(store, questions(10)))
    manifest = write_snapshot(store, questions(8) + questions(2, start=100))
    with contextlib.closing(a_run(store, manifest, "run-1")) as run:
        (work,) = run._job.works.values()
        kept = asked_while_away(any_objects, monkeypatch, lambda: list(run.source.kept(work)))
    assert len(kept) == 10


def test_rows_of_an_earlier_object_that_is_gone_while_the_store_is_there_are_not_waited_for(
    any_objects: Objects,
) -> None:
    store = DatasetStore(any_objects, "d")
    commit(store, write_snapshot(store, questions(10)))
    manifest = write_snapshot(store, questions(8) + questions(2, start=100))
    with contextlib.closing(a_run(store, manifest, "run-1")) as run:
        (work,) = run._job.works.values()
        any_objects.delete([store.batch_path(work.keep[0])])
        assert list(run.source.kept(work)) == []


def test_a_batch_of_another_run_is_adopted_though_the_store_was_away_when_it_was_looked_for(
    any_objects: Objects, fleet_db: FleetDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DatasetStore(any_objects, "d")
    manifest = write_snapshot(store, questions(20))
    with contextlib.closing(a_run(store, manifest, "mine", fleet_db)) as run:
        fleet_db.begin_run("rival", "d", "00000", "00001")
        run.source.engine_comes()
        batches = run.source.batches()
        assert next(batches).key == "00000"  # the shard is open: no row is read from here on
        commit(store, manifest, keys=["00001"])
        left = asked_while_away(any_objects, monkeypatch, lambda: [batch.key for batch in batches])
    assert left == []
    assert run.committed.get_nowait().key == "00001"


def known(batch: Batch | None) -> int:
    return 0 if batch is None else len(batch.known)


def test_the_journal_of_earlier_runs_is_read_though_the_store_was_away_at_the_start(
    any_objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DatasetStore(any_objects, "d")
    manifest = write_snapshot(store, questions(10))
    journal(store, manifest, "before", "00000", 6)
    with contextlib.closing(a_run(store, manifest, "run-1")) as run:
        batches = run.source.batches()
        assert known(asked_while_away(any_objects, monkeypatch, lambda: next(batches, None))) == 6


def test_a_segment_is_read_though_the_store_was_away_when_the_segments_were_listed_already(
    local_objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket or folder that is not there for a moment has no such object. Taken for an absence, its rows would be
    asked for and paid again, and the segment deleted before they are committed."""
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(10))
    journal(store, manifest, "before", "00000", 6)
    read, away = store.journal.read, iter([True])

    def gone_at_first(path: str) -> dict[str, list[Outcome]]:
        if next(away, False):
            raise FileNotFoundError(path)
        return read(path)

    monkeypatch.setattr(store.journal, "read", gone_at_first)
    with contextlib.closing(a_run(store, manifest, "run-1")) as run:
        assert known(next(run.source.batches())) == 6


@pytest.mark.slow
def test_the_journal_of_a_rival_that_died_is_read_though_the_store_was_away_when_it_was_noticed(
    any_objects: Objects, fleet_db: FleetDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DatasetStore(any_objects, "d")
    manifest = write_snapshot(store, questions(20))
    with contextlib.closing(a_run(store, manifest, "mine", fleet_db)) as run:
        run.source.engine_comes()
        batches = run.source.batches()
        assert known(next(batches)) == 0
        fleet_db.begin_run("rival", "d", "00000", "00001")
        journal(store, manifest, "rival", "00001", 6)
        fleet_db.end_run("rival")
        assert known(asked_while_away(any_objects, monkeypatch, lambda: next(batches, None))) == 6


def test_a_run_that_ends_while_its_store_is_away_waits_no_longer(
    local_objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(10))
    run = a_run(store, manifest, "run-1")

    def read() -> None:
        with contextlib.suppress(StoreError):
            list(run.source.batches())

    with away(local_objects, monkeypatch):
        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.1)
        assert thread.is_alive()
        run.close()
        thread.join(20 * PATIENCE)
        assert not thread.is_alive()
