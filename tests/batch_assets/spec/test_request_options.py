"""What a request wants: the dataset's YAML, overridden by tags of its run or backfill, written down once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fleet_databases import Clock
from support.specs import spec

from batch_assets.orchestration.launch_plan import run_size
from batch_assets.spec.deadline import Deadline
from batch_assets.spec.request_options import InvalidTag, RequestOptions, begin, request_of, request_options, tags_of
from gpu_runner.fleet_database.capacity_plan import CapacityMemory, CapacityPlan
from gpu_runner.fleet_database.database import FleetDatabase


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet_db(tmp_path: Path, clock: Clock) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db", now=clock)) as opened:
        yield opened


def test_without_a_word_nothing_presses() -> None:
    assert request_options(spec(), {"other": "tag"}) == RequestOptions(None, None, "cheapest", None)


def test_tags_go_before_the_yaml() -> None:
    own = spec(deadline="6h", budget_usd=20.0, objective="efficient", max_instances=5)
    assert request_options(own, {}) == RequestOptions(Deadline(seconds=21600), 20.0, "efficient", 5)
    tags = tags_of("90m", 7.5, "fastest", 2)
    assert tags.keys() == {"batch/deadline", "batch/budget_usd", "batch/objective", "batch/max_instances"}
    assert request_options(own, tags) == RequestOptions(Deadline(seconds=5400), 7.5, "fastest", 2)


@pytest.mark.parametrize(
    ("tag", "text", "said"),
    [
        ("batch/deadline", "soon", "tag batch/deadline: expected a time after the request"),
        ("batch/budget_usd", "0", "tag batch/budget_usd: expected US dollars above 0, found '0'"),
        ("batch/budget_usd", "nan", "found 'nan'"),
        ("batch/budget_usd", "12 $", "found '12 $'"),
        ("batch/objective", "cheap", "tag batch/objective: expected cheapest, fastest, efficient, found 'cheap'"),
        ("batch/max_instances", "0", "expected a whole number from 1 to 999"),
        ("batch/max_instances", "2.5", "expected a whole number from 1 to 999"),
    ],
)
def test_a_tag_that_cannot_be_wanted_is_named(tag: str, text: str, said: str) -> None:
    with pytest.raises(InvalidTag) as error:
        request_options(spec(), {tag: text})
    assert said in str(error.value)


def test_a_range_run_belongs_to_its_refresh_or_backfill_or_to_itself() -> None:
    assert request_of("r1", {"batch/request": "refresh", "dagster/backfill": "b"}) == "refresh"
    assert request_of("r1", {"dagster/backfill": "b"}) == "b"
    assert request_of("r1", {}) == "run:r1"


def test_a_requests_time_and_command_stay_while_its_wishes_may_change(fleet_db: FleetDatabase, clock: Clock) -> None:
    own = spec(deadline="1h", budget_usd=10.0)
    first = begin(fleet_db, own, "refresh", {})
    assert (first.deadline_in, first.budget_usd, first.instances) == (3600, 10, 1)
    assert fleet_db.command("d", "refresh", 3, (("a", 3),), None, CapacityMemory(), CapacityPlan(rows_total=5))
    clock.forward(600)
    later = begin(fleet_db, own, "refresh", {"batch/budget_usd": "30"})
    assert (later.since, later.deadline_in, later.budget_usd, later.instances) == (first.since, 3000, 30, 3)
    other = begin(fleet_db, own, "backfill", {"batch/deadline": "2h"})
    assert (other.age, other.deadline_in, other.budget_usd, other.instances) == (0, 7200, 10, 1)
    assert other.plan is None


@pytest.mark.parametrize(
    ("batches_per_run", "wanted", "instances", "size"),
    [
        (100, 400, None, 100),  # nothing presses: as the dataset says
        (100, 400, 8, 25),  # two runs for each instance
        (100, 17, 8, 4),  # never less than four batches
        (1, 400, 8, 1),  # unless the dataset says so
        (100, 80_000, 20, 100),  # never more than the dataset says
        (100, 0, 8, 4),
        (100, 12, 1, 100),  # one engine: nothing is gained by a second run
    ],
)
def test_with_a_deadline_runs_are_small_enough_for_all_instances(
    batches_per_run: int, wanted: int, instances: int | None, size: int
) -> None:
    assert run_size(batches_per_run, wanted, instances) == size
