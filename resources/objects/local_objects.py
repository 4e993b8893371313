"""Objects as files below a folder.

A create is a hard link to a file that was synced before: the file system refuses the second one.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, cast

from resources.objects.object_interface import LARGEST_OBJECT, ObjectInfo, StoreError, refuse_large
from resources.objects.store_folder import MARKER, FolderGone, StoreFolder

_TEMPORARY = ".writing-"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a file is written: the descriptor of its folder, its temporary name there, and its own."""

    folder: int
    temporary: str
    name: str

    def taken(self) -> bool:
        """An object of this name is there."""
        try:
            os.stat(self.name, dir_fd=self.folder)
        except FileNotFoundError:
            return False
        return True

    def link(self) -> bool:
        """Give it its name, unless that is taken."""
        try:
            os.link(self.temporary, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except FileExistsError:
            return False
        os.fsync(self.folder)
        return True

    def replace(self) -> None:
        """Give it its name, in place of what had it."""
        os.replace(self.temporary, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        os.fsync(self.folder)


def _described(path: str, found: os.stat_result) -> ObjectInfo:
    etag = f"{found.st_ino:x}-{found.st_mtime_ns:x}"
    return ObjectInfo(path, found.st_size, etag, found.st_mtime)


class LocalObjects:
    """Objects as files below a folder. It is made once: one that is gone later is not mounted (`StoreFolder`).

    That an object is not there is said only while the folder is: else StoreError is raised.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().resolve()
        self.root = str(self.folder)
        self._folder = StoreFolder(self.folder)

    def _file(self, path: str) -> Path:
        file = self.folder / path
        if ".." in Path(path).parts or Path(path).is_absolute():
            raise StoreError(f"object path: expected a path below the root, found {path!r}")
        return file

    @contextlib.contextmanager
    def _written(self, path: str) -> Iterator[tuple[_Place, BinaryIO]]:
        """A temporary file beside its destination, removed at the end whatever happened."""
        self._file(path)
        folder, _, name = path.rpartition("/")
        temporary = f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            with (
                self._folder.new_file(folder, temporary) as (parent, descriptor),
                os.fdopen(descriptor, "wb") as file,
            ):
                yield _Place(parent, temporary, name), file
        except FolderGone as error:
            raise StoreError(str(error)) from error

    @staticmethod
    def _sync(file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())

    def create(self, path: str, data: bytes) -> bool:
        with self._written(path) as (place, file):
            if place.taken():
                return False
            file.write(data)
            self._sync(file)
            return place.link()

    def put(self, path: str, data: bytes) -> None:
        with self._written(path) as (place, file):
            file.write(data)
            self._sync(file)
            place.replace()

    def upload(self, path: str, file: Path) -> None:
        with self._written(path) as (place, copy):
            with file.open("rb") as source:
                while block := source.read(1 << 22):
                    copy.write(block)
            self._sync(copy)
            place.replace()

    @contextlib.contextmanager
    def _absence_checked(self) -> Iterator[None]:
        """An object is looked for in the body."""
        try:
            yield
        except FileNotFoundError:
            self._check_there()
            raise

    def _check_there(self) -> None:
        try:
            self._folder.check_there()
        except FolderGone as error:
            raise StoreError(str(error)) from error

    def get(self, path: str, most: int = LARGEST_OBJECT) -> bytes:
        with self._absence_checked(), self._file(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return file.read() if size <= most else refuse_large(path, size, most)

    def exists(self, path: str) -> bool:
        found = self._file(path).is_file()
        if not found:
            self._check_there()
        return found

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        folder, found = self._file(prefix), False
        if folder.is_dir():
            for info in self._walk(str(folder), prefix.rstrip("/") + "/" if prefix else "", start_after):
                found = True
                yield info
        if not found:
            self._check_there()

    def _walk(self, folder: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(folder) as scan:
                after = start_after[len(prefix) :].partition("/")[0] if start_after.startswith(prefix) else ""
                entries = [
                    (entry.name + "/" if entry.is_dir() else entry.name, entry)
                    for entry in scan
                    if entry.name >= after or after.startswith(entry.name)
                ]
        except FileNotFoundError:  # emptied and removed while we listed
            return
        if len(entries) > 1:
            entries.sort(key=itemgetter(0))
        for name, entry in entries:
            path = prefix + name
            if name.endswith("/"):
                if path > start_after or start_after.startswith(path):
                    yield from self._walk(entry.path, path, start_after)
            elif path > start_after and not name.startswith((_TEMPORARY, MARKER)):
                try:
                    found = entry.stat()
                except FileNotFoundError:
                    continue
                yield _described(path, found)

    def delete_many(self, paths: Sequence[str]) -> None:
        self.delete(paths)

    def abandoned(self, before: float) -> Iterator[ObjectInfo]:
        for file in self.folder.rglob(f"{_TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError):
                found = _described(str(file.relative_to(self.folder)), file.stat())
                if found.modified_at < before:
                    yield found

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            file = self._file(path)
            file.unlink(missing_ok=True)
            if file.parent != self.folder:
                with contextlib.suppress(OSError):
                    file.parent.rmdir()

    def open(self, path: str) -> BinaryIO:
        import pyarrow as pa

        # Not Python's own file: a thread of Arrow that lets go of one while the interpreter ends aborts the process.
        with self._absence_checked():
            return cast(BinaryIO, pa.OSFile(str(self._file(path)), "rb"))

    def uri(self, path: str) -> str:
        return str(self._file(path))

    def storage_options(self) -> dict[str, str]:
        return {}
