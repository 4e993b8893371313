"""A large table published once: source → snapshot → batch objects → table → verify → export, without an engine.

    python benchmarks/publication.py [--rows 20000000] [--writers 1] [--folder DIR]

The snapshot, the batch objects, the table and its check are made by the platform's own code; only the outcomes are
invented: a sentence for each row, one row in 1,000 a dead letter. Each phase runs in a process of its own, so that its
peak of memory is its own. Prints wall and CPU seconds, peak MiB and what lies on the disk after each phase. Fails
unless every source row is in the table once, in the order of the snapshot's batches, and `verify` finds no difference.
For a check of memory that does not grow, run it twice with different `--rows`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
from scale import write_source

from batch_assets.exports.export import export
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import published_table
from batch_assets.publishing.verify import LedgerEntry, verify
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.export_options import checked_options
from batch_assets.spec.models import GeneratedDatasetSpec
from gpu_runner.rows import Origin, Outcome, Row
from resources.objects.opening import LocalObjects
from resources.store.dataset_store import BatchFooter, DatasetStore, SnapshotManifest

NAME, BATCH, DEAD_EVERY = "publication", 250, 1_000
RUN = "benchmark"
ORIGIN = Origin("bench", "simulated", "local", "none", False, RUN)
STARTED = 1_800_000_000.0


def the_store(folder: Path) -> DatasetStore:
    """The dataset below `folder`."""
    return DatasetStore(LocalObjects(folder / "store"), NAME)


def the_manifest(store: DatasetStore) -> SnapshotManifest:
    """Of the snapshot that there is."""
    snapshot = store.current_snapshot()
    assert snapshot is not None
    return store.manifest(snapshot)


def write_snapshot(folder: Path, rows: int) -> None:
    """The asset `prompts` without Dagster."""
    spec = GeneratedDatasetSpec.model_validate(
        {
            "name": NAME,
            "source": {"path": str(folder / "source.parquet")},
            "id": "id",
            "keep_columns": ["topic"],
            "prompt": {"user": "{{ question }}"},
            "model": "bench",
            "sampling": {"temperature": 1.0, "max_tokens": 64},
            "batch_rows": BATCH,
        }
    )
    (folder / "store").mkdir()
    with tempfile.TemporaryDirectory(dir=folder) as workdir:
        manifest = build_snapshot(spec, the_store(folder), now=STARTED, workdir=Path(workdir))
    assert manifest.rows == rows


def outcome(row: Row, number: int) -> Outcome:
    """An invented answer of about 30 tokens; a dead letter where `number` is a multiple of 1,000."""
    dead = number % DEAD_EVERY == 0
    return Outcome(
        row_id=row.row_id,
        row_key=row.row_key,
        output=None if dead else f"Row {row.row_id} follows from {row.row_key[:24]}, as {row.row_key[24:48]} shows.",
        finish_reason=None if dead else "stop",
        prompt_tokens=17,
        completion_tokens=0 if dead else 30,
        tries=3 if dead else 1,
        error="timeout" if dead else None,
        error_message="no answer within the time-out" if dead else None,
        origin=ORIGIN,
        started_at=STARTED + number / 1000,
        seconds=1.5,
        usd=2e-6,
    )


def commit_batches(folder: Path, first: int, last: int) -> None:
    """Batch objects number `first` to `last` of the snapshot, as a run writes them."""
    store = the_store(folder)
    manifest = the_manifest(store)
    entries = store.entries(manifest.snapshot)[first:last]
    for number, (entry, rows) in enumerate(store.rows(manifest, entries), first):
        outcomes = [outcome(row, number * BATCH + place) for place, row in enumerate(rows)]
        footer = BatchFooter.of(
            NAME, entry, outcomes, snapshot=manifest.snapshot, generation=1, epoch=1, run_id=RUN, root_run_id=RUN
        )
        assert store.commit(footer, outcomes, "chat")[1]


def write_table(folder: Path) -> None:
    """The asset `dataset` without Dagster."""
    store = the_store(folder)
    with tempfile.TemporaryDirectory(dir=folder) as workdir:
        publish(store, the_manifest(store), card=Card(), now=STARTED, workdir=Path(workdir))


def check_table(folder: Path, rows: int) -> None:
    """Every source row is in the table once, with its own prompt and outcome."""
    store = the_store(folder)
    table = published_table(store)
    assert table is not None
    dead = -(-rows // DEAD_EVERY)
    query = (
        "SELECT count(*), count(DISTINCT row_id), sum(row_id::BIGINT), count(output), count(DISTINCT batch), "
        "count(*) FILTER (starts_with(prompt[1].content, 'Question ' || row_id || ':')), "
        "count(*) FILTER (starts_with(output, 'Row ' || row_id || ' ')) FROM read_parquet(?)"
    )
    with duckdb.connect(config={"memory_limit": "2GB", "temp_directory": str(folder / "duckdb")}) as connection:
        found = connection.execute(query, [table.glob(store.objects)]).fetchone()
    wanted = (rows, rows, rows * (rows - 1) // 2, rows - dead, -(-rows // BATCH), rows, rows - dead)
    if found != wanted:
        raise RuntimeError(f"expected {wanted}, found {found}")


def verify_all(folder: Path) -> None:
    """`batch-assets verify`, with a catalog that says what the objects' names say. The list of dead letters, which
    another asset writes, is expected to be the only thing missing."""
    store = the_store(folder)
    entries = store.entries(the_manifest(store).snapshot)
    catalog = {entry.key: LedgerEntry(entry.data_version, rows=entry.rows, generation=1) for entry in entries}
    differences = verify(store, catalog).differences
    if unexpected := [one for one in differences if one.kind != "stale_dead_letters"]:
        raise RuntimeError(f"expected no difference, found {unexpected[:3]}")


def export_table(folder: Path, form: str) -> None:
    """`batch-assets export --format FORM`, a twentieth of the rows for validation."""
    store = the_store(folder)
    table = published_table(store)
    assert table is not None
    options = checked_options([column.name for column in table.columns], form, validation=0.05, split_by="row_id")
    record = export(store.objects, table, LocalObjects(folder / f"export-{form}"), options)
    if sum(record.rows.values()) != table.ok or not 0.04 < record.rows["validation"] / table.ok < 0.06:
        raise RuntimeError(f"expected {table.ok} rows, found {record.rows}")


def disk_mib(folder: Path) -> dict[str, float]:
    """MiB of files below each folder of the dataset; `blocks`: what the file system gave them all."""
    sizes: dict[str, float] = {"blocks": 0.0}
    for path, _, names in os.walk(folder / "store" / NAME):
        part = Path(path).relative_to(folder / "store" / NAME).parts[:1]
        for name in names:
            found = (Path(path) / name).stat()
            sizes["blocks"] += found.st_blocks * 512 / 2**20
            if part:
                sizes[part[0]] = sizes.get(part[0], 0.0) + found.st_size / 2**20
    return {name: round(size, 1) for name, size in sizes.items()}


def _phase(work: Callable[..., None], arguments: tuple[Any, ...], told: Any) -> None:
    """In a process of its own: do it, and tell its CPU seconds and peak MiB."""
    work(*arguments)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    told.put((usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024))


def measure(*jobs: tuple[Callable[..., None], tuple[Any, ...]]) -> dict[str, float]:
    """Run the jobs beside each other. Raises RuntimeError when one fails."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    began = time.monotonic()
    processes = [context.Process(target=_phase, args=(work, arguments, told)) for work, arguments in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if failed := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"a phase ended with status {failed[0]}")
    figures = [told.get() for _ in processes]
    return {
        "wall_seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(sum(cpu for cpu, _ in figures), 1),
        "peak_mib": round(max(peak for _, peak in figures)),
    }


