"""The fleet's database: one holder per instance, epochs that only grow, and what a holder may not do any more."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import sqlalchemy as sa

from gpu_runner.fleet_database.accounting.request_budget import BudgetRefusal
from gpu_runner.fleet_database.database import FleetDatabase, Lease, RunEnded, database_now
from gpu_runner.fleet_database.tables import RUNS
from gpu_runner.fleet_database.wait_reason import RequestFailure, RunActivity, WaitKind, WaitReason


@pytest.fixture
def fleet_db(tmp_path: Path) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db:
        yield fleet_db


def lapse(fleet_db: FleetDatabase, lease: Lease) -> None:
    """Let the lease's time run out now."""
    with fleet_db.engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE leases SET expires_at = expires_at - 1000 WHERE epoch = :e"), {"e": lease.epoch}
        )


def leased(fleet_db: FleetDatabase, instance: str = "gpu", run_id: str = "run", ttl: float = 60) -> Lease:
    lease = fleet_db.try_lease(instance, run_id, "d", ttl)
    assert lease is not None
    return lease


def test_of_sixteen_who_race_for_an_instance_one_holds_it_and_epochs_only_grow(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/fleet.db"
    rounds, racers = 4, 16
    start = Barrier(racers)

    def race(number: int) -> list[Lease | None]:
        found = []
        with contextlib.closing(FleetDatabase(url)) as own:  # opened by all at once, too
            for _ in range(rounds):
                start.wait()
                lease = own.try_lease("gpu", f"run-{number}", "d", 60)
                start.wait()
                assert lease is None or own.release(lease)
                found.append(lease)
        return found

    with ThreadPoolExecutor(racers) as pool:
        found = list(pool.map(race, range(racers)))
    winners = [[lease for lease in attempt if lease is not None] for attempt in zip(*found, strict=True)]
    assert [[lease.epoch for lease in attempt] for attempt in winners] == [[1], [2], [3], [4]]


def test_a_dataset_never_holds_more_leases_than_it_may_whoever_races(tmp_path: Path):
    with (
        contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db,
        ThreadPoolExecutor(16) as pool,
    ):
        found = list(pool.map(lambda i: fleet_db.try_lease(f"gpu-{i}", f"run-{i}", "d", 60, limit=3), range(16)))
        assert sum(lease is not None for lease in found) == fleet_db.leases_of("d") == 3
        assert fleet_db.try_lease("gpu-x", "run-x", "another", 60, limit=1)


def test_a_live_lease_is_renewed_and_released_once_by_its_holder(fleet_db: FleetDatabase):
    lease = leased(fleet_db)
    assert fleet_db.holder("gpu") == "run"
    assert fleet_db.renew(lease, 60)
    assert fleet_db.release(lease)
    assert not fleet_db.release(lease)
    assert not fleet_db.renew(lease, 60)
    assert fleet_db.holder("gpu") is None
    assert fleet_db.history("run") == [("gpu", 1, True)]


def test_who_lost_the_lease_can_neither_renew_nor_release_it_nor_its_successor(fleet_db: FleetDatabase):
    old = leased(fleet_db, run_id="old")
    lapse(fleet_db, old)
    assert fleet_db.holder("gpu") is None
    assert not fleet_db.renew(old, 60)
    new = leased(fleet_db, run_id="new")
    assert new.epoch == old.epoch + 1
    assert not fleet_db.renew(old, 60)
    assert not fleet_db.release(old)
    assert fleet_db.holder("gpu") == "new"
    assert fleet_db.renew(new, 60)


def test_an_epoch_is_never_used_again_after_a_release(fleet_db: FleetDatabase):
    epochs = []
    for _ in range(3):
        lease = leased(fleet_db)
        epochs.append(lease.epoch)
        assert fleet_db.release(lease)
    assert epochs == [1, 2, 3]
    assert leased(fleet_db, "another").epoch == 1


def test_lease_times_are_the_databases_not_ours(fleet_db: FleetDatabase, monkeypatch: pytest.MonkeyPatch):
    lease = leased(fleet_db, ttl=60)
    monkeypatch.setattr(time, "time", lambda: 10.0**10)
    monkeypatch.setattr(time, "monotonic", lambda: 10.0**10)
    assert fleet_db.holder("gpu") == "run"
    assert fleet_db.renew(lease, 60)
    assert fleet_db.try_lease("gpu", "other", "d", 60) is None


def test_the_databases_clock_counts_unix_seconds(fleet_db: FleetDatabase):
    with fleet_db.engine.connect() as connection:
        assert abs(connection.execute(sa.select(database_now())).scalar_one() - time.time()) < 2


def test_a_run_is_listed_with_its_worker_until_it_ends(fleet_db: FleetDatabase):
    fleet_db.begin_run("run", "d", "00000", "00099")
    assert fleet_db.beat("run", "leased", RunActivity("x" * 400), 17)
    (beat,) = fleet_db.runs()
    assert (beat.run_id, beat.dataset, beat.first_key, beat.last_key) == ("run", "d", "00000", "00099")
    assert (beat.state, len(beat.note), beat.rows_done) == ("leased", 300, 17)
    assert (beat.host, beat.pid) == (socket.gethostname(), os.getpid())
    assert 0 <= beat.age < 5
    fleet_db.end_run("run")
    assert fleet_db.runs() == []


@pytest.mark.parametrize("kind", WaitKind)
def test_what_a_run_waits_for_comes_back_with_its_numbers(fleet_db: FleetDatabase, kind: WaitKind):
    refusal = BudgetRefusal(1 / 3, 0.1, 0.2, 5.5, 0.7) if kind is WaitKind.BUDGET else None
    failure = RequestFailure("http_429", 429, "slow down") if kind is WaitKind.REQUESTS_FAIL else None
    told = RunActivity("waiting: for this", WaitReason(kind, refusal, failure))
    fleet_db.begin_run("run", "d", "00000", "00099")
    assert fleet_db.runs()[0].wait is None
    fleet_db.beat("run", "waiting", told, 0)
    (beat,) = fleet_db.runs()
    assert RunActivity(beat.note, beat.wait) == told
    fleet_db.beat("run", "leased", RunActivity("on gpu"), 0)
    assert fleet_db.runs()[0].wait is None


def test_since_when_a_run_waits_is_kept_while_it_waits_for_the_same(tmp_path: Path):
    now = 1000.0
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path / 'fleet.db'}", now=lambda: now)) as fleet_db:
        fleet_db.begin_run("run", "d", "00000", "00099")
        found = []
        for kind, waited in (
            (WaitKind.REQUESTS_FAIL, 10.0),
            (WaitKind.REQUESTS_FAIL, 12.5),
            (WaitKind.STORE, 0.0),
            (WaitKind.STORE, 0.0),
            (None, 0.0),
            (WaitKind.STORE, 0.0),
        ):
            now += 5
            met = RequestFailure("http_500", 500, "x" * 400) if kind is WaitKind.REQUESTS_FAIL else None
            wait = None if kind is None else WaitReason(kind, failure=met, seconds=waited)
            fleet_db.beat("run", "leased", RunActivity("", wait), 0)
            (beat,) = fleet_db.runs()
            found.append(None if beat.wait is None else beat.wait.seconds)
            if met is not None:
                assert beat.wait is not None and beat.wait.failure == RequestFailure("http_500", 500, "x" * 300)
    assert found == [10.0, 15.0, 0.0, 5.0, None, 0.0]


