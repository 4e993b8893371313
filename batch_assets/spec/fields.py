"""Types of single values in a dataset's YAML: what each takes, and the words for what it refuses."""

from __future__ import annotations

import datetime
import difflib
import importlib
import math
import re
import sys
import zoneinfo
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from batch_assets.spec.cron import cron_problem
from batch_assets.spec.deadline import InvalidDeadline, known_zone, parse_deadline
from batch_assets.spec.errors import Unusable, show
from batch_assets.templates.prompt_template import Template, TemplateProblem
from gpu_runner.models.names import name_problem
from resources.objects.hub_client import EXPECTED_ADDRESS, hub_address

MAX_SCHEMA_BYTES = 100_000
MAX_CHOICES, MAX_GRAMMAR = 1_000, 50_000
MAX_FIELDS_BYTES = 1 << 20
MAX_CONDITION = 20_000
MAX_OPERATORS = 500
MAX_PARENTHESES = 50
MAX_JOINED = 50
_SQL_OPERATOR = re.compile(
    r"\b(?:AND|OR|NOT|LIKE|ILIKE|BETWEEN|CASE|WHEN|IS|XOR)\b|\|\||::|[-+*/%<>=!~^&|]", re.IGNORECASE
)
_SQL_CALL = re.compile(r"\b(\w+)\s*\(")
_SQL_REPLACE = re.compile(r"\breplace\s*\([^()']*,\s*'((?:[^']|'')+)'\s*,\s*'((?:[^']|'')*)'\s*\)", re.IGNORECASE)
_SWELLING = frozenset({"lpad", "rpad", "repeat", "replicate", "space", "explode", "unnest"})
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/{2}")
_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,62}")
_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_CLASS = re.compile(rf"({_DOTTED}):({_DOTTED})", re.ASCII)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,49}")
MAX_CLASS_NAME = 500


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


def _asset_name(value: str) -> str:
    if any(not part for part in value.split("/")) or not value.isprintable():
        raise Unusable("the key of an asset: names with / between them, as some/key", show(value))
    return value


def _source_path(value: str) -> str:
    scheme = _SCHEME.match(value)
    if scheme and scheme[1].lower() not in ("s3", "gs", "hf"):
        raise Unusable(
            "a local path, s3://bucket/key, gs://bucket/key or hf://datasets/OWNER/NAME/FILE",
            f"the scheme {show(scheme[1])}",
            "Copy the files to disk or S3, or mount their store.",
        )
    try:
        hub_address(value)
    except ValueError:  # it may hold a secret, and is not shown
        hint = "A path or address is without user, password or query."
        raise Unusable(EXPECTED_ADDRESS, "another address of the hub", hint) from None
    return value


def _text_file(value: str) -> str:
    if "://" in value or "\0" in value:
        raise Unusable("a file beside the defs.yaml", show(value), "Copy it there.")
    return value


def _license(value: str) -> str:
    if not _LICENSE.fullmatch(value):
        raise Unusable("a licence as the Hugging Face hub names it: apache-2.0, cc-by-4.0, other", show(value))
    return value


