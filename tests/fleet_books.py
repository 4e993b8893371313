"""For tests of the fleet: books on SQLite and Postgres with a clock that the test moves, and an offer."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from gpu_runner.fleet import FleetBook, Lease
from gpu_runner.offers import Offer

OFFER = Offer(
    provider="sim-north",
    region="north-1",
    instance_type="gpu-1",
    gpu="L40S",
    gpus=1,
    gpu_memory_gib=48,
    spot=False,
    price_per_hour=3.6,
    boot_seconds=90,
    reliability=1.0,
    observed_at=0,
    source="test",
)


class Clock:
    """The database's clock, as far as the book under test is concerned."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += seconds


@contextlib.contextmanager
def sqlite_url(folder: Path) -> Iterator[str]:
    yield f"sqlite:///{folder}/fleet.db"


@contextlib.contextmanager
def postgres_url(server_url: str) -> Iterator[str]:
    """A database of its own on a running server."""
    name = f"fleet_{secrets.token_hex(6)}"
    admin = sa.create_engine(server_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    try:
        yield server_url.rsplit("/", 1)[0] + f"/{name}"
    finally:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
        admin.dispose()


def intended(
    book: FleetBook,
    name: str = "ba-1",
    *,
    run_id: str = "run",
    dataset: str = "d",
    ttl: float = 10,
    limit: int | None = None,
    cap: int | None = None,
    replaces: Lease | None = None,
    offer: Offer = OFFER,
    drain_seconds: float = 0.0,
) -> Lease | None:
    return book.intend(
        name,
        offer,
        clock=60,
        engine_key="key",
        model="m",
        run_id=run_id,
        dataset=dataset,
        ttl=ttl,
        limit=limit,
        cap=cap,
        replaces=replaces,
        drain_seconds=drain_seconds,
    )


def ready(book: FleetBook, name: str = "ba-1", *, run_id: str = "run", dataset: str = "d", ttl: float = 10) -> Lease:
    """An instance whose engine answers, leased by the run that ordered it."""
    lease = intended(book, name, run_id=run_id, dataset=dataset, ttl=ttl)
    assert lease is not None
    assert book.created(lease, f"machine of {name}")
    assert book.ready(lease, "http://127.0.0.1:1", 256)
    return lease
