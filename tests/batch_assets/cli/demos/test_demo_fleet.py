"""What `batch-assets demo-fleet` tells at its end. tests/e2e/test_demo.py runs it as a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dagster as dg

from batch_assets.catalog import ledger
from batch_assets.cli.demos.demo_fleet import DECISIONS, deadline_line, decision_lines, machine_lines
from batch_assets.orchestration.request_summary import RequestStatus


def decided(catalog: dg.DagsterInstance, **said: Any) -> None:
    """One entry of the catalog, as the sensor and the runs make them."""
    catalog.report_runless_asset_event(dg.AssetObservation(ledger.rows_key("example"), metadata=said))


def test_plans_and_moves_are_told_in_their_order_each_plan_once() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        decided(instance, decision="capacity", kind="pilot", instances=1, offers="1 × a/s.l4 spot")
        decided(instance, decision="lease", instance="one")
        decided(instance, decision="capacity", kind="grow", instances=2, offers="2 × b/n.l4")
        decided(instance, decision="capacity", kind="keep", instances=2, offers="2 × b/n.l4")
        decided(instance, decision="move", **{"from": "b/n.l4", "to": "c/e.l4", "saved_usd": 0.25})
        decided(instance, decision="capacity", kind="done", instances=0, offers="")
        lines = [line.split(" s  ", 1)[1] for line in decision_lines(instance, "example", 0.0)]
        assert lines == [
            "pilot: 1 × a/s.l4 spot",
            "grow: 2 × b/n.l4",
            "move from b/n.l4 to c/e.l4, which saves 0.25 $",
        ]
        assert decision_lines(instance, "example", 1e12) == []


def test_of_many_decisions_the_first_are_told() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        for number in range(DECISIONS + 1):
            decided(instance, decision="capacity", kind="grow", instances=number + 1, offers=f"{number + 1} × a")
        lines = decision_lines(instance, "example", 0.0)
        assert len(lines) == DECISIONS + 1 and lines[-1] == "  …"


def test_a_machine_is_told_with_its_rows_its_bill_and_its_end() -> None:
    machine: Any = SimpleNamespace(
        name="one",
        provider="sim-spot",
        gpu="1x L4",
        spot=True,
        age=60.0,
        reason="interrupted; by its provider",
        state="",
    )
    usd, seconds = SimpleNamespace(total=0.01), SimpleNamespace(total=61.0)
    bill: Any = SimpleNamespace(name="one", rows=1234, usd=usd, seconds=seconds)
    (line,) = machine_lines([machine], [bill])
    assert line.startswith("  sim-spot 1x L4 spot: 1,234 rows for 0.01")
    assert line.endswith("; interrupted")


def test_a_deadline_is_kept_or_missed_by_the_moment_of_the_last_row() -> None:
    kept = RequestStatus(deadline=100.0, finished_at=70.0)
    assert deadline_line(kept, 500.0) == "Deadline: kept with 30 s left"
    assert deadline_line(RequestStatus(deadline=100.0, finished_at=112.0), 500.0) == "Deadline: missed by 12 s"