def _delimiter(value: str) -> str:
    if len(value) != 1 or value in '"\r\n\0\ufeff':
        raise Unusable(
            "one character between two fields, such as ';'", show(value), 'A tab is "\\t", in double quotes.'
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
    except InvalidDeadline as error:
        raise Unusable(error.expected, show(value), error.hint) from error
    return value


def _model(value: str) -> str:
    if problem := name_problem(value):
        raise Unusable("a model as the engine knows it, e.g. Qwen/Qwen3-8B", show(value), f"{problem.capitalize()}.")
    return value


def _template(value: str) -> str:
    try:
        Template(value)
    except TemplateProblem as error:
        raise Unusable("a Jinja template", show(value), f"{error}.") from error
    return value


def _schema_of_class(value: Any) -> Any:
    """The JSON schema of a pydantic class, which may be named as `module:Class`; another value as it is.

    The module is imported, as Python finds it; nothing else is.
    """
    if isinstance(value, str):
        value, name = _imported(value), value
    elif isinstance(value, type):
        name = f"{value.__module__}:{value.__qualname__}"
    else:
        return value
    expected = "a class of pydantic (a subclass of BaseModel)"
    if not (isinstance(value, type) and issubclass(value, BaseModel)):
        raise Unusable(expected, f"{name:.200}, which is {'another class' if isinstance(value, type) else 'no class'}")
    try:
        return value.model_json_schema()
    except Exception as error:  # whatever pydantic, or code of the class, has to say
        raise Unusable(f"{expected} with a JSON schema", f"{name:.200}, which has none: {_said(error)}") from None


def _imported(path: str) -> Any:
    expected = "a JSON schema, or the import path of a pydantic class, as my_package.models:Answer"
    match = _CLASS.fullmatch(path) if len(path) <= MAX_CLASS_NAME else None
    if match is None:
        raise Unusable(expected, show(path))
    module, name = match.groups()
    if module.partition(".")[0] in sys.stdlib_module_names:  # some of them act when they are imported
        raise Unusable(expected, f"{module}, a module of Python itself")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        hint = "Install its package in this environment, or put its folder into PYTHONPATH."
        hint = hint if f"{module}.".startswith(f"{error.name}.") else f"{module} imports it."
        raise Unusable(f"a module that Python finds for {path}", f"no module {error.name!r:.100}", hint) from None
    except (Exception, SystemExit) as error:  # code of the user's
        raise Unusable(f"a module {module} that can be imported", f"an error at its import: {_said(error)}") from None
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            near = difflib.get_close_matches(part, [one for one in dir(found) if one[0] != "_"], n=1)
            hint = f"Did you mean {near[0]!r}?" if near else ""
            raise Unusable(f"a class {name} in the module {module}", f"no {part!r} in it", hint) from None
    return found


def _said(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first:.200}" if first.isprintable() else type(error).__name__


def _json_schema(value: dict[str, Any]) -> dict[str, Any]:
    import orjson

    from gpu_runner.client.json_schemas.output_schema import compile_check
    from gpu_runner.client.json_schemas.schema_limits import SchemaProblem, check_schema
    from gpu_runner.client.json_schemas.schema_mistakes import check_mistakes, unwrapped

    value = dict(unwrapped(value))
    try:
        check_schema(value)
        size = len(orjson.dumps(value))
        if size > MAX_SCHEMA_BYTES:
            raise Unusable(f"a JSON schema of at most {MAX_SCHEMA_BYTES} bytes", f"{size} bytes")
        compile_check(value)
        check_mistakes(value)
    except SchemaProblem as error:
        raise Unusable(error.expected, error.found, error.hint) from error
    except TypeError as error:
        raise Unusable("a JSON schema", show(value), f"It holds what JSON cannot: {error}.") from error
    return value


def _regex(value: str) -> str:
    from gpu_runner.client.structured_outputs import MAX_PATTERN, UnusablePattern, compile_pattern

    encodable(value)
    if len(value) > MAX_PATTERN:
        raise Unusable(f"a regular expression of at most {MAX_PATTERN:,} characters", f"{len(value):,}")
    try:
        compile_pattern(value)
    except UnusablePattern:
        hint = "Look-around, back-references and large repetitions are not taken: a match ends in linear time."
        raise Unusable("a regular expression", show(value), hint) from None
    return value


def _grammar(value: str) -> str:
    if not value.strip():
        raise Unusable("a grammar", "nothing but blanks")
    return value


def _choice(value: list[str]) -> list[str]:
    encodable(value)
    if len(set(value)) < len(value):
        twice = next(text for i, text in enumerate(value) if text in value[:i])
        raise Unusable("each choice once", show(twice))
    if (size := sum(len(text.encode()) for text in value)) > MAX_SCHEMA_BYTES:
        raise Unusable(f"choices of at most {MAX_SCHEMA_BYTES:,} bytes", f"{size:,}")
    if any(not text.strip() for text in value):
        raise Unusable("choices that are no blanks", "one that is")
    return value


def _where(value: str) -> str:
    import polars as pl

    from resources.store.row_condition import SQL_TEXT, looks_at_many_rows

    _check_condition_size(value, SQL_TEXT.sub("''", value))
    if found := looks_at_many_rows(value):
        raise Unusable("a condition on one row at a time", show(value), f"{found}() looks at many rows.")
    try:
        columns = pl.sql_expr(value).meta.root_names()
    except Exception as error:  # Polars has no one class for what its SQL parser refuses
        reason = f"{str(error).splitlines()[0][:200]}." if str(error) else type(error).__name__
        raise Unusable("a SQL condition over the row's columns", show(value), reason) from error
    if not columns:
        raise Unusable("a SQL condition that names a column", show(value))
    return value


def _check_condition_size(value: str, bare: str) -> None:
    """Polars walks a condition recursively, in native code: a long chain of OR overflows its stack."""
    if len(value) > MAX_CONDITION:
        raise Unusable(f"a SQL condition of at most {MAX_CONDITION:,} characters", f"{len(value):,}")
    operators = len(_SQL_OPERATOR.findall(bare))
    if operators > MAX_OPERATORS:
        raise Unusable(
            f"at most {MAX_OPERATORS} operators", str(operators), "Write column IN (…) for a list of values."
        )
    depth = deepest = 0
    for sign in bare:
        depth += (sign in "([") - (sign in ")]")
        deepest = max(deepest, depth)
    if deepest > MAX_PARENTHESES:
        raise Unusable(f"at most {MAX_PARENTHESES} parentheses in each other", str(deepest))
    for called in _SQL_CALL.findall(bare):
        if called.lower() in _SWELLING:
            raise Unusable("functions whose result is not longer than a row", f"{called}()")
    calls = [called.lower() for called in _SQL_CALL.findall(bare)]
    shrinking = [len(new) <= len(old) for old, new in _SQL_REPLACE.findall(value)]
    if calls.count("replace") != sum(shrinking):
        raise Unusable("replace(column, 'text', 'no longer text')", "a replace() that may make it longer")
    joins = bare.count("||") + (bare.count(",") if {"concat", "concat_ws", "array_to_string"} & {*calls} else 0)
    if joins > MAX_JOINED:
        raise Unusable(f"at most {MAX_JOINED} texts joined by || or concat()", str(joins + 1))


def encodable(value: Any) -> Any:
    import orjson

    try:
        orjson.dumps(value)
    except TypeError as error:
        raise Unusable("what JSON can carry", show(value), f"{error}.") from error
    if not _finite(value):
        raise Unusable("finite numbers", show(value), "JSON has no nan and no infinity.")
    return value


def request_fields(value: dict[str, Any]) -> dict[str, Any]:
    """Fields that each request of the dataset has: what JSON can carry, and not too much of it. Raises Unusable."""
    import orjson

    encodable(value)
    if (size := len(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))) > MAX_FIELDS_BYTES:
        raise Unusable(f"at most {MAX_FIELDS_BYTES:,} bytes of request fields", f"{size:,}")
    return value


