"""The published table against the objects it was made from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from batch_assets.differences import Difference, error_text
from batch_assets.publish import PublishedTable, published_table
from batch_assets.table_scan import Hashes, repeated_ids, table_batches
from resources.checked import sha256_of
from resources.store import CorruptObject, DatasetStore, SnapshotManifest

if TYPE_CHECKING:
    from batch_assets.verify import Totals

PUBLISH = "materialize the dataset asset"
REPAIR = "delete manifest.json of this version and materialize the dataset asset: it is written anew"
_NAMED = 5


def verify_table(
    store: DatasetStore, manifest: SnapshotManifest, expected: str | None, totals: Totals | None
) -> Iterator[Difference]:
    """What differs in the table that readers see.

    `expected` is the version that the current objects make (None while batches are missing: an older table is then as
    it should be), `totals` their counts (None when some could not be read).
    """
    try:
        seen = store.current_published()
    except CorruptObject as error:
        yield Difference("corrupt_pointer", None, f"version {expected or 'of a table'}", str(error), PUBLISH)
        return
    if seen is None:
        if expected is not None:
            yield Difference("missing_table", None, f"version {expected}", "none", PUBLISH)
        return
    if expected is not None and seen != expected:
        yield Difference("stale_table", None, f"version {expected}", f"version {seen}", PUBLISH)
    try:
        table = published_table(store, seen)
    except CorruptObject as error:
        yield Difference("broken_table", None, f"manifest of version {seen}", error_text(error), REPAIR)
        return
    if table is None:
        yield Difference("broken_table", None, f"manifest of version {seen}", "none", PUBLISH)
        return
    broken = list(_file_differences(store, table))
    yield from broken
    if not broken:
        yield from _line_differences(store, table)
    if totals is not None and seen == expected:
        yield from _count_differences(table, manifest, totals)


def readers_version(store: DatasetStore) -> str | None:
    """Version that readers see; None where CURRENT is gone or damaged."""
    with contextlib.suppress(CorruptObject):
        return store.current_published()
    return None


def _file_differences(store: DatasetStore, table: PublishedTable) -> Iterator[Difference]:
    for file in (*table.files, *([table.card] if table.card else [])):
        path = f"{table.path}/{file.name}"
        try:
            digest = sha256_of(store.objects, path)
        except FileNotFoundError:
            yield Difference("broken_table", None, path, "none", PUBLISH)
            continue
        if digest != file.sha256:
            yield Difference("broken_table", None, f"{path} sha256 {file.sha256}", digest, REPAIR)


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
        yield Difference("broken_table", None, "readable files", error_text(error), REPAIR)
        return
    for name, value in found.items():
        if value != getattr(table, name):
            wanted = f"{name} {getattr(table, name)} in {table.path}/manifest.json"
            yield Difference("wrong_table_counts", None, wanted, f"{value} in its files", REPAIR)
    if repeated:
        named = ", ".join(sorted(repeated)[:_NAMED])
        yield Difference(
            "duplicate_ids", None, "one line per row id", f"{len(repeated)} ids more than once: {named}", REPAIR
        )


def _count_differences(table: PublishedTable, manifest: SnapshotManifest, totals: Totals) -> Iterator[Difference]:
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
            yield Difference("wrong_table_counts", None, f"{name} {expected}", str(found), REPAIR)
