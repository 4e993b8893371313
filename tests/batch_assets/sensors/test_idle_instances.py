"""Whose request ends an instance that nobody leases: that of the dataset which pays for its idle time.

Offers are those of simulated providers in fleet.yaml; instances are rows of the fleet's database. Nothing runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from support.capacity_fleet import SPEC, fleet_yaml, instance
from support.sensor_dataset import KEYS, SensorDataset

from gpu_runner.fleet_database.connection import INSTANCES, LEASES
from gpu_runner.fleet_database.database import Lease

TICKS = 120.0  # seconds: several ticks of the sensor


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    """The dataset `d` has a deadline; another one, `e`, has no request."""
    fleet_yaml(tmp_path)
    with contextlib.ExitStack() as stack:
        yield SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack, SPEC)


def warm(site: SensorDataset, name: str, *, ordered_by: str, used_by: str, idle: float = 0.0) -> None:
    """An instance without a lease: ordered by one dataset, used last by another one, idle for so many seconds."""
    site.fleet_db.release(instance(site, name, dataset=ordered_by))
    site.fleet_db.release(leased(site, name, used_by))
    earlier = {LEASES: ("acquired_at", "released_at"), INSTANCES: ("created_at", "ready_at")}
    with site.fleet_db.engine.begin() as connection:
        for table, columns in earlier.items():
            mine = (table.c.instance if table is LEASES else table.c.name) == name
            connection.execute(sa.update(table).where(mine).values({one: table.c[one] - idle for one in columns}))


def leased(site: SensorDataset, name: str, dataset: str) -> Lease:
    lease = site.fleet_db.try_lease(name, f"run of {dataset}", dataset, 600)
    assert lease is not None
    return lease


def states(site: SensorDataset) -> dict[str, str]:
    return {one.name: one.state for one in site.fleet_db.fleet()}


def payers(site: SensorDataset) -> dict[str, str]:
    """Who is charged for the latest stretch of each instance."""
    return {charge.instance: charge.dataset for charge in site.fleet_db.charges()}


@pytest.mark.slow
def test_the_end_of_a_bounded_request_ends_what_it_pays_for_whoever_ordered_it(site: SensorDataset) -> None:
    site.snapshot()
    site.request()
    site.tick("capacity")
    warm(site, "of-e", ordered_by="e", used_by="d")
    warm(site, "of-d", ordered_by="d", used_by="e")
    assert payers(site) == {"of-e": "d", "of-d": "e"}
    site.commit(*KEYS)
    site.tick("capacity")
    assert states(site) == {"of-e": "ending", "of-d": "ready"}


@pytest.mark.slow
def test_what_only_the_last_rows_of_another_dataset_hold_ends_with_them(site: SensorDataset) -> None:
    site.snapshot()
    site.request()
    site.tick("capacity")
    draining = instance(site, "of-e", dataset="e")
    assert site.fleet_db.drain(draining)
    site.fleet_db.release(leased(site, "of-e", "d"))
    site.commit(*KEYS)
    site.tick("capacity")
    (one,) = site.fleet_db.fleet()
    assert (one.state, one.retiring) == ("ready", True)
    site.fleet_db.release(draining)
    assert states(site) == {"of-e": "ending"}


@pytest.mark.slow
def test_what_others_work_on_outlives_the_request_that_paid_for_its_boot(site: SensorDataset) -> None:
    site.snapshot()
    site.request()
    site.tick("capacity")
    assert site.fleet_db.drain(instance(site, "of-d"))
    lease = leased(site, "of-d", "e")
    site.commit(*KEYS)
    site.tick("capacity")
    (one,) = site.fleet_db.fleet()
    assert (one.lease, one.retiring) == (lease, False)


def test_while_a_bounded_request_lasts_it_pays_for_no_idle_instance_and_ends_none_of_others(
    site: SensorDataset,
) -> None:
    site.snapshot(1200, keys=[f"{i:05d}" for i in range(120)])
    site.request()
    site.tick("capacity")
    instance(site, "works")
    warm(site, "of-e", ordered_by="e", used_by="d", idle=TICKS)
    warm(site, "of-d", ordered_by="d", used_by="e", idle=TICKS)
    site.tick("capacity")
    assert states(site) == {"works": "ready", "of-e": "ending", "of-d": "ready"}
