"""One backup in the store: a tar stream, compressed with zstd and cut into parts, and a manifest.

`_platform/backups/ID/00000.tar.zst`, `00001.tar.zst`, … are the parts: put together and decompressed they are a tar
archive (`cat *.tar.zst | zstd -d | tar x`). `members.json` says what is in it. `manifest.json` is created last, and
never twice: a backup without it does not exist. All of it has a SHA-256. Memory is bounded by one part.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import orjson
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, TypeAdapter

from gpu_runner.errors import ExitStatus, UserFacingError
from resources.objects.opening import CorruptObject, Objects
from resources.store.object_integrity import Sealed, StoredFile, read_sealed

FOLDER = "_platform/backups/"  # no dataset's: their names do not begin with _
MANIFEST, MEMBERS = "manifest.json", "members.json"
PART_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20
LARGEST_MEMBERS = 256 << 20  # some 200 bytes for each file: a million runs
_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
_NAME = re.compile(r"(?:(?!\.{1,2}(?:/|$))[A-Za-z0-9_.-]+(?:/(?!$)|$))+")
_OTHER = "take another one: `batch-assets restore --list`"


class BackupError(UserFacingError):
    """A backup cannot be made, or cannot be used."""

    exit_status = ExitStatus.FAILED


class Member(BaseModel):
    """One file of a backup. `columns`: of a table of Postgres, in the order of the file; of a SQLite file none."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    bytes: int
    sha256: str
    columns: list[str] | None = None


class DatabaseCopy(BaseModel):
    """One database of a backup: `dagster`, `fleet` or `api`; `version`: of its tables ("": of each file its own)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    kind: str
    version: str = ""


class BackupManifest(Sealed):
    """What a backup says of itself. Times in Unix seconds; `bytes` before compression; `fleet`: whose it is."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    format: int = 1
    id: str
    began_at: float
    ended_at: float
    fleet: str
    versions: dict[str, str]
    databases: list[DatabaseCopy]
    bytes: int
    files: int
    members: StoredFile
    parts: list[StoredFile]

    @property
    def stored_bytes(self) -> int:
        """Bytes in the store."""
        return sum(part.bytes for part in self.parts) + self.members.bytes


_MEMBERS = TypeAdapter(list[Member])


def is_id(text: str) -> bool:
    """Whether this can be the id of a backup at all."""
    return _ID.fullmatch(text) is not None


def path_of(backup: str, name: str) -> str:
    """Where an object of a backup lies."""
    return f"{FOLDER}{backup}/{name}"


class _Parts(io.RawIOBase):
    """Takes a stream and creates an object of each PART_BYTES of it."""

    def __init__(self, objects: Objects, backup: str) -> None:
        self._objects, self._backup = objects, backup
        self._held = bytearray()
        self.written: list[StoredFile] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._held += data
        while len(self._held) >= PART_BYTES:
            self._put(bytes(self._held[:PART_BYTES]))
            del self._held[:PART_BYTES]
        return len(data)

    def finish(self) -> None:
        """Write what is left."""
        if self._held:
            self._put(bytes(self._held))
            self._held.clear()

    def _put(self, data: bytes) -> None:
        self.written.append(create(self._objects, self._backup, f"{len(self.written):05d}.tar.zst", data))


