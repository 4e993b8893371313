"""What lies beside exported files: of which table they are, how they were made, and how far it is."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from batch_assets.publishing.published_table import PublishedTable
from batch_assets.spec.export_options import TRAIN, VALIDATION, ExportError, ExportOptions
from resources.objects.opening import Objects
from resources.store.object_integrity import Sealed, read_sealed

FORMAT = 1
NAME = "export.json"


class ExportedFile(BaseModel):
    """One file: its records, bytes and SHA-256, which files of an earlier version do not have."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    rows: int
    bytes: int
    sha256: str | None = None


class ExportRecord(Sealed):
    """`export.json`. `next_group`: the row group of the table to go on with. `files`: all that are whole.

    `left_out`: lines of the table without a record, by reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: int = FORMAT
    dataset: str
    version: str
    options: dict[str, Any]
    next_group: int = 0
    parts: int = 0
    lines: int = 0
    complete: bool = False
    rows: dict[str, int] = Field(default_factory=dict)
    left_out: dict[str, int] = Field(default_factory=dict)
    files: list[ExportedFile] = Field(default_factory=list)


def read_record(target: Objects) -> ExportRecord | None:
    """The record of a folder, None where there is none. Raises CorruptObject."""
    try:
        return read_sealed(target, NAME, ExportRecord, "export into another folder")
    except FileNotFoundError:
        return None


def begun_record(target: Objects, table: PublishedTable, options: ExportOptions) -> ExportRecord:
    """The record to go on from; a new one is there before any file. Raises ExportError where the folder holds something
    else than this export.
    """
    wanted = ExportRecord(dataset=table.dataset, version=table.version, options=options.as_json())
    found = read_record(target)
    if found is None:
        if (other := next(iter(target.list("")), None)) is not None:
            raise ExportError(f"--to {target.root}: expected an empty folder or one of this export, found {other.path}")
        target.put(NAME, wanted.to_json())
        return wanted
    there, here = _told(found), _told(wanted)
    if there == here:
        _check_files(target, found)
        return found
    if found.parts:
        differs = [name for name in here if here[name] != there.get(name)]
        said = ", ".join(f"{name} {here[name]!r:.80} (found {there.get(name)!r:.80})" for name in differs)
        raise ExportError(
            f"--to {target.root}: expected an export with {said}; name another folder, or delete this one"
        )
    # Nothing of that one is whole: what it may have left goes.
    target.delete(f"{split}-00000.{ending}" for split in (TRAIN, VALIDATION) for ending in ("jsonl", "parquet"))
    target.put(NAME, wanted.to_json())
    return wanted


def advance(target: Objects, before: ExportRecord, after: ExportRecord) -> ExportRecord:
    """Write the record that follows on `before`. Raises ExportError where another command has written one since."""
    check_own(target, before)
    target.put(NAME, after.to_json())
    return after


def check_own(target: Objects, record: ExportRecord) -> None:
    """Raises ExportError where the folder's record is not this one: another command exports into it."""
    if read_record(target) != record:
        raise ExportError(
            f"--to {target.root}: expected one export at a time, found that another command writes here, too; wait "
            "until it has ended, then start this one again, or name another folder"
        )


def _check_files(target: Objects, record: ExportRecord) -> None:
    """Raises ExportError where files that were whole are so no more."""
    sizes = {info.path: info.size for info in target.list("")}
    if changed := [file.name for file in record.files if sizes.get(file.name) != file.bytes]:
        raise ExportError(
            f"--to {target.root}: expected the files that {NAME} lists, found {', '.join(changed[:5])} gone or of "
            "another size; name another folder, or delete this one"
        )


def _told(record: ExportRecord) -> dict[str, Any]:
    """What an export is of, and how it is made."""
    return {"dataset": record.dataset, "version": record.version, **record.options}
