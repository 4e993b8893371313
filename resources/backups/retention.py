"""Which backups are kept: the newest of each of the last hours and days that have one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

HOUR, DAY = 3600.0, 86400.0
NEWEST = 3  # one that is damaged is not the only one, also where several are made in an hour
UNFINISHED_SECONDS = DAY  # a backup without a manifest may still be made for so long
_TEXT = re.compile(r"hourly=(\d{1,4}),daily=(\d{1,4})")


@dataclass(frozen=True, slots=True)
class Keep:
    """How many hours, and how many days, keep their newest backup. Hours and days without a backup do not count."""

    hourly: int = 24
    daily: int = 14

    @classmethod
    def parse(cls, text: str) -> Keep:
        """Of `hourly=24,daily=14`. Raises ValueError."""
        match = _TEXT.fullmatch(text.replace(" ", ""))
        if match is None or not any(map(int, match.groups())):
            raise ValueError(f"expected hourly=N,daily=N with one of them above 0, found {text!r:.60}")
        return cls(int(match[1]), int(match[2]))


def expired(made: Iterable[tuple[str, float]], keep: Keep) -> list[str]:
    """Ids of the backups that are not kept, oldest first. `made`: ids, and when each was begun (Unix seconds).

    The newest NEWEST backups are always kept, and no clock is asked: what stops being made is not forgotten meanwhile.
    """
    newest_first = sorted(made, key=lambda one: one[1], reverse=True)
    kept = {backup for backup, _ in newest_first[:NEWEST]}
    for seconds, count in ((HOUR, keep.hourly), (DAY, keep.daily)):
        stretches: dict[int, str] = {}
        for backup, began in newest_first:
            stretches.setdefault(int(began // seconds), backup)
        kept |= set(list(stretches.values())[:count])
    return [backup for backup, _ in reversed(newest_first) if backup not in kept]
