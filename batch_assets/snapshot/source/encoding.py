"""Text files in other encodings than UTF-8, read as UTF-8; one whose first bytes are of another encoding is refused."""

from __future__ import annotations

import codecs
import io
from typing import BinaryIO, cast

from batch_assets.snapshot.source.errors import SourceError

READ_BYTES = 1 << 20
_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def first_read(stream: BinaryIO, size: int) -> bytes:
    """The beginning of a text in UTF-8, without its byte order mark, which may come in several reads."""
    data = b""
    while len(data) <= len(codecs.BOM_UTF8) and (more := stream.read(size)):
        data += more
    return data.removeprefix(codecs.BOM_UTF8)


class _Utf8(io.RawIOBase):
    """The bytes of a text in UTF-8. The first ones decide whether the text can be in the encoding that was named."""

    def __init__(self, raw: BinaryIO, encoding: str, name: str) -> None:
        self._raw, self._encoding, self._name = raw, encoding, name
        self._taken, self._begun = 0, False
        self._decoder: codecs.IncrementalDecoder | None = None

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """At least one byte until the end; more than `size` where characters take more bytes in UTF-8."""
        while True:
            data = self._raw.read(READ_BYTES if size < 0 else size)
            if not self._begun:
                data = self._first(data)
            text = self._decoded(data) if self._decoder else data
            if text or not data:
                return text

    def _first(self, data: bytes) -> bytes:
        """The beginning of the file, at least two bytes of it where there are as many; sets the decoder."""
        while len(data) < 2 and (more := self._raw.read(2)):
            data += more
        self._begun = True
        encoding = self._checked(data)
        if encoding != "utf-8":
            self._decoder = codecs.getincrementaldecoder(encoding)()
        return data

    def _checked(self, data: bytes) -> str:
        """The encoding to read with. Raises SourceError where the first bytes are of another one."""
        marked = _MARKS.get(data[:2])
        if self._encoding == "utf-16":
            if data and marked is None:
                raise SourceError(
                    f"{self._name}: expected UTF-16 with a byte order mark at its beginning, as source.encoding says, "
                    "found none; write utf-16-le or utf-16-be, or leave the encoding out if the file is UTF-8"
                )
            return marked or "utf-8"
        if self._encoding != "utf-8":
            return self._encoding
        found = "utf-16" if marked else _without_mark(data)
        if found:
            raise SourceError(
                f"{self._name}: expected text in UTF-8, found UTF-16 (its first bytes are {data[:2].hex(' ')}); "
                f"write source.encoding: {found}"
            )
        return "utf-8"

    def _decoded(self, data: bytes) -> bytes:
        assert self._decoder is not None
        waiting = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(data, final=not data)
            self._taken += len(data)
            return text.encode()
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{self._name}: expected text in {self._encoding}, as source.encoding says, found bytes that are none "
                f"at byte {self._taken - waiting + error.start + 1}; correct the file, or name its encoding"
            ) from error


def _without_mark(data: bytes) -> str | None:
    """The UTF-16 that these first bytes are in: a file of text begins with a character of ASCII, and holds no NUL."""
    if len(data) < 2 or (data[0] == 0) == (data[1] == 0):
        return None
    return "utf-16-be" if data[0] == 0 else "utf-16-le"


def in_utf8(raw: BinaryIO, encoding: str | None, name: str) -> BinaryIO:
    """The stream of a text file as UTF-8. Its `read` raises SourceError for bytes that are not of the encoding."""
    return cast(BinaryIO, _Utf8(raw, encoding or "utf-8", name))
