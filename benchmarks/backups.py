"""What a backup and a restore of a platform with 80,000 batches take, while somebody writes to its databases.

    python benchmarks/backups.py [--batches 80000] [--runs 800] [--later 800] [--json FILE]

The catalog is synthetic: one real entry of a batch is copied for all others, as the ledger writes it, and each run has
a file of events as a run of 100 batches has. Of the objects in the store those of batches that were committed after the
backup are real. Backup and restore are the commands in processes of their own, whose time and memory are measured; a
thread writes events meanwhile, and its slowest write is what a backup holds others up for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import sqlalchemy as sa
import yaml
from dagster._core.test_utils import create_run_for_test

from batch_assets import settings
from batch_assets.catalog import ledger
from batch_assets.dagster_internals import AssetEventTagsTable as TAGS
from batch_assets.dagster_internals import SqlEventLogStorageTable as EVENTS
from batch_assets.local_dagster.home import ensure_storage
from benchmarks.postgres import postgres
from gpu_runner.fleet_database.database import FleetDatabase
from resources.objects.opening import open_objects
from resources.store.dataset_store import BatchObject, DatasetStore

sys.path.insert(0, str(settings.PROJECT / "tests"))
from support.snapshots import commit, questions, write_snapshot

EVENTS_OF_A_RUN = 120
CHUNK = 5000


def make_store(store: DatasetStore, batches: int, later: int) -> None:
    """A snapshot of batches of one row. All but the last `later` have an object that nobody will read."""
    manifest = write_snapshot(store, questions(batches), batch_rows=1, batches_per_shard=1000)
    entries = store.entries(manifest.snapshot)
    first = entries[0].key
    commit(store, manifest, keys=[first, *(entry.key for entry in entries[batches - later :])])
    folder = Path(store.objects.uri(f"{store.dataset}/batches"))
    real = folder / BatchObject(first, entries[0].data_version, 0).name
    for number, entry in enumerate(entries[1 : batches - later]):
        name = folder / BatchObject(entry.key, entry.data_version, 0).name
        name.parent.mkdir()
        if number % 10_000:
            os.link(real, name)
        else:  # a file may have some 65,000 names
            shutil.copyfile(real, name)
            real = name


def report(instance: dg.DagsterInstance, store: DatasetStore, later: int) -> None:
    """Entries of the ledger for all batches but the last ones: one is written, and copied in bulk."""
    snapshot = store.current_snapshot() or ""
    entries = store.entries(snapshot)
    for start in range(0, len(entries), 10_000):
        instance.add_dynamic_partitions(store.dataset, [entry.key for entry in entries[start : start + 10_000]])
    first = entries[0]
    footer = store.footer(BatchObject(first.key, first.data_version, 0))
    instance.report_runless_asset_event(ledger.batch_event(store, footer, snapshot))
    with instance.event_log_storage.index_connection() as connection:  # type: ignore[attr-defined]
        (event,) = connection.execute(sa.select(EVENTS).where(EVENTS.c.partition == first.key)).mappings().all()
        tags = connection.execute(sa.select(TAGS).where(TAGS.c.event_id == event["id"])).mappings().all()
        for start in range(1, len(entries) - later, CHUNK):
            events, lines = [], []
            for number, entry in enumerate(entries[start : min(start + CHUNK, len(entries) - later)], start):

                def own(text: str, key: str = entry.key, version: str = entry.data_version) -> str:
                    return text.replace(first.data_version, version).replace(f'"{first.key}"', f'"{key}"')

                place = event["id"] + number
                events.append({**event, "id": place, "partition": entry.key, "event": own(event["event"])})
                for tag in tags:
                    plain = {name: value for name, value in tag.items() if name != "id"}
                    lines.append(plain | {"event_id": place, "value": own(tag["value"])})
            connection.execute(EVENTS.insert(), events)
            connection.execute(TAGS.insert(), lines)
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SELECT setval('event_logs_id_seq', (SELECT max(id) FROM event_logs))")
        connection.commit()


def make_runs(instance: dg.DagsterInstance, home: Path, count: int) -> None:
    """Runs that have ended; on SQLite each with a file of events."""
    ids = [create_run_for_test(instance, "j", status=dg.DagsterRunStatus.SUCCESS).run_id for _ in range(count)]
    for number in range(EVENTS_OF_A_RUN):
        instance.report_engine_event(
            f"event {number} of a run, as long as one of its events may be: {'x' * 600}",
            None,
            None,
            run_id=ids[0],
            job_name="j",
        )
    file = home / "history" / "runs" / f"{ids[0]}.db"
    for run_id in ids[1:] if file.exists() else ():
        shutil.copyfile(file, file.with_name(f"{run_id}.db"))


@contextlib.contextmanager
def writer(instance: dg.DagsterInstance) -> Iterator[list[float]]:
    """Somebody reports a batch twenty times a second; yields how long each write took, in seconds."""
    took: list[float] = []
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.wait(0.05):
            began = time.monotonic()
            instance.report_runless_asset_event(dg.AssetMaterialization(["other", "rows"], partition=str(number)))
            took.append(time.monotonic() - began)
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield took
    finally:
        stop.set()
        thread.join()


def measured(*words: str) -> tuple[float, float, dict[str, Any]]:
    """Seconds, peak memory in MB and what a command said as JSON."""
    code = (
        "import json, resource, subprocess, sys;"
        "done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE);"
        "peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024;"
        "print(json.dumps([done.returncode, peak, done.stdout.decode()]))"
    )
    command = [sys.executable, "-m", "batch_assets.cli.main", *words, "--json"]
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code, *command], stdout=subprocess.PIPE, check=True)
    seconds = time.monotonic() - began
    status, peak, said = json.loads(ended.stdout)
    assert status == 0, said
    return seconds, peak, json.loads(said)


def bench(folder: Path, batches: int, runs: int, later: int, url: str | None) -> dict[str, Any]:
    home = folder / ("postgres" if url else "sqlite")
    home.mkdir()
    config = yaml.safe_load((settings.PROJECT / "deploy" / "local" / "dagster.yaml").read_text())
    config |= {"storage": {"postgres": {"postgres_url": url}}} if url else {}
    (home / "dagster.yaml").write_text(yaml.safe_dump(config))
    os.environ |= {"DAGSTER_HOME": str(home), "BATCH_ASSETS_STORE": str(folder / "store")}
    os.environ |= {"BATCH_ASSETS_FLEET_DB": url, "BATCH_ASSETS_API_DB": url} if url else {}
    store = DatasetStore(open_objects(settings.store_root()), "d")
    ensure_storage(home)
    FleetDatabase(settings.fleet_database()).close()
    with dg.DagsterInstance.from_config(str(home)) as instance:
        report(instance, store, later)
        make_runs(instance, home, runs)
        with writer(instance) as alone:
            time.sleep(5)
        with writer(instance) as beside:
            backup_seconds, backup_mb, made = measured("backup")
    kept = (home / "dagster.yaml").read_text()
    shutil.rmtree(home)
    home.mkdir()
    (home / "dagster.yaml").write_text(kept)
    if url:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    restore_seconds, restore_mb, told = measured("restore", "--backup", made["id"])
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assert len(ledger.ledger_versions(instance, "d")) == batches
    return {
        "database": "postgres" if url else "sqlite",
        "batches": batches,
        "runs": runs,
        "batches_after_the_backup": told["datasets"][0]["reported"],
        "backup_seconds": round(backup_seconds, 1),
        "backup_copy_seconds": round(made["ended_at"] - made["began_at"], 1),
        "backup_peak_mb": round(backup_mb),
        "bytes": made["bytes"],
        "stored_bytes": made["stored_bytes"],
        "files": made["files"],
        "writes_alone_max_seconds": round(max(alone), 3),
        "writes_beside_max_seconds": round(max(beside), 3),
        "writes_beside": len(beside),
        "restore_seconds": round(restore_seconds, 1),
        "restore_peak_mb": round(restore_mb),
        "load_average": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=80_000)
    parser.add_argument("--runs", type=int, default=800)
    parser.add_argument("--later", type=int, default=800)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    with postgres() as server, tempfile.TemporaryDirectory(prefix="backups-") as folder:
        began = time.monotonic()
        make_store(DatasetStore(open_objects(f"{folder}/store"), "d"), given.batches, given.later)
        print(f"store made in {time.monotonic() - began:.0f} s", file=sys.stderr)
        for url in (None, server.url()):
            found.append(bench(Path(folder), given.batches, given.runs, given.later, url))
            print(json.dumps(found[-1], indent=1), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
