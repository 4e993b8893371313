"""Puts the databases of a backup where nothing is, or what is told to go.

All of the backup is read and compared with its checksums before anything is replaced. A Postgres is filled in one
transaction. Files are put into place one after the other, below a mark in the home that refuses everything else until
the restore has come to its end: one that was killed is begun anew, and leaves nothing half.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import sqlalchemy as sa

from batch_assets.api.database import migrations as api_versions
from batch_assets.backups.copies import columns_of, driver_error, named
from batch_assets.backups.databases import API, DAGSTER, FLEET, Databases, PostgresDatabase, TableGroup
from batch_assets.dagster_internals import storages
from batch_assets.local_dagster.home import UNFINISHED_RESTORE
from gpu_runner.fleet_database import migrations as fleet_versions
from resources.backups.archive import BackupError, BackupManifest, Member

STAGING = ".restoring"
# Tables that hold something as soon as anything was done.
LIVING = {
    DAGSTER: ("runs", "event_logs"),
    FLEET: ("instances", "leases", "batch_runs", "datasets"),
    API: ("api_files", "api_batches", "api_keys"),
}
_UPGRADES = {FLEET: fleet_versions.upgrade, API: api_versions.upgrade}


def check_kinds(manifest: BackupManifest, found: Databases) -> None:
    """Raises BackupError where a database of the backup is of another kind than the one of this environment."""
    kinds = found.kinds()
    for copy in manifest.databases:
        if kinds.get(copy.name) != copy.kind:
            where = {DAGSTER: "dagster.yaml", FLEET: "BATCH_ASSETS_FLEET_DB", API: "BATCH_ASSETS_API_DB"}[copy.name]
            raise BackupError(
                f"{where}: expected a database of the kind of the backup, {copy.kind}, found {kinds.get(copy.name)}"
            )


def living(found: Databases) -> list[str]:
    """What is in the databases already, in words; nothing: they are new."""
    said: list[str] = []
    for server in found.servers:
        with filled(server) as connection:
            for group in server.groups:
                for table in LIVING[group.name]:
                    if columns_of(_cursor(connection), table):
                        count = connection.exec_driver_sql(f'SELECT count(*) FROM "{table}"').scalar_one()
                        said += [f"{group.name}: {count:,} lines in {table}"] if count else []
    for file in found.sqlite_files():
        group_name = file.name.partition("/")[0].removesuffix(".db")
        for table in LIVING[group_name]:
            if count := _lines(file.path, table):
                said.append(f"{file.path}: {count:,} lines in {table}")
                break
    return said


def _lines(path: Path, table: str) -> int:
    if not path.exists():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=10)) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
                return 0
            return int(connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0])
    except sqlite3.DatabaseError:
        return 1  # what it holds cannot be read


@contextlib.contextmanager
def filled(server: PostgresDatabase) -> Iterator[sa.Connection]:
    """A transaction on a Postgres, without a limit for its statements. Raises BackupError without the address."""
    engine = sa.create_engine(server.url, poolclass=sa.NullPool, connect_args={"connect_timeout": 10})
    try:
        with engine.begin() as connection:
            yield connection
    except (sa.exc.SQLAlchemyError, driver_error()) as error:
        text = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        raise BackupError(f"{named(server)}: the backup cannot be put there: {text}") from None
    finally:
        engine.dispose()


def _cursor(connection: sa.Connection) -> Any:
    return connection.connection.cursor()


def begin(home: Path, backup: str) -> None:
    """Leave the mark: from here on everything but a restore is refused in this home."""
    with (home / UNFINISHED_RESTORE).open("w") as mark:
        mark.write(f"{backup}\n")
        mark.flush()
        os.fsync(mark.fileno())
    _sync(home)


def end(home: Path) -> None:
    """The restore has come to its end."""
    shutil.rmtree(home / STAGING, ignore_errors=True)
    (home / "storage.ready").touch()
    _sync(home)
    (home / UNFINISHED_RESTORE).unlink(missing_ok=True)


def install(manifest: BackupManifest, members: list[Member], staged: Path, found: Databases) -> None:
    """Put what was extracted to `staged` into the databases. Raises BackupError."""
    tables = {one.name: one for one in members if one.columns is not None}
    versions = {copy.name: copy.version for copy in manifest.databases}
    for server in found.servers:
        with filled(server) as connection:
            for group in server.groups:
                _fill(connection, group, versions.get(group.name, ""), tables, staged)
    if found.dagster is not None:
        for file in sorted(found.dagster.shards.glob("*.db*")):  # each before what its writer left beside it
            file.unlink()
    for member in members:
        if member.columns is None:
            place = found.place(member.name.removeprefix("sqlite/"))
            if place is None:
                raise BackupError(f"backup {manifest.id}: {member.name} has no place in this environment")
            _put(staged / member.name, place)


def _put(file: Path, place: Path) -> None:
    """Replace a database file. What its writer left beside the one before must not be read with the new one.

    That one is deleted first: without its log it may be no database, and a restore that is begun anew could not open
    it. Of a log without a database SQLite makes an empty one.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f"{place.name}.restored")
    shutil.copyfile(file, beside)
    with beside.open("rb") as copied:
        os.fsync(copied.fileno())
    for suffix in ("", "-wal", "-shm", "-journal"):
        place.with_name(place.name + suffix).unlink(missing_ok=True)
    beside.replace(place)
    _sync(place.parent)
    file.unlink()