def create(objects: Objects, backup: str, name: str, data: bytes) -> StoredFile:
    """One object of a backup. Raises BackupError when another one is there."""
    if not objects.create(path_of(backup, name), data):
        raise BackupError(f"{path_of(backup, name)}: expected no such object, found one: give the command again")
    return StoredFile(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


class ArchiveWriter:
    """Files of one backup, in the order in which they are added. Its manifest makes them a backup."""

    def __init__(self, objects: Objects, backup: str) -> None:
        self._objects, self._backup = objects, backup
        self._parts = _Parts(objects, backup)
        self._compressed = pa.CompressedOutputStream(pa.PythonFile(self._parts, mode="w"), "zstd")
        stream = cast(IO[bytes], _OfArrow(self._compressed))
        self._tar = tarfile.TarFile.open(fileobj=stream, mode="w|", bufsize=BLOCK_BYTES)
        self.members: list[Member] = []

    def add(self, name: str, file: Path, columns: list[str] | None = None) -> None:
        """Add a local file that nobody changes any more."""
        info = tarfile.TarInfo(name)
        info.size = file.stat().st_size
        with file.open("rb") as opened:
            source = _Hashed(opened)
            self._tar.addfile(info, cast(IO[bytes], source))
        self.members.append(Member(name=name, bytes=info.size, sha256=source.digest.hexdigest(), columns=columns))

    def commit(self, make: Callable[[StoredFile, list[StoredFile]], BackupManifest]) -> BackupManifest:
        """Write what is left, then the manifest that `make` makes of the list of members and the parts."""
        self._tar.close()
        self._compressed.close()
        self._parts.finish()
        members = create(self._objects, self._backup, MEMBERS, _MEMBERS.dump_json(self.members))
        manifest = make(members, self._parts.written)
        create(self._objects, self._backup, MANIFEST, manifest.to_json())
        return manifest


class _OfArrow:
    """An output of Arrow as tarfile writes to one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._stream.write(data)
        return len(data)


class _Hashed:
    """A file that is read once; `digest` is of what was read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def backups(objects: Objects) -> Iterator[BackupManifest | CorruptObject]:
    """All backups, the oldest first; of one whose manifest is damaged, what is wrong with it."""
    for info in objects.list(FOLDER):
        backup, _, name = info.path[len(FOLDER) :].partition("/")
        if name == MANIFEST and is_id(backup):
            try:
                yield read_manifest(objects, backup)
            except CorruptObject as error:
                yield error
            except FileNotFoundError:
                continue  # deleted meanwhile


def read_manifest(objects: Objects, backup: str) -> BackupManifest:
    """Raises FileNotFoundError, and CorruptObject for one that is damaged or of another backup."""
    found = read_sealed(objects, path_of(backup, MANIFEST), BackupManifest, _OTHER)
    if found.id != backup or found.format != 1:
        where = path_of(backup, MANIFEST)
        raise CorruptObject(f"{where}: expected backup {backup} in format 1, found {found.id!r:.60}, {found.format}")
    return found


def read_members(objects: Objects, manifest: BackupManifest) -> list[Member]:
    """What is in a backup. Raises CorruptObject."""
    data = _checked(objects, manifest.id, manifest.members, LARGEST_MEMBERS)
    found = _MEMBERS.validate_json(data)
    if any(not _NAME.fullmatch(one.name) for one in found):
        raise CorruptObject(f"{path_of(manifest.id, MEMBERS)}: expected names below the backup, found others; {_OTHER}")
    return found


def _checked(objects: Objects, backup: str, file: StoredFile, most: int) -> bytes:
    path = path_of(backup, file.name)
    try:
        data = objects.get(path, most)
    except FileNotFoundError:
        raise CorruptObject(f"{path}: expected a part of the backup, found none; {_OTHER}") from None
    if len(data) != file.bytes or hashlib.sha256(data).hexdigest() != file.sha256:
        raise CorruptObject(
            f"{path}: expected {file.bytes:,} bytes with the checksum of the manifest, found others; {_OTHER}"
        )
    return data


class _PartsReader(io.RawIOBase):
    """The parts of a backup as one stream; each is compared with its checksum before a byte of it is used."""

    def __init__(self, objects: Objects, manifest: BackupManifest) -> None:
        self._objects, self._backup = objects, manifest.id
        self._left = iter(manifest.parts)
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            part = next(self._left, None)
            if part is None:
                return 0
            self._held = memoryview(_checked(self._objects, self._backup, part, 2 * PART_BYTES))
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        return count


def extract(objects: Objects, manifest: BackupManifest, folder: Path) -> list[Member]:
    """Write all files of a backup below an empty folder. Raises CorruptObject, before or after some were written.

    Only files that the list of members names are written, with the sizes and checksums that it names.
    """
    members = read_members(objects, manifest)
    try:
        with _opened(objects, manifest) as tar:
            for member in members:
                _extract_one(manifest, tar, member, folder)
    except (pa.ArrowException, tarfile.TarError, EOFError) as error:
        raise CorruptObject(f"{FOLDER}{manifest.id}: not a whole archive ({type(error).__name__}); {_OTHER}") from error
    return members


@contextlib.contextmanager
def _opened(objects: Objects, manifest: BackupManifest) -> Iterator[tarfile.TarFile]:
    source = pa.PythonFile(io.BufferedReader(_PartsReader(objects, manifest), BLOCK_BYTES), mode="r")
    with (
        pa.CompressedInputStream(source, "zstd") as stream,
        tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|", bufsize=BLOCK_BYTES) as tar,
    ):
        yield tar


def _extract_one(manifest: BackupManifest, tar: tarfile.TarFile, member: Member, folder: Path) -> None:
    info = tar.next()
    if info is None or not info.isreg() or (info.name, info.size) != (member.name, member.bytes):
        raise CorruptObject(f"{FOLDER}{manifest.id}: expected {member.name} in the archive, found another; {_OTHER}")
    source = tar.extractfile(info)
    assert source is not None
    hashed = _Hashed(source)
    target = folder / member.name
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        while block := hashed.read(BLOCK_BYTES):
            file.write(block)
    if hashed.digest.hexdigest() != member.sha256:
        raise CorruptObject(f"{FOLDER}{manifest.id}: {member.name} has not the checksum of the manifest; {_OTHER}")


def summary(manifest: BackupManifest) -> dict[str, Any]:
    """One line of a list of backups, for machines."""
    shown = orjson.loads(manifest.model_dump_json(exclude={"members", "parts", "checksum"}))
    return {**shown, "stored_bytes": manifest.stored_bytes, "parts": len(manifest.parts)}
