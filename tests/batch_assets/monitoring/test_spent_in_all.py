"""What `status` says a dataset spent: all of it, and what the last request did."""

from __future__ import annotations

import time
from pathlib import Path

from support.dataset_site import dataset_site

from batch_assets.monitoring.dataset_status import Observer, dataset_status
from batch_assets.monitoring.display import request_lines
from batch_assets.orchestration.request_summary import request_status, summary_of
from gpu_runner.cost_meter import LeaseUsage


def test_what_a_dataset_spent_in_all_stays_after_a_request_without_work(tmp_path: Path) -> None:
    with dataset_site(tmp_path) as site:
        site.fleet_db.begin_request("d", "first")
        lease = site.fleet_db.try_lease("api", "run", "d", 60)
        assert lease is not None
        site.fleet_db.release(lease, LeaseUsage(1.0, 0.0, 10, 10, 10, useful_usd=0.3, wasted_usd=0.1))
        for name in ("first", "second"):
            site.fleet_db.begin_request("d", name)
            found = request_status(site.fleet_db, "d")
            ended = summary_of(found, finished_at=1.0, on_time=None, missing=0)
            site.fleet_db.end_request("d", name, ended)
        status = dataset_status(Observer(site.instance, site.fleet_db, site.store), time.time())
    assert status.request.usd_spent == 0.0
    assert request_lines(status, time.time()) == [
        "d: done, 0.40 $ spent in all, 0.00 $ by the last request, 0.10 $ of it wasted"
    ]
