"""A heartbeat keeps a run and its lease alive, and says at once when the lease may not be relied on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.timing import PATIENCE

from gpu_runner.cost_meter import LeaseUsage
from gpu_runner.fleet_database.database import FleetDatabase, Lease, RunEnded
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.fleet_database.wait_reason import WaitKind, WaitReason

TTL, INTERVAL = 20.0, 0.05


class Clock:
    """A monotonic clock that somebody else moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def fleet_db(tmp_path: Path) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db:
        yield fleet_db


def eventually(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20 * PATIENCE
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def held(fleet_db: FleetDatabase, heartbeat: Heartbeat, ttl: float = TTL) -> Lease:
    lease = fleet_db.try_lease("gpu", heartbeat.run_id, "d", ttl)
    assert lease is not None
    heartbeat.hold(lease, heartbeat.now())
    return lease


def test_a_run_beats_while_it_waits_and_while_it_holds_and_is_ended_once(fleet_db: FleetDatabase):
    heartbeat = Heartbeat(fleet_db, "run", ttl=TTL, interval=INTERVAL)
    heartbeat.rows_done = lambda: 7
    with heartbeat.beating("d", "00000", "00009"):
        heartbeat.tell("waiting: gpu is held by run x", WaitReason(WaitKind.ENGINES_HELD))
        eventually(lambda: fleet_db.runs()[0].note == "waiting: gpu is held by run x")
        assert fleet_db.runs()[0].wait == WaitReason(WaitKind.ENGINES_HELD)
        assert (fleet_db.runs()[0].state, fleet_db.runs()[0].rows_done) == ("waiting", 7)
        held(fleet_db, heartbeat)
        eventually(lambda: fleet_db.runs()[0].state == "leased")
    assert fleet_db.runs() == []


def test_a_lease_outlives_its_ttl_as_long_as_the_heart_beats(tmp_path: Path):
    clock = Clock()
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db", now=clock)) as fleet_db:
        heartbeat = Heartbeat(fleet_db, "run", ttl=10, interval=0.02, clock=clock)
        renewed: list[float] = []

        def renew(*words: Any, _renew: Any = fleet_db.renew) -> bool:
            good = bool(_renew(*words))
            renewed.append(clock.now)
            return good

        fleet_db.renew = renew  # type: ignore[method-assign]
        with heartbeat.beating("d", "00000", "00009"):
            lease = held(fleet_db, heartbeat, 10)
            for _ in range(4):
                clock.now += 6
                eventually(lambda: clock.now in renewed)
                assert heartbeat.check(lease)
            assert fleet_db.holder("gpu") == "run"


def test_a_refused_renewal_loses_the_lease_and_nothing_is_renewed_after_it(fleet_db: FleetDatabase):
    heartbeat = Heartbeat(fleet_db, "run", ttl=TTL, interval=INTERVAL)
    with heartbeat.beating("d", "00000", "00009"):
        lease = held(fleet_db, heartbeat)
        assert heartbeat.check(lease)
        fleet_db.release(lease)
        other = fleet_db.try_lease("gpu", "other", "d", 60)
        assert other is not None
        eventually(lambda: not heartbeat.check(lease))
        assert fleet_db.holder("gpu") == "other"
        heartbeat.stop_renewing(lease)
        assert not fleet_db.release(lease)


def test_without_a_renewal_the_lease_is_lost_by_our_own_clock_before_it_lapses(fleet_db: FleetDatabase):
    clock = Clock()
    heartbeat = Heartbeat(fleet_db, "run", ttl=10, interval=2, clock=clock)  # its thread does not run: nothing renews
    lease = held(fleet_db, heartbeat, 10)
    clock.now += 7.9
    assert heartbeat.check(lease)
    clock.now += 0.2
    assert not heartbeat.check(lease)
    clock.now -= 5
    assert not heartbeat.check(lease)


def test_a_process_that_was_stopped_between_lease_and_first_use_does_not_trust_it(fleet_db: FleetDatabase):
    clock = Clock()
    heartbeat = Heartbeat(fleet_db, "run", ttl=10, interval=2, clock=clock)
    asked_at = heartbeat.now()
    lease = fleet_db.try_lease("gpu", "run", "d", 10)
    assert lease is not None
    clock.now += 30
    heartbeat.hold(lease, asked_at)
    assert not heartbeat.check(lease)


def test_the_next_lease_is_good_after_one_was_lost(fleet_db: FleetDatabase):
    heartbeat = Heartbeat(fleet_db, "run", ttl=TTL, interval=INTERVAL)
    with heartbeat.beating("d", "00000", "00009"):
        first = held(fleet_db, heartbeat)
        fleet_db.release(first)
        eventually(lambda: not heartbeat.check(first))
        heartbeat.stop_renewing(first)
        second = held(fleet_db, heartbeat)
        time.sleep(3 * INTERVAL)
        assert heartbeat.check(second)
        assert not heartbeat.check(first)


def test_a_run_that_was_declared_dead_loses_its_lease_and_stops_beating(fleet_db: FleetDatabase):
    heartbeat = Heartbeat(fleet_db, "run", ttl=TTL, interval=INTERVAL)
    with heartbeat.beating("d", "00000", "00009"):
        lease = held(fleet_db, heartbeat)
        fleet_db.end_run("run")
        eventually(heartbeat.ended.is_set)
        assert not heartbeat.check(lease)
        assert fleet_db.runs() == []


def test_a_run_that_was_declared_dead_begins_no_op_any_more(fleet_db: FleetDatabase):
    with Heartbeat(fleet_db, "run", ttl=TTL, interval=INTERVAL).beating("d", "00000", "00009"):
        pass
    with Heartbeat(fleet_db, "run", ttl=TTL, interval=INTERVAL).beating("d", "00000", "00009"):
        fleet_db.declare_dead("run")  # and the op ends well
    with (
        pytest.raises(RunEnded, match="declared dead"),
        Heartbeat(fleet_db, "run", ttl=TTL, interval=INTERVAL).beating("d", "00000", "00009"),
    ):
        raise AssertionError("it began")
    assert fleet_db.runs() == []


def test_a_database_that_is_away_for_a_moment_costs_no_lease(fleet_db: FleetDatabase, monkeypatch: pytest.MonkeyPatch):
    heartbeat = Heartbeat(fleet_db, "run", ttl=TTL, interval=INTERVAL)
    renew, failures = fleet_db.renew, iter(range(4))

    def away(lease: Lease, ttl: float, spent: LeaseUsage, drain_seconds: float) -> bool:
        if next(failures, None) is not None:
            raise sa.exc.OperationalError("renew", {}, Exception("database is away"))
        return renew(lease, ttl, spent, drain_seconds)

    monkeypatch.setattr(fleet_db, "renew", away)
    with heartbeat.beating("d", "00000", "00009"):
        lease = held(fleet_db, heartbeat)
        eventually(lambda: next(failures, None) is None)
        time.sleep(2 * INTERVAL)
        assert heartbeat.check(lease)


def test_several_leases_are_kept_at_once_and_what_they_used_is_written_down(fleet_db: FleetDatabase):
    heartbeat = Heartbeat(fleet_db, "run", ttl=TTL, interval=INTERVAL)
    seen: list[LeaseUsage] = []
    with heartbeat.beating("d", "00000", "00009"):
        one, two = (fleet_db.try_lease(name, "run", "d", TTL) for name in ("one", "two"))
        assert one is not None
        assert two is not None
        heartbeat.hold(one, heartbeat.now())
        heartbeat.hold(two, heartbeat.now(), lambda: seen.append(LeaseUsage(1.5)) or LeaseUsage(1.5))
        eventually(lambda: seen)
        heartbeat.stop_renewing(one)
        assert not heartbeat.check(one)
        assert heartbeat.check(two)
        assert heartbeat.state == "leased"
