"""The properties of an object's JSON schema as typed columns, and JSON values as values of these types. Pure.

What has no one type (alternatives of different types, a schema that refers to itself, free objects) is a column of JSON
text. Every column may be null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from gpu_runner.client.json_schemas.schema_limits import References, SchemaProblem, subschemas

MAX_COLUMNS = 500
MAX_FIELDS = 2_000  # of all structs together
MAX_STEPS = 50_000
MAX_LEVELS = 8  # lists and structs in each other; deeper ones are JSON text
_UNTYPED = "what is typed otherwise"


class Kind(StrEnum):
    """What a column holds. `JSON`: text, of any value."""

    STRING = "string"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "boolean"
    LIST = "list"
    STRUCT = "struct"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A type; of a list that of its `item`, of a struct those of its `fields`."""

    kind: Kind
    item: ColumnType | None = None
    fields: tuple[tuple[str, ColumnType], ...] = ()


class Misfit(ValueError):
    """A value is not of the type of its column."""


_JSON = ColumnType(Kind.JSON)
_PLAIN = {kind.value: ColumnType(kind) for kind in (Kind.STRING, Kind.INTEGER, Kind.NUMBER, Kind.BOOLEAN)}
_OF_VALUES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def column_types(schema: Mapping[str, Any]) -> dict[str, ColumnType]:
    """The columns of an object by the names of its properties, in their order. `schema`: one that `check_schema` took.

    Raises SchemaProblem where it is no object with properties, or has too many.
    """
    reader = _Reader(schema)
    top = reader.resolved(schema)
    properties = top.get("properties")
    if "object" not in _types(top, "object") or not isinstance(properties, Mapping) or not properties:
        raise SchemaProblem("an object with properties at the top of the schema", "none")
    if len(properties) > MAX_COLUMNS:
        raise SchemaProblem(f"at most {MAX_COLUMNS} properties", str(len(properties)))
    return reader.columns(top)


def column_descriptions(schema: Mapping[str, Any]) -> dict[str, str]:
    """What the schema says of the properties at its top (`description`), by their names."""
    reader = _Reader(schema)
    properties = reader.resolved(schema).get("properties")
    found = {name: one.get("description") for name, one in (properties or {}).items() if isinstance(one, Mapping)}
    return {name: text for name, text in found.items() if isinstance(text, str) and text.strip()}


def fitted(value: Any, kind: ColumnType) -> Any:
    """A JSON value as one of a column: None, text, numbers, lists and mappings. Raises Misfit."""
    if value is None:
        return None
    found = type(value)
    match kind.kind:
        case Kind.STRING if found is str:
            return value
        case Kind.BOOLEAN if found is bool:
            return value
        case Kind.INTEGER if found is int and -(1 << 63) <= value < 1 << 63:
            return value
        case Kind.INTEGER if found is float and value.is_integer() and abs(value) < 1 << 53:
            return int(value)
        case Kind.NUMBER if found is float or found is int:
            return float(value)
        case Kind.LIST if found is list and kind.item is not None:
            item = kind.item
            return [fitted(one, item) for one in value]
        case Kind.STRUCT if found is dict:
            return {name: fitted(value.get(name), one) for name, one in kind.fields}
        case Kind.JSON:
            try:
                return orjson.dumps(value).decode()
            except TypeError as error:  # nested deeper than orjson writes
                raise Misfit from error
    raise Misfit


def fitted_row(text: str, types: Mapping[str, ColumnType]) -> dict[str, Any]:
    """The columns of one output. Raises Misfit where it is no JSON object, or has a value of another type."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Misfit from error
    if type(value) is not dict:
        raise Misfit
    return {name: fitted(value.get(name), kind) for name, kind in types.items()}


class _Reader:
    """Reads types of one schema. A reference that is met within itself ends in JSON text."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._references = References(root, list(subschemas(root)))
        self._within: list[int] = []
        self._fields = self._steps = 0

    def columns(self, top: Mapping[str, Any]) -> dict[str, ColumnType]:
        """The types of the properties of an object, which is the top of the schema."""
        self._within.append(id(top))
        return {name: self.type_of(one, 1) for name, one in top["properties"].items()}

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """What a schema refers to, or the one schema that it consists of; an empty one where that leads in a circle."""
        seen: set[int] = set()
        while isinstance(schema, Mapping) and id(schema) not in seen:
            seen.add(id(schema))
            both = schema.get("allOf")
            if isinstance(schema.get("$ref"), str) and not {"type", "properties"} & schema.keys():
                schema = self._references.target(schema["$ref"], "$ref")
            elif isinstance(both, list) and len(both) == 1 and not {"type", "properties"} & schema.keys():
                schema = both[0]
            else:
                return schema
        return {}

    def type_of(self, schema: Any, level: int) -> ColumnType:
        """The type of the values of a schema, `level` deep in lists and structs."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise SchemaProblem(f"types that are found in {MAX_STEPS:,} steps", "a schema that needs more")
        one = self.resolved(schema)
        if id(one) in self._within or level > MAX_LEVELS:
            return _JSON
        self._within.append(id(one))
        try:
            return self._type_of(one, level)
        finally:
            self._within.pop()

    def _type_of(self, one: Mapping[str, Any], level: int) -> ColumnType:
        for key in ("anyOf", "oneOf"):
            if isinstance(one.get(key), list) and "type" not in one:
                branches = [branch for branch in one[key] if not self._is_null(branch)]
                kinds = list(dict.fromkeys(self.type_of(branch, level) for branch in branches))
                return kinds[0] if len(kinds) == 1 else _JSON
        names = _types(one, _UNTYPED)
        if names == {"integer", "number"}:
            return _PLAIN["number"]
        if len(names) != 1:
            return _JSON
        (name,) = names
        if name == "array":
            items = one.get("items")
            known = isinstance(items, Mapping) and "prefixItems" not in one
            return ColumnType(Kind.LIST, self.type_of(items, level + 1)) if known else _JSON
        return self._struct(one, level) if name == "object" else _PLAIN.get(name, _JSON)

    def _struct(self, one: Mapping[str, Any], level: int) -> ColumnType:
        properties = one.get("properties")
        free = one.get("additionalProperties", False) is not False or "patternProperties" in one
        if not isinstance(properties, Mapping) or not properties or free:
            return _JSON
        # DuckDB does not tell apart what differs in case alone, and reads a name up to a NUL.
        if len({name.lower() for name in properties if name.isprintable()}) < len(properties):
            return _JSON
        self._fields += len(properties)
        if self._fields > MAX_FIELDS:
            raise SchemaProblem(f"at most {MAX_FIELDS:,} fields in objects within the object", "more")
        fields = [(name, self.type_of(inner, level + 1)) for name, inner in properties.items()]
        return ColumnType(Kind.STRUCT, fields=tuple(fields))

    def _is_null(self, schema: Any) -> bool:
        one = self.resolved(schema)
        return one.get("type") == "null" or ("const" in one and one["const"] is None)


def _types(one: Mapping[str, Any], otherwise: str) -> set[str]:
    """Names of the types that a schema lets through besides null; `otherwise`: where it does not say."""
    named = one.get("type")
    if isinstance(named, str | list):
        return {named} if isinstance(named, str) else {str(name) for name in named} - {"null"}
    values: Sequence[Any] | None = one.get("enum") if isinstance(one.get("enum"), list) else None
    if values is None:
        values = [one["const"]] if "const" in one else None
    if values is not None:
        return {_OF_VALUES.get(type(value), _UNTYPED) for value in values if value is not None} or {otherwise}
    return {"object"} if isinstance(one.get("properties"), Mapping) else {otherwise}
