"""A file that lies elsewhere, as a seekable one that is read in ranges."""

from __future__ import annotations

import io
from abc import abstractmethod
from typing import Any


class RangedFile(io.RawIOBase):
    """`size` in bytes; whoever has the file reads its ranges."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    @abstractmethod
    def read_range(self, start: int, length: int) -> memoryview:
        """Bytes that are there: `length` of them, or fewer, but one at least."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        part = self.read_range(self._at, length)
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)
