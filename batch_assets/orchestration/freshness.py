"""By when analysts may expect a new table: what a schedule and a deadline promise, as Dagster's freshness policy."""

from __future__ import annotations

import datetime
import itertools
from dataclasses import dataclass

import dagster as dg

from batch_assets.spec.deadline import Deadline, clock_changes, next_moments, parse_deadline
from batch_assets.spec.models import GeneratedDatasetSpec

SCHEDULE_TICKS = 60
SOME_MONDAY = 1_704_067_200.0  # 2024-01-01: schedules are looked at from here, whenever the code is loaded
WEEK = 7 * 86400.0
DAYS_OF_A_YEAR = 366


def freshness(spec: GeneratedDatasetSpec) -> dg.FreshnessPolicy | None:
    """By when analysts may expect a new table: where a schedule refreshes it and each refresh has a deadline.

    A cron policy where the deadline is a schedule itself and each of its moments has a refresh of its own; else the
    longest time between two tables.
    """
    if spec.schedule is None or spec.deadline is None:
        return None
    deadline = parse_deadline(spec.deadline, spec.timezone)
    if deadline.moment is not None:
        return None
    # Also where the clock is set: a day of 23 hours has the shortest time between two tables, one of 25 the longest.
    changes = clock_changes(spec.timezone, SOME_MONDAY, DAYS_OF_A_YEAR)
    found = [
        _pace(spec.schedule, deadline, since, spec.timezone)
        for since in (SOME_MONDAY, *(one - WEEK for one in changes))
    ]
    longest = max(one.longest for one in found)
    if deadline.cron is not None and all(one.paired for one in found):
        bound = datetime.timedelta(seconds=round(min(longest, *(one.shortest_gap for one in found))))
        return dg.FreshnessPolicy.cron(deadline_cron=deadline.cron, lower_bound_delta=bound, timezone=spec.timezone)
    between = max(one.between for one in found)
    return dg.FreshnessPolicy.time_window(fail_window=datetime.timedelta(seconds=round(between + longest)))


@dataclass(frozen=True, slots=True)
class _Pace:
    """Seconds: the longest from a refresh to its deadline, the longest between two refreshes, the shortest between two
    deadlines. `paired`: each deadline has a refresh of its own."""

    longest: float
    between: float
    shortest_gap: float
    paired: bool


def _pace(schedule: str, deadline: Deadline, since: float, zone: str) -> _Pace:
    """How refreshes and deadlines follow each other from `since` on."""
    ticks = next_moments(schedule, since, SCHEDULE_TICKS, zone)
    due = [deadline.at(tick) for tick in ticks]
    longest = max(at - tick for at, tick in zip(due, ticks, strict=True))
    between = max(later - earlier for earlier, later in itertools.pairwise(ticks))
    if deadline.cron is None:
        return _Pace(longest, between, longest, paired=False)
    moments = next_moments(deadline.cron, since, SCHEDULE_TICKS, zone)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    seen = {one for one in moments[1:] if one <= ticks[-1]}
    return _Pace(longest, between, min(gaps), paired=bool(seen) and set(due) >= seen)
