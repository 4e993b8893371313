from __future__ import annotations

import contextlib
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from support.webhooks import serving

from batch_assets import settings
from batch_assets.backups.backup import delete_backup, drop_expired, make_backup, unfinished
from batch_assets.backups.schedule import backup_asset, backup_schedule
from batch_assets.settings import SettingError
from gpu_runner.fleet_database.database import FleetDatabase
from resources.backups.archive import BackupManifest, backups, extract
from resources.backups.retention import DAY, HOUR, Keep
from resources.fleet.resource import GpuFleet
from resources.objects.opening import CorruptObject, Objects, open_objects
from resources.store.dataset_store import BatchStore

ROWS = dg.AssetKey(["d", "rows"])


ON_BOTH = pytest.mark.parametrize("home", ["sqlite", "postgres"], indirect=True)


def counts(made: BackupManifest, objects: Objects, folder: Path) -> dict[str, int]:
    """Lines of some tables of a backup, and whether all of its files are whole."""
    folder.mkdir()
    found = {}
    for member in extract(objects, made, folder):
        if member.columns is not None:
            found[member.name.rpartition("/")[2]] = (folder / member.name).read_bytes().count(b"\n")
            continue
        with contextlib.closing(sqlite3.connect(folder / member.name)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",), member.name
            tables = [line[0] for line in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            if "/runs/" not in member.name or member.name.endswith("index.db"):
                found |= {name: connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables}
    shutil.rmtree(folder)
    return found


@contextlib.contextmanager
def writing(*work: Callable[[int], object]) -> Iterator[None]:
    """Each of these is done again and again meanwhile, in a thread of its own."""
    stop, errors = threading.Event(), list[Exception]()

    def go_on(one: Callable[[int], object]) -> None:
        number = 0
        while not stop.is_set():
            try:
                one(number)
            except Exception as error:
                errors.append(error)
                return
            number += 1
            stop.wait(0.001)

    threads = [threading.Thread(target=go_on, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors


@ON_BOTH
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_backup_in_the_middle_of_writes_is_of_one_moment(
    instance: dg.DagsterInstance, fleet_db: FleetDatabase, objects: Objects, tmp_path: Path, times: int
) -> None:
    def materialize(number: int) -> None:
        instance.report_runless_asset_event(dg.AssetMaterialization(ROWS, partition=str(number)))

    def begin_and_lease(number: int) -> None:  # a run and its lease in one transaction
        fleet_db.begin_run(f"run-{number}", "d", "00000", "00001")
        fleet_db.try_lease(f"engine-{number}", f"run-{number}", "d", 60.0)

    with writing(materialize, begin_and_lease):
        deadline = time.monotonic() + 30
        while not instance.fetch_materializations(ROWS, limit=1).records and time.monotonic() < deadline:
            time.sleep(0.01)
        found = [counts(make_backup(instance, fleet_db, objects), objects, tmp_path / "out") for _ in range(times)]
    events = [one["event_logs"] for one in found]
    assert events == sorted(events)
    assert events[0] > 0
    for one in found:
        assert one["asset_event_tags"] in (0, one["event_logs"])
        assert one["batch_runs"] - one["leases"] in (0, 1)
    assert events[-1] <= len(instance.fetch_materializations(ROWS, limit=10_000).records)
    made = [one for one in backups(objects) if isinstance(one, BackupManifest)]
    assert len(made) == times
    last = fleet_db.last_backup()
    assert (last.backup, last.failure) == (max(made, key=lambda one: one.ended_at).id, "")
    assert last.age_seconds is not None


@pytest.mark.slow
@ON_BOTH
def test_all_databases_are_in_it(
    instance: dg.DagsterInstance, fleet_db: FleetDatabase, objects: Objects, home: Path
) -> None:
    from batch_assets.api.database.service_database import Records
    from batch_assets.api.settings import records_database

    Records(records_database()).close()
    made = make_backup(instance, fleet_db, objects, clock=lambda: 0.0)
    assert {one.name for one in made.databases} == {"dagster", "fleet", "api"}
    assert made.fleet + "-" == fleet_db.tag()
    assert made.id.startswith("19700101T000000Z-")
    if made.databases[0].kind == "postgres":
        assert all(one.version for one in made.databases)
    found = counts(made, objects, home / "out")
    assert {"event_logs", "runs", "kvs", "instigators", "leases", "datasets", "api_batches", "api_usage"} <= {*found}


@pytest.mark.parametrize("home", ["postgres"], indirect=True)
def test_no_password_is_in_what_is_stored(
    instance: dg.DagsterInstance, fleet_db: FleetDatabase, objects: Objects
) -> None:
    made = make_backup(instance, fleet_db, objects)
    password = sa.make_url(settings.fleet_database()).password
    assert password
    assert password not in made.model_dump_json()


def test_backups_that_are_not_kept_go_and_those_of_other_fleets_stay(
    instance: dg.DagsterInstance, fleet_db: FleetDatabase, objects: Objects, home: Path
) -> None:
    with contextlib.closing(FleetDatabase(f"sqlite:///{home}/other.db")) as other_fleet:
        other = make_backup(instance, other_fleet, objects, clock=lambda: 1.0)
    made = [make_backup(instance, fleet_db, objects, clock=lambda at=at: at * HOUR) for at in range(6)]  # type: ignore[misc]
    gone = drop_expired(objects, made[0].fleet, Keep(hourly=2, daily=1), 6 * HOUR)
    assert gone == [one.id for one in made[:3]]
    assert {one.id for one in backups(objects) if not isinstance(one, CorruptObject)} == {
        other.id,
        *(one.id for one in made[3:]),
    }


def test_what_is_left_of_an_unfinished_backup_goes_after_a_day(
    instance: dg.DagsterInstance, fleet_db: FleetDatabase, objects: Objects
) -> None:
    made = make_backup(instance, fleet_db, objects, clock=lambda: 0.0)
    objects.delete([f"_platform/backups/{made.id}/manifest.json"])
    assert unfinished(objects, HOUR) == []
    assert drop_expired(objects, made.fleet, Keep(), 2 * DAY) == [made.id]
    assert [*objects.list("_platform/backups/")] == []


def test_a_deletion_that_breaks_off_leaves_no_half_backup(
    instance: dg.DagsterInstance, fleet_db: FleetDatabase, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, delete = make_backup(instance, fleet_db, objects), type(objects).delete

    def break_off(self: Objects, paths: list[str]) -> None:
        delete(self, [*paths][:1])
        raise OSError("killed")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):
        patch.setattr(type(objects), "delete", break_off)
        delete_backup(objects, made.id)
    assert [*backups(objects)] == []


@pytest.mark.slow
def test_the_run_of_the_schedule_makes_one_and_says_so(instance: dg.DagsterInstance, home: Path) -> None:
    done = dg.materialize([backup_asset], instance=instance, resources=resources(home))
    (event,) = done.get_asset_materialization_events()
    said = event.step_materialization_data.materialization.metadata
    (made,) = backups(open_objects(settings.store_root()))
    assert isinstance(made, BackupManifest)
    assert said["backup"].value == made.id
    assert "fleet" in str(said["databases"].value)


@pytest.mark.slow
def test_a_backup_that_fails_says_why_once_and_everywhere(
    instance: dg.DagsterInstance, home: Path, fleet_db: FleetDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_backup(instance, fleet_db, open_objects(settings.store_root()))
    with serving() as hook:
        (home / "fleet.yaml").write_text(f"alerts: {{webhook: '{hook.url}'}}\n")
        monkeypatch.setenv("BATCH_ASSETS_WORKDIR", str(home / "gone"))
        done = dg.materialize([backup_asset], instance=instance, resources=resources(home), raise_on_error=False)
    assert not done.success
    (posted,) = hook.posted
    assert "not backed up" in str(posted)
    last = fleet_db.last_backup()
    assert "No such file or directory" in last.failure
    assert last.backup


def resources(home: Path) -> dict[str, object]:
    fleet = GpuFleet(database=settings.fleet_database(), home=str(home), config_path=str(home / "fleet.yaml"))
    return {"store": BatchStore(root=settings.store_root()), "fleet": fleet}


def test_the_schedule_is_off_until_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCH_ASSETS_BACKUP_CRON", raising=False)
    assert backup_schedule().default_status is dg.DefaultScheduleStatus.STOPPED
    monkeypatch.setenv("BATCH_ASSETS_BACKUP_CRON", "30 */2 * * *")
    assert backup_schedule().default_status is dg.DefaultScheduleStatus.RUNNING
    monkeypatch.setenv("BATCH_ASSETS_BACKUP_CRON", "hourly")
    with pytest.raises(SettingError, match="BATCH_ASSETS_BACKUP_CRON: expected"):
        backup_schedule()
