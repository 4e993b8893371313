"""What `batch-assets gc` does and prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from batch_assets import settings
from batch_assets.backups.backup import keep_setting, unfinished
from batch_assets.cli.output import output_console, print_json
from batch_assets.cli.user_errors import CommandError
from batch_assets.garbage.collect import Found, delete_all, find_all, pinned_versions
from batch_assets.garbage.unreferenced import Garbage, Grace, Kind
from batch_assets.request_status.dataset_status import observing
from batch_assets.request_status.dataset_status import unfinished as unfinished_runs
from batch_assets.spec.deadline import InvalidDeadline, parse_deadline
from batch_assets.spec.discovery import known_datasets
from resources.backups.archive import FOLDER, BackupManifest, backups
from resources.backups.retention import expired
from resources.objects.opening import Objects, open_objects, temporary_folder
from resources.store.dataset_store import DatasetStore

if TYPE_CHECKING:
    import dagster as dg


def collect_garbage(name: str | None, keep: int, older_than: str, *, delete: bool, as_json: bool) -> None:
    """Find what nobody needs, of one dataset or of all, and delete it when told. Raises CommandError, StoreError."""
    now, objects = time.time(), open_objects(settings.store_root())
    grace = Grace(now - _seconds(older_than))
    every = sorted({*known_datasets(), *([name] if name else [])})
    with observing(every) as seen, temporary_folder() as folder:
        stores = [DatasetStore(objects, one) for one in every]
        wanted = [one for one in stores if name in (None, one.dataset)]
        instance, fleet = (seen[0].instance, seen[0].fleet_db.tag().rstrip("-")) if seen else (None, "")
        more = _of_no_dataset(objects, fleet, now, grace) if name is None else ()
        pinned = pinned_versions(stores)
        found = find_all(wanted, pinned, keep, grace, lambda one: _busy(instance, one), more, folder / "garbage")
        deleted = delete_all(objects, folder / "garbage") if delete else 0
    if as_json:
        kinds = {kind.value: {"objects": found.objects[kind], "bytes": found.bytes[kind]} for kind in found.objects}
        print_json({"found": kinds, "skipped": found.skipped, "deleted": deleted})
    else:
        _print(found, deleted, delete=delete)


def _seconds(older_than: str) -> float:
    try:
        seconds = parse_deadline(older_than, "UTC").seconds
    except InvalidDeadline:
        seconds = None
    if seconds is None or seconds < 3600:
        raise CommandError(f"--older-than: expected a time of at least 1h, such as 7d or 36h, found {older_than!r:.60}")
    return seconds


def _busy(instance: dg.DagsterInstance | None, dataset: str) -> str:
    if instance is None:
        return ""
    runs = unfinished_runs(instance, dataset)
    return f"{len(runs)} of its runs are under way: give the command again when they have ended" if runs else ""


def _of_no_dataset(objects: Objects, fleet: str, now: float, grace: Grace) -> Iterator[Garbage]:
    """Backups of this fleet that are not kept, and what uploads have left."""
    made = [
        (one.id, one.began_at) for one in backups(objects) if isinstance(one, BackupManifest) and one.fleet == fleet
    ]
    gone = {*expired(made, keep_setting()), *unfinished(objects, now)}
    for info in objects.list(FOLDER):
        if info.path[len(FOLDER) :].partition("/")[0] in gone:
            yield Garbage(Kind.BACKUP, info.path, info.size)
    for info in objects.abandoned(grace.before):
        yield Garbage(Kind.UPLOAD, info.path, info.size)


def _print(found: Found, deleted: int, *, delete: bool) -> None:
    table = Table("what", "objects", "MB", box=SIMPLE_HEAD)
    for kind in Kind:
        if found.objects[kind]:
            table.add_row(kind.value, f"{found.objects[kind]:,}", f"{found.bytes[kind] / 1e6:,.1f}")
    console = output_console()
    if found.objects:
        console.print(table)
    for name, why in found.skipped.items():
        console.print(f"{name}: left alone: {why}", markup=False, highlight=False, soft_wrap=True)
    if delete:
        sys.stdout.write(f"{deleted:,} objects deleted\n")
    elif found.objects:
        sys.stdout.write("nothing was deleted: --delete does\n")
    else:
        sys.stdout.write("nothing to delete\n")
