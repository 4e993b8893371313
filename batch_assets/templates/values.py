"""What an expression of a prompt template may work on and print, and how much work one row may make.

Work is counted in steps, not in seconds: the same row is refused on every machine, or on none.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import ItemsView, Iterable, KeysView, ValuesView
from decimal import Decimal
from typing import Any

from jinja2 import Undefined

MAX_TEXT = 1 << 20
# A loop of 1,000 turns with ten expressions takes about 20,000; the slowest 250,000 found take about a second.
MAX_STEPS = 250_000
CHARACTERS_PER_STEP = 32
MAX_BITS = 4096
MAX_NESTED = 254  # what JSON is written with goes no deeper either

MOMENTS = (datetime.date, datetime.time, datetime.timedelta, Decimal, uuid.UUID)
_PRINTED = (str, Undefined, *MOMENTS)
_DATA = (str, int, float, list, tuple, dict, Undefined, *MOMENTS)
_WORDS = {
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true/false",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
}
_SIMPLE = frozenset({int, float, bool, type(None)})


class Unprintable(Exception):
    """An expression gives what cannot stand in a prompt. The message never quotes the row."""


class Nothing(Unprintable):
    """An expression without a value is printed."""


class TooMuch(Exception):
    """A row takes more steps, or makes longer texts, than a template may."""


class Meter:
    """The steps that are left to a row."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def spend(self, steps: int) -> None:
        """Take steps. Raises TooMuch when they are used up."""
        self.left -= steps
        if self.left < 0:
            raise TooMuch(f"takes more than {MAX_STEPS:,} steps (turns of loops, calls, list items) for one row")

    def weigh(self, value: Any) -> None:
        """Take steps by the size of a value with all that is in it. Raises TooMuch."""
        kind = type(value)
        if kind is str:
            self.spend(1 + len(value) // CHARACTERS_PER_STEP)
        elif kind in _SIMPLE:
            self.spend(1)
        else:
            self._weigh_parts(value)

    def _weigh_parts(self, value: Any) -> None:
        stack = [value]
        while stack:
            one = stack.pop()
            if isinstance(one, str | bytes):
                self.spend(1 + len(one) // CHARACTERS_PER_STEP)
            elif isinstance(one, dict):
                self.spend(1 + len(one))
                stack.extend(one)
                stack.extend(one.values())
            elif isinstance(one, list | tuple):
                self.spend(1 + len(one))
                stack.extend(one)
            elif isinstance(one, int) and one.bit_length() > MAX_BITS:
                raise TooMuch(f"makes a whole number of more than {MAX_BITS} bits")
            else:
                self.spend(1)


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def fits(length: int) -> None:
    """Raises TooMuch for the length of a text or list that is longer than a prompt may be."""
    if length > MAX_TEXT:
        raise TooMuch(f"makes a text or list longer than {MAX_TEXT:,}")


def text_of(value: Any) -> str:
    """A value as it is printed. Raises Nothing for null and Unprintable for what is no data."""
    kind = type(value)
    if kind is str:
        return str(value)
    if kind is int and value.bit_length() > MAX_BITS:
        raise TooMuch(f"makes a whole number of more than {MAX_BITS} bits")
    if kind in (int, float, bool) or isinstance(value, _PRINTED):
        return str(value)
    if value is None:
        raise Nothing("an expression gives null; write `{{ column or '' }}` where a value may be missing")
    if isinstance(value, list | tuple | dict):
        _check_parts(value)
        return str(value)
    raise Unprintable(f"expected text, a number, true/false, a list or a mapping, found {kind_of(value)}")


def _check_parts(value: Any) -> None:
    """Lists and mappings print what is in them as Python does, so that only text and numbers may be in them."""
    level, depth = [value], 0
    while level:
        inner: list[Any] = []
        for one in level:
            inner.extend(_parts_of(one))
        level, depth = inner, depth + 1
        if depth > MAX_NESTED and level:
            raise Unprintable(f"expected at most {MAX_NESTED} lists and mappings in each other, found more")


def _parts_of(one: Any) -> Iterable[Any]:
    if isinstance(one, dict):
        return [*one, *one.values()]
    if isinstance(one, list | tuple):
        return one
    if isinstance(one, MOMENTS):
        raise Unprintable(f"expected text or numbers in a list or mapping, found {kind_of(one)}; write `| tojson`")
    if type(one) not in _SIMPLE and not isinstance(one, str):
        raise Unprintable(f"expected text or numbers in a list or mapping, found {kind_of(one)}")
    return ()


def kind_of(value: Any) -> str:
    """What a value is, in words; never the value."""
    if isinstance(value, bytes | bytearray | memoryview):
        return "binary data"
    if isinstance(value, Undefined):
        return "nothing (a field that is not there)"
    if callable(value):
        return "a function or method"
    if isinstance(value, range | KeysView | ValuesView | ItemsView) or hasattr(value, "__next__"):
        return f"a {type(value).__name__}; write `| list`"
    return _WORDS.get(type(value), f"a {type(value).__name__}")


def is_data(value: Any) -> bool:
    """Whether filters may take it: data, or nothing at all."""
    return value is None or isinstance(value, _DATA)
