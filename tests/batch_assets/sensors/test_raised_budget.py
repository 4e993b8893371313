"""A request that its budget paused and an operator raises: the next tick of the capacity sensor starts it again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import sqlalchemy as sa
import yaml
from support.sensor_dataset import KEYS, S, SensorDataset

from batch_assets.orchestration.request_summary import request_status
from batch_assets.request_status.dataset_status import Observer, dataset_status
from batch_assets.request_status.display import request_lines
from gpu_runner.fleet_database.accounting.request_budget import BudgetRefusal
from gpu_runner.fleet_database.capacity_plan import Pause, PauseKind
from gpu_runner.fleet_database.connection import DATASETS
from gpu_runner.fleet_database.wait_reason import RunActivity, WaitKind, WaitReason

SPEC = {
    "name": "d",
    "source": {"path": "questions.jsonl"},
    "prompt": {"user": "{{ question }}"},
    "model": "Qwen/Qwen3-8B",
    "sampling": {"max_tokens": 400},
    "deadline": "20m",
    "budget_usd": 0.3,
}
OFFERS = [
    {"instance_type": "eight", "gpu": "H100", "gpus": 8, "price_per_hour": 24.0, "capacity": 4},
    {"instance_type": "one", "gpu": "A100-80GB", "price_per_hour": 1.5, "capacity": 4},
]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    provider = {"name": "sim-a", "boot_seconds": 480, "offers": OFFERS}
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"simulated": {"clock": 1.0, "providers": [provider]}}))
    with contextlib.ExitStack() as stack:
        found = SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack, SPEC)
        found.snapshot(12_000, keys=KEYS, batch_rows=1000)
        found.request()
        yield found


def past_its_deadline(site: SensorDataset) -> None:
    with site.fleet_db.engine.begin() as connection:
        moved = {"since": DATASETS.c.since - 3600, "deadline_at": DATASETS.c.deadline_at - 3600}
        connection.execute(sa.update(DATASETS).values(**moved))


def target(site: SensorDataset) -> Any:
    found = site.fleet_db.target("d")
    assert found is not None
    return found


def paused(site: SensorDataset) -> str:
    return target(site).pause.describe()


def says(site: SensorDataset) -> str:
    status = dataset_status(Observer(site.instance, site.fleet_db, site.store), time.time())
    return "\n".join(request_lines(status, time.time()))


@pytest.mark.slow
def test_a_paused_request_starts_again_within_a_tick_of_adjust_with_what_the_money_pays_for(
    site: SensorDataset,
) -> None:
    site.tick("capacity")
    assert (target(site).instances, target(site).plan.kind) == (0, "paused")
    assert "0.30 $ are left, and the next instance needs 0.46 $" in paused(site)
    assert "LATE" in says(site) and "paused: budget reached" in says(site)
    past_its_deadline(site)
    assert site.fleet_db.override("d", budget_usd=4.69)
    site.tick("capacity")
    assert target(site).instances >= 1 and target(site).pause is None
    assert {name.split("/")[1] for name, _ in target(site).offers} == {"one"}
    assert target(site).plan.on_time is False and "LATE" in says(site)


@pytest.mark.slow
def test_a_refused_lease_is_answered_with_the_budget_that_pays_for_all_the_work(site: SensorDataset) -> None:
    run = site.batches(S.STARTED, KEYS[0], KEYS[3])
    site.fleet_db.begin_run(run, "d", KEYS[0], KEYS[3])
    refused = BudgetRefusal(0.3, spent_usd=0.0, held_back_usd=0.1, drain_seconds=5.0, boot_usd=0.11)
    site.fleet_db.beat(run, "waiting", RunActivity("any words", WaitReason(WaitKind.BUDGET, refused)), 0)
    site.tick("capacity")
    pause = target(site).pause
    assert pause.kind is PauseKind.LEASE_REFUSED and refused.enough_usd < 0.33
    assert pause.enough_usd >= 0.46  # what the first instance needs by the plan


@pytest.mark.slow
def test_what_the_books_said_of_the_old_budget_does_not_hold_up_the_new_one(site: SensorDataset) -> None:
    assert site.fleet_db.begin_request("d", "r")
    run = site.batches(S.STARTED, KEYS[0], KEYS[3])
    site.fleet_db.begin_run(run, "d", KEYS[0], KEYS[3])
    refused = BudgetRefusal(0.6, spent_usd=0.1, held_back_usd=0.3, drain_seconds=5.0, boot_usd=0.2)
    site.fleet_db.beat(run, "waiting", RunActivity("any words", WaitReason(WaitKind.BUDGET, refused)), 0)
    site.tick("capacity")
    request = target(site).request
    (line,) = dataset_status(Observer(site.instance, site.fleet_db, site.store), time.time()).runs
    assert line.wait is not None
    assert (line.note, line.wait.kind, line.wait.status) == ("any words", WaitKind.BUDGET, None)
    site.fleet_db.override("d", budget_usd=0.6)
    site.tick("capacity")
    assert paused(site) == (
        "budget of 0.60 $ leaves no room for another instance: 0.10 $ are spent, and with it 0.30 $ until it could be "
        "ended (5 s to drain, its lease, 15 s until a sweep has ended it) and 0.40 $ for twice its boot would be held "
        "back"
    )
    site.fleet_db.override("d", budget_usd=5.0)
    site.tick("capacity")
    assert (target(site).request, target(site).pause) == (request, None) and target(site).instances >= 1


@pytest.mark.slow
@pytest.mark.parametrize("why", ["past its deadline", "no instances", "paused"])
def test_status_never_says_on_time_where_nothing_works_or_the_deadline_is_over(site: SensorDataset, why: str) -> None:
    """Also when the sensor that expected it has not looked again since."""
    site.fleet_db.override("d", budget_usd=100.0)
    site.tick("capacity")
    site.fleet_db.override("d", budget_usd=100.0, deadline_at=site.fleet_db.now() + 7200)
    site.tick("capacity")
    assert target(site).plan.on_time is True and "on time" in says(site)
    told = target(site)
    if why == "past its deadline":
        site.fleet_db.override("d", deadline_at=site.fleet_db.now() - 1)
    else:
        pause = Pause(PauseKind.BUDGET_REACHED, why) if why == "paused" else None
        site.fleet_db.command("d", told.request, 1 if pause else 0, pause=pause, memory=told.memory, plan=told.plan)
    status = request_status(site.fleet_db, "d")
    assert status.on_time is False
    assert "LATE" in says(site) and "on time" not in says(site)
    if why == "no instances":
        assert (status.finish_p50, status.finish_p95) == (None, None) and "(P50)" not in says(site)


@pytest.mark.slow
def test_an_engine_that_is_paid_by_the_token_is_paused_at_the_price_of_a_row_and_goes_on_with_enough(
    site: SensorDataset,
) -> None:
    price = {"input": 1.0, "output": 100.0}
    engine = {"name": "api", "kind": "endpoint", "url": "http://127.0.0.1:9", "usd_per_million_tokens": price}
    (site.folder / "fleet.yaml").write_text(yaml.safe_dump({"engines": [engine]}))
    site.fleet_db.begin_request("d", "r", budget_usd=0.03)
    site.tick("capacity")
    site.fleet_db.override("d", budget_usd=0.03)
    site.tick("capacity")
    assert "0.03 $ are left, and the next row may cost 0.10 $ (api)" in paused(site)
    enough = target(site).pause.enough_usd
    usd = 100.0 * 512 * 12_000 / 1e6  # half of the tokens that a row may have
    assert usd < enough < 2 * usd
    site.fleet_db.override("d", budget_usd=enough)
    site.tick("capacity")
    assert (target(site).pause, target(site).instances) == (None, 1)
    assert target(site).plan.usd_p50 == pytest.approx(usd, rel=0.05)
    run = site.batches(S.STARTED, KEYS[0], KEYS[3])
    site.fleet_db.begin_run(run, "d", KEYS[0], KEYS[3])
    refused = BudgetRefusal(enough, enough - 0.01, 0.0, 0.0, 0.0, row_usd=0.04)
    site.fleet_db.beat(run, "waiting", RunActivity("", WaitReason(WaitKind.BUDGET, refused)), 0)
    site.tick("capacity")
    assert target(site).pause.kind is PauseKind.LEASE_REFUSED
    assert paused(site).endswith("are spent, and a row may cost 0.04 $")


@pytest.mark.slow
def test_what_gates_have_paused_stays_so_until_they_are_accepted_whatever_is_planned(site: SensorDataset) -> None:
    site.tick("capacity")
    assert site.fleet_db.override("d", budget_usd=50)
    site.tick("capacity")
    before = target(site)
    assert before.instances > 0 and before.pause is None
    assert site.fleet_db.trip_gate("d", "cut", "gate cut: all rows are cut; its bound is 50%")
    site.tick("capacity")
    found = target(site)
    assert (found.instances, found.pause.kind, found.plan.kind) == (0, PauseKind.QUALITY, "paused")
    assert found.plan.reason == "gate cut: all rows are cut; its bound is 50%"
    assert "paused: gate cut: all rows are cut" in says(site)
    assert site.fleet_db.accept_gates("d", ["cut"])
    site.tick("capacity")
    assert (target(site).instances, target(site).pause) == (before.instances, None)