def _sync(folder: Path) -> None:
    """Names in a folder are on the disk from here on: the mark is the last to go."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fill(
    connection: sa.Connection, group: TableGroup, version: str, members: Mapping[str, Member], staged: Path
) -> None:
    cursor = _cursor(connection)
    own = [name for name in group.tables if f"postgres/{group.name}/{name}" in members]
    _make_tables(connection, cursor, group, version)
    there = {name: columns_of(cursor, name) for name in group.tables}
    for name in own:
        member = members[f"postgres/{group.name}/{name}"]
        unknown = sorted(set(member.columns or ()) - set(there[name]))
        if unknown:
            raise BackupError(
                f"{group.name}: the backup has columns that {name} has not here ({', '.join(unknown)}): restore it "
                "with the version that made it"
            )
    if any(there.values()):
        cursor.execute("TRUNCATE " + ", ".join(f'"{name}"' for name in group.tables if there[name]))
    for name in own:
        member = members[f"postgres/{group.name}/{name}"]
        columns = ", ".join(f'"{column}"' for column in member.columns or ())
        with (staged / member.name).open("rb") as file:
            cursor.copy_expert(f'COPY "{name}" ({columns}) FROM STDIN', file)
        _set_sequences(cursor, name, there[name])


def _make_tables(connection: sa.Connection, cursor: Any, group: TableGroup, version: str) -> None:
    """Tables of ours as they were: what later versions change in them, they change after the restore."""
    upgrade = _UPGRADES.get(group.name)
    if upgrade is None or not version:
        return
    found = None
    if columns_of(cursor, group.version_table):
        cursor.execute(f'SELECT version_num FROM "{group.version_table}"')
        found = (cursor.fetchone() or (None,))[0]
    if found != version:
        for name in (*reversed(group.tables), group.version_table):
            cursor.execute(f'DROP TABLE IF EXISTS "{name}"')
        upgrade(connection, version)


def _set_sequences(cursor: Any, table: str, columns: list[str]) -> None:
    """The next number of a column that counts is above those that were put in."""
    for column in columns:
        cursor.execute("SELECT pg_get_serial_sequence(%s, %s)", (f'"{table}"', column))
        sequence = cursor.fetchone()[0]
        if sequence is not None:
            cursor.execute(f'SELECT setval(%s, coalesce(max("{column}"), 0) + 1, false) FROM "{table}"', (sequence,))


def make_dagster_tables(instance: dg.DagsterInstance) -> None:
    """Dagster makes its tables when they are asked for."""
    storages.make_missing_tables(instance)
    instance.get_runs_count()
    instance.all_asset_keys()
    instance.all_instigator_state()
