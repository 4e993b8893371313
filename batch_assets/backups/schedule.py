"""The asset `platform/backups` and its schedule: a backup of the databases by the hour, each a run of its own.

A run and no sensor, as a copy may take longer than a tick may. Off unless BATCH_ASSETS_BACKUP_CRON names a schedule, or
somebody turns it on in the UI: on one machine it would start a worker by the hour to copy a disk onto itself.

No postponed annotations here: Dagster reads the classes of resources.
"""

import os
import time

import dagster as dg

from batch_assets.backups.backup import drop_expired, keep_setting, make_backup, note_failure
from batch_assets.settings import SettingError
from batch_assets.spec.cron import cron_problem
from resources.alerts import Alert, Alerts
from resources.backups.archive import FOLDER
from resources.fleet.fleet_config import FleetConfigError
from resources.fleet.resource import GpuFleet
from resources.objects.opening import open_objects
from resources.store.dataset_store import BatchStore

BACKUPS_KEY = dg.AssetKey(["platform", "backups"])
CRON = "BATCH_ASSETS_BACKUP_CRON"
HOURLY = "0 * * * *"


@dg.asset(
    key=BACKUPS_KEY,
    group_name="platform",
    kinds={"backup"},
    description="Backups of Dagster's state, the fleet's database and the front door's records, in the store. "
    "`batch-assets restore` brings one back.",
)
def backup_asset(context: dg.AssetExecutionContext, store: BatchStore, fleet: GpuFleet) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster looks for the bare name
    """Make one, then delete those that are not kept."""
    keep, objects = keep_setting(), open_objects(store.root)
    with fleet.open_database() as fleet_db:
        try:
            made = make_backup(context.instance, fleet_db, objects, say=context.log.info)
        except Exception as error:
            _tell(fleet, note_failure(fleet_db, error))
            raise
    gone = drop_expired(objects, made.fleet, keep, time.time())
    return dg.MaterializeResult(
        metadata={
            "backup": made.id,
            "seconds": round(made.ended_at - made.began_at, 3),
            "bytes": made.bytes,
            "stored_bytes": made.stored_bytes,
            "files": made.files,
            "databases": ", ".join(f"{one.name} ({one.kind})" for one in made.databases),
            "deleted": len(gone),
            "dagster/uri": objects.uri(f"{FOLDER}{made.id}"),
        }
    )


def _tell(fleet: GpuFleet, why: str) -> None:
    """The webhook hears of it, once for each run."""
    try:
        config = fleet.config().alerts
    except FleetConfigError:
        return  # said by the sensors that need it
    Alerts(config, {}).tell([Alert("backup", "platform", f"The databases were not backed up: {why}")])


backup_job = dg.define_asset_job(
    "backup",
    selection=dg.AssetSelection.assets(BACKUPS_KEY),
    description="Back the databases up into the store, and delete backups that are not kept.",
)


def backup_schedule() -> dg.ScheduleDefinition:
    """By BATCH_ASSETS_BACKUP_CRON (UTC); without it hourly, and off. Raises SettingError."""
    text = os.environ.get(CRON, "").strip()
    if text and (problem := cron_problem(text)):
        raise SettingError(f"{CRON}: expected a schedule such as {HOURLY}, found {text!r:.60}. {problem}")
    return dg.ScheduleDefinition(
        name="backup",
        job=backup_job,
        cron_schedule=text or HOURLY,
        default_status=dg.DefaultScheduleStatus.RUNNING if text else dg.DefaultScheduleStatus.STOPPED,
        description="Backs the databases up into the store.",
    )
