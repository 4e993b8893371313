"""The model on paper of a large control plane."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.control_plane import DAY, MEASURED, Sizes, changed, load_of

SIZES = Sizes(rows_per_day=1e9, instances=1_000)


def test_the_load_of_one_batch_and_one_run_is_what_they_cost() -> None:
    one = Sizes(rows_per_day=250, instances=0, batches_per_run=1)
    costs = replace(MEASURED, idle_statements=0.0)
    load = load_of(one, costs)
    assert (load.batches_a_day, load.runs_a_day, load.objects_a_day) == (1, 1, 1)
    assert load.events_a_day == costs.batch_events + costs.run_events
    assert load.dagster_statements * DAY == pytest.approx(costs.batch_statements + costs.run_statements)
    assert load.fleet_statements * DAY == pytest.approx(costs.claim_statements)
    assert (load.store_writes_a_day, load.store_reads_a_day) == (costs.batch_writes, costs.batch_reads)
    assert load.worker_cores * DAY == pytest.approx(250 * costs.row_seconds + costs.run_seconds)
    assert load.lock_share * DAY == pytest.approx(2 * costs.lock_seconds)


def test_twice_the_instances_beat_twice_as_often_and_make_no_more_batches() -> None:
    once, twice = load_of(SIZES), load_of(replace(SIZES, instances=2_000))
    assert twice.events_a_day == once.events_a_day
    beats = SIZES.instances / SIZES.beat_seconds
    assert twice.fleet_statements - once.fleet_statements == pytest.approx(beats * MEASURED.heartbeat_statements)
    assert twice.store_writes_a_day - once.store_writes_a_day == pytest.approx(1_000 * DAY / SIZES.journal_seconds)


def test_a_thousand_instances_ask_a_quarter_of_the_lock_and_with_the_change_little() -> None:
    as_it_is, then = load_of(SIZES), load_of(changed(SIZES))
    assert 0.25 > as_it_is.lock_share > 0.1 > then.lock_share
    assert then.events_a_day < as_it_is.events_a_day / 10
    assert then.runs_a_day == pytest.approx(as_it_is.runs_a_day)  # over as many rows
    assert as_it_is.store_usd_a_day < 0.02 * as_it_is.instances_usd_a_day
