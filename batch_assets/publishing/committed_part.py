"""The first committed batches of a dataset that is not complete, as a local file with the columns of its table.

Nobody sees it as a table: it is what a step of a chain reads while the step before is still made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from batch_assets.publishing.batch_reader import CommittedRows, pieces
from batch_assets.publishing.output_columns import OutputColumns
from batch_assets.publishing.prompt_column import PROMPT
from batch_assets.publishing.table_files import table_schema
from gpu_runner.rows import is_simulated
from resources.objects.object_read_ahead import read_ahead, threads_for
from resources.store.dataset_store import BatchEntry, BatchObject, DatasetStore, SnapshotManifest


def write_committed(
    store: DatasetStore,
    manifest: SnapshotManifest,
    entries: Sequence[BatchEntry],
    current: Mapping[str, BatchObject],
    file: Path,
    *,
    prompt: bool,
    output_columns: bool,
) -> bool:
    """Write the rows of these batches in the order of the snapshot, without duplicates, which the table has at its end.
    Returns whether a simulator wrote some of them.

    `prompt`, `output_columns`: as the table has them. Raises CorruptObject, FileNotFoundError.
    """
    schema = table_schema(store, manifest, prompt=prompt)
    columns = OutputColumns.of(manifest, schema.names) if output_columns else None
    schema = schema if columns is None else columns.within(schema)
    names = [name for name in schema.names if name != "duplicate_of"]
    committed = CommittedRows(store, manifest, current, prompt=PROMPT in schema.names)
    size, origins = committed.bytes_of, set[tuple[str | None, str | None]]()
    schema = schema.remove(schema.get_field_index("duplicate_of"))
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for rows in read_ahead(
            committed.read,
            pieces(entries, size),
            threads_for(store.objects),
            lambda piece: sum(size(entry) for entry in piece),
        ):
            rows = columns.add(rows, count=False) if columns else rows
            writer.write_table(rows.select(names).cast(schema))
            found = rows.select(["model", "engine"]).group_by(["model", "engine"]).aggregate([]).to_pylist()
            origins |= {(one["model"], one["engine"]) for one in found}
    return any(is_simulated(model or "", engine or "") for model, engine in origins)
