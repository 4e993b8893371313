"""Seconds and memory of a snapshot whose rows are made of lists (`explode`) or of groups (`group_by`).

    python -m benchmarks.chain_rows --rows 2000000

`--rows` rows come out of `explode` (ten elements a list) and go into `group_by` (ten rows a group). Each snapshot is
built in a process of its own; its peak memory is that of the process (`ru_maxrss`). The third line is a plain source of
as many rows.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.models import load_spec
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

PER_LIST, CHUNK = 10, 100_000


def write_source(path: Path, rows: int, kind: str) -> None:
    """Rows of about 60 bytes: lists of ten for `explode`, else one a row, of which every `rows / 10`th has one key."""
    writer: pq.ParquetWriter | None = None
    lines, groups = rows // PER_LIST if kind == "explode" else rows, max(1, rows // PER_LIST)
    for first in range(0, lines, CHUNK):
        numbers = range(first, min(lines, first + CHUNK))
        columns: dict[str, list[object]] = {"key": [f"topic {number % groups}" for number in numbers]}
        if kind == "explode":
            lists = ([f"What is {number} times {i}, and why?" for i in range(PER_LIST)] for number in numbers)
            columns["items"] = [json.dumps(one) for one in lists]
        else:
            columns["items"] = [f"What is {number} times 3, and why?" for number in numbers]
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
    assert writer is not None
    writer.close()


def build(folder: Path, kind: str) -> None:
    """Build one snapshot and print what it took as JSON."""
    made: dict[str, dict[str, object]] = {"explode": {"explode": "items"}, "group": {"group_by": ["key"]}}
    source: dict[str, object] = {"path": "source.parquet", **made.get(kind, {})}
    prompt = "{% for one in items %}{{ one }} {% endfor %}" if kind == "group" else "{{ items }}"
    identity = {"explode": {"id": "key"}}.get(kind, {})
    attributes = {"name": "d", "source": source, "prompt": {"user": prompt}, "model": "m", **identity}
    spec = load_spec(attributes, "defs.yaml")
    started, used = time.monotonic(), time.process_time()
    store = DatasetStore(open_objects(str(folder / "store")), "d")
    manifest = build_snapshot(spec, store, now=0.0, workdir=folder / "work", base=folder)
    print(
        json.dumps(
            {
                "rows": manifest.rows,
                "seconds": round(time.monotonic() - started, 1),
                "cpu_seconds": round(time.process_time() - used, 1),
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )


def main() -> None:
    """Measure each kind in a new process."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=2_000_000)
    options.add_argument("--kinds", default="explode,group,plain")
    options.add_argument("--in-folder", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--kind", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.in_folder is not None:
        build(given.in_folder, given.kind)
        return
    for kind in given.kinds.split(","):
        with tempfile.TemporaryDirectory() as name:
            write_source(Path(name) / "source.parquet", given.rows, kind)
            command = [sys.executable, "-m", "benchmarks.chain_rows", "--in-folder", name, "--kind", kind]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            print(f"{kind}: {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
