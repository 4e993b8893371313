"""Rows made from the rows of a file: columns under other names, and lists as one row per element (`source.explode`)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from batch_assets.snapshot.source.block import BLOCK_ROWS, Block
from batch_assets.snapshot.source.errors import MOST_NAMES, Reject, Unseen
from batch_assets.snapshot.source.text import json_value_of
from batch_assets.spec.source import SourceSpec

MAX_CELL = 16 << 20  # bytes of a JSON text
MAX_ELEMENTS = 100_000  # of one list
ERROR = "error"  # column of a published table: why a row has no output
_PLAIN = (str, int, float, bool, type(None))
MAX_DEPTH = 200


class NoList(Exception):
    """Why a cell is no list of rows."""


def columns_in_file(source: SourceSpec, columns: Sequence[str]) -> tuple[list[str], frozenset[str]]:
    """Columns to read, by their names in the file, and those of them that the file may lack: fields of elements."""
    exploded = [source.name_in_file(source.exploded_parts[0])] if source.explode else []
    wanted = list(dict.fromkeys([*map(source.name_in_file, columns), *exploded]))
    may_lack = frozenset(wanted) - set(exploded) if exploded else frozenset[str]()
    return [*wanted, *([ERROR] if source.answers_only and ERROR not in wanted else [])], may_lack


def derived(
    blocks: Iterable[Block], source: SourceSpec, columns: Sequence[str], id_column: str | None, unseen: Unseen
) -> Iterator[Block]:
    """The blocks with `columns` under their names: without rows that have no answer, where only answers are read, and
    with one row per element of `source.explode`.

    The id of an element is that of its row, and a digest of its content: it does not change with its place in the list.
    """
    if source.explode:
        unseen |= set(columns) - {source.exploded_parts[0]}
    for block in blocks:
        if source.answers_only:
            errors = block.columns[ERROR]
            block = block.take([row for row, error in enumerate(errors) if error is None])
        if source.explode is None:
            yield _renamed(block, source, columns)
            continue
        here = {source.name_here(name): name for name in block.columns}
        block = _renamed(block, source, [name for name, old in here.items() if source.name_in_file(name) == old])
        there = [name for name in block.columns if _has_values(block, name)]
        unseen.there |= dict.fromkeys(there)
        unseen.difference_update(there)
        yield from _exploded(block, source, columns, id_column, unseen)


def _has_values(block: Block, name: str) -> bool:
    return name in block.columns and (block.arrow is not None or any(v is not None for v in block.columns[name]))


def _renamed(block: Block, source: SourceSpec, columns: Sequence[str]) -> Block:
    """The block with these columns, by their names here."""
    values = {name: block.columns[source.name_in_file(name)] for name in columns}
    arrow = block.arrow and {name: block.arrow[source.name_in_file(name)] for name in columns}
    return Block(block.file, block.lines, values, arrow, block.rejects)


def _exploded(
    block: Block, source: SourceSpec, columns: Sequence[str], id_column: str | None, unseen: Unseen
) -> Iterator[Block]:
    column, path, leaf = source.exploded_parts
    made = Block(block.file, [], {name: [] for name in columns}, None, list(block.rejects), _no_ids(id_column))
    named = None if source.dataset is not None and id_column == source.name_here("row_id") else id_column
    for row, cell in enumerate(block.columns[column]):
        try:
            elements = _elements(cell, path)
            parent = {name: json_value(block.columns[name][row]) for name in columns if name in block.columns}
        except NoList as error:
            made.rejects.append(Reject(block.file, block.lines[row], f"source.explode: {error}"))
            continue
        seen: Counter[str] = Counter()
        for element in elements:
            fields = element if isinstance(element, dict) else {leaf: element}
            if unseen:
                unseen.difference_update(fields)
                if len(unseen.there) < MOST_NAMES:
                    unseen.there |= dict.fromkeys(fields)
            if made.ids is not None and id_column is not None:
                try:
                    own = fields[named] if named in fields else _id(parent.get(id_column), element, seen)
                except NoList as error:
                    made.rejects.append(Reject(block.file, block.lines[row], f"source.explode: {error}"))
                    continue
                made.ids.append(own)
            made.lines.append(block.lines[row])
            for name in columns:
                made.columns[name].append(fields[name] if name in fields else parent.get(name))
            if len(made.lines) >= BLOCK_ROWS:
                yield made
                made = Block(block.file, [], {name: [] for name in columns}, None, [], _no_ids(id_column))
    yield made


def _no_ids(id_column: str | None) -> list[Any] | None:
    return None if id_column is None else []


def _id(parent: Any, element: Any, seen: Counter[str]) -> Any:
    """`PARENT/DIGEST`; equal elements of one list are told apart by their number among them. What can be no id stays
    what it is, for whoever checks ids. Raises NoList.
    """
    if type(parent) not in (str, int) or not str(parent).strip():
        return parent
    try:
        text = orjson.dumps(element, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # whole numbers beyond 64 bits, or more than 254 levels
        try:
            text = json.dumps(element, sort_keys=True, separators=(",", ":")).encode()
        except RecursionError:
            raise NoList("expected an element that is not nested as deep") from None
    digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    seen[digest] += 1
    return f"{parent}/{digest}" + (f".{seen[digest]}" if seen[digest] > 1 else "")


def _elements(cell: Any, path: Sequence[str]) -> list[Any]:
    """The list in a cell: JSON text, or a value that is a list already. Raises NoList."""
    if not path:
        _refuse_long(cell)  # before it is copied
    value = _parsed(cell) if isinstance(cell, str | bytes) else json_value(cell)
    for key in path:
        if not isinstance(value, dict) or key not in value:
            raise NoList(f"expected an object with the key {key!r}, found {_kind(value)}")
        value = value[key]
        value = _parsed(value) if isinstance(value, str) else value
    if not isinstance(value, list):
        more = ""
        if isinstance(value, dict):
            lists = [key for key, inner in value.items() if isinstance(inner, list)]
            more = f"; name its list with a dot: {'.'.join(['explode: COLUMN', *path, lists[0][:64]])}" if lists else ""
        raise NoList(f"expected a list, found {_kind(value)}{more}")
    _refuse_long(value)
    return value


def _refuse_long(value: Any) -> None:
    if isinstance(value, list) and len(value) > MAX_ELEMENTS:
        raise NoList(f"expected at most {MAX_ELEMENTS:,} elements, found {len(value):,}")


def _parsed(text: str | bytes) -> Any:
    if len(text) > MAX_CELL:
        raise NoList(f"expected at most {MAX_CELL >> 20} MiB of JSON, found {len(text) >> 20} MiB")
    try:
        return json_value_of(text if isinstance(text, bytes) else text.encode())
    except orjson.JSONDecodeError as error:
        said = error.msg.partition(": line ")[0]
        raise NoList(f"expected a JSON list, found text that is no JSON: {said} at character {error.pos + 1}") from None
    except ValueError as error:
        raise NoList(f"expected a JSON list, found {error}") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", str: "text", bool: "true/false", int: "a number", float: "a number", list: "a list"}
    return "null" if value is None else names.get(type(value), "another value")


def json_value(value: Any, depth: int = 0) -> Any:
    """A value as JSON has it: what JSON does not know (dates, decimals) as text."""
    if isinstance(value, _PLAIN):
        return value
    if depth > MAX_DEPTH:
        raise NoList(f"expected values nested at most {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [json_value(one, depth + 1) for one in value]
    if isinstance(value, dict):
        return {str(key): json_value(one, depth + 1) for key, one in value.items()}
    return value.hex() if isinstance(value, bytes) else str(value)
