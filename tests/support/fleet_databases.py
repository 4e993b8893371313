"""For tests of the fleet: databases on SQLite and Postgres with a clock that the test moves, and an offer."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from gpu_runner.fleet_database.database import FleetDatabase, Lease
from gpu_runner.offers.offer import Offer

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
    """The database's clock, as far as the fleet's database under test is concerned."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += seconds


@contextlib.contextmanager
def sqlite_url(folder: Path) -> Iterator[str]:
    yield f"sqlite:///{folder}/fleet.db"


_EMPTY: dict[str, list[sa.Connection]] = {}  # by the URL of a server: to its databases that nobody uses


@contextlib.contextmanager
def postgres_url(server_url: str) -> Iterator[str]:
    """A database of its own on a running server: emptied and used again, as to create one takes 0.1 s of CPU.

    The connection that empties it is kept: Postgres starts a process for each.
    """
    empty = _EMPTY.setdefault(server_url, [])
    connection = empty.pop() if empty else _new_database(server_url)
    yield connection.engine.url.render_as_string(hide_password=False)
    _make_empty(connection)
    empty.append(connection)


def _new_database(server_url: str) -> sa.Connection:
    name = f"fleet_{secrets.token_hex(6)}"
    with _connect(server_url) as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    return _connect(server_url.rsplit("/", 1)[0] + f"/{name}")


def _make_empty(connection: sa.Connection) -> None:
    """Without other connections, tables and all else that a test made in it."""
    others = "pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    connection.exec_driver_sql(f"SELECT pg_terminate_backend(pid) FROM {others}")
    connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


def _connect(url: str) -> sa.Connection:
    return sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool).connect()


def intended(
    fleet_db: FleetDatabase,
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
    return fleet_db.intend(
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


def ready(
    fleet_db: FleetDatabase, name: str = "ba-1", *, run_id: str = "run", dataset: str = "d", ttl: float = 10
) -> Lease:
    """An instance whose engine answers, leased by the run that ordered it."""
    lease = intended(fleet_db, name, run_id=run_id, dataset=dataset, ttl=ttl)
    assert lease is not None
    assert fleet_db.created(lease, f"machine of {name}")
    assert fleet_db.ready(lease, "http://127.0.0.1:1", 256)
    return lease