def phases(folder: Path, rows: int, writers: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Name and figures of each phase, as they end."""
    yield "source", measure((write_source, (folder / "source.parquet", rows)))
    yield "snapshot", measure((write_snapshot, (folder, rows)))
    batches = -(-rows // BATCH)
    step = -(-batches // writers)
    ranges = [(folder, first, min(batches, first + step)) for first in range(0, batches, step)]
    yield "batch objects", measure(*((commit_batches, one) for one in ranges))
    yield "publish", measure((write_table, (folder,)))
    yield "publish again, unchanged", measure((write_table, (folder,)))
    yield "verify", measure((verify_all, (folder,)))
    check_table(folder, rows)
    for form in ("messages", "parquet"):
        yield f"export {form}", measure((export_table, (folder, form)))


def main() -> None:
    """One line of JSON per phase."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--writers", type=int, default=1, help="processes that write batch objects")
    parser.add_argument("--folder", type=Path, help="where it all lies while it runs; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for phase, figures in phases(folder, options.rows, options.writers):
            print(json.dumps({"phase": phase, **figures, "disk_mib": disk_mib(folder)}), flush=True)
        print(json.dumps({"rows": options.rows, "batches": -(-options.rows // BATCH), "table": "every row once"}))
        print(json.dumps({"load": os.getloadavg()}), flush=True)


if __name__ == "__main__":
    main()
