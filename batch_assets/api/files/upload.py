"""Reads a multipart upload as it comes: the file goes to disk, the small fields to memory, all within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.error_answers import unsupported_type

BUFFER_BYTES = 1 << 20
FIELD_BYTES = 4096
MOST_FIELDS = 20
HEADER_BYTES = 8192
NAME_LENGTH = 500
CLOSE = {"Connection": "close"}  # the rest of the body is not read


@dataclass(slots=True)
class Upload:
    """What came: the form's small fields, and the file's name and size. `filename` None: there was no file.

    `lines`: of the file, without blank ones at its end.
    """

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    bytes: int = 0
    lines: int = 0


class _Reader:
    """The parser's callbacks. Bytes of the file gather in `pending` until they are written."""

    def __init__(self, check_size: Callable[[int], None]) -> None:
        self.upload = Upload()
        self.pending = bytearray()
        self._check_size, self._lines = check_size, LineCount()
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = bytearray(), bytearray()
        self._name, self._text, self._is_file = "", bytearray(), False
        self.complete = False

    def on_end(self) -> None:
        """The last boundary."""
        self.complete = True

    def on_part_begin(self) -> None:
        self._headers, self._text, self._is_file = {}, bytearray(), False

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]
        self._check(len(self._header), HEADER_BYTES)

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check(len(self._value), HEADER_BYTES)

    def on_header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if b"filename" in options or self._name == "file":
            if self._name != "file" or self.upload.filename is not None:
                raise ApiError(400, "Expected one file, in the field 'file'.", param="file")
            self._is_file = True
            self.upload.filename = shown_name(options.get(b"filename", b""))

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.upload.bytes += end - start
            self._check_size(self.upload.bytes)
            part = data[start:end]
            self.upload.lines = self._lines.add(part)
            self.pending += part
        else:
            self._text += data[start:end]
            self._check(len(self._text), FIELD_BYTES)

    def on_part_end(self) -> None:
        if not self._is_file:
            self._check(len(self.upload.fields), MOST_FIELDS - 1)
            self.upload.fields[self._name] = self._text.decode("utf-8", "replace")

    @staticmethod
    def _check(size: int, most: int) -> None:
        if size > most:
            raise ApiError(400, "The form's fields are too many or too long.")


def shown_name(sent: bytes) -> str:
    """A file's name as it is kept: without folders and control characters, at most NAME_LENGTH characters.

    Browsers and HTTP libraries send a quote in it as %22 (multipart/form-data of the WHATWG's HTML standard).
    """
    name = sent.decode("utf-8", "replace").replace("%22", '"').replace("\\", "/").rpartition("/")[2]
    return "".join(letter for letter in name if letter.isprintable())[:NAME_LENGTH] or "upload"


class LineCount:
    """How many lines a file has, without blank ones at its end: those that a batch of it has."""

    def __init__(self) -> None:
        self.lines = self._ends = 0

    def add(self, part: bytes) -> int:
        """The next part of the file; returns the lines up to here."""
        if text := part.rstrip():
            self.lines = self._ends + text.count(b"\n") + 1
        self._ends += part.count(b"\n")
        return self.lines


def check_file_size(most_bytes: int, size: int) -> None:
    """Refuse a file of `size` bytes or more that is too large for anybody. Raises ApiError 413."""
    if size > most_bytes:
        said = f"The file is too large: expected at most {most_bytes:,} bytes."
        raise ApiError(413, said, param="file", code="file_too_large", headers=CLOSE)


async def read_upload(
    content_type: str, parts: AsyncIterator[bytes], target: Path, check_size: Callable[[int], None]
) -> Upload:
    """Read a multipart body, its file into `target`. `check_size` hears how many bytes of the file have come, and
    raises what ends the upload. Raises ApiError 400.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data":
        raise unsupported_type(kind.decode("latin-1"), "multipart/form-data")
    if not boundary:
        raise ApiError(400, "Expected a body of multipart/form-data with a boundary.")
    reader = _Reader(check_size)
    names = ("on_part_begin", "on_header_field", "on_header_value", "on_header_end", "on_headers_finished")
    callbacks = {name: getattr(reader, name) for name in (*names, "on_part_data", "on_part_end", "on_end")}
    with target.open("wb") as file:
        try:
            parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
            async for part in parts:
                parser.write(part)
                if len(reader.pending) >= BUFFER_BYTES:
                    await _write(file, reader.pending)
            parser.finalize()
        except FormParserError:
            raise ApiError(400, "The multipart body cannot be read.") from None
        if not reader.complete:
            raise ApiError(400, "The multipart body ends before its last boundary.")
        await _write(file, reader.pending)
    return reader.upload


async def _write(file: BinaryIO, pending: bytearray) -> None:
    await asyncio.to_thread(file.write, bytes(pending))
    pending.clear()
