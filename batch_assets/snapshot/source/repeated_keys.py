"""Rows of JSON in whose object a wanted key stands twice: a parser keeps one of its values in silence.

orjson cannot say so, and parsers that can take several times as long. So the bytes of a block are counted: as many
colons after a quote as its rows have keys means that none repeats. Where there are more, because values are objects or
texts with such colons, each wanted key is counted by itself, and only rows that may repeat one are parsed again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

FRUITLESS = 1_000  # rows of a file that are parsed again and do not repeat a key, before the looking for it ends
_PIECE = 1 << 17


class RepeatedKeys:
    """Looks at the blocks of one file, for the keys that are wanted."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self._needles = {name: orjson.dumps(name) for name in wanted}
        self._flat, self._fruitless = True, Counter[str]()

    def look(self, lines: Sequence[bytes | None], rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """A wanted key that is repeated in a line, by the line's place. `rows`: those that lines were parsed to."""
        if not self._needles:
            return {}
        text = b"\n".join([line or b"" for line in lines] if None in lines else lines)  # type: ignore[arg-type]
        signs = np.frombuffer(text, np.uint8)
        if self._flat:
            if _count(signs, b'":', 0) == sum(map(len, rows)):
                return {}
            self._flat = False
        found: dict[int, str] = {}
        for name, needle in self._needles.items():
            there = sum([name in row for row in rows])
            if _count(signs, needle, len(needle) - 2) > there and text.count(needle) > there:
                found |= self._repeated(lines, needle, name)
        # Told by the rows alone, not by the pieces in which they came: the same file has the same bad rows.
        self._needles = {name: one for name, one in self._needles.items() if self._fruitless[name] < FRUITLESS}
        return found

    def _repeated(self, lines: Sequence[bytes | None], needle: bytes, name: str) -> dict[int, str]:
        found = {}
        for place, line in enumerate(lines):
            if line is not None and line.count(needle) > 1 and self._fruitless[name] < FRUITLESS:
                if _keys(line).count(name) > 1:
                    found[place] = name
                else:
                    self._fruitless[name] += 1
        return found


def _count(signs: npt.NDArray[np.uint8], needle: bytes, at: int) -> int:
    """How often a needle stands in a text at most: its first byte, and the two from `at` on, are looked at.

    In pieces that the caches of a processor hold: several times as fast as to search the text for the needle.
    """
    found, length = 0, len(needle)
    for first in range(0, len(signs), _PIECE):
        piece = signs[first : first + _PIECE + length - 1]
        places = len(piece) - length + 1
        if places <= 0:
            break
        fits = piece[at : at + places] == needle[at]
        fits &= piece[at + 1 : at + 1 + places] == needle[at + 1]
        if at:
            fits &= piece[:places] == needle[0]
        found += int(np.count_nonzero(fits))
    return found


def _keys(line: bytes) -> list[str]:
    """The keys of an object, as often as they stand in it."""
    pairs: list[tuple[str, Any]] = []

    def note(of_object: list[tuple[str, Any]]) -> None:
        pairs[:] = of_object  # those of the whole come last

    try:
        json.loads(line, object_pairs_hook=note)
    except (ValueError, RecursionError):
        return []
    return [key for key, _ in pairs]
