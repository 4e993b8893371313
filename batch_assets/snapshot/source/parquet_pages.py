"""Sizes of the pages of a Parquet column chunk, from their headers: Thrift's compact protocol (parquet.thrift)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

# A header holds statistics too: the least and the largest value of a page may be cells of a megabyte.
HEADER_BYTES, MOST_HEADER_BYTES = 1 << 10, 64 << 20
# Fields of PageHeader: sizes of the page without and with its compression, and what a dictionary's page says of itself.
_UNPACKED, _PACKED, _DICTIONARY = 2, 3, 7
_VALUES = 1
_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)
_DEEPEST = 8


@dataclass(frozen=True, slots=True)
class Page:
    """Bytes of one page as it is stored, with its header, and when it is unpacked. `shared`: values of a dictionary."""

    stored: int
    unpacked: int
    shared: int | None = None


class _Thrift:
    """A cursor over one struct. IndexError where the bytes end before it; ValueError where they are none."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0
        self.inner: dict[int, dict[int, int]] = {}  # structs in the outermost one

    def byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def varint(self) -> int:
        number = shift = 0
        while (byte := self.byte()) & 0x80:
            number |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")
        return number | byte << shift

    def zigzag(self) -> int:
        number = self.varint()
        return number >> 1 ^ -(number & 1)

    def struct(self, depth: int = 0) -> dict[int, int]:
        """The whole numbers among the fields of a struct, by their ids; all other fields are passed over."""
        if depth > _DEEPEST:
            raise ValueError("structs nested too deeply")
        found: dict[int, int] = {}
        field = 0
        while (head := self.byte()) & 0x0F != _STOP:
            field = field + (head >> 4) if head >> 4 else self.zigzag()
            kind = head & 0x0F
            if kind in (_I16, _I32, _I64):
                found[field] = self.zigzag()
            elif kind == _STRUCT:
                self.inner[field] = self.struct(depth + 1)
            else:
                self._skip(kind)
        return found

    def _skip(self, kind: int) -> None:
        """Pass over a value of a kind that page headers have, besides numbers and structs."""
        if kind == _BINARY:
            length = self.varint()
            self.at += length
        elif kind == _BYTE:
            self.at += 1
        elif kind == _DOUBLE:
            self.at += 8
        elif kind not in (_TRUE, _FALSE):
            raise ValueError(f"a field of kind {kind}")


def pages(stream: BinaryIO, first: int, stored: int) -> Iterator[Page]:
    """The pages of a chunk that begins at `first` and takes `stored` bytes; their contents are not read.

    It ends early where the bytes are no page headers: whoever reads the chunk itself tells what is wrong with it.
    """
    at = first
    while at < first + stored:
        page = _page(stream, at)
        if page is None:
            return
        yield page
        at += page.stored


def _page(stream: BinaryIO, at: int) -> Page | None:
    size = HEADER_BYTES
    while size <= MOST_HEADER_BYTES:
        stream.seek(at)
        data = stream.read(size)
        cursor = _Thrift(data)
        try:
            fields = cursor.struct()
            packed, unpacked = fields.get(_PACKED, -1), fields.get(_UNPACKED, -1)
            shared = cursor.inner.get(_DICTIONARY, {}).get(_VALUES)
            return Page(cursor.at + packed, unpacked, shared) if packed >= 0 and unpacked >= 0 else None
        except ValueError:
            return None
        except IndexError:
            if len(data) < size:
                return None
        size *= 16
    return None
