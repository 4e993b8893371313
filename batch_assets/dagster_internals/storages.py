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
    groups = (RunStorageSqlMetadata, SqlEventLogStorageMetadata, ScheduleStorageSqlMetadata)
    return list(dict.fromkeys(table.name for group in groups for table in group.sorted_tables))
