"""Request fields that a row may have of its own: what each takes, read from a rendered template or a column's value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

MOST_STOPS = 16
MAX_TOOLS_JSON = 1 << 20  # characters of tools that are JSON text
MAX_DEPTH = 64
MAX_TURNS = 100  # of the user, in a conversation


class Unfit(Exception):
    """A value is none for its field: the text says what was expected, and what was found."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A number: from `least` (not itself where `above`) to `most`; `whole`: without a fraction."""

    whole: bool
    least: float
    most: float
    above: bool = False

    def read(self, text: str) -> int | float:
        """The number in a text. Raises Unfit."""
        found = _number(text)
        if found is None or (self.whole and isinstance(found, float)):
            raise Unfit(f"expected {self}, found {_shown(text)}")
        if not self.least <= found <= self.most or (self.above and found == self.least):
            raise Unfit(f"expected {self}, found {_shown(text)}")
        return found if self.whole else float(found)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        low = f"above {self.least:,}, up" if self.above else f"from {self.least:,}"
        return f"{kind} {low} to {self.most:,}"


_TOKENS = 1 << 20
NUMBERS: Mapping[str, Bounds] = {
    "temperature": Bounds(False, 0, 2),
    "max_tokens": Bounds(True, 1, _TOKENS),
    "min_tokens": Bounds(True, 0, _TOKENS),
    "top_p": Bounds(False, 0, 1, above=True),
    "top_k": Bounds(True, -1, (1 << 31) - 1),
    "min_p": Bounds(False, 0, 1),
    "seed": Bounds(True, 0, (1 << 63) - 1),
    "frequency_penalty": Bounds(False, -2, 2),
    "presence_penalty": Bounds(False, -2, 2),
    "repetition_penalty": Bounds(False, 0, 2, above=True),
}


def read_field(name: str, text: str) -> Any:
    """The value of a request field, by its rendered template. Raises Unfit."""
    return _stops(text) if name == "stop" else NUMBERS[name].read(text)


def read_json(value: Any) -> Any:
    """A value of a column, or its JSON text, without fields that are null. Raises Unfit."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        if len(value) > MAX_TOOLS_JSON:
            raise Unfit(f"expected JSON text of at most {MAX_TOOLS_JSON:,} characters, found {len(value):,}")
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise Unfit(f"expected JSON, found text that is none ({error})") from None
    return without_nulls(value, MAX_DEPTH)


def without_nulls(value: Any, depth: int) -> Any:
    """The value without fields of mappings that are null. Raises Unfit where JSON cannot carry it within `depth`."""
    if isinstance(value, dict | list) and not depth:
        raise Unfit("expected fewer levels, found too many")
    if isinstance(value, dict):
        return {str(name): without_nulls(one, depth - 1) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one, depth - 1) for one in value]
    if value is not None and not isinstance(value, str | int | float | bool):
        raise Unfit(f"expected text, numbers, true or false, found a value of type {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise Unfit("expected finite numbers, found another one")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise Unfit("expected whole numbers of at most 64 bits, found a longer one")
    return value


def _stops(text: str) -> list[str]:
    found: Any = [text]
    if text.lstrip().startswith("["):
        try:
            found = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise Unfit("expected one text, or a JSON list of texts ({{ [column] | tojson }}), found neither") from None
    if not 1 <= len(found) <= MOST_STOPS or not all(isinstance(one, str) and one for one in found):
        raise Unfit(f"expected 1 to {MOST_STOPS} texts, found a list of {len(found):,} values")
    return list(found)


def _number(text: str) -> int | float | None:
    """A number as columns print it; one with a fraction of zero is whole."""
    stripped = text.strip()
    if len(stripped) > 40 or not stripped.isascii() or "_" in stripped:  # which Python would take
        return None
    try:
        return int(stripped)
    except ValueError:
        pass
    try:
        found = float(stripped)
    except ValueError:
        return None
    if not math.isfinite(found):
        return None
    return int(found) if found.is_integer() and abs(found) < 1 << 53 else found


def _shown(text: str) -> str:
    """A number as it is, and of a text that is none no letter."""
    stripped = text.strip()
    return stripped if _number(stripped) is not None else f"a text of {len(text):,} characters that is no number"
