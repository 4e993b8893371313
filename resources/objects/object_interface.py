"""What the platform needs of a store of objects: one small interface, its errors, its bounds.

The one promise everything rests on is `Objects.create`: the first writer wins and every later one is refused, at the
level of the store itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NoReturn, Protocol

from gpu_runner.errors import ExitStatus, UserFacingError

# What is read whole: batch objects, journal segments, lists of batches. Larger things are read in ranges.
LARGEST_OBJECT = 2 << 30


class StoreError(UserFacingError):
    """The store cannot be used as it is: says what was expected, what was found, and what to do."""

    exit_status = ExitStatus.WRONG_REQUEST


class CorruptObject(StoreError):
    """An object in the store does not say what its name promises."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing: its path below the root and its size in bytes.

    `etag` changes whenever the object is written again; a change of bytes that goes past the store may leave it.
    `modified_at`: when it was written, in Unix seconds by the store's clock; 0.0: it is not known.
    """

    path: str
    size: int
    etag: str = ""
    modified_at: float = field(default=0.0, compare=False)


class Objects(Protocol):
    """What the platform needs of a store. Paths use `/` and are relative to the root."""

    root: str

    def create(self, path: str, data: bytes) -> bool:
        """Write an object that must not exist; False when another writer's is there.

        Bytes that are there already and equal to `data` may count as ours (on S3 they do: the reply to our own PUT can
        be lost), so what two writers must not both win has to differ between them.
        """

    def put(self, path: str, data: bytes) -> None:
        """Write or replace a small object."""

    def upload(self, path: str, file: Path) -> None:
        """Write or replace an object from a local file of any size."""

    def get(self, path: str, most: int = LARGEST_OBJECT) -> bytes:
        """The whole object. Raises FileNotFoundError, and CorruptObject for one of more than `most` bytes."""

    def exists(self, path: str) -> bool:
        """True when the object is there."""

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects below `prefix` (a folder, ending in `/`) whose path sorts after `start_after`, in order."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects in this order; one that is not there is no error."""

    def delete_many(self, paths: Sequence[str]) -> None:
        """Delete up to a thousand objects in no order, in one request where the store can."""

    def abandoned(self, before: float) -> Iterator[ObjectInfo]:
        """What uploads have left that broke off, begun before a Unix time; `delete` takes these paths, too.

        None where the store does not show them: there, a rule of the bucket removes them.
        """

    def open(self, path: str) -> BinaryIO:
        """The object as a seekable binary file, read in ranges. Raises FileNotFoundError."""

    def uri(self, path: str) -> str:
        """A path or `s3://` URL that Polars, DuckDB and pyarrow can read."""

    def storage_options(self) -> dict[str, str]:
        """Options for `polars.scan_parquet(uri, storage_options=…)`; empty for a local folder."""


def refuse_large(path: str, size: int, most: int) -> NoReturn:
    """Raises CorruptObject: the object is larger than anything of ours."""
    raise CorruptObject(f"{path}: expected an object of at most {most:,} bytes, found {size:,}: it is none of ours")
