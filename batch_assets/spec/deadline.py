"""Deadlines as people write them: a time after the request, a cron schedule, or a moment. Pure."""

from __future__ import annotations

import datetime
import itertools
import re
import zoneinfo
from dataclasses import dataclass

from batch_assets.spec.cron import cron_problem
from gpu_runner.errors import ExitStatus, UserFacingError

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(min|[smhd])\s*")
_LONGEST = 366 * 86400.0
UTC = "UTC"
_EXPECTED = (
    "a time after the request (6h, 90m, 1d 12h), a cron schedule, or a moment with its zone (2027-01-31T06:00:00Z)"
)


class InvalidDeadline(UserFacingError, ValueError):
    """A text that is no deadline."""

    exit_status = ExitStatus.WRONG_REQUEST

    def __init__(self, hint: str) -> None:
        super().__init__(f"expected {_EXPECTED}. {hint}")
        self.expected, self.hint = _EXPECTED, hint


@dataclass(frozen=True, slots=True)
class Deadline:
    """One of: `seconds` after the request, the next moment of a `cron` in `zone`, a `moment` (Unix seconds)."""

    seconds: float | None = None
    cron: str | None = None
    moment: float | None = None
    zone: str = UTC

    def at(self, since: float) -> float:
        """The deadline of a request made at `since`, both in Unix seconds."""
        if self.moment is not None:
            return self.moment
        if self.cron is not None:
            # A request that the same schedule starts is for the next one.
            return next_moments(self.cron, since + 60.0, 1, self.zone)[0]
        assert self.seconds is not None
        return since + self.seconds


def parse_deadline(text: str, zone: str = UTC) -> Deadline:
    """The deadline in a text; a cron schedule is meant in the time zone `zone`. Raises InvalidDeadline."""
    text = text.strip()
    if len(text) > 200:
        raise InvalidDeadline("It is longer than 200 characters.")
    if (seconds := parse_seconds(text)) is not None:
        if not 0 < seconds <= _LONGEST:
            raise InvalidDeadline("The time lies between 1 second and 366 days.")
        return Deadline(seconds=seconds)
    if re.match(r"\d{4}-\d\d-\d\d", text):
        try:
            moment = datetime.datetime.fromisoformat(text)
        except ValueError as error:
            raise InvalidDeadline(f"{str(error)[:1].upper()}{str(error)[1:]}.") from None
        if moment.tzinfo is None:
            raise InvalidDeadline("Say in which time zone it is: end it with Z or +02:00.")
        if not 2000 <= moment.year < 3000:
            raise InvalidDeadline("The year lies between 2000 and 3000.")
        return Deadline(moment=moment.timestamp())
    if text.startswith("@") or len(text.split()) == 5:
        if problem := cron_problem(text):
            raise InvalidDeadline(problem)
        return Deadline(cron=text, zone=zone)
    raise InvalidDeadline("")


def next_moments(cron: str, since: float, count: int, zone: str = UTC) -> list[float]:
    """The next moments of a schedule in a time zone, in Unix seconds; `since` itself may be the first.

    As Dagster's own schedules have them: a time that a clock skips is replaced by the first one after it, and of one
    that it shows twice the second counts.
    """
    from batch_assets.dagster_internals import schedule_times  # heavy, for who only wants a deadline read

    return [moment.timestamp() for moment in itertools.islice(schedule_times(since, cron, zone), count)]


def known_zone(name: str) -> bool:
    """Whether this is the name of a time zone of the IANA database, like Europe/Paris."""
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):  # not there, a path elsewhere, a folder
        return False
    return True


def clock_changes(zone: str, since: float, days: int) -> list[float]:
    """Midnights (UTC) in so many days from `since` before which the zone's clock was set, in Unix seconds."""
    where = zoneinfo.ZoneInfo(zone)
    midnights = [since + day * 86400.0 for day in range(days)]
    offsets = [datetime.datetime.fromtimestamp(moment, where).utcoffset() for moment in midnights]
    return [midnights[i] for i in range(1, days) if offsets[i] != offsets[i - 1]]


def parse_seconds(text: str) -> float | None:
    """Seconds of `6h`, `90m`, `1d 12h`; None for anything else."""
    found, end = 0.0, 0
    for match in _PART.finditer(text):
        if match.start() != end:
            return None
        found, end = found + float(match[1]) * _UNITS[match[2]], match.end()
    return found if end and end == len(text) else None
