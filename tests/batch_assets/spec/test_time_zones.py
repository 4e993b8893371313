"""A schedule and a deadline in a time zone of their own: also on the days on which its clock is set."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import dagster as dg
import pytest

from batch_assets.component import dataset_definitions
from batch_assets.orchestration.freshness import freshness
from batch_assets.spec.deadline import next_moments, parse_deadline
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.spec.request_options import request_options
from batch_assets.tags import DEADLINE_TAG

PARIS = ZoneInfo("Europe/Paris")


def spec(**more: Any) -> GeneratedDatasetSpec:
    attributes = {"name": "d", "source": {"path": "q.jsonl"}, "prompt": {"user": "{{ q }}"}, "model": "m", **more}
    return load_spec(attributes, "defs.yaml")


def paris(month: int, day: int, hour: int, minute: int = 0) -> float:
    return datetime.datetime(2027, month, day, hour, minute, tzinfo=PARIS).timestamp()


def test_the_schedule_of_a_refresh_runs_in_its_time_zone(tmp_path: Path):
    (schedule,) = dataset_definitions(spec(schedule="0 6 * * *", timezone="Europe/Paris"), tmp_path).schedules or ()
    assert isinstance(schedule, dg.ScheduleDefinition)
    assert (schedule.cron_schedule, schedule.execution_timezone) == ("0 6 * * *", "Europe/Paris")
    (plain,) = dataset_definitions(spec(schedule="0 6 * * *"), tmp_path).schedules or ()
    assert isinstance(plain, dg.ScheduleDefinition) and plain.execution_timezone == "UTC"


def test_a_deadline_that_is_a_schedule_is_in_the_time_zone_also_as_a_tag():
    own = spec(deadline="0 8 * * *", timezone="Europe/Paris")
    for tags in ({}, {DEADLINE_TAG: "0 8 * * *"}):
        deadline = request_options(own, tags).deadline
        assert deadline is not None
        assert deadline.at(paris(1, 31, 6)) == paris(1, 31, 8)
        assert deadline.at(paris(7, 31, 6)) == paris(7, 31, 8)
    assert parse_deadline("0 8 * * *").at(paris(1, 31, 6)) == paris(1, 31, 9)


def test_where_the_clock_skips_or_repeats_an_hour_a_day_has_one_moment():
    """In 2027 the clock of Paris goes from 2:00 to 3:00 on 28 March, and from 3:00 back to 2:00 on 31 October."""
    spring = next_moments("30 2 * * *", paris(3, 27, 12), 2, "Europe/Paris")
    assert spring == [paris(3, 28, 3), paris(3, 29, 2, 30)]
    autumn = next_moments("30 2 * * *", paris(10, 30, 12), 2, "Europe/Paris")
    assert [datetime.datetime.fromtimestamp(one, PARIS).day for one in autumn] == [31, 1]


def test_freshness_knows_the_zone_and_its_short_and_long_days():
    hours = datetime.timedelta(hours=1)
    own = {"schedule": "0 1 * * *", "timezone": "Europe/Paris"}
    cron = freshness(spec(**own, deadline="0 1 * * *"))
    # On the day of 23 hours a deadline comes 23 hours after the one before.
    assert cron == dg.FreshnessPolicy.cron(
        deadline_cron="0 1 * * *", lower_bound_delta=23 * hours, timezone="Europe/Paris"
    )
    # On the day of 25 hours a refresh comes 25 hours after the one before.
    after = freshness(spec(**own, deadline="6h"))
    assert after == dg.FreshnessPolicy.time_window(fail_window=31 * hours)


@pytest.mark.parametrize(
    ("zone", "hint"),
    [
        ("Europe/Pariss", "Did you mean 'Europe/Paris'?"),
        ("Europe", "found 'Europe'"),
        ("../../etc/passwd", "found '../../etc/passwd'"),
        ("/etc/passwd", "found '/etc/passwd'"),
        ("", "found ''"),
        ("Mars/Olympus\0", "found"),
        ("x" * 5000, "found"),
    ],
)
def test_an_unknown_time_zone_is_refused(zone: str, hint: str):
    with pytest.raises(SpecError) as refused:
        spec(schedule="0 6 * * *", timezone=zone)
    said = str(refused.value)
    assert "timezone: expected a time zone of the IANA database, e.g. Europe/Paris" in said
    assert hint in said