def test_a_kind_of_waiting_that_a_later_version_wrote_is_none(fleet_db: FleetDatabase):
    fleet_db.begin_run("run", "d", "00000", "00099")
    with fleet_db.engine.begin() as connection:
        connection.execute(RUNS.update().values(wait_kind="a new one"))
    assert fleet_db.runs()[0].wait is None


def test_the_end_of_a_run_ends_every_lease_it_still_has(fleet_db: FleetDatabase):
    fleet_db.begin_run("run", "d", "00000", "00099")
    leased(fleet_db, "gpu-1")
    leased(fleet_db, "gpu-2")
    leased(fleet_db, "gpu-3", run_id="other")
    fleet_db.end_run("run")
    assert (fleet_db.holder("gpu-1"), fleet_db.holder("gpu-2"), fleet_db.holder("gpu-3")) == (None, None, "other")


def test_a_run_that_was_declared_dead_stays_dead_and_leases_nothing(fleet_db: FleetDatabase):
    fleet_db.begin_run("zombie", "d", "00000", "00099")
    lease = leased(fleet_db, run_id="zombie")
    fleet_db.release_run("zombie")
    fleet_db.end_run("zombie")
    assert not fleet_db.renew(lease, 60)
    assert not fleet_db.beat("zombie", "leased", RunActivity(), 5)
    assert fleet_db.runs() == []
    with pytest.raises(RunEnded, match="declared dead"):
        fleet_db.try_lease("gpu", "zombie", "d", 60)
    assert fleet_db.holder("gpu") is None


def test_the_number_of_instances_is_one_until_somebody_commands_another(fleet_db: FleetDatabase):
    assert fleet_db.instances("d") == 1
    fleet_db.set_instances("d", 4)
    fleet_db.set_instances("d", 3)
    assert (fleet_db.instances("d"), fleet_db.instances("e")) == (3, 1)
