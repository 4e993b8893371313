"""A `.json` file: one array of objects, taken apart item by item, so that no more than one item is held."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.files import first_read

# One item is bounded as a line of JSONL is.
MAX_ITEM = 16 << 20
READ_BYTES = 1 << 20
_SPACE = b" \t\r\n"
# All up to the next sign that counts, with whole strings; a quote that counts opens one that ends in a later piece.
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_BETWEEN = re.compile(rb'(?:[^"\[\]{},]++|' + _STRING + rb')*+(["\[\]{},])', re.DOTALL)
_WITHIN = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb')*+(["\[\]{}])', re.DOTALL)
_REST_OF_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_ANY_STRING = re.compile(_STRING, re.DOTALL)
_BETWEEN_OBJECTS = re.compile(rb"\}\s*,\s*\{")
_OPENS_ARRAY = re.compile(rb"\[\s*(?:\{|\Z)")
_OPENS_OBJECT = re.compile(rb"\{[ \t\r]*\n\s*" + _STRING + rb"\s*:")
_FOUND = {b"{": "an object", b'"': "text"}


def _remedy(data: bytes) -> str:
    """What to do with a text that is no array."""
    if _is_over_lines(data):
        return "write the list that it holds to a file of its own (jq .KEY FILE), or an object per line"
    return "for one object per line write source.format: jsonl"


def refuse_swallowed(file: str, place: int, item: bytes) -> None:
    """Raise SourceError for an item that is no JSON and has the end of one object, and the beginning of the next, in
    what its quotes make a text: a quote in it is not escaped, and items after it are taken for parts of it.
    """
    if any(_BETWEEN_OBJECTS.search(text[0]) for text in _ANY_STRING.finditer(item)):
        raise SourceError(
            f"{file}, line {place}: expected the quotes within this item to be escaped, found that its texts reach "
            "into the items after it; correct it. No item can be told from text after it, so on_bad_row: skip does not "
            "help here."
        )


def refuse_other_layout(file: str, number: int, lines: Sequence[bytes | None]) -> None:
    """Raise SourceError for lines that begin an array, or an object over several of them, where each should be an
    object. `number`: of the first of them in its file.
    """
    text = b"\n".join(filter(None, lines)).lstrip()
    if _OPENS_ARRAY.match(text.partition(b"\n")[0]):
        raise SourceError(
            f"{file}, line {number}: expected a JSON object per line, found the beginning of an array; "
            "write source.format: json"
        )
    if _is_over_lines(text):
        raise SourceError(
            f"{file}, line {number}: expected a JSON object per line, found one over several lines; write each on a "
            "line of its own (jq -c . FILE), or all as one array, with source.format: json"
        )


def _is_over_lines(text: bytes) -> bool:
    """Whether a text begins with an object of several lines, which may go on after it."""
    if _OPENS_OBJECT.match(text):
        return True
    if not text.startswith(b"{"):
        return False
    letters = text.decode(errors="replace")
    try:
        _, end = json.JSONDecoder().raw_decode(letters)
    except (ValueError, RecursionError):
        return False
    return "\n" in letters[:end]


class JsonArray:
    """The items of one array, as their bytes."""

    def __init__(self, file: str, stream: BinaryIO) -> None:
        self._file, self._stream = file, stream
        self._depth = 0
        self._in_string = False
        self._parts: list[bytes] = []
        self._size = 0
        self._count = 0
        self._ended = False

    def blocks(self) -> Iterator[list[bytes | None]]:
        """Items, a piece of the file at a time. One of more than MAX_ITEM comes as None and is never held whole.

        Raises SourceError where the file is no single array: nothing after that place can be told to be an item.
        """
        data = self._opened()
        while True:
            items, rest = self._taken(data)
            if items:
                yield items
            rest = rest.strip(_SPACE) if self._ended else rest
            if self._ended and rest:
                raise SourceError(
                    f"{self._file}: expected the end of the file after its array, found more text; "
                    "join the arrays to one, or write an object per line and source.format: jsonl"
                )
            more = self._stream.read(READ_BYTES)
            if not more:
                break
            data = rest + more
        if not self._ended:
            raise SourceError(
                f"{self._file}: expected the array to be closed with ], found the end of the file within item "
                f"{self._count + 1}; the file is cut off, or a quote or bracket in it is not closed"
            )

    def _opened(self) -> bytes:
        """What follows the bracket that opens the array."""
        data = first_read(self._stream, READ_BYTES).lstrip(_SPACE)
        while not data and (more := self._stream.read(READ_BYTES)):
            data = more.lstrip(_SPACE)
        if data[:1] != b"[":
            found = _FOUND.get(data[:1], "other text") if data else "nothing"
            raise SourceError(
                f"{self._file}: expected a JSON array of objects, [{{…}}, {{…}}], found {found}; {_remedy(data)}"
            )
        return data[1:]

    def _taken(self, data: bytes) -> tuple[list[bytes | None], bytes]:
        """(items that end in these bytes, what is to be read again with the next ones)."""
        items: list[bytes | None] = []
        at = start = 0
        while not self._ended:
            if self._in_string:
                at = _REST_OF_STRING.match(data, at).end()  # type: ignore[union-attr]  # it matches nothing, too
                if at == len(data) or data[at : at + 1] == b"\\":
                    self._keep(data[start:at])
                    return items, data[at:]
                self._in_string, at = False, at + 1
            found = (_WITHIN if self._depth else _BETWEEN).match(data, at)
            if found is None:
                self._keep(data[start:])
                return items, b""
            at = found.end()
            if self._steps(found[1]):
                self._keep(data[start : at - 1])
                start = at
                items += self._item()
        return items, data[at:]

    def _steps(self, sign: bytes) -> bool:
        """Take in a quote or bracket; whether it ends an item."""
        if sign == b'"':
            self._in_string = True
        elif sign in b"[{":
            self._depth += 1
        elif self._depth:
            self._depth -= 1
        elif sign == b"}":
            raise SourceError(
                f"{self._file}: expected brackets that match, found one }} too many in item {self._count + 1}; "
                "correct it. No item can be told from text after it, so on_bad_row: skip does not help here."
            )
        else:
            self._ended = sign == b"]"
            return True
        return False

    def _keep(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= MAX_ITEM:
            self._parts.append(part)
        else:
            self._parts.clear()

    def _item(self) -> list[bytes | None]:
        """The item that ended, in a list; nothing for an array without items."""
        item = None if self._size > MAX_ITEM else b"".join(self._parts).strip(_SPACE)
        self._parts.clear()
        self._size = 0
        if item == b"" and self._ended and not self._count:
            return []
        self._count += 1
        return [item]
