"""Checks answers against a dataset's JSON schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jsonschema_rs
import orjson

Check = Callable[[str], str | None]

PROBLEM_LENGTH = 300


def compile_check(schema: Mapping[str, Any]) -> Check:
    """A function that says what is wrong with an answer, or None when it fits.

    Raises ValueError when the schema itself is wrong. References to other documents are not fetched.
    """
    try:
        validator = jsonschema_rs.validator_for(dict(schema), offline=True)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        raise ValueError(f"expected a JSON schema, found one that is wrong: {error}"[:PROBLEM_LENGTH]) from error

    def check(text: str) -> str | None:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            return f"not JSON ({error.msg} at character {error.pos})"
        if validator.is_valid(value):
            return None
        first = next(iter(validator.iter_errors(value)))
        where = "/".join(map(str, first.instance_path)) or "the top"
        return f"{first.message} (at {where})"[:PROBLEM_LENGTH]

    return check
