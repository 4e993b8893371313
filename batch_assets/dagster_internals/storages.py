"""Where an instance of Dagster keeps its state: the files of SQLite, or a database of Postgres with these tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import sqlalchemy as sa
from dagster._core.storage.event_log.schema import SqlEventLogStorageMetadata
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._core.storage.runs.schema import RunStorageSqlMetadata
from dagster._core.storage.runs.sqlite.sqlite_run_storage import SqliteRunStorage
from dagster._core.storage.schedules.schema import ScheduleStorageSqlMetadata
from dagster._core.storage.schedules.sqlite.sqlite_schedule_storage import SqliteScheduleStorage

VERSION_TABLE = "alembic_version"
_GROUPS = (RunStorageSqlMetadata, SqlEventLogStorageMetadata, ScheduleStorageSqlMetadata)
_LOCK = 0x64616774  # of Postgres' advisory locks: one process at a time makes tables
_LIVING = ("runs", "event_logs")  # they hold something as soon as anything was done


@dataclass(frozen=True, slots=True)
class SqliteStorage:
    """The files of SQLite. `runs`: of runs; `shards`: folder with one file for each run's events, and `index.db`."""

    schedules: Path
    runs: Path
    shards: Path


def sqlite_storage(instance: dg.DagsterInstance) -> SqliteStorage | None:
    """The files of an instance on SQLite; None: it is on something else."""
    runs, events, schedules = instance.run_storage, instance.event_log_storage, instance.schedule_storage
    if not isinstance(runs, SqliteRunStorage) or not isinstance(events, SqliteEventLogStorage):
        return None
    if not isinstance(schedules, SqliteScheduleStorage):
        return None
    return SqliteStorage(_file(schedules._conn_string), _file(runs._conn_string), Path(events._base_dir))


def _file(url: str) -> Path:
    return Path(sa.make_url(url).database or "")


def postgres_urls(instance: dg.DagsterInstance) -> list[str]:
    """Addresses of the Postgres databases of an instance, each once, with their passwords; none: it has no Postgres."""
    storages = (instance.run_storage, instance.event_log_storage, instance.schedule_storage)
    found = [getattr(storage, "postgres_url", None) for storage in storages]
    return list(dict.fromkeys(url for url in found if url)) if all(found) else []


def storage_tables() -> list[str]:
    """Names of all tables of Dagster's storage, each after those that it refers to."""
    return list(dict.fromkeys(table.name for group in _GROUPS for table in group.sorted_tables))


def make_missing_tables(instance: dg.DagsterInstance) -> None:
    """Make the tables that a Postgres of Dagster lacks, where it holds nothing yet.

    Dagster makes them one after the other, each in a transaction of its own, and not at all where one of them is there:
    a process that was killed meanwhile leaves a database that it cannot use, nor mend. One process at a time does it,
    as homes on several machines may share a database. Tables of an older version of Dagster are left as they are: its
    own migration brings them to the newest, and they must not be said to be that.
    """
    for url in postgres_urls(instance):
        with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            there = {*sa.inspect(connection).get_table_names()}
            wanted = {*storage_tables(), VERSION_TABLE}
            if not there & wanted or any(name in there and _has_lines(connection, name) for name in _LIVING):
                continue
            if VERSION_TABLE in there and (found := _versions(connection)) and found != {_newest()}:
                continue
            if wanted - there or not _has_lines(connection, VERSION_TABLE):
                _make_all(connection)


def _has_lines(connection: sa.Connection, table: str) -> bool:
    return connection.exec_driver_sql(f'SELECT 1 FROM "{table}" LIMIT 1').first() is not None


def _versions(connection: sa.Connection) -> set[str]:
    return {str(line[0]) for line in connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}")}


def _newest() -> str | None:
    """The version that Dagster's tables have when this Dagster has made them."""
    from alembic.script import ScriptDirectory
    from dagster_postgres.schedule_storage import schedule_storage
    from dagster_postgres.utils import pg_alembic_config

    return ScriptDirectory.from_config(pg_alembic_config(schedule_storage.__file__)).get_current_head()


def _make_all(connection: sa.Connection) -> None:
    from dagster._core.storage.sql import stamp_alembic_rev
    from dagster_postgres.schedule_storage import schedule_storage
    from dagster_postgres.utils import pg_alembic_config

    for group in _GROUPS:
        group.create_all(connection)
    stamp_alembic_rev(pg_alembic_config(schedule_storage.__file__), connection)
