"""Whether OpenAI's strict mode takes a schema: it refuses others with status 400, each row of a dataset alike.

https://platform.openai.com/docs/guides/structured-outputs, supported schemas. What is not known to be taken counts as
refused: without `strict` the schema is sent all the same, and outputs are checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_runner.client.json_schemas.schema_limits import depth_of, subschemas

MAX_LEVELS = 10
MAX_PROPERTIES = 5_000
MAX_CHOICES = 1_000
MAX_LETTERS = 120_000
_WORDS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref", "$defs"),
        *("definitions", "title", "description", "$schema", "pattern", "format", "multipleOf", "minimum", "maximum"),
        *("exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems"),
    }
)
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})
_LEVELS_OF_KEYWORDS = 2  # `properties` and the name below it


def strict_takes(schema: Mapping[str, Any]) -> bool:
    """Whether a schema may be sent with `strict: true`. It is one that `check_schema` took."""
    if schema.get("type") != "object" or "anyOf" in schema or depth_of(schema) > MAX_LEVELS * _LEVELS_OF_KEYWORDS:
        return False
    properties = choices = letters = 0
    for _, one in subschemas(schema):
        if not _takes(one):
            return False
        names, values = one.get("properties", {}), one.get("enum", [])
        properties, choices = properties + len(names), choices + len(values)
        letters += sum(map(len, names)) + sum(len(value) for value in [*values, one.get("const")] if _is_text(value))
    return properties <= MAX_PROPERTIES and choices <= MAX_CHOICES and letters <= MAX_LETTERS


def _takes(one: Mapping[str, Any]) -> bool:
    """Known keywords; an object has all its properties required, and no others."""
    if not one.keys() <= _WORDS or one.get("format", "date") not in _FORMATS:
        return False
    kinds = one.get("type")
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds) or "properties" in one
    if not is_object:
        return True
    return one.get("additionalProperties") is False and set(one.get("required", [])) == set(one.get("properties", {}))


def _is_text(value: object) -> bool:
    return isinstance(value, str)