def _finite(value: Any) -> bool:
    """Whether JSON can carry every number in it; orjson would make null of the others."""
    level = [value]
    while level:
        if any(isinstance(one, float) and not math.isfinite(one) for one in level):
            return False
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for parts in inner for part in parts]
    return True


def _flag(value: Any) -> Any:
    """Files of before may have truth values of YAML 1.1, where nothing else can be meant."""
    word = value.lower() if isinstance(value, str) else value
    return word in ("yes", "on") if word in ("yes", "on", "no", "off") else value


def _scalar(value: Any) -> Any:
    if value is not None and not isinstance(value, str | int | float | bool):
        raise Unusable("text, a number, true/false or null", show(value), "Quote what YAML takes for a date.")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise Unusable("a whole number of at most 64 bits", show(value), "Quote it to make it text.")
    if isinstance(value, float) and not math.isfinite(value):
        raise Unusable("a finite number", show(value), "Quote it to make it text.")
    if isinstance(value, str) and not value.isascii():
        encodable(value)
    return value


Text = Annotated[str, Field(min_length=1, max_length=1 << 20), AfterValidator(_template)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Rate = Annotated[float, Field(ge=0, le=1)]
Column = Annotated[str, Field(min_length=1, max_length=255)]
Scalar = Annotated[
    Any,
    AfterValidator(_scalar),
    WithJsonSchema({"type": ["string", "integer", "number", "boolean", "null"]}),
]
Model = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_model)]
Name = Annotated[str, AfterValidator(_name)]
EngineName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
AssetName = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_asset_name)]
SourcePath = Annotated[str, Field(min_length=1), AfterValidator(_source_path)]
TextFile = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_text_file)]
Delimiter = Annotated[str, AfterValidator(_delimiter)]
Cron = Annotated[str, AfterValidator(_cron)]
TimeZone = Annotated[str, AfterValidator(_zone)]
Deadline = Annotated[str, BeforeValidator(_moment), AfterValidator(_deadline)]
Condition = Annotated[str, AfterValidator(_where)]
License = Annotated[str, AfterValidator(_license)]
Regex = Annotated[str, Field(min_length=1), AfterValidator(_regex)]
Choice = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]],
    Field(min_length=1, max_length=MAX_CHOICES),
    AfterValidator(_choice),
]
Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR), AfterValidator(_grammar)]
JsonSchema = Annotated[
    dict[str, Any],
    BeforeValidator(_schema_of_class),
    AfterValidator(_json_schema),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": True}, {"type": "string"}]}),
]
Encodable = Annotated[dict[str, Any], AfterValidator(request_fields)]
