"""The published table against the objects it was made from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow.compute as pc

from batch_assets.publishing.differences import Difference, error_text
from batch_assets.publishing.published_table import PublishedTable, published_table
from batch_assets.publishing.table_scan import Hashes, repeated_ids, table_batches
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import DatasetStore, SnapshotManifest
from resources.store.object_integrity import sha256_of

PUBLISH = "materialize the dataset asset"
_NAMED = 5


def verify_table(
    store: DatasetStore, manifest: SnapshotManifest, expected: tuple[str, ...], totals: Totals | None
) -> Iterator[Difference]:
    """What differs in the table that readers see.

    `expected` are the versions of the tables that the current objects make, of which readers see one (empty while
    batches are missing: an older table is then as it should be), `totals` their counts (None when some could not be
    read).
    """
    wanted = f"version {' or '.join(expected)}"
    try:
        seen = store.current_published()
    except CorruptObject as error:
        yield Difference("corrupt_pointer", None, wanted if expected else "version of a table", str(error), PUBLISH)
        return
    if seen is None:
        if expected:
            yield Difference("missing_table", None, wanted, "none", PUBLISH)
        return
    if expected and seen not in expected:
        yield Difference("stale_table", None, wanted, f"version {seen}", PUBLISH)
    try:
        table = published_table(store, seen)
    except CorruptObject as error:
        yield Difference("broken_table", None, f"manifest of version {seen}", error_text(error), store.mended_by_run)
        return
    if table is None:
        yield Difference("broken_table", None, f"manifest of version {seen}", "none", PUBLISH)
        return
    broken = list(_file_differences(store, table))
    yield from broken
    if not broken:
        yield from _line_differences(store, table)
    if totals is not None and seen in expected:
        yield from _count_differences(store, table, manifest, totals)


def readers_version(store: DatasetStore) -> str | None:
    """Version that readers see; None where CURRENT is gone or damaged."""
    with contextlib.suppress(CorruptObject):
        return store.current_published()
    return None


def is_simulated(store: DatasetStore, version: str | None) -> bool | None:
    """Whether a published table has rows of an engine simulator; None without a table whose manifest can be read."""
    with contextlib.suppress(CorruptObject):
        table = published_table(store, version) if version else None
        return None if table is None else table.simulated
    return None


def _file_differences(store: DatasetStore, table: PublishedTable) -> Iterator[Difference]:
    for file in table.stored():
        path = f"{table.path}/{file.name}"
        try:
            digest = sha256_of(store.objects, path)
        except FileNotFoundError:
            yield Difference("broken_table", None, path, "none", PUBLISH)
            continue
        if digest != file.sha256:
            yield Difference("broken_table", None, f"{path} sha256 {file.sha256}", digest, store.mended_by_run)


def _line_differences(store: DatasetStore, table: PublishedTable) -> Iterator[Difference]:
    """The lines against the manifest that lies beside them."""
    found = dict.fromkeys(("rows", "dead", "duplicates", "prompt_tokens", "completion_tokens"), 0)
    hashes = Hashes(table.rows)
    columns = ["row_id", "error", "duplicate_of", "prompt_tokens", "completion_tokens"]
    try:
        for batch in table_batches(store, table, columns):
            hashes.add(batch.column("row_id"))
            found["rows"] += batch.num_rows
            found["dead"] += batch.num_rows - batch.column("error").null_count
            found["duplicates"] += batch.num_rows - batch.column("duplicate_of").null_count
            for name in ("prompt_tokens", "completion_tokens"):
                found[name] += pc.sum(batch.column(name)).as_py() or 0
        repeated = repeated_ids(store, table, hashes)
    except (CorruptObject, FileNotFoundError) as error:
        yield Difference("broken_table", None, "readable files", error_text(error), store.mended_by_run)
        return
    for name, value in found.items():
        if value != getattr(table, name):
            wanted = f"{name} {getattr(table, name)} in {table.path}/manifest.json"
            yield Difference("wrong_table_counts", None, wanted, f"{value} in its files", store.mended_by_run)
    if repeated:
        named = ", ".join(sorted(repeated)[:_NAMED])
        yield Difference(
            "duplicate_ids",
            None,
            "one line per row id",
            f"{len(repeated)} ids more than once: {named}",
            store.mended_by_run,
        )


def _count_differences(
    store: DatasetStore, table: PublishedTable, manifest: SnapshotManifest, totals: Totals
) -> Iterator[Difference]:
    """The table's counts against the snapshot's and the objects'."""
    pairs = {
        "rows": (manifest.rows + manifest.duplicates, table.rows),
        "duplicates": (manifest.duplicates, table.duplicates),
        "dead": (totals.dead, table.dead - table.dead_duplicates),
        "ok": (totals.ok, table.ok - (table.duplicates - table.dead_duplicates)),
        "prompt_tokens": (totals.prompt_tokens, table.prompt_tokens),
        "completion_tokens": (totals.completion_tokens, table.completion_tokens),
    }
    for name, (expected, found) in pairs.items():
        if expected != found:
            yield Difference("wrong_table_counts", None, f"{name} {expected}", str(found), store.mended_by_run)


@dataclass(frozen=True, slots=True)
class Totals:
    """Stable keys of `--json`. `rows` and `batches` are the snapshot's, the other counts those of sound objects.

    `table` is the folder of the published table, or None; `simulated`: it has rows of an engine simulator.
    `rejected` of `source_rows` are left out by the snapshot.
    """

    dataset: str
    rows: int = 0
    ok: int = 0
    dead: int = 0
    batches: int = 0
    batches_done: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    table: str | None = None
    source_rows: int = 0
    rejected: int = 0
    simulated: bool | None = None
