"""Types of single values in a dataset's YAML: what each takes, and the words for what it refuses."""

from __future__ import annotations

import datetime
import difflib
import re
import zoneinfo
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from batch_assets.cron import cron_problem
from batch_assets.moments import MomentProblem, known_zone, parse_deadline
from batch_assets.spec_errors import Unusable, show
from batch_assets.templates import Template, TemplateProblem

MAX_SCHEMA_BYTES = 100_000
# Conditions are evaluated block by block, so what looks across rows would depend on where a block ends.
_NOT_PER_ROW = re.compile(
    r"\b(avg|sum|count|min|max|first|last|median|std\w*|var\w*|quantile\w*|corr|covar\w*|rank|dense_rank|row_number"
    r"|lag|lead|ntile|over)\s*\(",
    re.IGNORECASE,
)
_SQL_TEXT = re.compile(r"'(?:[^']|'')*'")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/{2}")
_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,62}")


class Strict(BaseModel):
    """A section of a spec: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise Unusable(
            "1 to 63 characters of a-z, 0-9 and _, starting with a letter or digit",
            show(value),
            "It becomes the asset group, the pool and a folder in the store.",
        )
    return value


def _source_path(value: str) -> str:
    scheme = _SCHEME.match(value)
    if scheme and scheme[1].lower() != "s3":
        raise Unusable(
            "a local path or s3://bucket/key",
            f"the scheme {show(scheme[1])}",
            "Copy the files to disk or S3, or mount their store.",
        )
    return value


def _cron(value: str) -> str:
    if problem := cron_problem(value):
        raise Unusable("a cron schedule of five fields, e.g. '0 6 * * *'", show(value), problem)
    return value


def _zone(value: str) -> str:
    if not known_zone(value):
        near = difflib.get_close_matches(value, zoneinfo.available_timezones(), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else ""
        raise Unusable("a time zone of the IANA database, e.g. Europe/Paris", show(value), hint)
    return value


def _moment(value: Any) -> Any:
    """YAML reads a timestamp without quotes as a date."""
    return value.isoformat() if isinstance(value, datetime.datetime) else value


def _deadline(value: str) -> str:
    try:
        parse_deadline(value)
    except MomentProblem as error:
        raise Unusable(error.expected, show(value), error.hint) from error
    return value


def _template(value: str) -> str:
    try:
        Template(value)
    except TemplateProblem as error:
        raise Unusable("a Jinja template", show(value), f"{error}.") from error
    return value


def _json_schema(value: dict[str, Any]) -> dict[str, Any]:
    import jsonschema_rs
    import orjson

    try:
        size = len(orjson.dumps(value))
    except TypeError as error:
        raise Unusable("a JSON schema", show(value), f"It holds what JSON cannot: {error}.") from error
    if size > MAX_SCHEMA_BYTES:
        raise Unusable(f"a JSON schema of at most {MAX_SCHEMA_BYTES} bytes", f"{size} bytes")
    for reference in _references(value):
        if not str(reference).startswith("#"):
            raise Unusable("references within the schema (#/$defs/…)", f"$ref {show(reference)}", "Nothing is fetched.")
    try:
        jsonschema_rs.meta.validate(value)
        jsonschema_rs.validator_for(value)
    except (jsonschema_rs.ValidationError, ValueError) as error:
        raise Unusable("a valid JSON schema", show(value), f"{str(error).splitlines()[0]}.") from error
    return value


def _references(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        own = [value[key] for key in ("$ref", "$dynamicRef") if key in value]
        return own + [found for inner in value.values() for found in _references(inner)]
    if isinstance(value, list):
        return [found for inner in value for found in _references(inner)]
    return []


def _where(value: str) -> str:
    import polars as pl

    if found := _NOT_PER_ROW.search(_SQL_TEXT.sub("''", value)):
        raise Unusable("a condition on one row at a time", show(value), f"{found[1]}() looks at many rows.")
    try:
        columns = pl.sql_expr(value).meta.root_names()
    except Exception as error:  # Polars has no one class for what its SQL parser refuses
        reason = f"{str(error).splitlines()[0]}."
        raise Unusable("a SQL condition over the row's columns", show(value), reason) from error
    if not columns:
        raise Unusable("a SQL condition that names a column", show(value))
    return value


def encodable(value: Any) -> Any:
    import orjson

    try:
        orjson.dumps(value)
    except TypeError as error:
        raise Unusable("what JSON can carry", show(value), f"{error}.") from error
    return value


def _scalar(value: Any) -> Any:
    if value is not None and not isinstance(value, str | int | float | bool):
        raise Unusable("text, a number, true/false or null", show(value), "Quote what YAML takes for a date.")
    if isinstance(value, str) and not value.isascii():
        encodable(value)
    return value


Text = Annotated[str, Field(min_length=1, max_length=1 << 20), AfterValidator(_template)]
Rate = Annotated[float, Field(ge=0, le=1)]
Column = Annotated[str, Field(min_length=1, max_length=255)]
Scalar = Annotated[
    Any,
    AfterValidator(_scalar),
    WithJsonSchema({"type": ["string", "integer", "number", "boolean", "null"]}),
]
Name = Annotated[str, AfterValidator(_name)]
SourcePath = Annotated[str, Field(min_length=1), AfterValidator(_source_path)]
Cron = Annotated[str, AfterValidator(_cron)]
TimeZone = Annotated[str, AfterValidator(_zone)]
Deadline = Annotated[str, BeforeValidator(_moment), AfterValidator(_deadline)]
Condition = Annotated[str, AfterValidator(_where)]
JsonSchema = Annotated[dict[str, Any], AfterValidator(_json_schema)]
Encodable = Annotated[dict[str, Any], AfterValidator(encodable)]
