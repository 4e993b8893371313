"""What lets a reader of the store tell a damaged object from a whole one: pointers, checksums, sealed manifests.

Checksums are SHA-256 of the standard library: it runs at disk speed where the processor has instructions for it, and
stores, tools and people know it. Objects written before there were checksums have none and are read as before.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Self, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict

from resources.objects.opening import CorruptObject, Objects

READ_BYTES = 1 << 22
MOST_POINTER_BYTES = 200
LARGEST_POINTER, LARGEST_MANIFEST = 4096, 64 << 20  # a larger object is not read at all
_POINTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

SealedModel = TypeVar("SealedModel", bound="Sealed")


class StoredFile(BaseModel):
    """One object as it was written: its name below its folder, its size in bytes and its SHA-256."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """A local file, before it is uploaded under its own name."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        return cls(name=path.name, bytes=path.stat().st_size, sha256=digest.hexdigest())


class Sealed(BaseModel):
    """A manifest whose stored form carries the SHA-256 of its other fields; one from before there were any has none."""

    checksum: str | None = None

    def to_json(self) -> bytes:
        """What is stored, with its checksum."""
        plain = self.model_dump_json(exclude={"checksum"}).encode()
        return self.model_copy(update={"checksum": _digest(plain)}).model_dump_json(indent=1).encode()


def _digest(data: bytes) -> str:
    """Digest of the fields as they are written, so that a later version with more fields finds the same."""
    fields = {name: value for name, value in orjson.loads(data).items() if name != "checksum"}
    return hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hexdigest()


def is_damage(error: Exception) -> bool:
    """Whether a reader of Arrow says that the bytes it was given are no whole file of its kind.

    Not: that it was given none. What the operating system, S3 or a time-out say has an errno or a class of its own;
    Arrow's own findings are its exceptions, and OSErrors without either.
    """
    import pyarrow as pa  # slow to import: files of datasets are checked without it

    if isinstance(error, pa.ArrowException):
        return not isinstance(error, MemoryError)
    return isinstance(error, KeyError) or (type(error) is OSError and error.errno is None)


def read_sealed(objects: Objects, path: str, kind: type[SealedModel], todo: str) -> SealedModel:
    """A manifest. Raises FileNotFoundError, and CorruptObject saying `todo` when it is not as it was written."""
    data = objects.get(path, LARGEST_MANIFEST)
    try:
        found = kind.model_validate_json(data)
    except ValueError as error:
        raise CorruptObject(f"{path}: not a manifest ({type(error).__name__}, {len(data)} bytes); {todo}") from None
    if found.checksum not in (None, _digest(data)):
        raise CorruptObject(f"{path}: expected checksum {found.checksum}, found other contents; {todo}")
    return found.model_copy(update={"checksum": None})


def read_pointer(objects: Objects, path: str, todo: str) -> str | None:
    """The name that a CURRENT holds; None when there is no such object. Raises CorruptObject saying `todo`.

    A name has one part: it never leads out of the folder.
    """
    try:
        data = objects.get(path, LARGEST_POINTER)
    except FileNotFoundError:
        return None
    text = data[:MOST_POINTER_BYTES].decode("ascii", "replace").strip()
    if len(data) > MOST_POINTER_BYTES or not _POINTER.fullmatch(text):
        raise CorruptObject(f"{path}: expected one name, found {_shown(data)}; {todo}")
    return text


def _shown(data: bytes) -> str:
    return "an empty object" if not data.strip() else f"{len(data)} bytes that are none"


def sha256_of(objects: Objects, path: str) -> str:
    """SHA-256 of an object, read in blocks. Raises FileNotFoundError."""
    digest = hashlib.sha256()
    with objects.open(path) as opened:
        while block := opened.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
