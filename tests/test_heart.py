"""A heart keeps a run and its lease alive, and says at once when the lease may not be relied on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from pace import PATIENCE

from gpu_runner.fleet import FleetBook, Lease
from gpu_runner.heart import Heart
from gpu_runner.spend import Spent

TTL, INTERVAL = 2.0, 0.05


class Clock:
    """A monotonic clock that somebody else moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def book(tmp_path: Path) -> Iterator[FleetBook]:
    with contextlib.closing(FleetBook(f"sqlite:///{tmp_path}/fleet.db")) as book:
        yield book


def eventually(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5 * PATIENCE
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def held(book: FleetBook, heart: Heart, ttl: float = TTL) -> Lease:
    lease = book.try_lease("gpu", heart.run_id, "d", ttl)
    assert lease is not None
    heart.hold(lease, heart.now())
    return lease


def test_a_run_beats_while_it_waits_and_while_it_holds_and_is_ended_once(book: FleetBook):
    heart = Heart(book, "run", ttl=TTL, interval=INTERVAL)
    heart.rows_done = lambda: 7
    with heart.beating("d", "00000", "00009"):
        heart.note = "waiting: gpu is held by run x"
        eventually(lambda: book.runs()[0].note == heart.note)
        assert (book.runs()[0].state, book.runs()[0].rows_done) == ("waiting", 7)
        held(book, heart)
        eventually(lambda: book.runs()[0].state == "leased")
    assert book.runs() == []


def test_a_lease_outlives_its_ttl_as_long_as_the_heart_beats(book: FleetBook):
    heart = Heart(book, "run", ttl=0.4, interval=INTERVAL)
    with heart.beating("d", "00000", "00009"):
        lease = held(book, heart, 0.4)
        time.sleep(0.9)
        assert heart.check(lease)
        assert book.holder("gpu") == "run"


def test_a_refused_renewal_loses_the_lease_and_nothing_is_renewed_after_it(book: FleetBook):
    heart = Heart(book, "run", ttl=TTL, interval=INTERVAL)
    with heart.beating("d", "00000", "00009"):
        lease = held(book, heart)
        assert heart.check(lease)
        book.release(lease)
        other = book.try_lease("gpu", "other", "d", 60)
        assert other is not None
        eventually(lambda: not heart.check(lease))
        assert book.holder("gpu") == "other"
        heart.let_go(lease)
        assert not book.release(lease)


def test_without_a_renewal_the_lease_is_lost_by_our_own_clock_before_it_lapses(book: FleetBook):
    clock = Clock()
    heart = Heart(book, "run", ttl=10, interval=2, clock=clock)  # its thread does not run: nothing renews
    lease = held(book, heart, 10)
    clock.now += 7.9
    assert heart.check(lease)
    clock.now += 0.2
    assert not heart.check(lease)
    clock.now -= 5
    assert not heart.check(lease)


def test_a_process_that_was_stopped_between_lease_and_first_use_does_not_trust_it(book: FleetBook):
    clock = Clock()
    heart = Heart(book, "run", ttl=10, interval=2, clock=clock)
    asked_at = heart.now()
    lease = book.try_lease("gpu", "run", "d", 10)
    assert lease is not None
    clock.now += 30
    heart.hold(lease, asked_at)
    assert not heart.check(lease)


def test_the_next_lease_is_good_after_one_was_lost(book: FleetBook):
    heart = Heart(book, "run", ttl=TTL, interval=INTERVAL)
    with heart.beating("d", "00000", "00009"):
        first = held(book, heart)
        book.release(first)
        eventually(lambda: not heart.check(first))
        heart.let_go(first)
        second = held(book, heart)
        time.sleep(3 * INTERVAL)
        assert heart.check(second)
        assert not heart.check(first)


def test_a_run_that_was_declared_dead_loses_its_lease_and_stops_beating(book: FleetBook):
    heart = Heart(book, "run", ttl=TTL, interval=INTERVAL)
    with heart.beating("d", "00000", "00009"):
        lease = held(book, heart)
        book.end_run("run")
        eventually(heart.ended.is_set)
        assert not heart.check(lease)
        assert book.runs() == []


def test_a_database_that_is_away_for_a_moment_costs_no_lease(book: FleetBook, monkeypatch: pytest.MonkeyPatch):
    heart = Heart(book, "run", ttl=TTL, interval=INTERVAL)
    renew, failures = book.renew, iter(range(4))

    def away(lease: Lease, ttl: float, spent: Spent, drain_seconds: float) -> bool:
        if next(failures, None) is not None:
            raise sa.exc.OperationalError("renew", {}, Exception("database is away"))
        return renew(lease, ttl, spent, drain_seconds)

    monkeypatch.setattr(book, "renew", away)
    with heart.beating("d", "00000", "00009"):
        lease = held(book, heart)
        eventually(lambda: next(failures, None) is None)
        time.sleep(2 * INTERVAL)
        assert heart.check(lease)


def test_several_leases_are_kept_at_once_and_what_they_used_is_written_down(book: FleetBook):
    heart = Heart(book, "run", ttl=TTL, interval=INTERVAL)
    seen: list[Spent] = []
    with heart.beating("d", "00000", "00009"):
        one, two = (book.try_lease(name, "run", "d", TTL) for name in ("one", "two"))
        assert one is not None
        assert two is not None
        heart.hold(one, heart.now())
        heart.hold(two, heart.now(), lambda: seen.append(Spent(1.5)) or Spent(1.5))
        eventually(lambda: seen)
        heart.let_go(one)
        assert not heart.check(one)
        assert heart.check(two)
        assert heart.state == "leased"
