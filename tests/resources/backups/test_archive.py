from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

from resources.backups import archive
from resources.backups.archive import (
    ArchiveWriter,
    BackupManifest,
    DatabaseCopy,
    backups,
    extract,
    path_of,
    read_manifest,
)
from resources.objects.opening import CorruptObject, Objects
from resources.store.object_integrity import StoredFile

ID = "20261128T010000Z-abcdef"


def write(objects: Objects, folder: Path, files: dict[str, bytes], backup: str = ID) -> BackupManifest:
    writer = ArchiveWriter(objects, backup)
    for name, data in files.items():
        (folder / "file").write_bytes(data)
        writer.add(name, folder / "file", ["a", "b"] if name.startswith("postgres/") else None)

    def manifest(members: StoredFile, parts: list[StoredFile]) -> BackupManifest:
        return BackupManifest(
            id=backup,
            began_at=1.0,
            ended_at=2.0,
            fleet="ba-1",
            versions={},
            databases=[DatabaseCopy(name="fleet", kind="sqlite")],
            bytes=sum(map(len, files.values())),
            files=len(files),
            members=members,
            parts=parts,
        )

    return writer.commit(manifest)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "PART_BYTES", 4096)


@pytest.fixture
def files() -> dict[str, bytes]:
    return {"sqlite/fleet.db": os.urandom(20_000), "postgres/api/api_files": b"", "sqlite/dagster/runs/a.db": b"x" * 9}


def test_what_was_added_comes_back(any_objects: Objects, tmp_path: Path, files: dict[str, bytes]) -> None:
    made = write(any_objects, tmp_path, files)
    assert len(made.parts) > 3
    assert [*backups(any_objects)] == [made]
    members = extract(any_objects, read_manifest(any_objects, ID), tmp_path / "out")
    assert {one.name: (tmp_path / "out" / one.name).read_bytes() for one in members} == files
    assert [one.columns for one in members] == [None, ["a", "b"], None]


def test_the_parts_together_are_a_tar_archive(local_objects: Objects, tmp_path: Path, files: dict[str, bytes]) -> None:
    made = write(local_objects, tmp_path, files)
    whole = b"".join(local_objects.get(path_of(ID, part.name)) for part in made.parts)
    (tmp_path / "a.tar").write_bytes(pa.CompressedInputStream(pa.BufferReader(whole), "zstd").read())
    listed = subprocess.run(["tar", "-tf", tmp_path / "a.tar"], check=True, capture_output=True, text=True)
    assert listed.stdout.split() == [*files]


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "members", "manifest", "swapped"])
def test_a_damaged_backup_is_refused(
    local_objects: Objects, tmp_path: Path, files: dict[str, bytes], damage: str
) -> None:
    made = write(local_objects, tmp_path, files)
    part = path_of(ID, made.parts[1].name)
    data = local_objects.get(part)
    if damage == "cut":
        local_objects.put(part, data[:-1])
    elif damage == "changed":
        local_objects.put(part, data[:9] + bytes([data[9] ^ 1]) + data[10:])
    elif damage == "gone":
        local_objects.delete([part])
    elif damage == "swapped":
        local_objects.put(part, local_objects.get(path_of(ID, made.parts[2].name)))
    else:
        path = path_of(ID, f"{damage}.json")
        local_objects.put(path, local_objects.get(path).replace(b"fleet", b"float"))
    with pytest.raises(CorruptObject, match="--list"):
        extract(local_objects, read_manifest(local_objects, ID), tmp_path / "out")


def test_a_backup_without_a_manifest_is_none(local_objects: Objects, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(20_000))
    ArchiveWriter(local_objects, ID).add("sqlite/fleet.db", tmp_path / "file")
    assert [*local_objects.list(archive.FOLDER)]
    assert [*backups(local_objects)] == []


def test_a_damaged_manifest_hides_no_other(local_objects: Objects, tmp_path: Path, files: dict[str, bytes]) -> None:
    write(local_objects, tmp_path, files)
    other = write(local_objects, tmp_path, files, "20261128T020000Z-abcdef")
    local_objects.put(path_of(ID, "manifest.json"), b"{")
    first, second = backups(local_objects)
    assert isinstance(first, CorruptObject)
    assert ID in str(first)
    assert second == other
