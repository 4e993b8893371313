"""Is a stored batch what its name and its footer say? Its pages are read, so a flipped byte is found, too."""

from __future__ import annotations

import pyarrow.compute as pc

from gpu_runner.rows import data_version
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import BatchEntry, BatchFooter, BatchObject, DatasetStore


def check_object(store: DatasetStore, entry: BatchEntry, batch: BatchObject) -> BatchFooter:
    """Read one batch object whole. Raises CorruptObject when it is not exactly what its name and footer say."""
    path = store.batch_path(batch)
    table, footer = store.read_batch(batch)
    ids, keys, errors, outputs = (table.column(name) for name in ("row_id", "row_key", "error", "output"))
    if data_version(zip(ids.to_pylist(), keys.to_pylist(), strict=True)) != entry.data_version:
        raise CorruptObject(f"{path}: its rows are not those of data version {entry.data_version}")
    if len(ids) != entry.rows or len(ids.unique()) != entry.rows:
        raise CorruptObject(f"{path}: expected {entry.rows} rows of different ids, found {len(ids.unique())}")
    if pc.any(pc.equal(errors.is_null(), outputs.is_null())).as_py():
        raise CorruptObject(f"{path}: a row has both an output and an error, or neither")
    found = {
        "dataset": store.dataset,
        "ok": errors.null_count,
        "dead": len(errors) - errors.null_count,
        "prompt_tokens": pc.sum(table.column("prompt_tokens")).as_py(),
        "completion_tokens": pc.sum(table.column("completion_tokens")).as_py(),
    }
    for name, value in found.items():
        if getattr(footer, name) != value:
            raise CorruptObject(f"{path}: its footer says {name} {getattr(footer, name)}, its rows say {value}")
    return footer
