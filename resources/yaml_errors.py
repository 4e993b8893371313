"""What is wrong in a YAML file that people write, in our words: key, what was expected, what was found, what to do."""

from __future__ import annotations

import difflib
import itertools
import reprlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any

from pydantic import BaseModel, ValidationError

_QUOTE = "Put it in quotes to make it text."
_KINDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "text that UTF-8 can carry",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
    "too_short": ("at least this many entries:", "min_length"),
    "too_long": ("at most this many entries:", "max_length"),
    "string_too_short": ("at least this many characters:", "min_length"),
    "string_too_long": ("at most this many characters:", "max_length"),
}

_FORMS = {  # what a pattern asks for, as people say it
    "^[a-z]{2}$": "two small letters, a language by ISO 639-1 (en)",
    "^[a-z]{2,3}$": "two or three small letters, a language by ISO 639 (en)",
    r"^[a-z0-9][a-z0-9._-]{0,62}$": "at most 63 small letters, digits, dots, - and _, a letter or digit first",
    r"^[1-9][0-9]{0,3}[smhd]$": "a whole number and s, m, h or d (24h)",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "a name of letters, digits and _, no digit first",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong place in a spec. `key` is dotted (`sampling.temperature`); `hint` may be empty."""

    key: str
    expected: str
    found: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.key}: expected {self.expected}, found {self.found}"
        return f"{text}. {self.hint}" if self.hint else text


_SHORT = reprlib.Repr()


class Unusable(ValueError):
    """Raised by the spec's own validators, with the words that the reader shall see.

    `key` is relative to the model whose validator raised it.
    """

    def __init__(self, expected: str, found: str, hint: str = "", *, key: str = "") -> None:
        super().__init__(f"expected {expected}, found {found}")
        self.expected, self.found, self.hint, self.key = expected, found, hint, key


def show(value: object) -> str:
    """A value as the reader wrote it, cut to a line, with control characters escaped."""
    if value is None:
        return "nothing"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value[:100]) if isinstance(value, str) else _SHORT.repr(value) if _is_large(value) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _is_large(value: object) -> bool:
    """Whether it would take long to write it down; it may hold itself many times."""
    stack, seen = [value], 0
    while stack and seen < 1000:
        one = stack.pop()
        seen += 1 + (len(one) // 100 if isinstance(one, str | bytes) else 0)
        if isinstance(one, int) and one.bit_length() > 256:
            return True
        if isinstance(one, Mapping):
            stack.extend(itertools.islice(one.values(), 1000))
            stack.extend(itertools.islice(one, 1000))
        elif isinstance(one, list | tuple | set):
            stack.extend(itertools.islice(one, 1000))
    return bool(stack)


def nearest(word: str, known: Sequence[str]) -> str:
    """`Did you mean …?`, or the list of what there is."""
    if (match := near_miss(word, known)) is not None:
        return f"Did you mean {match!r}?"
    return f"Known here: {', '.join(known)}" if known else "There are none here."


def near_miss(word: str, known: Sequence[str]) -> str | None:
    """The known word that this one is probably meant to be, None when none is like it."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.6)), None)


def problems_of(error: ValidationError, model: type[BaseModel], data: object) -> list[Problem]:
    """All that pydantic found wrong in `data`."""
    return [problem_of(dict(detail), model, data) for detail in error.errors(include_url=False)]


def problem_of(detail: dict[str, Any], model: type[BaseModel], data: object) -> Problem:
    """One of the errors of a ValidationError."""
    kind, context = detail["type"], detail.get("ctx", {})
    location = _location(detail["loc"], data, keep_last=kind in ("missing", "extra_forbidden"))
    key, found = ".".join(f"{part!s:.200}" for part in location) or "attributes", show(detail["input"])
    if kind == "extra_forbidden":
        known = sorted(model_at(model, location[:-1]).model_fields)
        return Problem(key, "a known key", show(location[-1]), nearest(str(location[-1]), known))
    if kind == "missing":
        field = model_at(model, location[:-1]).model_fields.get(str(location[-1]))
        return Problem(key, "a value", "nothing", (field and field.description) or "")
    if isinstance(context.get("error"), Unusable):
        cause = context["error"]
        at = ".".join(part for part in (key if location else "", cause.key) if part)
        return Problem(at or "attributes", cause.expected, cause.found, cause.hint)
    if kind in ("literal_error", "enum"):
        choices = str(context["expected"])
        return Problem(key, choices, found, _near_choice(detail["input"], choices))
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return Problem(key, f"{words} {context[name]}", found)
    if kind == "string_pattern_mismatch":
        pattern = str(context["pattern"])
        return Problem(key, _FORMS.get(pattern, f"text of the form {pattern}"), found)
    hint = _QUOTE if kind == "string_type" and isinstance(detail["input"], bool | int | float) else ""
    return Problem(key, _KINDS.get(kind, str(detail["msg"])), _with_type(detail["input"]), hint)


def _near_choice(value: object, choices: str) -> str:
    words = [word for word in choices.replace(" or ", ", ").replace("'", "").split(", ") if word]
    match = difflib.get_close_matches(str(value).lower(), words, n=1)
    return f"Did you mean {match[0]!r}?" if match else ""


def _with_type(value: object) -> str:
    names = {str: "text", bool: "true/false", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
    name = names.get(type(value))
    return f"{show(value)} ({name})" if name else show(value)


def _location(parts: Sequence[str | int], data: Any, *, keep_last: bool) -> list[str | int]:
    """Pydantic's location without the steps that are its own (union branches, wrapped validators)."""
    kept: list[str | int] = []
    for index, part in enumerate(parts):
        inside = (isinstance(data, Mapping) and part in data) or (
            isinstance(data, Sequence) and not isinstance(data, str) and isinstance(part, int) and part < len(data)
        )
        if inside:
            data = data[part]  # `inside` has looked
            kept.append(part)
        elif keep_last and index == len(parts) - 1:
            kept.append(part)
    return kept


def model_at(model: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel]:
    """The nested model that a location leads to."""
    for part in location:
        field = model.model_fields.get(str(part))
        inner = _model_in(field.annotation) if field is not None else None
        model = inner or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not isinstance(annotation, UnionType):
        with_fields = typing.get_origin(annotation) is None and issubclass(annotation, BaseModel)
        return annotation if with_fields else None
    for argument in typing.get_args(annotation):
        if found := _model_in(argument):
            return found
    return None
