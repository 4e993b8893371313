"""Bounds on a dataset's JSON schema: nothing is fetched, and checking an answer against it ends soon.

An answer is checked in steps: one for each part of the answer and each schema that applies to it. `$ref` can make that
number grow exponentially, with the schema alone or with the depth of the answer; both are worked out beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_PATTERNS = 200
MAX_STEPS = 10_000  # for one part of an answer
MAX_PATH_STEPS = 1e7  # for the deepest part of an answer: one or two seconds
ANSWER_DEPTH = 1024  # orjson reads nothing deeper

DRAFTS = frozenset(
    {
        "http://json-schema.org/draft-04/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
    }
)
_LONGEST = 2_000_000  # additions: about a second
_ANCHORS = ("$anchor", "$dynamicAnchor")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords whose schemas apply to the same part of an answer, and to parts within it.
_HERE_ONE, _HERE_MANY, _HERE_NAMED = ("not", "if", "then", "else"), ("allOf", "anyOf", "oneOf"), ("dependentSchemas",)
_WITHIN_ONE = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "contentSchema"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_WITHIN_MANY, _WITHIN_NAMED = ("prefixItems", "items"), ("properties", "patternProperties")
_NAMED = ("$defs", "definitions", "dependencies", *_HERE_NAMED, *_WITHIN_NAMED)


class SchemaProblem(ValueError):
    """A schema that is refused: what was expected, what was found, and where in it."""

    def __init__(self, expected: str, found: str, where: str = "", hint: str = "") -> None:
        at = f" at {where}" if where else ""
        super().__init__(f"JSON schema: expected {expected}, found {found}{at}")
        self.expected, self.found, self.hint = expected, f"{found}{at}", hint


def check_schema(schema: Mapping[str, Any]) -> int:
    """How deep an answer may be nested so that its check ends soon. Raises SchemaProblem."""
    _check_size(schema)
    found = list(subschemas(schema))
    for place, node in found:
        _check_words(place, node)
    patterns = sum("pattern" in node for _, node in found) + sum(
        len(_map(node, "patternProperties")) for _, node in found
    )
    if patterns > MAX_PATTERNS:
        raise SchemaProblem(f"at most {MAX_PATTERNS} patterns", str(patterns))
    return _Work(schema, found).depth()


def depth_of(value: Any) -> int:
    """Levels of lists and objects in a JSON value."""
    depth, level = 0, [value]
    while level := [part for one in level for part in _parts(one)]:
        depth += 1
    return depth


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _check_size(schema: Any) -> None:
    """Bounds on all of it, also on what is no schema (enum, const, unknown keywords)."""
    nodes, depth, level = 1, 0, [schema]
    while level:
        inner = [part for one in level for part in _parts(one)]
        nodes, depth = nodes + len(inner), depth + 1
        if inner and depth > MAX_DEPTH:
            raise SchemaProblem(f"a JSON schema of at most {MAX_DEPTH} levels", "more")
        if nodes > MAX_NODES:
            raise SchemaProblem(f"a JSON schema of at most {MAX_NODES} values", "more")
        for one in level:
            if isinstance(one, float) and not math.isfinite(one):
                raise SchemaProblem("finite numbers in a JSON schema", str(one))
            if isinstance(one, int) and not -(1 << 63) <= one < 1 << 64:
                raise SchemaProblem(
                    "whole numbers of at most 64 bits in a JSON schema", f"one of {one.bit_length()} bits"
                )
            if isinstance(one, dict) and not all(isinstance(key, str) for key in one):
                raise SchemaProblem("keys that are text in a JSON schema", "another one")
        level = inner


def subschemas(schema: Any, place: str = "#") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every schema in a schema with its JSON pointer; values of enum and const are data."""
    if not isinstance(schema, Mapping):
        return
    yield place, schema
    for key, value in schema.items():
        if key in _NAMED:
            inner: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
        elif key in _HERE_MANY or (key in _WITHIN_MANY and isinstance(value, list)):
            inner = enumerate(value) if isinstance(value, list) else ()
        else:
            inner = [("", value)] if key in (*_HERE_ONE, *_WITHIN_ONE) else ()
        for name, one in inner:
            word = str(name).replace("~", "~0").replace("/", "~1")
            yield from subschemas(one, f"{place}/{key}/{word}".rstrip("/"))


def _check_words(place: str, schema: Mapping[str, Any]) -> None:
    """`$schema`, `$id` and references of one schema."""
    if "$schema" in schema:
        draft = schema["$schema"]
        if not isinstance(draft, str) or draft.rstrip("#") not in DRAFTS:
            known = "draft-04, draft-06, draft-07, 2019-09 or 2020-12 of json-schema.org"
            raise SchemaProblem(f"a known draft ({known}) in $schema", f"{draft!r:.80}", place, "Nothing is fetched.")
    for key in ("$id", "id"):
        name = schema.get(key)
        if place != "#" and isinstance(name, str) and not name.startswith("#"):
            raise SchemaProblem(
                f"no {key} below the top", f"{name!r:.80}", place, "References start at the top: #/$defs/…"
            )
    for key in _REFERENCES:
        if key in schema and not (isinstance(schema[key], str) and schema[key].startswith("#")):
            expected = "references within the schema (#/$defs/…)"
            raise SchemaProblem(expected, f"{key} {schema[key]!r:.80}", place, "Nothing is fetched.")


