"""Stable column types for values without a schema (JSON, grids): one type per column, whatever block a value is in.

A column's kind grows with what is seen: nothing, then a kind; whole numbers become numbers when a fraction appears;
lists and objects grow from within. What cannot be joined (text after numbers) is a mismatch, and the row is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa

MAX_DEPTH = 32
MAX_KEYS = 1000
_WORDS = {"bool": "true/false", "int": "a whole number", "float": "a number", "text": "text"}
_SCALARS = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "text": pa.string()}
_NAMES: dict[type, str] = {bool: "bool", int: "int", float: "float", str: "text"}


@dataclass(frozen=True, slots=True)
class ListKind:
    """A list; `item` is the kind of its values."""

    item: Kind


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """A JSON object; a key that is absent counts as null."""

    keys: dict[str, Kind]


Kind = str | ListKind | ObjectKind | None


class Mismatch(Exception):
    """A value does not go with those before it."""


def kind_of(value: Any, depth: int = 0) -> Kind:
    """The kind of one value. Raises Mismatch when it cannot be a table cell."""
    if value is None:
        return None
    name = _NAMES.get(type(value))
    if name == "int" and not -(1 << 63) <= value < 1 << 63:
        raise Mismatch("a whole number beyond 64 bits")
    if name is not None:
        return name
    if depth >= MAX_DEPTH:
        raise Mismatch(f"values nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        item: Kind = None
        for inner in value:
            item = join(item, kind_of(inner, depth + 1))
        return ListKind(item)
    return ObjectKind({key: kind_of(inner, depth + 1) for key, inner in value.items()})


def join(one: Kind, other: Kind) -> Kind:
    """The kind that holds values of both. Raises Mismatch."""
    if one == other or other is None:
        return one
    if one is None:
        return other
    if {one, other} == {"int", "float"} if isinstance(one, str) and isinstance(other, str) else False:
        return "float"
    if isinstance(one, ListKind) and isinstance(other, ListKind):
        return ListKind(join(one.item, other.item))
    if isinstance(one, ObjectKind) and isinstance(other, ObjectKind):
        keys = one.keys | {key: join(one.keys.get(key), kind) for key, kind in other.keys.items()}
        if len(keys) > MAX_KEYS:
            raise Mismatch(f"objects with more than {MAX_KEYS} different keys in one column")
        return ObjectKind(keys)
    raise Mismatch(f"expected {words(one)} as in the rows before, found {words(other)}")


def words(kind: Kind) -> str:
    """A kind as people say it."""
    if isinstance(kind, str):
        return _WORDS[kind]
    return "null" if kind is None else "a list" if isinstance(kind, ListKind) else "an object"


def arrow_type(kind: Kind) -> pa.DataType:
    """The Arrow type of a column. A column of nothing but nulls, or of empty objects, becomes text."""
    if isinstance(kind, str):
        return _SCALARS[kind]
    if isinstance(kind, ListKind):
        return pa.list_(arrow_type(kind.item))
    if isinstance(kind, ObjectKind) and kind.keys:
        return pa.struct([pa.field(key, arrow_type(inner)) for key, inner in kind.keys.items()])
    return pa.string()


def to_arrow(values: Sequence[Any], kind: Kind) -> pa.Array:
    """Values as an array of the column's type."""
    try:
        return pa.array(values, arrow_type(kind))
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        # Whole numbers beyond 2^53 among fractions, and empty objects: Arrow wants them converted.
        return pa.array([_fit(value, kind) for value in values], arrow_type(kind))


def _fit(value: Any, kind: Kind) -> Any:
    if value is None:
        return None
    if kind == "float":
        return float(value)
    if isinstance(kind, ListKind):
        return [_fit(inner, kind.item) for inner in value]
    if isinstance(kind, ObjectKind):
        if not kind.keys:
            return orjson.dumps(value).decode()
        return {key: _fit(value.get(key), inner) for key, inner in kind.keys.items()}
    return value


@dataclass(slots=True)
class ColumnKinds:
    """The kinds of some columns of a source so far."""

    names: Sequence[str]
    kinds: dict[str, Kind] = field(default_factory=dict)

    def learn(self, columns: dict[str, list[Any]]) -> dict[int, str]:
        """Take in a block. Returns why rows do not fit, by their place in the block; the others are taken in."""
        refused: dict[int, str] = {}
        for name in self.names:
            values = columns[name]
            types = set(map(type, values)) - {type(None)}
            known = self.kinds.get(name)
            if not types or (len(types) == 1 and types < {str, bool, float} and _NAMES[next(iter(types))] == known):
                continue
            self._learn_each(name, values, refused)
        return refused

    def _learn_each(self, name: str, values: Sequence[Any], refused: dict[int, str]) -> None:
        kind = self.kinds.get(name)
        for place, value in enumerate(values):
            if value is None or place in refused:
                continue
            try:
                kind = join(kind, kind_of(value))
            except Mismatch as error:
                refused[place] = f"column {name!r}: {error}"
        self.kinds[name] = kind
