"""A table that is made of a dataset's published one, beside it in the store: `NAME/PART`. One version for each version
of that table and of the rules by which it is made; a report lies in its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import pyarrow as pa

from batch_assets.publishing.publish import (
    changed_files,
    prune_versions,
    switch_readers,
    unfinished_versions,
    whole_table,
)
from batch_assets.publishing.published_table import PublishedTable
from batch_assets.publishing.table_files import Column, TableFile, Totals
from resources.store.dataset_store import DatasetStore
from resources.store.object_integrity import Sealed, read_sealed

Report = TypeVar("Report", bound=Sealed)


class DerivedStore(DatasetStore):
    """The place of a table that is made of a dataset's own one."""

    def __init__(self, of: DatasetStore, part: str) -> None:
        super().__init__(of.objects, f"{of.dataset}/{part}")
        self._run = of.mended_by_run

    @property
    def mended_by_run(self) -> str:
        return self._run


def renewed(
    target: DatasetStore, version: str, intact: bool, write: Callable[[], PublishedTable], keep_versions: int
) -> PublishedTable:
    """The version of a derived table, which readers see from now on; written unless it is there, byte by byte, and what
    lies beside it is `intact`."""
    left = unfinished_versions(target)
    found = whole_table(target, version)
    if found is None or changed_files(target, found) or not intact:
        found = write()
    switch_readers(target, found)
    prune_versions(target, found, keep_versions, left)
    return found


def write_manifest(
    table: PublishedTable,
    target: DatasetStore,
    version: str,
    *,
    totals: Totals,
    files: list[TableFile],
    schema: pa.Schema,
    descriptions: Mapping[str, str],
    report: tuple[str, Sealed],
    now: float,
) -> PublishedTable:
    """Write report (its name, and what it says) and manifest of a table that was made of another one, `table`: counts,
    tokens and dollars of its own lines. `descriptions`: of columns that the other one does not have."""
    described = {column.name: column.description for column in table.columns} | dict(descriptions)
    columns = [Column(name=one.name, type=str(one.type), description=described.get(one.name)) for one in schema]
    found = table.model_copy(
        update={
            "dataset": target.dataset,
            "version": version,
            "created_at": now,
            "rows": totals.rows,
            "ok": totals.rows - totals.dead,
            "dead": totals.dead,
            "duplicates": totals.duplicates,
            "dead_duplicates": totals.dead_duplicates,
            "prompt_tokens": totals.prompt_tokens,
            "completion_tokens": totals.completion_tokens,
            "usd": totals.usd,
            "unpriced": totals.unpriced,
            "reused": dict(sorted(totals.reused.items())),
            "bytes": sum(file.bytes for file in files),
            "output_mismatches": None,
            "columns": columns,
            "sources": totals.sources(),
            "files": files,
            "card": None,
        }
    )
    name, said = report
    target.objects.put(target.published_path(version, name), said.to_json())
    target.objects.put(target.published_path(version, "manifest.json"), found.to_json())
    return found


def report_of(target: DatasetStore, name: str, kind: type[Report], version: str | None = None) -> Report | None:
    """The report of the version that readers see, or of another one; None before. Raises CorruptObject."""
    version = version or target.current_published()
    if version is None:
        return None
    try:
        return read_sealed(target.objects, target.published_path(version, name), kind, target.mended_by_run)
    except FileNotFoundError:
        return None
