"""Strings that match a regular expression, for `pattern` in a schema and for `structured_outputs.regex`.

Understands literals, `.`, escapes (\\d \\w \\s and their capitals, \\t \\n \\r), classes with ranges and negation,
groups, alternation, `? * + {m} {m,} {m,n}` and the anchors at both ends. Look-around, back-references and
flags raise ValueError, which becomes the 400 of an engine that cannot compile a grammar. So does a pattern that asks
for more than `_MOST` characters, counting empty ones and all of a class, or for more than `_DEEPEST` groups in groups.
"""

from __future__ import annotations

import string
from random import Random

_PRINTABLE = string.ascii_letters + string.digits + " _-.,"
_CLASSES = {"d": string.digits, "w": string.ascii_letters + string.digits + "_", "s": " "}
_CONTROL = {"t": "\t", "n": "\n", "r": "\r"}
# An open end (`*`, `+`, `{2,}`) adds at most this many repeats.
_MORE = 6
_MOST = 100_000
_DEEPEST = 50


def matching(pattern: str, rng: Random) -> str:
    """A string that matches `pattern` from end to end."""
    return _Reader(pattern, rng).read_all()


class _Reader:
    """Recursive descent over the pattern that writes the string while it reads."""

    def __init__(self, pattern: str, rng: Random) -> None:
        self.pattern = pattern
        self.rng = rng
        self.at = 0
        self._left, self._depth = _MOST, 0

    def read_all(self) -> str:
        text = self._alternatives()
        if self.at < len(self.pattern):
            raise self._unsupported()
        return text

    def _unsupported(self) -> ValueError:
        return ValueError(f"pattern {self.pattern!r}: not understood at position {self.at}")

    def _spend(self, characters: int) -> None:
        """Counts what the pattern asks for. Raises ValueError when it is too much."""
        self._left -= characters
        if self._left < 0:
            found = f"{self.pattern[:80]!r} with more"
            raise ValueError(f"pattern: expected one for at most {_MOST:,} characters in all its parts, found {found}")

    def _peek(self) -> str:
        return self.pattern[self.at] if self.at < len(self.pattern) else ""

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise self._unsupported()
        self.at += 1
        return char

    def _alternatives(self) -> str:
        choices = [self._series()]
        while self._peek() == "|":
            self.at += 1
            choices.append(self._series())
        return self.rng.choice(choices)

    def _series(self) -> str:
        parts: list[str] = []
        while self._peek() and self._peek() not in "|)":
            start = self.at
            piece = self._atom()
            end = self.at
            low, high = self._repeats()
            parts.append(piece if low == high == 1 else self._repeat(start, end, self.rng.randint(low, high)))
        return "".join(parts)

    def _repeat(self, start: int, end: int, count: int) -> str:
        """Read the atom at start:end again `count` times, so that `[a-z]{3}` is not one letter thrice."""
        resume = self.at
        pieces = []
        for _ in range(count):
            self.at = start
            pieces.append(self._atom())
            assert self.at == end
        self.at = resume
        return "".join(pieces)

    def _atom(self) -> str:
        self._spend(1)
        char = self._take()
        if char in "^$":
            return ""
        if char == "(":
            return self._group()
        if char == "[":
            return self.rng.choice(self._class())
        if char == ".":
            return self.rng.choice(_PRINTABLE)
        if char == "\\":
            return self.rng.choice(self._escape())
        if char in "*+?{":
            raise self._unsupported()
        return char

    def _group(self) -> str:
        if self._peek() == "?":
            if not self.pattern.startswith("?:", self.at):
                raise self._unsupported()
            self.at += 2
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"pattern: expected at most {_DEEPEST} groups in groups, found more")
        text = self._alternatives()
        if self._take() != ")":
            raise self._unsupported()
        self._depth -= 1
        return text

    def _escape(self) -> str:
        """The characters that the escape after a backslash stands for."""
        char = self._take()
        if char.lower() in _CLASSES:
            chars = _CLASSES[char.lower()]
            return chars if char.islower() else "".join(c for c in _PRINTABLE if c not in chars)
        if char in _CONTROL:
            return _CONTROL[char]
        if char.isalnum():
            raise self._unsupported()
        return char

    def _class(self) -> str:
        negated = self._peek() == "^"
        self.at += negated
        chars = ""
        while self._peek() != "]" or not chars:
            char = self._take()
            members = self._escape() if char == "\\" else char
            if len(members) == 1 and self._peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                first, last = ord(members), ord(self._take())
                self._spend(max(0, last - first))
                members = "".join(map(chr, range(first, last + 1)))
            self._spend(1)
            chars += members
        self.at += 1
        if negated:
            chars = "".join(c for c in _PRINTABLE if c not in chars)
        if not chars:
            raise self._unsupported()
        return chars

    def _repeats(self) -> tuple[int, int]:
        char = self._peek()
        if char not in ("?", "*", "+", "{"):
            return 1, 1
        self.at += 1
        low, high = {"?": (0, 1), "*": (0, _MORE), "+": (1, _MORE), "{": (0, 0)}[char]
        if char == "{":
            end = self.pattern.find("}", self.at)
            bounds = self.pattern[self.at : end].split(",")
            if end < 0 or not bounds[0].isdigit() or not all(b.isdigit() or not b for b in bounds[1:]):
                raise self._unsupported()
            low = _count(bounds[0])
            high = low if len(bounds) == 1 else _count(bounds[1]) if bounds[1] else low + _MORE
            self.at = end + 1
        if self._peek() == "?":  # lazy: the same strings
            self.at += 1
        return low, high


def _count(digits: str) -> int:
    """A number of repeats; one that is too long to be a number here is as good as too many."""
    return int(digits) if len(digits) <= 9 else 10**9
