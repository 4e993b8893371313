"""JSON values that validate against a JSON Schema, as structured output of an engine does.

Covers type (also a list), enum, const, properties with required and optional ones, additionalProperties and
minProperties, items, prefixItems, minItems, maxItems, uniqueItems, string lengths, pattern and the usual formats,
number ranges with multipleOf, anyOf, oneOf, allOf (merged), local $ref with recursion. What it cannot do raises
ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from random import Random
from typing import Any

from gpu_runner.simulator.generated_text import WORDS
from gpu_runner.simulator.pattern import matching

Schema = Mapping[str, Any]

_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_FORMATS = {
    "date": r"20[0-4]\d-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\dZ",
    "date-time": r"20[0-4]\d-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])T([01]\d|2[0-3]):[0-5]\d:[0-5]\dZ",
    "email": r"[a-z]{3,8}@[a-z]{3,8}\.example",
    "uri": r"https://[a-z]{3,8}\.example/[a-z]{2,6}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    "ipv4": r"10\.[1-9]\d?\.[1-9]\d?\.[1-9]\d?",
}
# Below this depth optional properties and items are left out, so that recursive schemas come to an end.
_DEEP = 4
_TOO_DEEP = 60
_LONGEST = 100_000  # no answer is longer


def instance(schema: Schema | bool, rng: Random) -> Any:
    """A value that `schema` accepts; the same rng state gives the same value."""
    return _Writer(schema, rng).value(schema, 0)


class _Writer:
    def __init__(self, root: Schema | bool, rng: Random) -> None:
        self.root = root
        self.rng = rng

    def value(self, schema: Any, depth: int) -> Any:
        if schema is True or schema == {}:
            return self.rng.choice(WORDS)
        if not isinstance(schema, Mapping):
            raise ValueError(f"schema: expected an object, found {type(schema).__name__}")
        if depth > _TOO_DEEP:
            raise ValueError("schema: recursion without an end")
        schema = self._flat(schema, depth)
        for key in ("minLength", "minItems", "minProperties"):
            if schema.get(key, 0) > _LONGEST:
                raise ValueError(f"schema: expected {key} of at most {_LONGEST}, found {schema[key]}")
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.rng.choice(schema["enum"])
        kind = self._kind(schema)
        if kind == "null":
            return None
        if kind == "boolean":
            return self.rng.random() < 0.5
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        if kind == "string":
            return self._string(schema)
        return self._object(schema, depth) if kind == "object" else self._array(schema, depth)

    def _flat(self, schema: Schema, depth: int) -> Schema:
        """Follow $ref, merge allOf, pick one of anyOf and oneOf, until none is left."""
        for _ in range(_TOO_DEEP):
            if "$ref" in schema:
                rest = {key: value for key, value in schema.items() if key != "$ref"}
                schema = _merge(self._resolve(schema["$ref"]), rest)
            elif "allOf" in schema:
                parts = schema["allOf"]
                schema = {key: value for key, value in schema.items() if key != "allOf"}
                for part in parts:
                    schema = _merge(schema, self._flat(part, depth))
            elif branches := schema.get("anyOf") or schema.get("oneOf"):
                rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
                schema = _merge(self._branch(branches, depth), rest)
            else:
                return schema
        raise ValueError("schema: $ref that leads to itself")

    def _branch(self, branches: list[Schema], depth: int) -> Schema:
        """Any branch; deep down the one that goes no deeper, when there is one."""
        if depth >= _DEEP:
            flat = [b for b in branches if not ({"$ref", "properties", "items", "anyOf", "oneOf"} & b.keys())]
            branches = flat or branches
        return self.rng.choice(branches)

    def _resolve(self, ref: str) -> Schema:
        if not ref.startswith("#"):
            raise ValueError(f"schema: only local references are supported, found {ref!r}")
        node: Any = self.root
        for part in ref[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, Mapping) or key not in node:
                raise ValueError(f"schema: reference {ref!r} leads nowhere")
            node = node[key]
        return {} if node is True else node

    def _kind(self, schema: Schema) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = self.rng.choice(kind)
        if kind is None:
            hints = {"properties": "object", "items": "array", "minimum": "number", "maximum": "number"}
            kind = next((hints[key] for key in hints if key in schema), "string")
        if kind not in _TYPES:
            raise ValueError(f"Invalid type: {kind}")
        return str(kind)

    def _number(self, schema: Schema, kind: str) -> int | float:
        step = schema.get("multipleOf") or (1 if kind == "integer" else None)
        low, low_open = _bound(schema, "minimum", "exclusiveMinimum", max)
        high, high_open = _bound(schema, "maximum", "exclusiveMaximum", min)
        if low is None:
            low, low_open = (min(0, high - 100) if high is not None else 0), False
        if high is None:
            high, high_open = max(1000, low + 1000), False
        if step is None:
            value = float(low + (high - low) * (0.001 + 0.998 * self.rng.random()))
            short = round(value, 4)
            return short if low < short < high else value
        if kind == "integer":
            step = Fraction(str(step)).numerator  # the integers among the multiples of 2.5 are those of 5
        first = math.floor(low / step) + 1 if low_open else math.ceil(low / step)
        last = math.ceil(high / step) - 1 if high_open else math.floor(high / step)
        if first > last:
            raise ValueError(f"schema: no {kind} between {low} and {high}")
        multiple = self.rng.randint(first, last) * step
        return int(multiple) if kind == "integer" else float(round(multiple, 10))

    def _string(self, schema: Schema) -> str:
        pattern = schema.get("pattern") or _FORMATS.get(schema.get("format", ""))
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if pattern:
            for _ in range(100):
                text = matching(pattern, self.rng)
                if low <= len(text) and (high is None or len(text) <= high):
                    return text
            raise ValueError(f"schema: found no string of length {low} to {high} for pattern {pattern!r}")
        text = " ".join(self.rng.choices(WORDS, k=self.rng.randint(2, 8)))
        while len(text) < low:
            text += " " + self.rng.choice(WORDS)
        return text if high is None else text[:high].ljust(low, "x")

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        result = {}
        for name, inner in properties.items():
            if name in required or (depth < _DEEP and self.rng.random() < 0.5):
                result[name] = self.value(inner, depth + 1)
        extra = schema.get("additionalProperties", True)
        for name in required:
            if name not in result:
                result[name] = self.value(extra, depth + 1)
        missing = [name for name in properties if name not in result]
        while len(result) < schema.get("minProperties", 0):
            if missing:
                name, inner = missing[0], properties[missing.pop(0)]
            else:
                name, inner = f"{self.rng.choice(WORDS)}_{len(result)}", extra
            result[name] = self.value(inner, depth + 1)
        return result

    def _array(self, schema: Schema, depth: int) -> list[Any]:
        prefix = schema.get("prefixItems", [])
        low = max(schema.get("minItems", 0), 0 if depth >= _DEEP else min(1, schema.get("maxItems", 1)))
        high = schema.get("maxItems", low if depth >= _DEEP else max(low, 3))
        count = self.rng.randint(low, max(low, min(high, low + 3)))
        items = schema.get("items", True)
        if items is False:
            count = min(count, len(prefix))
        result: list[Any] = []
        for index in range(max(count, min(len(prefix), high))):
            inner = prefix[index] if index < len(prefix) else items
            value = self.value(inner, depth + 1)
            for _ in range(100):
                if not schema.get("uniqueItems") or value not in result:
                    break
                value = self.value(inner, depth + 1)
            result.append(value)
        return result


def _bound(schema: Schema, closed: str, exclusive: str, tighter: Any) -> tuple[Any, bool]:
    """The bound of a number and whether it is excluded itself."""
    plain, strict = schema.get(closed), schema.get(exclusive)
    if strict is None or isinstance(strict, bool):
        return plain, strict is True
    if plain is None or tighter(plain, strict) == strict:
        return strict, True
    return plain, False


def _merge(one: Schema, two: Schema) -> Schema:
    """Both schemas at once, where they do not contradict each other."""
    merged = {**one, **two}
    if "properties" in one and "properties" in two:
        merged["properties"] = {**one["properties"], **two["properties"]}
    if "required" in one and "required" in two:
        merged["required"] = [*one["required"], *two["required"]]
    return merged
