"""Schemas that are valid and check nothing, or that nothing satisfies; and which ones OpenAI's strict mode takes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_runner.client.json_schemas.openai_strict import strict_takes
from gpu_runner.client.json_schemas.output_schema import compile_check
from gpu_runner.client.json_schemas.schema_limits import SchemaProblem, check_schema
from gpu_runner.client.json_schemas.schema_mistakes import check_mistakes, unwrapped

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def refusal(schema: dict[str, Any]) -> str:
    compile_check(schema)
    with pytest.raises(SchemaProblem) as caught:
        check_mistakes(schema)
    return f"{caught.value}. {caught.value.hint}"


@pytest.mark.parametrize(
    "wrapper",
    [
        {"name": "person", "strict": True, "schema": PERSON},
        {"schema": PERSON},
        {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}},
    ],
)
def test_openais_wrapper_is_understood(wrapper: dict[str, Any]):
    assert unwrapped(wrapper) == PERSON


@pytest.mark.parametrize("schema", [PERSON, {}, {"type": "object", "properties": {"schema": {"type": "object"}}}])
def test_a_schema_is_itself(schema: dict[str, Any]):
    assert unwrapped(schema) is schema


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "object", "propertes": {}}, "found 'propertes' at #. Did you mean 'properties'?"),
        ({"type": "object", "require": ["a"]}, "Did you mean 'required'?"),
        ({"name": {"type": "string"}}, "properties stand under `properties`"),
        ({"properties": {"a": {"type": "array", "item": {}}}}, "found 'item' at #/properties/a. Did you mean 'items'?"),
        ({"type": "string", "nullable": True}, "[string, 'null']"),
        ({"anyOf": [{"typ": "string"}]}, "Did you mean 'type'?"),
    ],
)
def test_unknown_keywords_are_named_with_what_was_meant(schema: dict[str, Any], said: str):
    assert said in refusal(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "minLength": 9, "maxLength": 3},
        {"type": "array", "minItems": 2, "maxItems": 1},
        {"type": "number", "exclusiveMinimum": 3, "maximum": 3},
        {"type": "string", "enum": [1.1, 2]},
        {"type": "string", "const": 5},
        {"enum": ["a"], "minLength": 3},
        {"properties": {"a": {"type": "string", "enum": [False]}}},
        {"type": "object", "properties": {"name": {}}, "required": ["nmae"], "additionalProperties": False},
        {"type": "object", "properties": {"name": False}, "required": ["name"]},
        {"type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["child"]},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"$ref": "#/$defs/a", "type": "object", "$defs": {"a": {"type": "string"}}},
        {"anyOf": [False, {"allOf": [{"type": "null"}, {"type": "array"}]}]},
        {"type": "array", "minItems": 1, "items": False},
    ],
)
def test_what_nothing_satisfies_is_refused(schema: dict[str, Any]):
    assert "expected" in refusal(schema)


@pytest.mark.parametrize(
    "schema",
    [
        PERSON,
        {},
        {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True, "enum": [2]},
        {
            "type": "object",
            "properties": {"child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["child"],
        },
        {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
        {"allOf": [{"type": "number"}, {"type": "integer"}]},
        {"not": {"minimum": 3, "maximum": 1}},
        {"enum": ["a", 1, None]},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"x-order": 1, "title": "t", "format": "date", "default": 1},
        {"type": "object", "patternProperties": {"^a": {}}, "required": ["ab"], "additionalProperties": False},
        {"properties": {"enum": {"type": "string"}, "propertes": {}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}}}},
    ],
)
def test_honest_schemas_are_taken(schema: dict[str, Any]):
    compile_check(schema)
    check_mistakes(schema)


KINDS = st.sampled_from(["string", "integer", "number", "null", "boolean"])
SMALL = st.integers(-3, 3)
LEAVES = st.one_of(
    st.fixed_dictionaries({"type": KINDS}),
    st.fixed_dictionaries({"enum": st.lists(st.one_of(SMALL, st.sampled_from(["a", "b"]), st.none()), min_size=1)}),
    st.fixed_dictionaries({"type": st.just("integer"), "minimum": SMALL, "maximum": SMALL}),
    st.fixed_dictionaries({"const": SMALL, "type": KINDS}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(st.sampled_from("ab"), inner, min_size=1),
                "required": st.lists(st.sampled_from("ab"), unique=True, max_size=1),
            }
        ),
    ),
    max_leaves=4,
)
VALUES = st.recursive(
    st.one_of(SMALL, st.sampled_from(["a", "b", ""]), st.none(), st.booleans(), st.just(0.5)),
    lambda inner: st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(SCHEMAS, st.lists(VALUES, min_size=20, max_size=20))
def test_a_schema_that_is_called_unsatisfiable_has_no_value(schema: dict[str, Any], values: list[Any]):
    import jsonschema_rs

    try:
        check_mistakes(schema)
    except SchemaProblem as problem:
        if "some value satisfies" in problem.expected:
            assert not [value for value in values if jsonschema_rs.is_valid(schema, value)]


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"additionalProperties": True}, False),
        ({"required": ["name"]}, False),
        ({"properties": {"name": {"type": "string", "minLength": 1}, "age": {}}}, False),
        ({"properties": {"name": {"type": "string", "default": "x"}, "age": {}}}, False),
        ({"properties": {"name": {"oneOf": [{"type": "string"}]}, "age": {}}}, False),
        ({"properties": {"name": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "age": {}}}, True),
        ({"properties": {"name": {"type": "string", "format": "uri"}, "age": {}}}, False),
        ({"properties": {"name": {"type": "object"}, "age": {}}}, False),
        ({"type": "array"}, False),
        ({"anyOf": [{}]}, False),
        ({"patternProperties": {"^x": {}}}, False),
        ({"properties": {"name": {"enum": list(range(1001))}, "age": {}}}, False),
    ],
)
def test_what_openais_strict_mode_takes(change: dict[str, Any], taken: bool):
    schema = PERSON | change
    check_schema(schema)
    assert strict_takes(schema) is taken
