"""Versions of the fleet's tables: a database of any earlier version is brought to today's, once, and loses nothing."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from gpu_runner.fleet_database.database import FleetDatabase, Lease, LeaseUsage, RunEnded
from gpu_runner.fleet_database.migrations import HEAD, VERSION_TABLE, FleetDatabaseTooNew, upgrade, version_of
from gpu_runner.fleet_database.tables import METADATA
from gpu_runner.fleet_database.wait_reason import RunActivity, WaitKind, WaitReason
from gpu_runner.offers.selection import FailureKind

FIXTURES = Path(__file__).parents[2] / "fixtures"


def restored(name: str, folder: Path) -> Path:
    """A database from a file that earlier code made."""
    path = folder / "fleet.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript((FIXTURES / name).read_text())
    return path


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A database as the code left it before its tables had versions."""
    return restored("fleet_database_before_versions.sql", tmp_path)


@pytest.fixture
def version_0001(tmp_path: Path) -> Path:
    """A database as the code of version 0001 left it."""
    return restored("fleet_database_0001.sql", tmp_path)


@pytest.fixture
def version_0002(tmp_path: Path) -> Path:
    """A database as the code of version 0002 left it."""
    return restored("fleet_database_0002.sql", tmp_path)


@pytest.fixture
def version_0003(tmp_path: Path) -> Path:
    """A database as the code of version 0003 left it."""
    return restored("fleet_database_0003.sql", tmp_path)


def differences(engine: sa.Engine) -> list[object]:
    """What Alembic finds different between the database and the tables of today's code."""
    with engine.connect() as connection:
        options = {"include_object": lambda item, name, kind, *_: name != VERSION_TABLE, "compare_type": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), METADATA))


Rows = dict[str, list[dict[str, object]]]


