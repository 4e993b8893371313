"""What a request cost is read for its dataset alone: looks do not become dearer with what others were charged."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.fleet_databases import OFFER, Clock, intended, ready

from batch_assets.orchestration.request_summary import request_status
from gpu_runner.fleet_database.database import FleetDatabase, LeaseUsage


class Reads:
    """Statements and rows that a connection of the fleet's database answered."""

    def __init__(self) -> None:
        self.statements = self.rows = 0

    def row(self, _: sqlite3.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
        self.rows += 1
        return row

    def statement(self, *_: object) -> None:
        self.statements += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet_db(tmp_path: Path, clock: Clock) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db", now=clock)) as fleet_db:
        yield fleet_db


def used(fleet_db: FleetDatabase, clock: Clock, name: str, dataset: str) -> None:
    """An instance that booted, worked and ended for a dataset."""
    lease = ready(fleet_db, name, run_id=f"run-{name}", dataset=dataset, ttl=100)
    clock.forward(10)
    assert fleet_db.renew(lease, 100, LeaseUsage(6, 1, 10, 100, 100))
    assert fleet_db.give_up(lease, "done")
    fleet_db.ended(name, 0)


def looked(fleet_db: FleetDatabase, dataset: str) -> tuple[int, int]:
    """Statements and rows of one look."""
    reads, engine = Reads(), fleet_db.engine
    connection = fleet_db.engine.raw_connection()
    connection.driver_connection.row_factory = reads.row  # type: ignore[union-attr]
    connection.close()  # back into the pool, which hands it out next
    sa.event.listen(engine, "before_cursor_execute", reads.statement)
    try:
        request_status(fleet_db, dataset)
    finally:
        sa.event.remove(engine, "before_cursor_execute", reads.statement)
        connection = fleet_db.engine.raw_connection()
        connection.driver_connection.row_factory = None  # type: ignore[union-attr]
        connection.close()
    return reads.statements, reads.rows


def test_a_look_reads_no_more_for_what_other_datasets_were_charged(fleet_db: FleetDatabase, clock: Clock) -> None:
    fleet_db.begin_request("d", "request")
    used(fleet_db, clock, "ba-own", "d")
    first = looked(fleet_db, "d")
    assert first[1] > 0
    for number in range(30):
        used(fleet_db, clock, f"ba-{number}", f"other-{number % 3}")
    assert looked(fleet_db, "d") == first


def test_the_charges_of_a_dataset_are_those_of_the_whole_history(fleet_db: FleetDatabase, clock: Clock) -> None:
    for number, dataset in enumerate("dedf"):
        used(fleet_db, clock, f"ba-{number}", dataset)
    shared = ready(fleet_db, "ba-shared", dataset="e", ttl=100)
    clock.forward(5)
    assert fleet_db.release(shared, LeaseUsage(3, 0, 4, 5, 6))
    assert fleet_db.try_lease("ba-shared", "run-d", "d", 100) is not None
    assert intended(fleet_db, "ba-slow", dataset="d", offer=replace(OFFER, provider="sim-south")) is not None
    clock.forward(7)
    for dataset in "def":
        whole = [charge for charge in fleet_db.charges() if charge.dataset == dataset]
        assert whole
        assert fleet_db.charges_of(dataset) == whole
    assert fleet_db.provider_clocks() == {one.provider: one.clock for one in fleet_db.costs()}
