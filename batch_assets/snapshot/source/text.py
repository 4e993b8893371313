"""JSONL, JSON arrays, CSV and TSV, read in blocks; what cannot be read becomes a Reject with the number of its line."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO

import orjson

from batch_assets.snapshot.source.block import BLOCK_ROWS, Block
from batch_assets.snapshot.source.errors import OTHER_ENCODING, NotUtf8, Reject, SourceError, Unseen, no_column, shown
from batch_assets.snapshot.source.files import first_read
from batch_assets.snapshot.source.json_array import MAX_ITEM, JsonArray, refuse_other_layout, refuse_swallowed
from batch_assets.snapshot.source.repeated_keys import RepeatedKeys

MAX_LINE = 16 << 20
READ_BYTES = 1 << 20
# Lines that a record that is no CSV may take with it. More means that a quote was never closed: nobody can tell which
# of the lines after it are rows.
MAX_LOST_LINES = 100
# orjson reads a whole number beyond 64 bits as a float with other digits. A line without a run of 19 digits has none.
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_TOO_LONG = f"the line is longer than {MAX_LINE >> 20} MiB"
_ITEM_TOO_LONG = f"the item is longer than {MAX_ITEM >> 20} MiB"
_NO_ITEM = "expected a JSON object, found nothing: there is a comma too many"
_DELIMITERS = (",", ";", "\t", "|")
_KINDS = {list: "a list", str: "text", int: "a number", float: "a number", bool: "true/false", type(None): "null"}


def line_blocks(stream: BinaryIO) -> Iterator[list[bytes | None]]:
    """Lines without their newline, a block at a time. A line over MAX_LINE comes as None and is never held whole.

    In a file that begins with lines without any newline, but with carriage returns, these end lines (old Mac).
    """
    rest, skipping, data = b"", False, first_read(stream, READ_BYTES)
    end = b"\r" if b"\n" not in data and b"\r" in data[:-1] else b"\n"
    while data:
        lines: list[bytes | None] = [*(rest + data).split(end)]
        rest = lines.pop() or b""
        if lines and (skipping or len(lines[0] or b"") > MAX_LINE):
            lines[0], skipping = None, False
        if len(rest) > MAX_LINE or skipping:
            rest, skipping = b"", True
        if lines:
            yield lines
        data = stream.read(READ_BYTES)
    if rest or skipping:
        yield [None if skipping else rest]


def read_jsonl(
    file: str, stream: BinaryIO, columns: Sequence[str], optional: Unseen, given: Mapping[str, str | None]
) -> Iterator[Block]:
    """One JSON object per line. Blank lines are no rows; a key that a row lacks counts as null, or has its value in
    `given`: columns of the file's folders.
    """
    return _objects(file, line_blocks(stream), columns, optional, given, _TOO_LONG)


def read_json(
    file: str, stream: BinaryIO, columns: Sequence[str], optional: Unseen, given: Mapping[str, str | None]
) -> Iterator[Block]:
    """One array of objects, as `read_jsonl`; the line of a row is its place in the array, from 1."""
    return _objects(file, JsonArray(file, stream).blocks(), columns, optional, given, _ITEM_TOO_LONG, _NO_ITEM)


def _objects(
    file: str,
    blocks: Iterable[Sequence[bytes | None]],
    columns: Sequence[str],
    optional: Unseen,
    given: Mapping[str, str | None],
    too_long: str,
    blank: str | None = None,
) -> Iterator[Block]:
    """Rows of texts that are an object each. `blank`: why a text of spaces is a bad row; without it, it is none.

    Columns that are not optional must be somewhere in the first block of each file.
    """
    number, begun, checked = 0, False, False
    optional.difference_update(given)
    values, repeated = [(name, given.get(name)) for name in columns], RepeatedKeys(columns)
    for lines in blocks:
        rows: list[dict[str, Any]] = []
        numbers: list[int] = []
        rejects: list[Reject] = []
        first = number + 1
        for line in lines:
            number += 1
            if line is None:
                rejects.append(Reject(file, number, too_long))
                continue
            if not line or line.isspace():
                rejects += [] if blank is None else [Reject(file, number, blank)]
                continue
            try:
                row = json_value_of(line)
            except ValueError as error:
                if blank is not None:
                    refuse_swallowed(file, number, line)
                rejects.append(Reject(file, number, _json_reason(line, error)))
                continue
            if type(row) is dict:
                rows.append(row)
                numbers.append(number)
            else:
                rejects.append(Reject(file, number, f"expected a JSON object, found {_KINDS[type(row)]}"))
        if not begun and (rows or rejects):
            if blank is None and rejects and (not numbers or rejects[0].line < numbers[0]):
                refuse_other_layout(file, rejects[0].line, lines[rejects[0].line - first :])
            begun = True
        if not checked and rows:
            there = dict.fromkeys([*(key for row in rows for key in row), *given])
            no_column(file, [name for name in columns if name not in optional], list(there))
            checked = True
        optional.look(rows)
        found = {name: [row.get(name, absent) for row in rows] for name, absent in values}
        twice = {first + place: name for place, name in repeated.look(lines, rows).items()}
        yield _without(twice, Block(file, numbers, found, rejects=rejects))


def _without(repeated: Mapping[int, str], block: Block) -> Block:
    """The block without rows that repeat a key, by their lines: these are among its rejects."""
    if not repeated:
        return block
    lines = [line for line in block.lines if line in repeated]
    said = [f"expected each key once in its object, found {shown(repeated[line])} twice or more" for line in lines]
    rejects = [Reject(block.file, line, reason) for line, reason in zip(lines, said, strict=True)]
    block = block.take([place for place, line in enumerate(block.lines) if line not in repeated])
    block.rejects = sorted(block.rejects + rejects, key=lambda reject: reject.line)
    return block


def json_value_of(text: bytes) -> Any:
    """The value of a JSON text, with whole numbers of any size as they are written.

    Raises ValueError: orjson's for what is no JSON, else one that says what Python cannot read.
    """
    value = orjson.loads(text)
    if not _LONG_NUMBER.search(text):
        return value
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("values nested too deeply") from None
    except ValueError:
        raise ValueError("a whole number of more than 4,300 digits") from None


def _json_reason(line: bytes, error: ValueError) -> str:
    if not isinstance(error, orjson.JSONDecodeError):
        return str(error)
    try:
        line.decode()
    except UnicodeDecodeError as bad:
        return NotUtf8(bad.start + 1)
    return f"not valid JSON: {error.msg.partition(': line ')[0]} at character {error.pos + 1}"


class _CsvLines:
    """Text lines for csv.reader, and the numbers of those that are not to be trusted."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.number = 0
        self.ended = False
        self.bad: dict[int, str] = {}

    def __iter__(self) -> Iterator[str]:
        for lines in line_blocks(self._stream):
            for line in lines:
                self.number += 1
                yield self._text(line)
        self.ended = True

    def _text(self, line: bytes | None) -> str:
        if line is None:
            self.bad[self.number] = _TOO_LONG
            return "\n"
        try:
            return line.decode() + "\n"
        except UnicodeDecodeError as error:
            self.bad[self.number] = NotUtf8(error.start + 1)
            return line.decode(errors="replace") + "\n"


