"""A check of cron schedules that says what is wrong; Dagster checks again when the schedule is built."""

from __future__ import annotations

import re

_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_FIELDS: tuple[tuple[str, int, int, list[str], int], ...] = (
    ("minute", 0, 59, [], 0),
    ("hour", 0, 23, [], 0),
    ("day of month", 1, 31, [], 0),
    ("month", 1, 12, _MONTHS, 1),
    ("day of week", 0, 7, _DAYS, 0),
)
_ALIASES = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
_PART = re.compile(r"(?:\*|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>\d+))?")
_LONGEST = dict(zip(range(1, 13), (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True))


def cron_problem(text: str) -> str | None:
    """What is wrong with a cron schedule of five fields (or @daily and the like); None when nothing is."""
    if text in _ALIASES:
        return None
    parts = text.split()
    if len(parts) != len(_FIELDS):
        return f"It has {len(parts)} fields, not five (minute, hour, day of month, month, day of week)."
    values = []
    for part, (name, low, high, names, base) in zip(parts, _FIELDS, strict=True):
        found = _values(part.lower(), low, high, names, base)
        if found is None:
            return f"The field {name} is {part!r}, not *, or numbers from {low} to {high} with , - and /."
        values.append(found)
    if parts[4] == "*" and min(values[2]) > max(_LONGEST[month] for month in values[3]):
        return "No such day exists in these months, so it would never run."
    return None


def _values(text: str, low: int, high: int, names: list[str], base: int) -> set[int] | None:
    values: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None or match["step"] == "0":
            return None
        first, last = (_number(match[side], names, base) for side in ("first", "last"))
        if match["first"] is None:
            first, last = low, high
        elif match["last"] is None:
            last = high if match["step"] else first
        if first is None or last is None or not low <= first <= last <= high:
            return None
        values.update(range(first, last + 1, int(match["step"] or 1)))
    return values


def _number(word: str | None, names: list[str], base: int) -> int | None:
    if word is None:
        return None
    if word in names:
        return names.index(word) + base
    return int(word) if word.isdecimal() and len(word) <= 2 else None
