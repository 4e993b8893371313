"""What a valid schema most probably does not mean: keywords that check nothing, and what no value can satisfy.

For schemas as a user writes them; one that is in use already is only held to `schema_limits`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import jsonschema_rs

from gpu_runner.client.json_schemas.schema_limits import References, SchemaProblem, subschemas

_WRAPPER = frozenset({"name", "strict", "schema", "description"})
_KEYWORDS = frozenset(
    {
        *("$schema", "$id", "id", "$ref", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"),
        *("$recursiveAnchor", "$vocabulary", "$comment", "$defs", "definitions", "allOf", "anyOf", "oneOf", "not"),
        *("if", "then", "else", "dependentSchemas", "dependencies", "dependentRequired", "prefixItems", "items"),
        *("additionalItems", "contains", "minContains", "maxContains", "properties", "patternProperties"),
        *("additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "type", "enum"),
        *("const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength"),
        *("minLength", "pattern", "maxItems", "minItems", "maxProperties", "minProperties", "required"),
        *("title", "description", "default", "deprecated", "readOnly", "writeOnly", "examples", "example", "format"),
        *("contentEncoding", "contentMediaType", "contentSchema", "propertyOrdering"),
        "discriminator",  # OpenAPI's, beside oneOf: pydantic writes it
    }
)
_BOUNDS = (
    *(("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems")),
    *(("minProperties", "maxProperties"), ("minContains", "maxContains")),
)
# Keywords that look at one value alone: what `enum` and `const` are tried against.
_OF_ONE_VALUE = (
    *("type", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength", "minLength"),
    *("maxItems", "minItems", "maxProperties", "minProperties", "required", "const"),
)
_TRIED_VALUES = 1_000
_PASSES = 100


def unwrapped(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema within OpenAI's `{name, strict, schema}`, also within `{type: json_schema, json_schema: …}`."""
    inner = schema.get("json_schema")
    if schema.get("type") == "json_schema" and isinstance(inner, Mapping) and schema.keys() == {"type", "json_schema"}:
        schema = inner
    inner = schema.get("schema")
    return inner if isinstance(inner, Mapping) and schema.keys() <= _WRAPPER else schema


def check_mistakes(schema: Mapping[str, Any]) -> None:
    """Raises SchemaProblem for the first mistake. The schema is one that `check_schema` took."""
    found = list(subschemas(schema))
    for place, one in found:
        _check_keywords(place, one)
    for place, one in found:
        if not {"not", "if"} & set(place.split("/")):
            _check_values(place, one)
    if not _Satisfiable(schema, found).root():
        hint = "A value that is required leads to itself, or to what nothing can be."
        raise SchemaProblem("a schema that some value satisfies", "one that no value can satisfy", "#", hint)


def _check_keywords(place: str, one: Mapping[str, Any]) -> None:
    for word in one:
        if word in _KEYWORDS or word.startswith("x-"):
            continue
        if word == "nullable":
            hint = "Write the type as [string, 'null']."
        elif near := difflib.get_close_matches(word, sorted(_KEYWORDS), n=1, cutoff=0.6):
            hint = f"Did you mean {near[0]!r}?"
        else:
            hint = "A keyword that is unknown checks nothing; properties stand under `properties`."
        raise SchemaProblem("known keywords of JSON schema", f"{word!r:.80}", place, hint)