def rows(path: Path) -> Rows:
    """Every row of each table, its values by column."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return {name: [dict(row) for row in connection.execute(f"SELECT * FROM {name}")] for name in METADATA.tables}


def kept(before: Rows, after: Rows) -> Rows:
    """What stands in `after` of the columns that were there before."""
    columns = {name: found[0].keys() if found else () for name, found in before.items()}
    return {name: [{key: row[key] for key in columns[name]} for row in after[name]] for name in before}


def test_a_new_database_has_the_tables_of_the_code(url: str) -> None:
    with contextlib.closing(FleetDatabase(url)) as fleet_db:
        assert differences(fleet_db.engine) == []
        with fleet_db.engine.connect() as connection:
            assert version_of(connection) == HEAD


def test_a_database_from_before_versions_is_upgraded_and_keeps_every_row(earlier: Path) -> None:
    before = rows(earlier)
    assert len(before["batch_runs"]) == 3

    with contextlib.closing(FleetDatabase(f"sqlite:///{earlier}")) as fleet_db:
        assert differences(fleet_db.engine) == []
        assert [cost.name for cost in fleet_db.costs()] == ["ba-fd621e-404f9d42"]
        target = fleet_db.target("example")
        assert target is not None
        assert (target.instances, target.offers) == (1, (("sim-north/north-1/n.l40s", 1),))
    assert kept(before, rows(earlier)) == before


def test_a_database_of_version_0001_is_upgraded_and_keeps_every_row(version_0001: Path) -> None:
    before = rows(version_0001)

    with contextlib.closing(FleetDatabase(f"sqlite:///{version_0001}")) as fleet_db:
        assert differences(fleet_db.engine) == []
        target, over = fleet_db.target("d"), fleet_db.target("e")
        assert target is not None
        assert over is not None
        assert target.plan is not None
        assert (target.plan.kind, target.plan.rows_left, target.plan.rows_total) == ("pilot", 3975, 4000)
        assert (target.plan.assignments, len(target.plan.next_best), target.ended) == ((), 1, None)
        assert over.ended is not None
        assert (over.plan, over.ended.request, over.ended.on_time, over.ended.missing) == (None, "r", True, 2)
        (beat,) = fleet_db.runs()
        assert (beat.state, beat.rows_done, beat.wait) == ("waiting", 25, None)  # its next beat says what it waits for
        assert beat.note.startswith("waiting: paused: budget of 0.60 $ leaves no room")
        assert [(one.offer, one.kind, one.text) for one in fleet_db.offer_failures(math.inf)] == [
            ("sim-a/eight", FailureKind.FAILED, "boot failed"),
            ("sim-a/eight", FailureKind.LOST, "lost"),
            ("sim-a/one", FailureKind.NO_CAPACITY, "no capacity"),
        ]
    assert kept(before, rows(version_0001)) == before


def test_the_failures_of_version_0001_get_their_kind_on_every_database(url: str) -> None:
    engine = sa.create_engine(url)
    failures = sa.table("offer_failures", *(sa.column(name) for name in ("provider", "offer", "at", "reason")))
    words = ["no capacity", "lost", "boot failed: no capacity"]
    with engine.begin() as connection:
        upgrade(connection, "0001")
        lines = [{"provider": "p", "offer": "o", "at": float(n), "reason": said} for n, said in enumerate(words)]
        connection.execute(failures.insert(), lines)
    engine.dispose()
    with contextlib.closing(FleetDatabase(url)) as fleet_db:
        assert differences(fleet_db.engine) == []
        found = fleet_db.offer_failures(math.inf)[::-1]
    assert [one.text for one in found] == words
    assert [one.kind for one in found] == [FailureKind.NO_CAPACITY, FailureKind.LOST, FailureKind.FAILED]


def test_runs_of_version_0001_go_on_writing_after_the_upgrade(version_0001: Path) -> None:
    with contextlib.closing(FleetDatabase(f"sqlite:///{version_0001}")) as fleet_db:
        with contextlib.closing(sqlite3.connect(version_0001)) as old:  # the statements of its code
            old.execute("UPDATE batch_runs SET state = 'leased', note = 'on ba-2', rows_done = 30")
            old.execute("INSERT INTO offer_failures (provider, offer, at, reason) VALUES ('p', 'o', 2e9, 'lost')")
            old.execute(
                "INSERT INTO batch_runs (run_id, dataset, first_key, last_key, state, note, rows_done, host, pid, "
                "started_at, beat_at) VALUES ('r', 'd', '0', '1', 'waiting', 'waiting', 0, 'host', 1, 2e9, 2e9)"
            )
            old.commit()
        assert [(one.note, one.wait) for one in fleet_db.runs()] == [("on ba-2", None), ("waiting", None)]
        newest = fleet_db.offer_failures(math.inf)[0]
        assert (newest.kind, newest.text) == (FailureKind.FAILED, "lost")


def test_runs_that_version_0002_declared_dead_stay_dead_and_no_other(version_0002: Path) -> None:
    before = rows(version_0002)

    with contextlib.closing(FleetDatabase(f"sqlite:///{version_0002}")) as fleet_db:
        assert differences(fleet_db.engine) == []
        beats = {name: fleet_db.run_beat(name) for name in ("at-work", "ended", "dead", "without-row")}
        assert {name: beat is not None and beat.declared_dead for name, beat in beats.items()} == {
            "at-work": False, "ended": False, "dead": True, "without-row": True
        }  # fmt: skip
        assert kept(before, rows(version_0002)) == before
        for name in ("dead", "without-row"):
            with pytest.raises(RunEnded):
                fleet_db.begin_run(name, "d", "00008", "00011")
        fleet_db.begin_run("ended", "d", "00004", "00007")
        fleet_db.declare_dead("at-work")
        assert not fleet_db.beat("at-work", "leased", RunActivity(), 13)
    after = {row["run_id"]: row for row in rows(version_0002)["batch_runs"]}
    assert after["dead"]["declared_dead_at"] == after["dead"]["beat_at"]
    # A worker of version 0002 that still runs obeys these two.
    assert (after["at-work"]["state"], after["at-work"]["note"]) == ("ended", "declared dead")


def test_runs_of_version_0003_go_on_waiting_and_say_with_their_next_beat_since_when(version_0003: Path) -> None:
    before = rows(version_0003)

    with contextlib.closing(FleetDatabase(f"sqlite:///{version_0003}")) as fleet_db:
        assert differences(fleet_db.engine) == []
        assert kept(before, rows(version_0003)) == before
        beat = fleet_db.run_beat("waits")
        assert beat is not None and beat.wait is not None and beat.wait.refusal is not None
        assert (beat.wait.kind, beat.wait.seconds, beat.wait.failure) == (WaitKind.BUDGET, 0.0, None)
        with contextlib.closing(sqlite3.connect(version_0003)) as old:  # a statement of its code
            old.execute("UPDATE batch_runs SET wait_kind = NULL, note = 'on gpu' WHERE run_id = 'waits'")
            old.commit()
        assert {beat.run_id: beat.wait for beat in fleet_db.runs()} == {"waits": None, "works": None}
        assert fleet_db.beat("works", "leased", RunActivity("", WaitReason(WaitKind.STORE, seconds=20.0)), 50)
        (beat,) = [one for one in fleet_db.runs() if one.wait is not None]
        assert beat.run_id == "works" and 20 <= beat.wait.seconds < 25


def test_a_lease_of_version_0005_that_is_older_than_the_request_counts_from_the_upgrade_on(url: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        upgrade(connection, "0005")
        connection.execute(sa.text("INSERT INTO datasets (dataset, instances, request, since) VALUES ('d', 1, 'r', 5)"))
        columns = "instance, epoch, run_id, dataset, acquired_at, expires_at, useful_usd"
        values = "('old', 1, 'r', 'd', 4, 4e9, 0.9), ('new', 1, 'r', 'd', 6, 4e9, 0.2)"
        connection.execute(sa.text(f"INSERT INTO leases ({columns}) VALUES {values}"))
    engine.dispose()
    with contextlib.closing(FleetDatabase(url)) as fleet_db:
        assert differences(fleet_db.engine) == []
        assert fleet_db.spend("d").usd == pytest.approx(0.2)
        assert fleet_db.renew(Lease("old", 1, "r", "d"), 10.0, LeaseUsage(useful_usd=1.0))
        assert fleet_db.spend("d").usd == pytest.approx(0.3)


def test_what_people_read_makes_no_run_dead(url: str) -> None:
    with contextlib.closing(FleetDatabase(url)) as fleet_db:
        fleet_db.begin_run("r", "d", "00000", "00003")
        assert fleet_db.beat("r", "waiting", RunActivity("declared dead"), 0)
        fleet_db.end_run("r")
        beat = fleet_db.run_beat("r")
        assert beat is not None and not beat.declared_dead
        fleet_db.begin_run("r", "d", "00000", "00003")


def test_an_older_one_that_lacks_columns_and_tables_gets_them(earlier: Path) -> None:
    with contextlib.closing(sqlite3.connect(earlier)) as connection:
        connection.executescript(
            "ALTER TABLE leases DROP COLUMN reason; ALTER TABLE datasets DROP COLUMN counted_usd;"
            "DROP TABLE batch_claims"
        )
    with contextlib.closing(FleetDatabase(f"sqlite:///{earlier}")) as fleet_db:
        assert differences(fleet_db.engine) == []
        assert len(fleet_db.costs()) == 1


def test_a_database_of_a_later_version_is_refused_and_left_alone(earlier: Path) -> None:
    FleetDatabase(f"sqlite:///{earlier}").close()
    with contextlib.closing(sqlite3.connect(earlier)) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        connection.commit()
    before = rows(earlier)

    with pytest.raises(FleetDatabaseTooNew, match=f"expected version {HEAD} or an earlier one, found 9999"):
        FleetDatabase(f"sqlite:///{earlier}")
    assert rows(earlier) == before


def test_many_open_a_new_database_at_once_and_one_makes_its_tables(url: str) -> None:
    def opened(_: int) -> int:
        with contextlib.closing(FleetDatabase(url)) as fleet_db:
            return len(fleet_db.fleet())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(opened, range(8))) == [0] * 8


@pytest.mark.slow
def test_a_process_that_finds_its_tables_does_not_load_alembic(earlier: Path) -> None:
    code = (
        "import sys; from gpu_runner.fleet_database.database import FleetDatabase; "
        f"FleetDatabase('sqlite:///{earlier}').close(); print('alembic' in sys.modules)"
    )
    asked = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert [run.stdout.strip() for run in asked] == ["True", "False"]
