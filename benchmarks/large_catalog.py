"""Ticks of the sensors, and `batch-assets status`, beside a complete dataset of many batches.

    python benchmarks/large_catalog.py [--batches 80000] [--lost 2000] [--ticks 5] [--json FILE] [--profile SENSOR]

The catalog is a real one, on SQLite, written in bulk: a snapshot, and for each batch a ledger entry and an object, all
of them links to a few files. Nothing runs: each sensor is evaluated by its own function in this process, first by one
that has no memory, then by the same one again, as the code server keeps it. `--lost` batches are then deleted from the
store, and `reconcile` is evaluated until all of them are found. `status` is the command itself, three times.
`--profile`: the costliest functions of the ticks of one sensor.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import dagster as dg

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT))

from support.sensor_dataset import SPEC, SensorDataset, report_in_bulk  # noqa: E402
from support.snapshots import questions, write_snapshot  # noqa: E402

from batch_assets.catalog import ledger  # noqa: E402
from batch_assets.local_dagster.home import prepare_home  # noqa: E402
from resources.store.dataset_store import BatchObject  # noqa: E402

SENSORS = ("launcher", "capacity", "publisher", "reconcile", "reaper", "chain", "watchdog")
MOST_ROUNDS = 500
LINKS = 10_000  # of one file at most: file systems bound them


@contextlib.contextmanager
def complete(folder: Path, batches: int) -> Iterator[SensorDataset]:
    """A dataset of one row a batch, all of them there, in a project of its own."""
    defs = folder / "defs" / "d"
    defs.mkdir(parents=True)
    (defs / "questions.jsonl").write_text('{"id": "a", "question": "What?"}\n')
    (defs / "defs.yaml").write_text(
        json.dumps({"type": "batch_assets.GeneratedDataset", "attributes": {**SPEC, "batches_per_run": 500}})
    )
    os.environ["DAGSTER_HOME"] = str(folder / "home")
    home = prepare_home()
    own = {"STORE": home / "store", "DEFS": folder / "defs"}
    os.environ.update({f"BATCH_ASSETS_{name}": str(value) for name, value in own.items()})
    engines = [{"name": f"e{n}", "kind": "endpoint", "url": f"http://127.0.0.1:{9000 + n}"} for n in range(4)]
    (home / "fleet.yaml").write_text(json.dumps({"engines": engines}))
    keys = [f"{number:05d}" for number in range(batches)]
    with contextlib.ExitStack() as stack:
        instance = dg.DagsterInstance.from_config(str(home))
        ledger.remember_entries(instance)  # as the code server does
        site = SensorDataset.open(home, instance, stack, {**SPEC, "batches_per_run": 500, "objective": "fastest"})
        write_snapshot(site.store, questions(batches), batch_rows=1, batches_per_shard=400)
        instance.add_dynamic_partitions("d", keys)
        site.fleet_db.set_instances("d", 4)
        site.request()
        report_in_bulk(site, keys)
        entries = site.store.entries(site.store.current_snapshot() or "")
        paths = [path_of(site, BatchObject(entry.key, entry.data_version, 0)) for entry in entries]
        for number, path in enumerate(paths[1:], start=1):
            path.parent.mkdir(exist_ok=True)
            if number % LINKS:
                os.link(paths[number // LINKS * LINKS], path)
            else:
                shutil.copyfile(paths[0], path)
        yield site


def path_of(site: SensorDataset, batch: BatchObject) -> Path:
    """The file of a batch's object."""
    return Path(site.store.objects.uri(site.store.batch_path(batch)))


def seconds_of(site: SensorDataset, sensor: str, kept: Mapping[str, dg.SensorDefinition]) -> float:
    """How long one evaluation takes."""
    began = time.perf_counter()
    site.tick(sensor, kept)
    return time.perf_counter() - began


def kept_sensors(site: SensorDataset) -> dict[str, dg.SensorDefinition]:
    """The sensors of one code server."""
    found = site.sensors()
    own = {one.name: one for one in site.definitions.get_repository_def().sensor_defs}
    return {name: found.get(name) or own[name] for name in SENSORS if name in found or name in own}


def found_again(site: SensorDataset, kept: Mapping[str, dg.SensorDefinition], lost: int) -> dict[str, float]:
    """Delete `lost` batches from the store: ticks until all of them are marked as lost, and the slowest one."""
    keys = [entry.key for entry in site.store.entries(site.store.current_snapshot() or "")]
    gone = keys[7 :: max(1, len(keys) // lost)][:lost]
    versions = ledger.ledger_versions(site.instance, "d")
    for key in gone:
        path_of(site, BatchObject(key, versions[key].data_version, versions[key].generation)).unlink()
    ticks: list[float] = []
    while there(site) > len(keys) - len(gone) and len(ticks) < MOST_ROUNDS:
        ticks.append(seconds_of(site, "reconcile", kept))
    return {"ticks": len(ticks), "slowest": max(ticks), "launcher after": seconds_of(site, "launcher", kept)}


def there(site: SensorDataset) -> int:
    """Batches that the ledger holds to be there."""
    return sum(not version.void for version in ledger.ledger_versions(site.instance, "d").values())


def status_seconds() -> float:
    """The command, with its start."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "batch_assets.cli.main", "status"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=80_000)
    parser.add_argument("--lost", type=int, default=2_000)
    parser.add_argument("--ticks", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", choices=SENSORS)
    asked = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="large-catalog-") as folder, complete(Path(folder), asked.batches) as site:
        kept = kept_sensors(site)
        for sensor in kept:
            first = seconds_of(site, sensor, kept)
            profile = cProfile.Profile() if sensor == asked.profile else contextlib.nullcontext()
            with profile:
                later = [seconds_of(site, sensor, kept) for _ in range(asked.ticks)]
            found[sensor] = {"first": first, "median": statistics.median(later), "slowest": max(later)}
            print(sensor, {name: round(value, 2) for name, value in found[sensor].items()}, flush=True)
            if isinstance(profile, cProfile.Profile):
                pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
        took = [status_seconds() for _ in range(3)]
        found["status"] = {"first": took[0], "later": min(took[1:])}
        if asked.lost:
            found["lost"] = found_again(site, kept, asked.lost)
    for name in ("status", "lost") if asked.lost else ("status",):
        print(name, {key: round(value, 2) for key, value in found[name].items()})
    if asked.json is not None:
        asked.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
