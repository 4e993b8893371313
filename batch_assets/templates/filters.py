"""Jinja's filters and tests for prompts: those whose result can be far larger than what they are given are bounded
before they work, all are charged for what they take and give, and none sees anything but data.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any, cast

from jinja2 import filters as jinja_filters
from jinja2 import pass_environment
from jinja2.environment import Environment

from batch_assets.templates.values import MOMENTS, Meter, Unprintable, fits, is_data, kind_of, text_of, words

# Not the same from one reading to the next, or made for HTML pages.
_WITHOUT = ("random", "urlize", "xmlattr", "attr", "pprint")
_OF_TEXT = words(
    "capitalize center e escape forceescape indent lower replace safe striptags title trim truncate upper wordcount "
    "wordwrap"
)
_CHEAP = frozenset({"default", "d", "first", "last", "length", "count"})
_CHEAP_TESTS = words(
    "boolean callable defined divisibleby even false filter float integer iterable mapping none number odd sameas "
    "sequence string test true undefined"
)
_VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()), range)
_CONVERSION = re.compile(r"%(?:\((?P<name>[^()]*)\))?[-+ #0]*(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?.", re.DOTALL)
_FIELD = re.compile(r"\{\{|\}\}|\{(?P<name>\w*)(?:!s)?(?::(?P<spec>[^{}]{0,40}))?\}")
_MAX_WIDTH = 9999


def settle(value: Any, meter: Meter) -> Any:
    """Views and generators as lists, within the row's steps. Raises Unprintable for what is no data."""
    if is_data(value):
        return value
    if isinstance(value, _VIEWS):
        meter.spend(len(value))
        return list(value)
    if hasattr(value, "__next__"):
        found = []
        for item in value:
            meter.spend(1)
            found.append(item)
        return found
    raise Unprintable(f"a filter expected text, a number, a list or a mapping, found {kind_of(value)}")


def install(environment: Environment, meter: Meter) -> None:
    """Put the bounded filters and tests into an environment."""
    filters = cast("dict[str, Callable[..., Any]]", environment.filters)
    for name in _WITHOUT:
        filters.pop(name, None)
    filters |= {
        "batch": _batch,
        "center": _center,
        "format": formatted,
        "indent": _indent,
        "join": _join,
        "replace": replaced,
        "round": _round,
        "slice": _slice,
        "string": text_of,
        "sum": _sum,
        "tojson": to_json,
        "wordwrap": _wordwrap,
    }
    for name, work in list(filters.items()):
        filters[name] = _metered(name, work, meter)
    for name, test in list(environment.tests.items()):
        if name not in _CHEAP_TESTS:
            environment.tests[name] = _weighed(cast("Callable[..., Any]", test), meter)


def _metered(name: str, work: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    cheap, of_text = name in _CHEAP, name in _OF_TEXT

    def run(own: tuple[Any, ...], value: Any, rest: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if type(value) is not str:
            value = settle(value, meter)
            value = text_of(value) if of_text else value
        meter.spend(1) if cheap else meter.weigh(value)
        if rest or options:
            for one in (*rest, *options.values()):
                meter.weigh(settle(one, meter))
        found = work(*own, value, *rest, **options)
        if type(found) is not str:
            found = settle(found, meter)
        meter.spend(1) if cheap else meter.weigh(found)
        return found

    if hasattr(work, "jinja_pass_arg"):
        return functools.wraps(work)(lambda own, value, *rest, **options: run((own,), value, rest, options))
    return functools.wraps(work)(lambda value, *rest, **options: run((), value, rest, options))


def _weighed(test: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    @functools.wraps(test)
    def call(*given: Any) -> Any:
        for one in given:
            meter.weigh(one)
        return test(*given)

    return call


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text for a prompt; Jinja's own filter escapes for HTML."""
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise Unprintable("tojson: expected an indent from 0 to 16")
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_in_json)


def _in_json(value: Any) -> str:
    if isinstance(value, MOMENTS):
        return str(value)
    raise Unprintable(f"tojson: expected what JSON can carry, found {kind_of(value)}")


def _center(value: str, width: int = 80) -> str:
    fits(width)
    return value.center(width)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    fits(len(value) + (value.count("\n") + 2) * (len(width) if isinstance(width, str) else width))
    return str(jinja_filters.do_indent(value, width, first, blank))


@pass_environment
def _wordwrap(
    environment: Environment,
    value: str,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> str:
    if not isinstance(width, int) or width < 1:
        raise Unprintable("wordwrap: expected a width of at least 1")
    # A break needs a whole line, or white space that is there.
    breaks = len(value) // width + len(value.split()) + value.count("\n") + 1
    fits(len(value) + breaks * len(wrapstring or "\n"))
    return jinja_filters.do_wordwrap(environment, value, width, break_long_words, wrapstring, break_on_hyphens)


def replaced(value: str, old: str, new: str, count: int | None = None) -> str:
    """`str.replace`, bounded."""
    old, new = text_of(old), text_of(new)
    fits(len(value) + value.count(old) * len(new))
    return value.replace(old, new, -1 if count is None else count)


@pass_environment
def _join(environment: Environment, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(jinja_filters.make_attrgetter(environment, attribute), value)
    return joined(text_of(d), value)


def joined(between: str, values: Any) -> str:
    """`str.join` of values as they are printed, bounded."""
    texts = [text_of(value) for value in values]
    fits(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def _batch(value: Any, linecount: int, fill_with: Any = None) -> list[Any]:
    fits(linecount)
    return list(jinja_filters.do_batch(list(value), linecount, fill_with))


def _slice(value: Any, slices: int, fill_with: Any = None) -> list[Any]:
    fits(slices)
    return list(jinja_filters.sync_do_slice(list(value), slices, fill_with))


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if not -300 <= precision <= 300:
        raise Unprintable("round: expected a precision from -300 to 300")
    return jinja_filters.do_round(value, precision, method)  # type: ignore[arg-type]


@pass_environment
def _sum(environment: Environment, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    values = iterable if attribute is None else map(jinja_filters.make_attrgetter(environment, attribute), iterable)
    found = start
    for value in values:
        if not all(isinstance(one, int | float) or type(one) in MOMENTS for one in (found, value)):
            raise Unprintable("sum: expected numbers")
        found = found + value
    return found


def formatted(value: str, *given: Any, **options: Any) -> str:
    """printf-style formatting, bounded in widths and in what is filled in."""
    value = text_of(value)
    filled: Any = options or tuple(given)
    longest = max((len(text_of(one)) for one in (*given, *options.values())), default=0)
    total = len(value)
    for match in _CONVERSION.finditer(value):
        for part in (match["width"], match["precision"]):
            _check_width(part)
        total += longest + int(match["width"] or 0) + int(match["precision"] or 0)
    fits(total)
    return str(value % filled)


def format_method(value: str, *given: Any, **options: Any) -> str:
    """`str.format` with plain fields only: no attributes, no items, no fields in fields."""
    rest = _FIELD.sub("", value)
    if "{" in rest or "}" in rest:
        raise Unprintable("format: expected fields like {}, {0}, {name} or {:.2f}")
    longest = max((len(text_of(one)) for one in (*given, *options.values())), default=0)
    total = len(value)
    for match in _FIELD.finditer(value):
        for digits in re.findall(r"\d+", match["spec"] or ""):
            _check_width(digits)
            total += int(digits)
        total += longest
    fits(total)
    return value.format(*given, **options)


def _check_width(text: str | None) -> None:
    if text and (text == "*" or len(text) > 4 or int(text) > _MAX_WIDTH):
        raise Unprintable(f"format: expected widths of at most {_MAX_WIDTH}")
