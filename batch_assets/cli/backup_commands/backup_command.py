"""What `batch-assets backup` and `restore --list` print."""

from __future__ import annotations

import contextlib
import sys
import time

from rich.box import SIMPLE_HEAD
from rich.table import Table

from batch_assets import settings
from batch_assets.backups.backup import drop_expired, keep_setting, make_backup
from batch_assets.cli.output import output_console, print_json
from batch_assets.local_dagster.home import ensure_storage, prepare_home
from gpu_runner.fleet_database.database import FleetDatabase
from resources.backups.archive import BackupManifest, backups, summary
from resources.objects.opening import CorruptObject, open_objects, self_test


def back_up(*, as_json: bool) -> None:
    """Make a backup now, delete those that are not kept, and say what was done."""
    import dagster as dg

    keep, objects = keep_setting(), open_objects(settings.store_root())
    home = prepare_home()
    ensure_storage(home)
    self_test(objects)
    say = (lambda text: None) if as_json else (lambda text: sys.stderr.write(f"{text}\n"))
    with (
        dg.DagsterInstance.from_config(str(home)) as instance,
        contextlib.closing(FleetDatabase(settings.fleet_database())) as fleet_db,
    ):
        made = make_backup(instance, fleet_db, objects, say=say)
    gone = drop_expired(objects, made.fleet, keep, time.time())
    if as_json:
        print_json({**summary(made), "deleted": gone})
        return
    sys.stdout.write(f"{describe(made)}, in {made.ended_at - made.began_at:.1f} s; {objects.root}\n")
    if gone:
        sys.stdout.write(f"{len(gone)} older backups deleted\n")


def describe(made: BackupManifest) -> str:
    """What a backup is, on one line."""
    of = ", ".join(f"{one.name} ({one.kind})" for one in made.databases)
    return f"backup {made.id} of {of}: {made.files} files, {_mb(made.bytes)}, {_mb(made.stored_bytes)} in the store"


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def show_backups(*, as_json: bool) -> None:
    """List all backups of the store, the newest first."""
    found = [*backups(open_objects(settings.store_root()))][::-1]
    whole = [one for one in found if isinstance(one, BackupManifest)]
    broken = [str(one) for one in found if isinstance(one, CorruptObject)]
    if as_json:
        print_json({"backups": [summary(one) for one in whole], "broken": broken})
        return
    table = Table("backup", "begun (UTC)", "fleet", "databases", "files", "in the store", box=SIMPLE_HEAD)
    for one in whole:
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.began_at))
        of = ", ".join(f"{copy.name} ({copy.kind})" for copy in one.databases)
        table.add_row(one.id, begun, one.fleet, of, f"{one.files:,}", _mb(one.stored_bytes))
    console = output_console()
    if whole:
        console.print(table)
    else:
        console.print(f"no backup in {settings.store_root()}: `batch-assets backup` makes one")
    for line in broken:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