def _check_values(place: str, one: Mapping[str, Any]) -> None:
    for low, high in _BOUNDS:
        least, most = one.get(low), one.get(high)
        if _is_number(least) and _is_number(most) and least > most:
            raise SchemaProblem(f"{low} of at most {high}", f"{least} and {most}", place)
    for low, high in (("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")):
        least, most = one.get(low), one.get(high)
        if _is_number(least) and _is_number(most) and least >= most:
            raise SchemaProblem(f"{low} below {high}", f"{least} and {most}", place)
    _check_choices(place, one)
    properties, required = one.get("properties", {}), one.get("required", [])
    for name in required if isinstance(required, list) else ():
        closed = one.get("additionalProperties") is False and not one.get("patternProperties")
        if isinstance(properties, Mapping) and (properties.get(name) is False or (closed and name not in properties)):
            near = difflib.get_close_matches(str(name), list(properties), n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "additionalProperties is false: no other one may be there."
            raise SchemaProblem("required properties that may be there", f"{name!r:.80}", place, hint)


def _check_choices(place: str, one: Mapping[str, Any]) -> None:
    """Values of `enum` and `const` against the other keywords that look at one value."""
    choices = one.get("enum") if "enum" in one else [one["const"]] if "const" in one else None
    if not isinstance(choices, list) or len(choices) > _TRIED_VALUES:
        return
    word = "enum" if "enum" in one else "const"
    rest = {key: one[key] for key in _OF_ONE_VALUE if key in one and key != word and one[key] is not True}
    if not choices or (rest and not any(jsonschema_rs.is_valid(rest, value) for value in choices)):
        found = f"{word} {str(choices)[:80]} beside {', '.join(rest)}" if choices else f"an empty {word}"
        hint = "Text that looks like a number is to be quoted." if "type" in rest else ""
        raise SchemaProblem("a value that the other keywords let through", found, place, hint)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Satisfiable:
    """Which schemas some finite value satisfies, as far as required parts, references and types tell.

    None counts until a value for it is found: so a schema that requires itself is never reached.
    """

    def __init__(self, root: Mapping[str, Any], found: list[tuple[str, Mapping[str, Any]]]) -> None:
        self._root = root
        self._references = References(root, found)
        self._known: dict[int, bool] = {}
        self._found = [one for _, one in found]
        self._ids = frozenset(map(id, self._found))

    def root(self) -> bool:
        """Whether the whole schema can be satisfied; True also where that takes too long to tell."""
        for _ in range(_PASSES):
            before = len(self._known)
            for one in reversed(self._found):  # inner ones first
                if id(one) not in self._known and self._holds(one):
                    self._known[id(one)] = True
            if id(self._root) in self._known:
                return True
            if len(self._known) == before:
                return False
        return True

    def _holds(self, one: Mapping[str, Any]) -> bool:
        rules: tuple[Callable[[Mapping[str, Any]], bool], ...] = (self._branches, self._targets, self._inner)
        return all(rule(one) for rule in rules)

    def _can(self, schema: Any) -> bool:
        return schema is not False and (id(schema) in self._known or id(schema) not in self._ids)

    def _branches(self, one: Mapping[str, Any]) -> bool:
        for word in ("anyOf", "oneOf"):
            if isinstance(one.get(word), list) and not any(map(self._can, one[word])):
                return False
        return all(map(self._can, one["allOf"])) if isinstance(one.get("allOf"), list) else True

    def _targets(self, one: Mapping[str, Any]) -> bool:
        """A reference can be satisfied, by a type that this schema and its `allOf` allow as well."""
        targets = [self._references.target(one[key], key) for key in ("$ref", "$dynamicRef") if key in one]
        if not all(map(self._can, targets)):
            return False
        parts = [one, *targets, *(one["allOf"] if isinstance(one.get("allOf"), list) else ())]
        allowed = [kinds for part in parts if (kinds := _types(part)) is not None]
        return not allowed or bool(frozenset.intersection(*allowed))

    def _inner(self, one: Mapping[str, Any]) -> bool:
        """What must be in an object or a list; other types need none of it."""
        kinds = _types(one)
        if kinds == frozenset(["object"]):
            properties = one.get("properties", {})
            return all(self._can(properties[name]) for name in _names(one) if name in properties)
        if kinds == frozenset(["array"]) and one.get("minItems", 0) > 0 and "prefixItems" not in one:
            items = one.get("items", True)
            return self._can(items[0] if isinstance(items, list) and items else items)
        return True


def _names(one: Mapping[str, Any]) -> Iterator[str]:
    required = one.get("required", [])
    yield from required if isinstance(required, list) else ()


def _types(schema: Any) -> frozenset[str] | None:
    """Types that a schema names; None where it names none. A whole number is a number."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds is None:
        return None
    named = frozenset([kinds] if isinstance(kinds, str) else kinds)
    return named | {"integer"} if "number" in named else named
