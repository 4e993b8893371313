"""An export of a defs.yaml: one version for each version of the table and of the options, the newest named by CURRENT.

A version is a folder of its own, and is written by `export`: after a kill it goes on. Readers see the former version
until all files are there. The one before is kept, older ones are deleted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson

from batch_assets.exports.delta_table import is_written, write_delta
from batch_assets.exports.export import export
from batch_assets.exports.hub_push import Pushed
from batch_assets.exports.pushed_export import push_export, read_push
from batch_assets.exports.record import NAME, ExportRecord, read_record
from batch_assets.publishing.derived_table import DerivedStore
from batch_assets.publishing.published_table import PublishedTable, published_table
from batch_assets.spec.export_options import ExportError, ExportOptions
from batch_assets.spec.exports import EXPORTS, ExportSpec
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.source import JUDGED, PASSED
from resources.objects.objects_below import ObjectsBelow
from resources.objects.opening import CorruptObject, Objects, StoreError, open_objects
from resources.store.dataset_store import DatasetStore
from resources.store.object_integrity import read_pointer

FORMAT = 1
CURRENT = "CURRENT"
_AGAIN = "`batch-assets run` of the dataset writes it again"


@dataclass(frozen=True, slots=True)
class WrittenExport:
    """What lies where: `place` has the folders of all versions, `files` is that of this one. `pushed`: to the hub."""

    version: str
    record: ExportRecord
    place: Objects
    files: Objects
    pushed: Pushed | None = None


def export_declared(
    store: DatasetStore,
    spec: ExportSpec,
    *,
    base: Path,
    of: GeneratedDatasetSpec | None = None,
    final: bool = True,
    told: Callable[[ExportRecord], None] = lambda record: None,
) -> WrittenExport:
    """Write an export of the published table, push it where that is said, and have CURRENT name it; what is there is
    not written again.

    `base`: where a relative `to` begins. `of`: the dataset, for the card of what is pushed. `final`: False where more
    rows are to come: the files stay here, nothing is appended, and the export is not done yet. Raises ExportError,
    StoreError.
    """
    table = _table(store, spec)
    if table is None:
        parts = {PASSED: "rows that pass its filter", JUDGED: "judged rows"}
        what = parts.get(spec.part or "", "a published table")
        raise ExportError(f"expected {what} of {store.dataset}, found none; {store.mended_by_run}")
    place, version = export_place(store, spec, base), export_version(table, spec)
    if spec.appends and not final:
        nothing = ExportRecord(dataset=table.dataset, version=table.version, options=_options(table, spec).as_json())
        return WrittenExport(version, nothing, place, place)
    if spec.format == "delta":
        record = write_delta(
            store.objects,
            table,
            place,
            _options(table, spec),
            export=spec.name,
            version=version,
            mode=spec.mode or "overwrite",
            partition_by=spec.partition_by,
        )
        return WrittenExport(version, record, place, place)
    there = _versions(place)
    before = read_pointer(place, CURRENT, _AGAIN) if CURRENT in there else None
    files = ObjectsBelow(place, version)
    if version in there and not _is_whole(files):
        _delete_version(place, version)
    record = export(store.objects, table, files, _options(table, spec), told=told)
    if before != version:
        if (now := _table(store, spec)) is None or now.version != table.version:
            raise ExportError(
                f"{spec.name}: another table was published meanwhile, whose run writes this export, too; {_AGAIN}"
            )
        place.put(CURRENT, version.encode())
        for old in there - {CURRENT, version, before}:
            _delete_version(place, old)
    pushed = push_export(store, files, record, spec.push, of) if spec.push is not None and final else None
    return WrittenExport(version, record, place, files, pushed)


def is_exported(store: DatasetStore, spec: ExportSpec, base: Path) -> bool:
    """Whether readers see an export of the published table, with all its files."""
    try:
        if (table := _table(store, spec)) is None:
            return False
        place, version = export_place(store, spec, base), export_version(table, spec)
        if spec.format == "delta":
            mode = spec.mode or "overwrite"
            return is_written(place, table, export=spec.name, version=version, mode=mode)
        if read_pointer(place, CURRENT, _AGAIN) != version:
            return False
        files = ObjectsBelow(place, version)
        found = read_record(files)
        if found is None or not found.complete or not _is_whole(files):
            return False
        there = read_push(files)
        return spec.push is None or (
            there is not None and (there.repo, there.branch) == (spec.push.repo, spec.push.branch)
        )
    except (ExportError, StoreError):
        return False


def export_place(store: DatasetStore, spec: ExportSpec, base: Path) -> Objects:
    """Where the versions of an export lie."""
    if spec.to is None:
        return ObjectsBelow(store.objects, f"{store.dataset}/{EXPORTS}/{spec.name}")
    return open_objects(spec.to if "://" in spec.to else str(base / Path(spec.to).expanduser()))


def export_version(table: PublishedTable, spec: ExportSpec) -> str:
    """Version (16 hex digits) of the files that a table and the options make. Raises BadOption."""
    options = _options(table, spec).as_json()
    delta = [spec.mode or "overwrite", spec.partition_by] if spec.format == "delta" else []
    made = orjson.dumps([FORMAT, table.version, options, *delta], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(made).hexdigest()[:16]


def _options(table: PublishedTable, spec: ExportSpec) -> ExportOptions:
    return spec.options([column.name for column in table.columns])


def _table(store: DatasetStore, spec: ExportSpec) -> PublishedTable | None:
    return published_table(store if spec.part is None else DerivedStore(store, spec.part))


def _versions(place: Objects) -> set[str]:
    """Folders of versions, and CURRENT."""
    return {info.path.partition("/")[0] for info in place.list("")}


def _is_whole(files: Objects) -> bool:
    """Whether all files that the record names are there, of their sizes."""
    try:
        record = read_record(files)
    except CorruptObject:
        return False
    sizes = {info.path: info.size for info in files.list("")}
    return record is not None and all(sizes.get(file.name) == file.bytes for file in record.files)


def _delete_version(place: Objects, version: str) -> None:
    """The record goes first: without it nothing is taken for whole."""
    paths = [info.path for info in place.list(f"{version}/")]
    place.delete(sorted(paths, key=lambda path: not path.endswith(f"/{NAME}")))
