"""Which databases this platform has: Dagster's state, the fleet's database and the front door's records.

Each is SQLite files or tables in a Postgres; several may be in one Postgres. In the order in which they are copied: a
place that one database keeps in another (a sensor's cursor in the event log) must not lie behind what was copied of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import sqlalchemy as sa

from batch_assets import settings
from batch_assets.api.database import migrations as api_versions
from batch_assets.api.database import usage_tables  # noqa: F401 - its tables stand on METADATA, too
from batch_assets.api.database.tables import METADATA as API_TABLES
from batch_assets.api.settings import records_database
from batch_assets.dagster_internals import storages
from gpu_runner.fleet_database import migrations as fleet_versions
from gpu_runner.fleet_database.tables import METADATA as FLEET_TABLES
from resources.backups.archive import BackupError

INDEX = "index.db"
DAGSTER, FLEET, API = "dagster", "fleet", "api"


@dataclass(frozen=True, slots=True)
class SqliteFile:
    """One file of SQLite, and its name in a backup."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class TableGroup:
    """Tables of ours in a Postgres, each after those that it refers to; `version_table` says their version."""

    name: str
    tables: tuple[str, ...]
    version_table: str


@dataclass(frozen=True, slots=True)
class PostgresDatabase:
    """One database of a Postgres server. `url` holds a password and is never shown."""

    url: sa.URL = field(repr=False)
    groups: tuple[TableGroup, ...]


@dataclass(frozen=True, slots=True)
class Databases:
    """All databases of a platform. `shards`: folder of the event logs of Dagster's runs on SQLite."""

    dagster: storages.SqliteStorage | None
    files: tuple[SqliteFile, ...]
    servers: tuple[PostgresDatabase, ...]

    def sqlite_files(self) -> Iterator[SqliteFile]:
        """All files that are there, in the order to copy them: places in the event log before the event log."""
        if self.dagster is not None:
            yield SqliteFile("dagster/schedules.db", self.dagster.schedules)
            yield SqliteFile("dagster/runs.db", self.dagster.runs)
            for file in sorted(self.dagster.shards.glob("*.db")):
                if file.name != INDEX:
                    yield SqliteFile(f"dagster/runs/{file.name}", file)
            yield SqliteFile(f"dagster/runs/{INDEX}", self.dagster.shards / INDEX)
        yield from self.files

    def kinds(self) -> dict[str, str]:
        """Of each database by name: `sqlite` or `postgres`."""
        found = {group.name: "postgres" for server in self.servers for group in server.groups}
        found |= {DAGSTER: "sqlite"} if self.dagster is not None else {}
        return found | {one.name.removesuffix(".db"): "sqlite" for one in self.files}

    def place(self, name: str) -> Path | None:
        """Where a SQLite file of a backup belongs; None: this platform has no such file."""
        if self.dagster is not None and name.startswith("dagster/"):
            inner = name.removeprefix("dagster/")
            if inner.startswith("runs/"):
                return self.dagster.shards / inner.removeprefix("runs/")
            return {"schedules.db": self.dagster.schedules, "runs.db": self.dagster.runs}.get(inner)
        return next((one.path for one in self.files if one.name == name), None)


def databases(instance: dg.DagsterInstance) -> Databases:
    """Those of this environment. Raises BackupError for a storage of Dagster that is neither SQLite nor Postgres."""
    dagster, on_server = storages.sqlite_storage(instance), storages.postgres_urls(instance)
    if dagster is None and not on_server:
        kind = type(instance.event_log_storage).__name__
        raise BackupError(f"dagster.yaml: expected a storage on SQLite or Postgres, found {kind}: back it up yourself")
    tables = TableGroup(DAGSTER, tuple(storages.storage_tables()), storages.VERSION_TABLE)
    wanted = [(url, tables) for url in on_server]
    wanted.append((settings.fleet_database(), _group(FLEET, FLEET_TABLES, fleet_versions.VERSION_TABLE)))
    wanted.append((records_database(), _group(API, API_TABLES, api_versions.VERSION_TABLE)))
    files: list[SqliteFile] = []
    servers: dict[tuple[str | None, int | None, str | None], PostgresDatabase] = {}
    for text, group in wanted:
        url = sa.make_url(text)
        if url.get_backend_name() == "sqlite":
            files.append(SqliteFile(f"{group.name}.db", Path(url.database or "")))
            continue
        place = (url.host, url.port or 5432, url.database)
        before = servers.get(place, PostgresDatabase(url, ()))
        servers[place] = PostgresDatabase(before.url, (*before.groups, group))
    return Databases(dagster, tuple(files), tuple(servers.values()))


def _group(name: str, metadata: sa.MetaData, version_table: str) -> TableGroup:
    return TableGroup(name, tuple(table.name for table in metadata.sorted_tables), version_table)
