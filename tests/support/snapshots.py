"""Snapshots and batch objects for tests, written straight in the documented format."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gpu_runner.rows import Generation, Origin, Outcome, Row, Task, data_version, row_key
from resources.store.dataset_store import BatchEntry, BatchFooter, BatchObject, DatasetStore, Shard, SnapshotManifest
from resources.store.object_integrity import StoredFile

ORIGIN = Origin("simulated/tiny", "simulated 1.0", "simulated", "1x H100", True, "run-1")
MODEL = "simulated/tiny"


@dataclass(frozen=True)
class SourceRow:
    """One source row: its id, its question, and what the table keeps of it."""

    row_id: str
    question: str
    keep: Mapping[str, Any]


def questions(count: int, *, start: int = 0) -> list[SourceRow]:
    """Source rows with two kept columns."""
    return [
        SourceRow(f"id-{i:06d}", f"What is {i} plus {i}?", {"topic": f"topic {i % 3}", "level": i % 5})
        for i in range(start, start + count)
    ]


def outcome(row: Row, number: int = 0, *, dead: bool = False, task: Task = "chat", output: Any = None) -> Outcome:
    """A completion, or a dead letter, with figures that differ from row to row."""
    if output is None:
        output = (float(number), 1.0, 0.5) if task == "embedding" else f"answer {number} to {row.row_id}"
    return Outcome(
        row_id=row.row_id,
        row_key=row.row_key,
        output=None if dead else output,
        finish_reason=None if dead else "stop",
        prompt_tokens=0 if dead else 10 + number % 7,
        completion_tokens=0 if dead else 20 + number % 11,
        tries=3 if dead else 1,
        error="prompt_too_long" if dead else None,
        error_message="the prompt has 9000 tokens, the engine takes 4096" if dead else None,
        origin=ORIGIN,
        started_at=1_700_000_000.0 + number,
        seconds=0.25,
        usd=None if dead else 0.001,
    )


def write_snapshot(
    store: DatasetStore,
    rows: Sequence[SourceRow],
    *,
    duplicates: Mapping[str, str] | None = None,
    batch_rows: int = 10,
    batches_per_shard: int = 3,
    task: Task = "chat",
    json_schema: Mapping[str, Any] | None = None,
    rejected: int = 0,
    keep_schema: Mapping[str, pa.DataType] | None = None,
    model: str = MODEL,
) -> SnapshotManifest:
    """Write a snapshot and make it current. `duplicates` maps the id of a repeated row to the row that is asked."""
    generation = Generation(task, model, {"temperature": 0}, json_schema)
    keep = list(rows[0].keep) if rows else []
    types = dict(keep_schema or {name: _type(rows[0].keep[name]) for name in keep})
    lines = [_line(generation, row, types) for row in rows]
    groups = [lines[i : i + batch_rows] for i in range(0, len(lines), batch_rows)]
    entries = [
        BatchEntry(f"{i:05d}", len(group), _version(group), *divmod(i, batches_per_shard))
        for i, group in enumerate(groups)
    ]
    snapshot = hashlib.sha256(repr((entries, sorted((duplicates or {}).items()), lines)).encode()).hexdigest()[:16]
    shards = _write_shards(store, snapshot, groups, batches_per_shard, types)
    copies = _write_duplicates(store, snapshot, rows, duplicates or {}, types)
    store.objects.put(store.snapshot_path(snapshot, "batches.parquet"), _parquet(_batches(entries)))
    manifest = SnapshotManifest(
        dataset=store.dataset,
        snapshot=snapshot,
        previous=store.current_snapshot(),
        created_at=1_700_000_000.0,
        source="questions.jsonl",
        rows=len(rows),
        batches=len(entries),
        batch_rows=batch_rows,
        source_rows=len(rows) + len(duplicates or {}) + rejected,
        rejected=rejected,
        duplicates=len(duplicates or {}),
        added=len(rows),
        changed=0,
        removed=0,
        unchanged=0,
        keep_columns=keep,
        shards=shards,
        duplicate_shards=copies,
        files=written_files(store, snapshot),
        generation={
            "task": task,
            "model": model,
            "sampling": {"temperature": 0},
            "json_schema": json_schema,
            "repair_tries": 1,
        },
    )
    store.put_manifest(manifest)
    return manifest


def _batches(entries: Sequence[BatchEntry]) -> pa.Table:
    """The table of batches."""
    columns = ("key", "rows", "data_version", "shard", "row_group")
    types_of = (pa.string(), pa.int64(), pa.string(), pa.int32(), pa.int32())
    return pa.table(
        {
            name: pa.array([getattr(entry, name) for entry in entries], kind)
            for name, kind in zip(columns, types_of, strict=True)
        }
    )


def written_files(store: DatasetStore, snapshot: str) -> list[StoredFile]:
    """Size and checksum of what lies in a snapshot's folder."""
    folder = store.snapshot_path(snapshot, "")
    found = {info.path[len(folder) :]: store.objects.get(info.path) for info in store.objects.list(folder)}
    return [
        StoredFile(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in found.items()
        if name != "manifest.json"
    ]


def commit(
    store: DatasetStore,
    manifest: SnapshotManifest,
    *,
    keys: Iterable[str] | None = None,
    dead: Iterable[str] = (),
    cut: Collection[str] = (),
    generation: int = 0,
    answer: Callable[[Row, int], Any] | None = None,
) -> dict[str, BatchFooter]:
    """Commit batches (all unless `keys`), rows in `dead` as dead letters, those in `cut` with an answer that ends at
    its token limit; returns their footers by key."""
    wanted, lost = None if keys is None else set(keys), set(dead)
    task = manifest.settings().task
    footers = {}
    number = 0
    for entry, rows in store.rows(manifest, store.entries(manifest.snapshot)):
        if wanted is None or entry.key in wanted:
            outcomes = [
                outcome(
                    row,
                    number + i,
                    dead=row.row_id in lost,
                    task=task,
                    output=answer(row, number + i) if answer else None,
                )
                for i, row in enumerate(rows)
            ]
            outcomes = [replace(one, finish_reason="length") if one.row_id in cut else one for one in outcomes]
            footer = BatchFooter.of(
                store.dataset,
                entry,
                outcomes,
                snapshot=manifest.snapshot,
                generation=generation,
                epoch=1,
                run_id=ORIGIN.run_id,
                root_run_id=ORIGIN.run_id,
            )
            footers[entry.key], _ = store.commit(footer, outcomes, task)
        number += len(rows)
    return footers


def overwrite(store: DatasetStore, path: str, data: bytes) -> None:
    """Damage an object, as a broken disk or a careless hand would."""
    store.objects.put(path, data)


def current_path(store: DatasetStore, manifest: SnapshotManifest, key: str) -> str:
    """Path of the current object of a batch."""
    current: BatchObject = store.current_objects(store.entries(manifest.snapshot))[key]
    return store.batch_path(current)


def _line(generation: Generation, row: SourceRow, types: Mapping[str, Any]) -> dict[str, Any]:
    prompt = [{"role": "user", "content": row.question}] if generation.task == "chat" else row.question
    line = {"row_id": row.row_id, "row_key": row_key(generation, prompt), "prompt": orjson.dumps(prompt)}
    return line | {name: row.keep[name] for name in types}


def _version(group: Sequence[Mapping[str, Any]]) -> str:
    return data_version((line["row_id"], line["row_key"]) for line in group)


def _type(value: Any) -> pa.DataType:
    return pa.scalar(value).type


def _write_shards(
    store: DatasetStore,
    snapshot: str,
    groups: Sequence[Sequence[Mapping[str, Any]]],
    batches_per_shard: int,
    types: Mapping[str, pa.DataType],
) -> list[Shard]:
    fields = {"row_id": pa.string(), "row_key": pa.string(), "prompt": pa.binary(), **types}
    schema = pa.schema(list(fields.items()))
    shards = []
    for first in range(0, len(groups), batches_per_shard):
        inside = groups[first : first + batches_per_shard]
        sink = io.BytesIO()
        with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
            for group in inside:
                writer.write_table(pa.Table.from_pylist(list(group), schema=schema))
        name = f"prompts-{len(shards):05d}.parquet"
        store.objects.put(store.snapshot_path(snapshot, name), sink.getvalue())
        shards.append(Shard(path=name, rows=sum(map(len, inside))))
    return shards


def _write_duplicates(
    store: DatasetStore,
    snapshot: str,
    rows: Sequence[SourceRow],
    duplicates: Mapping[str, str],
    types: Mapping[str, pa.DataType],
) -> list[Shard]:
    if not duplicates:
        return []
    kept = {row.row_id: row.keep for row in rows}
    lines = [{"row_id": copy, "of_row_id": first, **kept[first]} for copy, first in duplicates.items()]
    schema = pa.schema([("row_id", pa.string()), ("of_row_id", pa.string()), *types.items()])
    half = (len(lines) + 1) // 2
    shards = []
    for part in (lines[:half], lines[half:]):
        if part:
            name = f"duplicates-{len(shards):05d}.parquet"
            table = pa.Table.from_pylist(part, schema=schema)
            store.objects.put(store.snapshot_path(snapshot, name), _parquet(table))
            shards.append(Shard(path=name, rows=len(part)))
    return shards


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()
