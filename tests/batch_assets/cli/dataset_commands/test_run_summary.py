"""The last lines of `batch-assets run`."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test

from batch_assets.cli.dataset_commands.run import Request, Runner
from batch_assets.cli.dataset_commands.run_summary import dead_lines, paused, run_pointers, success
from batch_assets.cli.interrupts import Signals
from batch_assets.publishing.dead_letters import DeadLetterExample
from batch_assets.tags import CHAIN_SINCE_TAG, CHAIN_TAG
from gpu_runner.fleet_database.capacity_plan import Pause, PauseKind, pause_to_json, read_pause


@pytest.mark.parametrize(
    ("rows", "table_rows", "batches", "expected"),
    [
        (5000, 5000, 20, "5,000 rows in 20 batches: 4,999 ok, 1 dead, 7 completion tokens"),
        (12, 12, 1, "12 rows in 1 batch: 11 ok, 1 dead, 7 completion tokens"),
        (8, 40, 1, "40 rows in 1 batch, 8 of them asked, the others ask the same: 7 ok, 1 dead, 7 completion tokens"),
    ],
)
def test_rows_that_ask_the_same_are_told_from_those_that_were_asked(
    rows: int, table_rows: int, batches: int, expected: str
) -> None:
    counts = {"ok": rows - 1, "dead": 1, "completion_tokens": 7}
    status = SimpleNamespace(
        dataset="d", rows=rows, table_rows=table_rows, batches=batches, table="t", simulated=False, **counts
    )
    runner = SimpleNamespace(generated=rows, taken_over=0, seconds=3.0, request=Request("d"))
    assert success(status, runner)[1] == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("generated", "taken_over", "expected"),
    [
        (60, 40, "60 rows generated in 3 s, 40 rows that an earlier run had finished were taken over"),
        (0, 40, "no row was asked, 40 rows that an earlier run had finished were taken over"),
        (0, 0, "nothing to generate, the table is up to date"),
    ],
)
def test_rows_that_were_asked_now_are_told_from_those_that_a_run_before_had_finished(
    generated: int, taken_over: int, expected: str
) -> None:
    counts = {"ok": 100, "dead": 0, "completion_tokens": 7}
    status = SimpleNamespace(dataset="d", rows=100, table_rows=100, batches=1, table="t", simulated=False, **counts)
    runner = SimpleNamespace(generated=generated, taken_over=taken_over, seconds=3.0, request=Request("d"))
    assert success(status, runner)[0] == f"d: {expected}"  # type: ignore[arg-type]


@pytest.mark.parametrize("chain", [False, True])
def test_rows_of_runs_before_a_request_are_none_of_its_own(chain: bool) -> None:
    with dg.DagsterInstance.ephemeral() as instance, Signals() as signals:
        before = create_run_for_test(instance).run_id
        first = create_run_for_test(instance).run_id if chain else ""
        # The clock of the fleet's database may be ahead of Dagster's.
        tags = {CHAIN_TAG: first, CHAIN_SINCE_TAG: repr(time.time() + 60)} if chain else {}
        so_far = create_run_for_test(instance).run_id if chain else None  # of a step that begins on rows so far
        asked = create_run_for_test(instance, tags=tags).run_id
        mine = create_run_for_test(instance).run_id
        seen: Any = SimpleNamespace(instance=instance)
        runner = Runner(Request("d"), cast(Any, None), signals, asked)
        runner._count({before: 100}, seen)
        runner._count({before: 140, mine: 50, "of no catalog": 5}, seen)
        runner._count({before: 140, mine: 30}, seen)  # a batch is void
        runner._count({before: 140, mine: 60} | ({so_far: 7} if so_far else {}), seen)
    assert (runner.generated, runner.taken_over) == (80 + (7 if chain else 0), 45)


def test_failed_runs_are_linked_only_where_a_dagster_stays() -> None:
    assert run_pointers(["r1"], "http://127.0.0.1:4321") == ["  http://127.0.0.1:4321/runs/r1"]
    assert run_pointers(["r1", "r2"], None) == [
        "  run r1: `batch-assets ui` shows it",
        "  run r2: `batch-assets ui` shows it",
    ]


def test_a_redrive_says_how_many_dead_letters_are_answered_now() -> None:
    counts = {"ok": 998, "dead": 2, "completion_tokens": 7}
    status = SimpleNamespace(dataset="d", rows=1000, table_rows=1000, batches=4, table="t", simulated=False, **counts)
    runner = SimpleNamespace(
        generated=0, taken_over=0, seconds=3.0, request=Request("d", redrive_error=""), dead_before=680
    )
    assert success(status, runner)[0] == "d: 678 of 680 dead letters are answered now"  # type: ignore[arg-type]
    runner.dead_before = status.dead = 0
    assert success(status, runner)[0] == "d: there are no dead letters to try again"  # type: ignore[arg-type]


def test_dead_letters_are_counted_by_error_with_an_example() -> None:
    dead = [DeadLetterExample("rejected_402", 680, "r1", "no credit"), DeadLetterExample("timeout", 2, "r9", "")]
    assert dead_lines("d", dead) == [
        "dead letters:",
        "  680 rejected_402, as row r1: no credit",
        "    2 timeout, as row r9",
        "batch-assets redrive d [--error CODE]: tries them again, and nothing else",
    ]


def test_a_run_that_its_budget_stopped_says_the_sum_and_the_command_that_goes_on() -> None:
    pause = Pause(PauseKind.BUDGET_REACHED, "budget reached: 0.10 $ are left", 1.5)
    assert read_pause(pause_to_json(pause)) == pause
    assert paused("d", pause, 0.5, own=False)[1] == (
        "a budget of 1.50 $ for the whole request would do: `batch-assets adjust d --budget-usd 1.50` goes on from "
        "there; what is finished is kept"
    )
    assert paused("d", pause, 0.5, own=True)[1].startswith(
        "a budget of 1.00 $ for the next run would do: `batch-assets run d --budget-usd 1.00`"
    )
    before = read_pause('{"kind": "budget_reached", "text": "of an earlier version"}')
    assert before is not None and before.enough_usd is None
    assert "nobody knows which budget would do: `batch-assets plan d` says it" in paused("d", before, 0.0, own=True)[1]


def test_a_pause_of_a_gate_says_what_to_look_at_and_both_ways_on() -> None:
    pause = Pause(
        PauseKind.QUALITY, "gate cut: 240 of the last 250 rows (96%) are cut", gates=(("cut", ""), ("empty", ""))
    )
    said = paused("d", pause, 0.5, own=True)
    assert said[0] == "d: paused: gate cut: 240 of the last 250 rows (96%) are cut"
    assert "batch-assets show d --order newest" in said[1]
    assert "`batch-assets run d --accept-gate cut --accept-gate empty` goes on as it is" in said[2]
    assert "`batch-assets adjust d --accept cut --accept empty` goes on" in paused("d", pause, 0.5, own=False)[2]
    of_chain = paused("d", pause, 0.5, own=True, upstream="answers")[2]
    assert "`batch-assets run answers --upstream --accept-gate cut --accept-gate empty` goes on" in of_chain
