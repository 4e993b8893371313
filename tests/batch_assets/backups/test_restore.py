"""A backup, and everything lost: what comes back, and what the store and the fleet add to it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.test_utils import create_run_for_test
from support import killed_restore
from support.dataset_project import BATCH, DatasetProject
from support.fleet_databases import OFFER
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.timing import PATIENCE
from typer.testing import CliRunner, Result

from batch_assets import settings
from batch_assets.backups import restore
from batch_assets.catalog import ledger
from batch_assets.cli.backup_commands import restore_command
from batch_assets.cli.main import app
from batch_assets.component import dataset_definitions
from batch_assets.dagster_internals import storages
from batch_assets.local_dagster.home import ensure_storage
from batch_assets.publishing.verify import ledger_of_reports, verify
from batch_assets.request_status.dataset_status import Observer
from batch_assets.spec.models import load_spec
from batch_assets.tags import REFRESH_TAG
from gpu_runner.fleet_database.database import FleetDatabase
from resources.backups.archive import BackupManifest, backups, path_of
from resources.fleet.resource import GpuFleet
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import DatasetStore

ON_BOTH = pytest.mark.parametrize("home", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
ROWS = 4 * BATCH
STEPS = ("begin", "install", "_put", "end_runs", "settle_fleet", "catch_up")


@dataclass
class Lost:
    """A platform whose home and databases can be lost, while its store and its engine stay."""

    home: Path
    engine: SimulatedEngine
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def open(self) -> DatasetProject:
        """The platform as a new process finds it. `close` before anything is lost."""
        folder = self.home.parent
        spec = {
            "name": "d",
            "source": {"path": "questions.jsonl"},
            "prompt": {"user": "{{ question }}"},
            "id": "id",
            "model": "test-model",
            "sampling": {"temperature": 0, "max_tokens": 16},
            "batch_rows": BATCH,
        }
        instance = self.stack.enter_context(dg.DagsterInstance.from_config(str(self.home)))
        database = settings.fleet_database()
        fleet_db = self.stack.enter_context(contextlib.closing(FleetDatabase(database)))
        (self.home / "fleet.yaml").write_text(json.dumps({"engines": [self.entry()]}))
        config = str(self.home / "fleet.yaml")
        fleet = GpuFleet(database=database, home=str(self.home), config_path=config, ttl=3.0, beat=0.5)
        store = DatasetStore(open_objects(settings.store_root()), "d")
        loaded = load_spec(spec, "d")
        return DatasetProject(
            folder, instance, fleet_db, store, fleet, dataset_definitions(loaded, folder), {"d": (loaded, folder)}
        )

    def entry(self) -> dict[str, object]:
        prices = {"input": 100.0, "output": 1000.0}
        return {"name": "hosted", "kind": "endpoint", "url": self.engine.url, "usd_per_million_tokens": prices}

    def close(self) -> None:
        self.stack.close()

    def lose(self) -> None:
        """The home is gone, and the database is empty; what a person keeps is there: the two files of settings."""
        self.close()
        kept = {name: (self.home / name).read_text() for name in ("dagster.yaml", "fleet.yaml")}
        shutil.rmtree(self.home)
        self.home.mkdir()
        for name, text in kept.items():
            (self.home / name).write_text(text)
        if settings.fleet_is_shared():
            engine = sa.create_engine(settings.fleet_database(), poolclass=sa.NullPool)
            with engine.begin() as connection:
                connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")

    def asked(self) -> int:
        """Requests that the engine received. Its log is written later, so that the last ones may not be there yet."""
        return int(self.engine.get("/simulator/stats")["requests"])


@pytest.fixture
def lost(home: Path) -> Iterator[Lost]:
    with simulated_engine("--speed", "500", model="test-model") as engine:
        platform = Lost(home, engine)
        try:
            yield platform
        finally:
            platform.close()


def command(*words: str, status: int = 0) -> Result:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == status, (done.output, done.stderr, done.exception)
    return done


def generate(site: DatasetProject, first: str, last: str) -> None:
    done = site.run_rows(first, last, None)
    assert done.success, site.reason()


def half_done(lost: Lost) -> DatasetProject:
    """Two batches of four are committed, and the request for all of them is open."""
    site = lost.open()
    site.source([f"question {number}" for number in range(ROWS)])
    assert site.materialize("prompts", tags={REFRESH_TAG: "d"}).success
    generate(site, "00000", "00001")
    return site


@pytest.mark.slow
@ON_BOTH
def test_everything_is_lost_and_goes_on_and_nothing_is_asked_again(lost: Lost) -> None:
    site = half_done(lost)
    command("backup")
    tag, before = site.fleet_db.tag(), site.fleet_db.spend("d").usd
    generate(site, "00002", "00002")
    spent = site.fleet_db.spend("d").usd
    assert 0 < before < spent
    lost.lose()

    told = command("restore").output
    assert "1 batches put into the catalog" in told
    assert lost.asked() == 3 * BATCH
    site = lost.open()
    assert site.fleet_db.tag() == tag
    assert site.fleet_db.spend("d").usd == pytest.approx(spent, rel=0.01)
    assert {*ledger.ledger_versions(site.instance, "d")} == {"00000", "00001", "00002"}
    (request,) = site.tick("launcher").run_requests or ()
    assert request.tags["dagster/asset_partition_range_start"] == "00003"
    generate(site, "00000", "00003")
    assert lost.asked() == ROWS
    for name in ("dataset", "dead_letters"):
        assert site.materialize(name).success
    seen = Observer(site.instance, site.fleet_db, site.store)
    assert verify(site.store, ledger_of_reports(seen.reports())).differences == ()
    site.instance.report_runless_asset_event(dg.AssetMaterialization("more"))  # numbers of events go on


@pytest.mark.slow
def test_runs_that_were_under_way_have_ended_and_their_leases_with_them(lost: Lost) -> None:
    site = half_done(lost)
    going = create_run_for_test(site.instance, "j", status=dg.DagsterRunStatus.STARTED).run_id
    waiting = create_run_for_test(site.instance, "j", status=dg.DagsterRunStatus.NOT_STARTED).run_id
    site.fleet_db.begin_run(going, "d", "00002", "00003")
    assert site.fleet_db.try_lease("hosted", going, "d", 1e9)
    command("backup")
    lost.lose()
    command("restore")
    site = lost.open()
    statuses = {one: site.instance.get_run_by_id(one).status for one in (going, waiting)}  # type: ignore[union-attr]
    assert statuses == {going: dg.DagsterRunStatus.FAILURE, waiting: dg.DagsterRunStatus.NOT_STARTED}
    assert site.fleet_db.holder("hosted") is None
    assert site.fleet_db.runs() == []


@pytest.mark.slow
@ON_BOTH
def test_a_home_that_lives_is_refused_unless_told(lost: Lost) -> None:
    site = half_done(lost)
    command("backup")
    generate(site, "00002", "00002")
    lost.close()
    assert "--overwrite" in command("restore", status=2).stderr
    site = lost.open()
    assert "00002" in ledger.ledger_versions(site.instance, "d")
    lost.close()
    command("restore", "--overwrite")
    site = lost.open()
    assert len(ledger.ledger_versions(site.instance, "d")) == 3  # the store has the third


@pytest.mark.slow
def test_a_damaged_backup_is_refused_and_the_one_before_is_offered(lost: Lost) -> None:
    half_done(lost)
    command("backup")
    command("backup")
    objects = open_objects(settings.store_root())
    first, last = sorted(
        (one for one in backups(objects) if isinstance(one, BackupManifest)), key=lambda one: one.began_at
    )
    path = path_of(last.id, last.parts[0].name)
    objects.put(path, objects.get(path)[:-5])
    lost.lose()
    said = command("restore", status=1).stderr
    assert last.id in said
    assert f"--backup {first.id}" in said
    assert command("restore", "--backup", first.id, "--dry-run").exit_code == 0
    command("restore", "--backup", first.id)
    assert len(ledger.ledger_versions(lost.open().instance, "d")) == 2


@ON_BOTH
@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_restore_that_is_killed_is_done_again(lost: Lost, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """What `kill -9` leaves at a step is what an error there leaves: nothing is cleaned up."""
    if step == "_put" and settings.fleet_is_shared():
        pytest.skip("no file is put into place")
    site = half_done(lost)
    command("backup")
    generate(site, "00002", "00002")
    spent = site.fleet_db.spend("d").usd
    lost.lose()
    owner = restore if step in ("begin", "install", "_put") else restore_command
    real, calls = getattr(owner, step), []

    def killed(*arguments: object, **more: object) -> object:
        calls.append(step)
        if len(calls) > (2 if step == "_put" else 0):
            if step != "_put":
                real(*arguments, **more)  # its work is done, and nobody hears of it
            raise KeyboardInterrupt
        return real(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, killed)
        CliRunner().invoke(app, ["restore"])
    assert calls
    assert "has not come to its end" in command("status", status=2).stderr
    command("restore")
    site = lost.open()
    assert len(ledger.ledger_versions(site.instance, "d")) == 3
    assert site.fleet_db.spend("d").usd == pytest.approx(spent, rel=0.01)
    assert lost.asked() == 3 * BATCH


@ON_BOTH
@pytest.mark.slow
@pytest.mark.soak("losses")
@pytest.mark.parametrize("living", [False, True], ids=["lost", "living"])
def test_kill_9_at_a_dozen_moments_of_a_restore_leaves_nothing_half(lost: Lost, living: bool) -> None:
    """Each try goes further than the one before, and finds what that has left."""
    site = half_done(lost)
    command("backup")
    generate(site, "00002", "00002")
    spent = site.fleet_db.spend("d").usd
    if living:
        lost.close()
    else:
        lost.lose()
    tries = [sys.executable, killed_restore.__file__, "17", "--overwrite"]
    done = subprocess.run(tries, capture_output=True, text=True, timeout=PATIENCE * 300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    print(last)
    killed = int(last.split()[1].rstrip(","))
    assert killed >= 10 and last.endswith("then 0"), done.stderr[-3000:]
    assert not [path for path in lost.home.rglob("*") if "restor" in path.name]
    for file in lost.home.rglob("*.db"):
        with contextlib.closing(sqlite3.connect(file)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",), file
    assert lost.asked() == 3 * BATCH
    site = lost.open()
    assert {*ledger.ledger_versions(site.instance, "d")} == {"00000", "00001", "00002"}
    assert site.fleet_db.spend("d").usd == pytest.approx(spent, rel=0.01)
    generate(site, "00000", "00003")
    assert lost.asked() == ROWS
    for name in ("dataset", "dead_letters"):
        assert site.materialize(name).success
    seen = Observer(site.instance, site.fleet_db, site.store)
    assert verify(site.store, ledger_of_reports(seen.reports())).differences == ()


@pytest.mark.slow
@pytest.mark.parametrize("home", ["postgres"], indirect=True)
def test_tables_that_a_killed_process_left_half_made_are_made(instance: dg.DagsterInstance, home: Path) -> None:
    engine = sa.create_engine(settings.fleet_database(), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE asset_keys, secondary_indexes, instigators, alembic_version")
    ensure_storage(home)
    assert instance.all_asset_keys() == [] and not instance.all_instigator_state()
    instance.report_runless_asset_event(dg.AssetMaterialization("a"))
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()


MAKES_TABLES = (
    "import sys, time\n"
    "from batch_assets.dagster_internals import storages\n"
    "import dagster_postgres.schedule_storage, alembic.script\n"
    "print(flush=True)\n"
    "sys.stdin.readline()\n"
    "storages.postgres_urls = lambda _: [sys.argv[1]]\n"
    "storages.make_missing_tables(None)\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["postgres"], indirect=True)
def test_two_processes_make_the_missing_tables_once(instance: dg.DagsterInstance, home: Path) -> None:
    instance.all_asset_keys()
    engine = sa.create_engine(settings.fleet_database(), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE asset_keys, secondary_indexes, instigators, alembic_version")
    command, pipes = [sys.executable, "-c", MAKES_TABLES, settings.fleet_database()], subprocess.PIPE
    makers = [subprocess.Popen(command, stdin=pipes, stdout=pipes, stderr=pipes, text=True) for _ in range(2)]
    for maker in makers:
        assert maker.stdout is not None and maker.stdout.readline()
    with engine.begin() as holder:  # both have seen what is missing before one of them may make it
        holder.exec_driver_sql("LOCK TABLE runs IN ACCESS EXCLUSIVE MODE")
        for maker in makers:
            assert maker.stdin is not None
            maker.stdin.write("\n")
            maker.stdin.flush()
        time.sleep(1.0)
    ended = [maker.communicate(timeout=60 * PATIENCE) for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0], ended
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()


@pytest.mark.slow
@pytest.mark.parametrize("home", ["postgres"], indirect=True)
def test_tables_of_an_older_dagster_are_not_said_to_be_the_newest(instance: dg.DagsterInstance, home: Path) -> None:
    instance.all_asset_keys()
    engine = sa.create_engine(settings.fleet_database(), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE asset_keys")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '567bc23fd1ac'")
    storages.make_missing_tables(instance)
    with engine.begin() as connection:
        found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()
        assert found == "567bc23fd1ac" and not sa.inspect(connection).has_table("asset_keys")


def test_the_mark_goes_after_all_names_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, folder, file, synced = tmp_path / "home", tmp_path / "home" / "history", tmp_path / "runs.db", list[str]()
    home.mkdir()
    file.write_text("new")

    def fsync(descriptor: int) -> None:
        now = sorted(one.relative_to(home).as_posix() for one in home.rglob("*") if one.is_file())
        synced.append(f"{Path(f'/proc/self/fd/{descriptor}').readlink().name}: {' '.join(now)}")

    monkeypatch.setattr(os, "fsync", fsync)
    restore.begin(home, "b")
    restore._put(file, folder / "runs.db")
    restore.end(home)
    mark = restore.UNFINISHED_RESTORE
    assert f"home: {mark}" in synced and f"history: history/runs.db {mark}" in synced
    assert synced[-1] == f"home: history/runs.db {mark} storage.ready"


def whole(place: Path) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(place)) as connection:
            return connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    except sqlite3.DatabaseError:
        return False


def half_checkpointed(folder: Path) -> Path:
    """A database as `kill -9` leaves it while its log is being written into it: it is none without the log."""
    made, left = folder / "made.db", folder / "left.db"
    with contextlib.closing(sqlite3.connect(made, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("PRAGMA wal_autocheckpoint=0")
        writer.execute("CREATE TABLE t (a TEXT)")
        writer.executemany("INSERT INTO t VALUES (?)", [("x" * 900,) for _ in range(100)])
        writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        before = made.read_bytes()
        writer.execute("CREATE INDEX i ON t (a)")
        writer.execute("DELETE FROM t WHERE rowid % 2")
        shutil.copyfile(f"{made}-wal", f"{left}-wal")
        writer.execute("PRAGMA wal_checkpoint(FULL)")
        half = len(before) // 2 // 4096 * 4096
        left.write_bytes(made.read_bytes()[:half] + before[half:])
    alone = folder / "alone.db"
    shutil.copyfile(left, alone)
    assert not whole(alone)
    return left


@pytest.mark.parametrize("moment", range(1, 7))
def test_a_file_that_is_put_back_is_at_no_moment_without_the_log_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    new, place, calls = tmp_path / "new.db", half_checkpointed(tmp_path), list[str]()
    with contextlib.closing(sqlite3.connect(new)) as connection:
        connection.execute("CREATE TABLE new (a)")

    def killed(real: Callable[..., object]) -> Callable[..., object]:
        def at_its_moment(path: Path, *given: object, **more: object) -> object:
            calls.append(path.name)
            if len(calls) == moment:
                raise KeyboardInterrupt
            return real(path, *given, **more)

        return at_its_moment

    with monkeypatch.context() as patch:
        for name in ("unlink", "replace"):
            patch.setattr(Path, name, killed(getattr(Path, name)))
        with pytest.raises(KeyboardInterrupt):
            restore._put(new, place)
    assert len(calls) == moment and whole(place), calls


@pytest.mark.slow
def test_a_backup_of_another_kind_of_database_is_refused(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    half_done(lost)
    command("backup")
    lost.lose()
    monkeypatch.setenv("BATCH_ASSETS_API_DB", "postgresql+psycopg2://u:secret@127.0.0.1:1/api")
    said = command("restore", status=1).stderr
    assert "BATCH_ASSETS_API_DB: expected a database of the kind of the backup, sqlite, found postgres" in said
    assert "secret" not in said


@pytest.mark.slow
def test_which_backup_is_meant_must_be_clear(lost: Lost) -> None:
    assert "expected a backup, found none" in command("restore", status=2).stderr
    half_done(lost)
    command("backup")
    with sqlite3.connect(lost.home / "fleet.db") as connection:
        connection.execute("UPDATE fleet_facts SET value = 'ba-other-' WHERE name = 'tag'")
    connection.close()
    command("backup")
    assert "2 platforms" in command("restore", status=2).stderr
    assert "no such backup" in command("restore", "--backup", "20200101T000000Z-abcdef", status=2).stderr
    assert "expected an id" in command("restore", "--backup", "../x", status=2).stderr
    assert command("restore", "--list").output.count("ba-other") == 1


@pytest.mark.slow
def test_a_store_on_s3_brings_everything_back(lost: Lost, s3_objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_ASSETS_STORE", s3_objects.root)
    site = half_done(lost)
    command("backup")
    generate(site, "00002", "00002")
    spent = site.fleet_db.spend("d").usd
    lost.lose()
    assert "1 batches put into the catalog" in command("restore").output
    site = lost.open()
    assert {*ledger.ledger_versions(site.instance, "d")} == {"00000", "00001", "00002"}
    assert site.fleet_db.spend("d").usd == pytest.approx(spent, rel=0.01)
    generate(site, "00000", "00003")
    assert lost.asked() == ROWS
    assert {info.path.split("/")[0] for info in s3_objects.list("")} >= {"d"}


@pytest.mark.slow
def test_an_order_of_the_backup_is_not_forgotten(lost: Lost) -> None:
    """A provider that this environment does not know may bill a machine of the backup: the restore says so."""
    site = half_done(lost)
    site.fleet_db.intend(
        f"{site.fleet_db.tag()}1",
        OFFER,
        clock=1,
        engine_key="k",
        model="m",
        run_id="r",
        dataset="d",
        ttl=10,
        limit=None,
    )
    command("backup")
    lost.lose()
    said = command("restore").output
    assert "1 instances of the backup are being ended" in said
    assert "may still be billed: no provider sim-north is configured" in said
