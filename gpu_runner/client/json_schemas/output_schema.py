"""Checks answers against a dataset's JSON schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jsonschema_rs
import orjson

from gpu_runner.client.json_schemas.schema_limits import ANSWER_DEPTH, SchemaProblem, check_schema, depth_of

Check = Callable[[str], str | None]

PROBLEM_LENGTH = 300
# Each step of a search that goes back takes some 50 ns; a pattern that needs more does not match.
_PATTERNS = jsonschema_rs.FancyRegexOptions(backtrack_limit=200_000, size_limit=4 << 20)


def compile_check(schema: Mapping[str, Any]) -> Check:
    """A function that says what is wrong with an answer, or None when it fits.

    Raises ValueError when the schema itself is wrong, refers to anything outside of itself, or could keep a check busy
    for ever. Nothing is fetched.
    """
    deepest = check_schema(schema)
    validator = _validator(schema)

    def check(text: str) -> str | None:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            return f"not JSON ({error.msg} at character {error.pos})"
        if deepest < ANSWER_DEPTH and depth_of(value) > deepest:
            return f"nested deeper than the {deepest} levels up to which this schema can be checked"
        if validator.is_valid(value):
            return None
        first = next(iter(validator.iter_errors(value)))
        where = "/".join(map(str, first.instance_path)) or "the top"
        place = f" (at {where:.80})"
        return first.message[: PROBLEM_LENGTH - len(place)] + place

    return check


def _validator(schema: Mapping[str, Any]) -> jsonschema_rs.Validator:
    try:
        jsonschema_rs.meta.validate(dict(schema))
        return jsonschema_rs.validator_for(dict(schema), offline=True, pattern_options=_PATTERNS)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError, TypeError) as error:
        said = str(error).splitlines()[0][:PROBLEM_LENGTH]
        raise SchemaProblem("a valid JSON schema", f"one that is wrong: {said}") from error