def read_csv(
    file: str,
    stream: BinaryIO,
    columns: Sequence[str],
    optional: Unseen,
    delimiter: str = ",",
    may_lack: Container[str] = (),
    given: Mapping[str, str | None] = MappingProxyType({}),
) -> Iterator[Block]:
    """Delimited values with a header line (RFC 4180). All values are text; an empty field is null. Of columns in
    `may_lack`, those that are not there are left out; those of `given`, columns of the file's folders, are added.

    A record that cannot be used rejects every line that it takes. Raises SourceError when it takes more than
    MAX_LOST_LINES, or all that is left of the file: a quote was opened and not closed.
    """
    csv.field_size_limit(MAX_LINE)
    lines = _CsvLines(stream)
    reader = csv.reader(iter(lines), strict=True, delimiter=delimiter)
    header = _header(file, reader, lines)
    if header is None:
        return
    _refuse_delimiter(file, columns, header, delimiter)
    columns = [name for name in columns if name in header or name in given or name not in may_lack]
    no_column(file, columns, [*header, *given])
    optional.clear()
    constant = {name: given[name] for name in columns if name not in header}
    columns = [name for name in columns if name in header]
    places = [header.index(name) for name in columns]
    block = Block(file, [], {name: [] for name in columns})
    for number, fields in _csv_rows(file, reader, lines, block, len(header)):
        block.lines.append(number)
        for name, place in zip(columns, places, strict=True):
            block.columns[name].append(fields[place] or None)
        if len(block.lines) + len(block.rejects) >= BLOCK_ROWS:
            yield _with(constant, Block(file, block.lines, block.columns, rejects=list(block.rejects)))
            block.lines, block.columns = [], {name: [] for name in columns}
            block.rejects.clear()
    yield _with(constant, block)


