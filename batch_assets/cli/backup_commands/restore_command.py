"""What `batch-assets restore` does and prints."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from batch_assets import settings
from batch_assets.backups import restore
from batch_assets.backups.catch_up import CaughtUp, catch_up, datasets_of, end_runs, settle_fleet
from batch_assets.backups.databases import Databases, databases
from batch_assets.cli.backup_commands.backup_command import describe
from batch_assets.cli.output import print_json
from batch_assets.local_dagster.home import UNFINISHED_RESTORE, dagster_runs, prepare_home
from batch_assets.local_dagster.local_fleet import fleet_of
from batch_assets.spec.discovery import known_datasets
from gpu_runner.errors import ExitStatus
from gpu_runner.money import format_usd
from resources.backups.archive import BackupError, BackupManifest, backups, extract, is_id, read_manifest
from resources.objects.opening import CorruptObject, Objects, open_objects, temporary_folder

if TYPE_CHECKING:
    from resources.backups.archive import Member


class RestoreRefused(BackupError):
    """The request itself cannot be carried out as it is."""

    exit_status = ExitStatus.WRONG_REQUEST


def restore_databases(backup: str | None, *, dry_run: bool, overwrite: bool, as_json: bool) -> int:
    """Put a backup back and bring it up to what the store and the providers say; returns the exit status."""
    import dagster as dg

    began, objects = time.monotonic(), open_objects(settings.store_root())
    manifest = _chosen(objects, backup)
    _say(describe(manifest))
    home = prepare_home()
    with dg.DagsterInstance.from_config(str(home)) as instance:
        if not dry_run:
            restore.make_dagster_tables(instance)
        found = databases(instance)
        restore.check_kinds(manifest, found)
        if dagster_runs(home, instance):
            raise RestoreRefused(f"{home}: expected that nothing runs there, found a Dagster at work: end it first")
    held = [] if (home / UNFINISHED_RESTORE).exists() else restore.living(found)
    if dry_run:
        return _dry_run(objects, manifest, held, as_json=as_json)
    if held and not overwrite:
        raise RestoreRefused(
            f"expected databases that hold nothing, found {'; '.join(held[:3])}: give --overwrite to lose that, or "
            "name an empty DAGSTER_HOME"
        )
    _put_back(objects, manifest, found, home)
    said, done = _bring_up(manifest, home, objects)
    restore.end(home)
    return _report(manifest, said, done, time.monotonic() - began, as_json=as_json)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _chosen(objects: Objects, backup: str | None) -> BackupManifest:
    """The backup that is named, or the newest one. Raises RestoreRefused, CorruptObject."""
    if backup is not None:
        if not is_id(backup):
            raise RestoreRefused(
                f"--backup: expected an id that `batch-assets restore --list` shows, found {backup!r:.60}"
            )
        try:
            return read_manifest(objects, backup)
        except FileNotFoundError:
            raise RestoreRefused(f"{backup}: no such backup in {objects.root}; `batch-assets restore --list`") from None
    found = [*backups(objects)]
    for broken in (str(one) for one in found if isinstance(one, CorruptObject)):
        _say(broken)
    whole = sorted((one for one in found if isinstance(one, BackupManifest)), key=lambda one: one.began_at)
    if not whole:
        raise RestoreRefused(
            f"{objects.root}: expected a backup, found none: is BATCH_ASSETS_STORE the same as before?"
        )
    fleets = {one.fleet for one in whole}
    if len(fleets) > 1:
        raise RestoreRefused(
            f"{objects.root} has backups of {len(fleets)} platforms: name one with --backup (see --list)"
        )
    return whole[-1]


def _extracted(objects: Objects, manifest: BackupManifest, folder: Path) -> list[Member]:
    """Raises BackupError for a backup that cannot be used, with the one before it."""
    try:
        return extract(objects, manifest, folder)
    except CorruptObject as error:
        earlier = [
            one.id
            for one in backups(objects)
            if isinstance(one, BackupManifest) and one.fleet == manifest.fleet and one.began_at < manifest.began_at
        ]
        todo = (
            f"the one before it: `batch-assets restore --backup {earlier[-1]}`"
            if earlier
            else "there is none before it"
        )
        raise BackupError(f"backup {manifest.id} cannot be used: {error}; {todo}") from None


def _dry_run(objects: Objects, manifest: BackupManifest, held: list[str], *, as_json: bool) -> int:
    with temporary_folder() as folder:
        members = _extracted(objects, manifest, folder)
    if as_json:
        print_json({"backup": manifest.id, "files": len(members), "whole": True, "held": held})
        return 0
    sys.stdout.write(f"{manifest.id}: all {len(members)} files are as they were written\n")
    for line in held:
        sys.stdout.write(f"it would be lost with --overwrite: {line}\n")
    return 0


def _put_back(objects: Objects, manifest: BackupManifest, found: Databases, home: Path) -> None:
    staged = home / restore.STAGING
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(mode=0o700)
    members = _extracted(objects, manifest, staged)
    _say(f"all {len(members)} files are as they were written; putting them into place")
    restore.begin(home, manifest.id)
    restore.install(manifest, members, staged, found)


def _bring_up(manifest: BackupManifest, home: Path, objects: Objects) -> tuple[list[str], list[CaughtUp]]:
    """What the backup does not know."""
    import dagster as dg

    fleet = fleet_of(home, settings.fleet_database())
    with dg.DagsterInstance.from_config(str(home)) as instance, fleet.open_database() as fleet_db:
        ended = end_runs(instance)
        said, billed = settle_fleet(fleet, fleet_db, manifest.ended_at)
        said.insert(0, f"{ended} runs that were under way have ended; those of open requests are started again")
        done: list[CaughtUp] = []
        for store in datasets_of(instance, [*known_datasets()], objects):
            with contextlib.suppress(FileNotFoundError):
                done.append(catch_up(instance, fleet_db, store, manifest.began_at, billed, _say))
    return said, done


def _report(manifest: BackupManifest, said: list[str], done: list[CaughtUp], seconds: float, *, as_json: bool) -> int:
    problems = [f"{one.dataset}: {problem}" for one in done for problem in one.problems]
    if as_json:
        shown = [asdict(one) for one in done]
        print_json({"backup": manifest.id, "seconds": round(seconds, 3), "said": said, "datasets": shown})
        return 1 if problems else 0
    for sentence in said:
        sys.stdout.write(f"{sentence}\n")
    for one in done:
        if one.reported or one.usd:
            cost = f"; {one.rows:,} rows since have cost at least ${format_usd(one.usd)}" if one.usd else ""
            sys.stdout.write(f"{one.dataset}: {one.reported:,} batches put into the catalog{cost}\n")
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    sys.stdout.write(f"restored from {manifest.id} in {seconds:.1f} s; start Dagster, and open requests go on\n")
    return 1 if problems else 0
