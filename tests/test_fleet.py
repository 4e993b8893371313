"""The fleet's books: one holder per instance, epochs that only grow, and what a holder may not do any more."""

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

from gpu_runner.fleet import FleetBook, Lease, RunEnded, database_now


@pytest.fixture
def book(tmp_path: Path) -> Iterator[FleetBook]:
    with contextlib.closing(FleetBook(f"sqlite:///{tmp_path}/fleet.db")) as book:
        yield book


def lapse(book: FleetBook, lease: Lease) -> None:
    """Let the lease's time run out now."""
    with book.engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE leases SET expires_at = expires_at - 1000 WHERE epoch = :e"), {"e": lease.epoch}
        )


def leased(book: FleetBook, instance: str = "gpu", run_id: str = "run", ttl: float = 60) -> Lease:
    lease = book.try_lease(instance, run_id, "d", ttl)
    assert lease is not None
    return lease


def test_of_sixteen_who_race_for_an_instance_one_holds_it_and_epochs_only_grow(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/fleet.db"
    rounds, racers = 4, 16
    start = Barrier(racers)

    def race(number: int) -> list[Lease | None]:
        found = []
        with contextlib.closing(FleetBook(url)) as own:  # opened by all at once, too
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
    with contextlib.closing(FleetBook(f"sqlite:///{tmp_path}/fleet.db")) as book, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: book.try_lease(f"gpu-{i}", f"run-{i}", "d", 60, limit=3), range(16)))
        assert sum(lease is not None for lease in found) == book.leases_of("d") == 3
        assert book.try_lease("gpu-x", "run-x", "another", 60, limit=1)


def test_a_live_lease_is_renewed_and_released_once_by_its_holder(book: FleetBook):
    lease = leased(book)
    assert book.holder("gpu") == "run"
    assert book.renew(lease, 60)
    assert book.release(lease)
    assert not book.release(lease)
    assert not book.renew(lease, 60)
    assert book.holder("gpu") is None
    assert book.history("run") == [("gpu", 1, True)]


def test_who_lost_the_lease_can_neither_renew_nor_release_it_nor_its_successor(book: FleetBook):
    old = leased(book, run_id="old")
    lapse(book, old)
    assert book.holder("gpu") is None
    assert not book.renew(old, 60)
    new = leased(book, run_id="new")
    assert new.epoch == old.epoch + 1
    assert not book.renew(old, 60)
    assert not book.release(old)
    assert book.holder("gpu") == "new"
    assert book.renew(new, 60)


def test_an_epoch_is_never_used_again_after_a_release(book: FleetBook):
    epochs = []
    for _ in range(3):
        lease = leased(book)
        epochs.append(lease.epoch)
        assert book.release(lease)
    assert epochs == [1, 2, 3]
    assert leased(book, "another").epoch == 1


def test_lease_times_are_the_databases_not_ours(book: FleetBook, monkeypatch: pytest.MonkeyPatch):
    lease = leased(book, ttl=60)
    monkeypatch.setattr(time, "time", lambda: 10.0**10)
    monkeypatch.setattr(time, "monotonic", lambda: 10.0**10)
    assert book.holder("gpu") == "run"
    assert book.renew(lease, 60)
    assert book.try_lease("gpu", "other", "d", 60) is None


def test_the_databases_clock_counts_unix_seconds(book: FleetBook):
    with book.engine.connect() as connection:
        assert abs(connection.execute(sa.select(database_now())).scalar_one() - time.time()) < 2


def test_a_run_is_listed_with_its_worker_until_it_ends(book: FleetBook):
    book.begin_run("run", "d", "00000", "00099")
    assert book.beat("run", "leased", "x" * 400, 17)
    (beat,) = book.runs()
    assert (beat.run_id, beat.dataset, beat.first_key, beat.last_key) == ("run", "d", "00000", "00099")
    assert (beat.state, len(beat.note), beat.rows_done) == ("leased", 300, 17)
    assert (beat.host, beat.pid) == (socket.gethostname(), os.getpid())
    assert 0 <= beat.age < 5
    book.end_run("run")
    assert book.runs() == []


def test_the_end_of_a_run_ends_every_lease_it_still_has(book: FleetBook):
    book.begin_run("run", "d", "00000", "00099")
    leased(book, "gpu-1")
    leased(book, "gpu-2")
    leased(book, "gpu-3", run_id="other")
    book.end_run("run")
    assert (book.holder("gpu-1"), book.holder("gpu-2"), book.holder("gpu-3")) == (None, None, "other")


def test_a_run_that_was_declared_dead_stays_dead_and_leases_nothing(book: FleetBook):
    book.begin_run("zombie", "d", "00000", "00099")
    lease = leased(book, run_id="zombie")
    book.release_run("zombie")
    book.end_run("zombie")
    assert not book.renew(lease, 60)
    assert not book.beat("zombie", "leased", "", 5)
    assert book.runs() == []
    with pytest.raises(RunEnded, match="declared dead"):
        book.try_lease("gpu", "zombie", "d", 60)
    assert book.holder("gpu") is None


def test_the_number_of_instances_is_one_until_somebody_commands_another(book: FleetBook):
    assert book.instances("d") == 1
    book.set_instances("d", 4)
    book.set_instances("d", 3)
    assert (book.instances("d"), book.instances("e")) == (3, 1)
