"""A dataset on the simulated fleet: rows and money are the same figures wherever they stand."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.dataset_project import DatasetProject, dataset_project
from support.machines import ended_machines

from batch_assets.cli.fleet_commands.fleet import cost_json, cost_lines
from batch_assets.orchestration.cost_report import Summary
from batch_assets.orchestration.request_summary import request_status, summary_of
from batch_assets.publishing.published_table import published_table
from batch_assets.request_status.dataset_status import Observer, dataset_status
from batch_assets.request_status.display import request_lines
from gpu_runner.fleet_database.accounting.charges import by_day
from gpu_runner.money import format_usd

ROWS = 60
FLEET = {
    "simulated": {
        "clock": 600,
        "providers": [
            {
                "name": "sim-a",
                "boot_seconds": 60,
                "offers": [{"instance_type": "a", "gpu": "H100", "price_per_hour": 9}],
            }
        ],
    },
    "idle_minutes": 60,
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DatasetProject]:
    (tmp_path / "fleet.yaml").write_text(json.dumps(FLEET))
    with ended_machines(tmp_path), dataset_project(tmp_path) as found:
        found.source([f"What is {i}?" for i in range(ROWS)])
        assert found.materialize("prompts").success
        yield found


def end(site: DatasetProject, request: str) -> None:
    """As the capacity sensor does it."""
    found = summary_of(request_status(site.fleet_db, "d"), finished_at=time.time(), on_time=None, missing=0)
    assert site.fleet_db.end_request("d", request, found)


def figures(site: DatasetProject) -> dict[str, Any]:
    """What every place says, checked against the bill; the machines have ended."""
    (bill,) = [cost_json(line) for line in cost_lines(site.fleet_db.costs())]
    spend = Summary.of(by_day(site.fleet_db.charges()))
    status = dataset_status(Observer(site.instance, site.fleet_db, site.store), time.time())
    table = published_table(site.store)
    assert table is not None
    column = pl.read_parquet(f"{site.folder}/store/{table.path}/part-*.parquet")["usd"]
    card = site.store.objects.get(f"{table.path}/README.md").decode()
    assert bill["rows"] == spend.rows == status.ok == len(column) == ROWS
    assert bill["usd"] == pytest.approx(spend.usd) == pytest.approx(status.request.usd_total)
    for part in ("useful_usd", "booting_usd", "idle_usd", "wasted_usd"):
        assert bill[part] == pytest.approx(getattr(spend, part))
    assert bill["useful_usd"] == pytest.approx(column.sum(), abs=1e-6) == pytest.approx(table.usd, abs=1e-6)
    useful = f"${format_usd(bill['useful_usd'], fine=True)}"
    assert f"| cost of these rows | {useful} |" in card and f"{useful} useful" in card
    assert f"{format_usd(bill['usd'])} $ spent in all" in request_lines(status, time.time())[0]
    return bill


@pytest.mark.slow
def test_rows_and_money_are_the_same_wherever_they_stand_also_after_a_run_without_work(site: DatasetProject) -> None:
    assert site.fleet_db.begin_request("d", "first")
    assert site.run_rows("00000", "00005", None).success
    assert site.materialize("dataset").success
    assert site.fleet.down(site.fleet_db, here=True)[1] == []
    end(site, "first")
    first = figures(site)
    assert site.fleet_db.begin_request("d", "second")
    assert site.run_rows("00000", "00005", None).success
    assert site.materialize("dataset").success
    end(site, "second")
    assert figures(site) == first
