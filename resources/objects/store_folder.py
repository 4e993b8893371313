"""The folder of a local store, opened anew for every write and known again by a marker file that lies in it.

A mount that goes away leaves an empty folder of the same name. So a write first opens the folder, then looks for the
marker, and does everything else relative to that descriptor: whatever is mounted or unmounted meanwhile, it reaches the
folder that was looked at, or fails.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MARKER = ".batch-assets-store"
_LONGEST_MARKER = 100
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_TRIES = 100


class FolderGone(Exception):
    """The folder is not the one that it was: says what was expected and found."""


class StoreFolder:
    """A folder that is made once: one that is gone later, or has not its marker any more, is not mounted.

    For several threads. A folder without a marker that has objects was made before there were markers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._guard = threading.Lock()
        self._marker: str | None = None
        self._had_objects = False
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), _opened(path) as root:
            self._marker = _read_marker(root)
            self._had_objects = self._marker is None and _holds_something(root)
        self._was_there = path.is_dir()

    @contextlib.contextmanager
    def new_file(self, folder: str, name: str) -> Iterator[tuple[int, int]]:
        """Descriptors of a folder and of a new file in it, which is removed at the end. Raises FolderGone, OSError."""
        with self._root() as root:
            parent, file = self._new_file(root, folder, name)
            try:
                yield parent, file
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=parent)
                os.close(parent)

    def _new_file(self, root: int, folder: str, name: str) -> tuple[int, int]:
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):  # somebody's delete took the folder away when it was empty
                parent = self._enter(root, folder)
                try:
                    return parent, os.open(name, _NEW_FILE, 0o666, dir_fd=parent)
                except BaseException:
                    os.close(parent)
                    raise
        raise FolderGone(f"{self.path / folder}: expected a folder, found that it vanishes as often as it is made")

    def check_there(self) -> None:
        """For who has found nothing in it. Raises FolderGone when the folder is gone, or is not the one that it was."""
        if self._marker is None and not self._was_there:
            return  # never seen
        try:
            with _opened(self.path) as root:
                if self._marker is not None:
                    same = _read_marker(root) == self._marker
                else:
                    same = not self._had_objects or _holds_something(root)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FolderGone(f"{self.path}: the store's folder is gone: is it mounted?") from error
        if not same:
            raise FolderGone(
                f"{self.path}: expected the store that was there before, found another folder: is it mounted?"
            )

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        if not self._was_there:
            _make(self.path)
            self._was_there = True
        try:
            with _opened(self.path) as root:
                self._check(root)
                yield root
        except (FileNotFoundError, NotADirectoryError) as error:
            if self.path.is_dir():
                raise
            raise FolderGone(
                f"{self.path}: the store's folder is gone; mount it again, or make an empty one"
            ) from error

    def _check(self, root: int) -> None:
        """The open folder is the store: it has the marker that was seen before; the first write leaves one."""
        if self._marker is not None and _read_marker(root) == self._marker:
            return
        with self._guard:
            found = _read_marker(root)
            if found is None and self._marker is None and (_holds_something(root) or not self._had_objects):
                found = _leave_marker(root)
            if found is None or found != (self._marker or found):
                what = "a folder without its marker" if found is None else "the marker of another store"
                raise FolderGone(
                    f"{self.path}: expected the store that was there before, found {what} ({MARKER}): is it mounted?"
                )
            self._marker = found

    def _enter(self, root: int, folder: str) -> int:
        """A descriptor of a folder below the root; what is missing is made and synced into the one above."""
        with contextlib.suppress(FileNotFoundError):
            return os.open(folder or ".", _FOLDER, dir_fd=root)
        descriptor = os.dup(root)
        for name in PurePosixPath(folder).parts:
            try:
                inner = self._enter_one(descriptor, name)
            finally:
                os.close(descriptor)
            descriptor = inner
        return descriptor

    @staticmethod
    def _enter_one(parent: int, name: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            return os.open(name, _FOLDER, dir_fd=parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
            os.fsync(parent)
        return os.open(name, _FOLDER, dir_fd=parent)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, _FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _make(folder: Path) -> None:
    """Make a folder and its parents, each synced into the one above: an object is no safer than its folder."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        with _opened(folder.parent) as parent:
            os.fsync(parent)


def _holds_something(root: int) -> bool:
    with os.scandir(root) as entries:
        return next(entries, None) is not None


def _read_marker(root: int) -> str | None:
    try:
        descriptor = os.open(MARKER, os.O_RDONLY | os.O_CLOEXEC, dir_fd=root)
    except FileNotFoundError:
        return None
    try:
        return os.read(descriptor, _LONGEST_MARKER).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)


def _leave_marker(root: int) -> str:
    """Write a marker, unless another process is first; returns the one that is there."""
    identity = uuid.uuid4().hex
    temporary = f"{MARKER}-{identity}"
    descriptor = os.open(temporary, _NEW_FILE, 0o666, dir_fd=root)
    try:
        os.write(descriptor, f"{identity}\n".encode())
        os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, MARKER, src_dir_fd=root, dst_dir_fd=root)
    finally:
        os.close(descriptor)
        os.unlink(temporary, dir_fd=root)
    os.fsync(root)
    found = _read_marker(root)
    assert found is not None
    return found
