"""Services that plan for a fleet: those of one owner at a time, while one of them lives."""

from __future__ import annotations

import os

import sqlalchemy as sa
from support.fleet_databases import Clock

from gpu_runner.fleet_database.connection import FACTS
from gpu_runner.fleet_database.database import FleetDatabase

SILENT = 20.0


def beat(fleet_db: FleetDatabase, name: str, owner: str) -> str | None:
    """The owner that it is refused for."""
    rival = fleet_db.beat_service(name, owner, f"records of {owner}", SILENT)
    return None if rival is None else rival.owner


def test_processes_of_one_owner_are_let_in_together_and_another_owner_is_refused(
    fleet_db: FleetDatabase, clock: Clock
) -> None:
    assert beat(fleet_db, "p1", "one") is None and beat(fleet_db, "p2", "one") is None
    clock.forward(5)
    rival = fleet_db.beat_service("q", "two", "records of two", SILENT)
    assert rival is not None and (rival.owner, rival.note, rival.age) == ("one", "records of one", 5)
    assert rival.pid == os.getpid()
    assert beat(fleet_db, "p1", "one") is None, "who is refused has written nothing"


def test_the_last_process_that_ends_makes_room_at_once_and_a_killed_one_when_it_was_silent(
    fleet_db: FleetDatabase, clock: Clock
) -> None:
    for name in ("p1", "p2"):
        beat(fleet_db, name, "one")
    fleet_db.end_service("p1")
    assert beat(fleet_db, "q", "two") == "one"
    fleet_db.end_service("p2")
    assert beat(fleet_db, "q", "two") is None
    clock.forward(SILENT)
    assert beat(fleet_db, "p3", "one") == "two"
    clock.forward(1)
    assert beat(fleet_db, "p3", "one") is None


def test_one_that_was_stopped_for_too_long_finds_the_fleet_taken(fleet_db: FleetDatabase, clock: Clock) -> None:
    beat(fleet_db, "stopped", "one")
    clock.forward(SILENT + 1)
    assert beat(fleet_db, "stopped", "one") is None, "nobody has come meanwhile"
    clock.forward(SILENT + 1)
    assert beat(fleet_db, "q", "two") is None
    assert beat(fleet_db, "stopped", "one") == "two"


def test_a_clock_that_is_set_back_keeps_nobody_out_for_long(fleet_db: FleetDatabase, clock: Clock) -> None:
    beat(fleet_db, "killed", "one")
    clock.forward(-3600)
    assert beat(fleet_db, "q", "two") is None


def test_what_is_said_fits_into_its_column_and_other_facts_stay(fleet_db: FleetDatabase) -> None:
    tag = fleet_db.tag()
    assert fleet_db.beat_service("n" * 500, "o" * 16, "ü" * 5_000, SILENT) is None
    with fleet_db.engine.connect() as connection:
        facts = dict(connection.execute(sa.select(FACTS.c.name, FACTS.c.value)).tuples().all())
    assert len(facts) == 2 and all(len(name) <= 64 and len(value) <= 300 for name, value in facts.items())
    assert fleet_db.tag() == tag
