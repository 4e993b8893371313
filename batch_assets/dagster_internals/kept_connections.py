"""Dagster's own storages, without opening the database anew for each statement.

Stock Dagster makes a SQLAlchemy engine and a connection for every statement (`connect` of
dagster/_core/storage/*/sqlite/*.py), asks before most of them whether a table exists, and deletes old ticks after each
tick. An idle daemon spends more than half of its time so. Here one engine and its connections are kept per database.
On Postgres, where each new connection is a process of the server and a password that is proved, the three storages
share the connections of this process; one that the server has closed meanwhile is replaced before it is used. Dagster
has no setting for this, so it leans on private names; each of them is held by
`tests/batch_assets/dagster_internals/test_kept_connections.py`.

Only for a process that lives long and does not fork: connections must not be carried over into a child. The worker of a
run is one: of four events on Postgres, 6.7 of 7.6 ms of the server and 3.3 of 6.0 ms of the worker are connections.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dagster as dg
import sqlalchemy as sa
from dagster._core.scheduler.instigation import TickStatus
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.event_log.sqlite.sqlite_event_log import INDEX_SHARD_NAME
from dagster._core.storage.runs import SqliteRunStorage
from dagster._core.storage.schedules import SqliteScheduleStorage
from dagster._core.storage.sqlite import SQLITE_BUSY_TIMEOUT_SECONDS

KEPT, RECYCLE_SECONDS = 4, 3600  # connections to a Postgres server
PURGE_SECONDS = 600.0  # between two deletions of one sensor's old ticks; they are kept for days

_keeping = weakref.WeakSet[dg.DagsterInstance]()

Connect = Callable[[], contextlib.AbstractContextManager[sa.Connection]]


def keep_connections(
    instance: dg.DagsterInstance, clock: Callable[[], float] = time.monotonic, *, kept: int = KEPT
) -> None:
    """Keep the connections of the instance's storages for as long as the process lives. Nothing the second time.

    `kept`: at most so many to a Postgres server; further ones are closed after their use.
    """
    if instance in _keeping:
        return
    _keeping.add(instance)
    schedules, runs, events = instance.schedule_storage, instance.run_storage, instance.event_log_storage
    if type(schedules) is SqliteScheduleStorage:
        _replace(schedules, "connect", _kept(schedules._conn_string))
        for name in ("has_instigators_table", "_has_instigators_table", "has_built_index"):
            _remember(schedules, name)
        _purge_seldom(schedules, clock)
    if type(runs) is SqliteRunStorage:
        _replace(runs, "connect", _kept(runs._conn_string))
    if type(events) is SqliteEventLogStorage:
        with events.index_connection():  # makes the database where there is none
            pass
        url = events.conn_string_for_shard(INDEX_SHARD_NAME)
        _replace(events, "index_connection", _kept(url, lock=events._db_lock))
        _remember(events, "_has_asset_key_col_on_connection")  # asked of the database's schema at each event
    if postgres := [one for one in (schedules, runs, events) if hasattr(one, "postgres_url")]:
        _share_postgres(postgres, kept)


def use_instance(context: dg.SensorEvaluationContext, instance: dg.DagsterInstance) -> None:
    """The context of a tick takes this instance for its log and its resources, too: by itself it opens one of its own
    for the first word that it writes down, on Postgres with six connections.
    """
    if not hasattr(context, "_instance"):
        raise AttributeError("SensorEvaluationContext._instance: expected a field, found none")
    context._instance = instance


def _share_postgres(storages: Sequence[Any], kept: int) -> None:
    """One engine for all storages of one database, which keeps a few connections."""
    from dagster_postgres.utils import create_pg_engine

    engines: dict[str, sa.Engine] = {}
    for storage in storages:
        url, token_provider, replaced = storage.postgres_url, storage._token_provider, storage._engine
        if url not in engines:
            engines[url] = create_pg_engine(
                url,
                token_provider,
                isolation_level="AUTOCOMMIT",
                pool_size=kept,
                max_overflow=-1,
                pool_pre_ping=True,
                pool_recycle=RECYCLE_SECONDS,
            )
        storage._engine = engines[url]
        replaced.dispose()
        for name in ("has_table", "_has_asset_key_col_on_connection"):
            if hasattr(storage, name):
                _remember(storage, name)


def _kept(url: str, lock: contextlib.AbstractContextManager[object] | None = None) -> Connect:
    """`connect` of a storage: a connection of one engine, in a transaction that ends with the body.

    `lock`: held meanwhile, where Dagster lets only one thread at a time connect.
    """
    engine = sa.create_engine(url, max_overflow=-1, connect_args={"timeout": SQLITE_BUSY_TIMEOUT_SECONDS})
    alone = lock or contextlib.nullcontext()

    @contextlib.contextmanager
    def connect() -> Iterator[sa.Connection]:
        with alone, engine.connect() as connection, connection.begin():
            yield connection

    return connect


def _remember(storage: object, name: str) -> None:
    """Of what a method says that a database has: what is there stays there, and is looked for until it is found."""
    ask, found = getattr(storage, name), set[tuple[object, ...]]()

    def has(*asked: object) -> bool:
        what = tuple(one for one in asked if not isinstance(one, sa.Connection))
        if what not in found and ask(*asked):
            found.add(what)
        return what in found

    _replace(storage, name, has)


def _purge_seldom(storage: SqliteScheduleStorage, clock: Callable[[], float]) -> None:
    """Delete old ticks of one sensor and status now and then, not after each of its ticks."""
    purge, done = storage.purge_ticks, dict[tuple[str, frozenset[TickStatus]], float]()

    def purge_ticks(
        origin_id: str, selector_id: str, before: float, tick_statuses: Sequence[TickStatus] | None = None
    ) -> None:
        key, now = (selector_id, frozenset(tick_statuses or ())), clock()
        if key not in done or now - done[key] >= PURGE_SECONDS:
            purge(origin_id, selector_id, before, tick_statuses)
            done[key] = now

    _replace(storage, "purge_ticks", purge_ticks)


def _replace(storage: object, name: str, replacement: Callable[..., object]) -> None:
    """Put a function in the place of a method of this one storage. It must be there: else Dagster has changed."""
    if not callable(getattr(storage, name)):
        raise AttributeError(f"{type(storage).__name__}.{name}: expected a method, found {getattr(storage, name)!r}")
    setattr(storage, name, replacement)
