"""Makes a backup of all databases in the store, while everything goes on, and deletes those that are not kept."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg

from batch_assets.backups.copies import Moment, copy_sqlite
from batch_assets.backups.databases import Databases, databases
from batch_assets.settings import SettingError
from gpu_runner.errors import UserFacingError
from gpu_runner.fleet_database.database import FleetDatabase, FleetDatabaseError
from resources.backups.archive import (
    FOLDER,
    MANIFEST,
    ArchiveWriter,
    BackupManifest,
    DatabaseCopy,
    backups,
    is_id,
    path_of,
)
from resources.backups.retention import UNFINISHED_SECONDS, Keep, expired
from resources.objects.opening import CorruptObject, Objects, temporary_folder
from resources.store.object_integrity import StoredFile

KEEP = "BATCH_ASSETS_BACKUP_KEEP"
_ID_TIME = "%Y%m%dT%H%M%SZ"


def keep_setting() -> Keep:
    """Which backups are kept: BATCH_ASSETS_BACKUP_KEEP. Raises SettingError."""
    text = os.environ.get(KEEP, "").strip()
    try:
        return Keep.parse(text) if text else Keep()
    except ValueError as error:
        raise SettingError(f"{KEEP}: {error}") from None


def make_backup(
    instance: dg.DagsterInstance,
    fleet_db: FleetDatabase,
    objects: Objects,
    *,
    clock: Callable[[], float] = time.time,
    say: Callable[[str], object] = lambda _: None,
) -> BackupManifest:
    """Copy every database into the store. What failed is noted in the fleet's database. Raises BackupError, StoreError.

    Nobody waits for it: writers go on, and the copy of each database is of one moment.
    """
    began = clock()
    try:
        manifest = _make(instance, fleet_db, objects, began, clock, say)
    except Exception as error:
        note_failure(fleet_db, error)
        raise
    fleet_db.backup_made(manifest.id, manifest.stored_bytes, manifest.ended_at - manifest.began_at)
    return manifest


def note_failure(fleet_db: FleetDatabase, error: Exception) -> str:
    """Write down why there is no backup, if the database can; returns the sentence."""
    text = str(error).partition("\n")[0] if isinstance(error, UserFacingError | OSError) else ""
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    try:
        fleet_db.backup_failed(said)
    except FleetDatabaseError:  # it may be what could not be copied
        return f"{said}; the fleet's database cannot be written either"
    return said


def _make(
    instance: dg.DagsterInstance,
    fleet_db: FleetDatabase,
    objects: Objects,
    began: float,
    clock: Callable[[], float],
    say: Callable[[str], object],
) -> BackupManifest:
    found, fleet = databases(instance), fleet_db.tag().rstrip("-")
    backup = f"{time.strftime(_ID_TIME, time.gmtime(began))}-{secrets.token_hex(3)}"
    writer = ArchiveWriter(objects, backup)
    with temporary_folder() as folder:
        copies = _copy_all(found, writer, folder / "copy", say)

    def manifest(members: StoredFile, parts: list[StoredFile]) -> BackupManifest:
        return BackupManifest(
            id=backup,
            began_at=began,
            ended_at=clock(),
            fleet=fleet,
            versions={
                **{name: importlib.metadata.version(name) for name in ("batch-assets", "dagster")},
                "python": platform.python_version(),
            },
            databases=copies,
            bytes=sum(one.bytes for one in writer.members),
            files=len(writer.members),
            members=members,
            parts=parts,
        )

    return writer.commit(manifest)


def _copy_all(found: Databases, writer: ArchiveWriter, copy: Path, say: Callable[[str], object]) -> list[DatabaseCopy]:
    """Copy one file or table after the other; no two copies are on the disk at once."""
    made: list[DatabaseCopy] = []
    for server in found.servers:
        with Moment(server) as moment:
            for group in server.groups:
                say(f"{group.name}: copying its tables")
                for table in group.tables:
                    if columns := moment.columns(table):
                        moment.copy(table, columns, copy)
                        writer.add(f"postgres/{group.name}/{table}", copy, columns)
                made.append(DatabaseCopy(name=group.name, kind="postgres", version=moment.version(group)))
    said = ""
    for file in found.sqlite_files():
        name = file.name.partition("/")[0].removesuffix(".db")
        if name != said:
            say(f"{name}: copying its files")
            said = name
        copy.unlink(missing_ok=True)
        if copy_sqlite(file.path, copy):
            writer.add(f"sqlite/{file.name}", copy)
    kinds = found.kinds()
    return made + [DatabaseCopy(name=name, kind=kind) for name, kind in kinds.items() if kind == "sqlite"]


def drop_expired(objects: Objects, fleet: str, keep: Keep, now: float) -> list[str]:
    """Delete the backups of this fleet that are not kept, and what is left of unfinished ones; returns their ids."""
    own = [one for one in backups(objects) if not isinstance(one, CorruptObject) and one.fleet == fleet]
    gone = expired([(one.id, one.began_at) for one in own], keep)
    gone += unfinished(objects, now)
    for backup in gone:
        delete_backup(objects, backup)
    return gone


def unfinished(objects: Objects, now: float) -> list[str]:
    """Ids of backups that never got a manifest, or lost it, and were begun so long ago that nobody makes them now."""
    seen: dict[str, bool] = {}
    for info in objects.list(FOLDER):
        backup, _, name = info.path[len(FOLDER) :].partition("/")
        if is_id(backup):
            seen[backup] = seen.get(backup, False) or name == MANIFEST
    return [backup for backup, whole in seen.items() if not whole and now - began_at(backup) > UNFINISHED_SECONDS]


def began_at(backup: str) -> float:
    """When a backup was begun, by its id: Unix seconds."""
    import calendar

    return float(calendar.timegm(time.strptime(backup.partition("-")[0], _ID_TIME)))


def delete_backup(objects: Objects, backup: str) -> None:
    """Delete a backup: first its manifest, without which it is none, whatever ends this half-way."""
    objects.delete([path_of(backup, MANIFEST)])
    objects.delete(_rest(objects, backup))


def _rest(objects: Objects, backup: str) -> Iterator[str]:
    yield from [info.path for info in objects.list(path_of(backup, ""))]