def _with(constant: Mapping[str, str | None], block: Block) -> Block:
    """The block with columns of one value."""
    block.columns |= {name: [value] * len(block.lines) for name, value in constant.items()}
    return block


def _header(file: str, reader: Any, lines: _CsvLines) -> list[str] | None:
    try:
        header: list[str] = next(reader)
    except StopIteration:
        return None
    except csv.Error as error:
        raise SourceError(f"{file}, line 1: expected a header line, found text that is no CSV ({error})") from error
    if lines.bad:
        reason = next(iter(lines.bad.values()))
        hint = f". {OTHER_ENCODING}" if isinstance(reason, NotUtf8) else ""
        raise SourceError(f"{file}, line 1: expected a header line, found one that is {reason}{hint}")
    name, times = next(iter(Counter(filter(None, header)).most_common(1)), ("", 0))  # commas at the end name nothing
    if times > 1:
        said = f"{file}, line 1: expected each column name once, found {shown(name)} {times} times"
        raise SourceError(f"{said}; give one of them another name in the file")
    return header


def _refuse_delimiter(file: str, columns: Sequence[str], header: Sequence[str], delimiter: str) -> None:
    """Raise SourceError for a header that is one column without the wanted ones, but holds another delimiter."""
    if len(header) != 1 or header[0] in columns or not columns:
        return
    others = [sign for sign in _DELIMITERS if sign != delimiter and sign in header[0]]
    if others:
        found = max(others, key=header[0].count)
        raise SourceError(
            f"{file}, line 1: expected columns with {_shown(delimiter)} between them, found one column "
            f"{shown(header[0])} that holds {_shown(found)}; write delimiter: {_shown(found)} beside its path"
        )


def _shown(delimiter: str) -> str:
    """A delimiter as YAML takes it."""
    return json.dumps(delimiter, ensure_ascii=False)


def _csv_rows(file: str, reader: Any, lines: _CsvLines, block: Block, width: int) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of each record; every line of what cannot be used goes to the rejects."""
    while True:
        first, reason = lines.number + 1, ""
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fields, reason = [], f"not valid CSV: {error}"
        if lines.bad:
            reason = next(iter(lines.bad.values()))
            lines.bad.clear()
        elif fields and len(fields) != width:
            reason = f"expected {width} fields, found {len(fields)}"
        if reason:
            _reject_lines(file, first, lines, reason, block)
        elif fields:
            yield first, fields


def _reject_lines(file: str, first: int, lines: _CsvLines, reason: str, block: Block) -> None:
    """Reject each line of a record: those after the first may have been rows, swallowed by a quote."""
    last = lines.number
    if last > first and (lines.ended or last - first >= MAX_LOST_LINES):
        raise SourceError(
            f"{file}, line {first}: expected the quote that opens in this record to be closed, found no end of it in "
            f"{'the rest of the file' if lines.ended else 'its place'} ({last - first + 1} lines, to line {last}); "
            "close or double it. No row can be told from text after it, so on_bad_row: skip does not help here."
        )
    block.rejects.append(Reject(file, first, reason))
    swallowed = f"within the record of line {first}, which cannot be used ({reason})"
    block.rejects += [Reject(file, number, swallowed) for number in range(first + 1, last + 1)]