def _map(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


class References:
    """What references lead to, within one schema; `found` are its subschemas."""

    def __init__(self, root: Mapping[str, Any], found: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        self.root = root
        schemas = [schema for _, schema in found]
        self.anchors = {f"#{schema[key]}": schema for schema in schemas for key in _ANCHORS if key in schema}
        self.anchors |= {str(s[key]): s for s in schemas for key in ("$id", "id") if str(s.get(key)).startswith("#")}

    def target(self, reference: str, key: str) -> Any:
        """The schema that a reference of this keyword names. Raises SchemaProblem when there is none."""
        if reference in ("#", "#/"):
            return self.root
        if reference in self.anchors:
            return self.anchors[reference]
        node: Any = self.root
        for word in reference[2:].split("/") if reference.startswith("#/") else [reference]:
            word = word.replace("~1", "/").replace("~0", "~")
            step = int(word) if isinstance(node, list) and word.isdecimal() and len(word) < 6 else word
            try:
                node = node[step]
            except (LookupError, TypeError):
                raise SchemaProblem(
                    "references within the schema", f"{key} {reference!r:.80}, which is not there"
                ) from None
        return node


class _Work:
    """Steps of a check, as a graph of schemas."""

    def __init__(self, root: Mapping[str, Any], found: list[tuple[str, Mapping[str, Any]]]) -> None:
        self.root = root
        self._references = References(root, found)
        self.here: dict[int, list[int]] = {}
        self.within: dict[int, list[list[int]]] = {}
        stack: list[Any] = [root]
        while stack:
            schema = stack.pop()
            if id(schema) in self.here or not isinstance(schema, Mapping):
                continue
            here, within = self._here(schema), self._within(schema)
            self.here[id(schema)] = [id(one) for one in here if isinstance(one, Mapping)]
            self.within[id(schema)] = [[id(one) for one in group if isinstance(one, Mapping)] for group in within]
            stack += [*here, *(one for group in within for one in group)]

    def _here(self, schema: Mapping[str, Any]) -> list[Any]:
        found = [schema[key] for key in _HERE_ONE if key in schema]
        found += [one for key in _HERE_MANY if isinstance(schema.get(key), list) for one in schema[key]]
        found += [one for key in (*_HERE_NAMED, "dependencies") for one in _map(schema, key).values()]
        return found + [self._references.target(schema[key], key) for key in _REFERENCES if key in schema]

    def _within(self, schema: Mapping[str, Any]) -> list[list[Any]]:
        """Groups of schemas that may apply to one and the same part of an answer."""
        always = [*_map(schema, "patternProperties").values()]
        always += [schema[key] for key in _WITHIN_ONE if isinstance(schema.get(key), Mapping)]
        each = [*_map(schema, "properties").values()]
        each += [one for key in _WITHIN_MANY if isinstance(schema.get(key), list) for one in schema[key]]
        return [[*always, one] for one in each] or [always]

    def depth(self) -> int:
        """The deepest answer whose check is bounded. Raises SchemaProblem when not even a flat one is."""
        order = self._order()
        before: dict[int, float] = dict.fromkeys(order, 0.0)
        for depth in range(ANSWER_DEPTH):
            steps: dict[int, float] = {}
            for node in order:
                inner = max((sum(before[one] for one in group) for group in self.within[node]), default=0.0)
                own = 1.0 if depth == 0 else max(inner, 0.0)
                steps[node] = own + sum(steps[one] for one in self.here[node])
            if depth == 0 and max(steps.values()) > MAX_STEPS:
                raise SchemaProblem(
                    f"at most {MAX_STEPS:,} schemas for one value", "more, through $ref, allOf, anyOf, oneOf"
                )
            if steps[id(self.root)] > MAX_PATH_STEPS:
                return depth - 1
            if steps == before:
                break
            if depth * len(order) > _LONGEST:
                return depth
            before = steps
        return ANSWER_DEPTH

    def _order(self) -> list[int]:
        """Every schema after those that apply to the same part. Raises SchemaProblem for one that leads to itself."""
        done: dict[int, bool] = {}
        order: list[int] = []
        for root in self.here:
            stack = [(root, False)]
            while stack:
                node, left = stack.pop()
                if left:
                    done[node] = True
                    order.append(node)
                elif node not in done:
                    done[node] = False
                    stack.append((node, True))
                    stack += [(one, False) for one in self.here[node] if not done.get(one, False)]
                elif not done[node]:
                    raise SchemaProblem("references that come to an end", "a $ref that leads to itself")
        return order
