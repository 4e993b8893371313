"""The drill: a platform at work is backed up, killed, and loses its home and database; a restore, and it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
import yaml
from support.fleet_databases import postgres_url

from batch_assets import settings
from e2e.harness import Simulator, eventually
from gpu_runner.fleet_database.database import FleetDatabase
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

pytestmark = [pytest.mark.soak("losses"), pytest.mark.timeout(600)]

ROWS, BATCH_ROWS = 3000, 50
PRICES = {"input": 100.0, "output": 1000.0}


@pytest.fixture(params=["sqlite", "postgres"])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder, defs = tmp_path / "home", tmp_path / "defs" / "d"
    folder.mkdir()
    defs.mkdir(parents=True)
    lines = [json.dumps({"id": f"{number:05d}", "question": f"Question {number}?"}) for number in range(ROWS)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    attributes = {
        "name": "d",
        "model": "test-model",
        "source": {"path": str(tmp_path / "questions.jsonl")},
        "prompt": {"user": "{{ question }}"},
        "id": "id",
        "sampling": {"max_tokens": 64},
        "batch_rows": BATCH_ROWS,
        "batches_per_run": 10,
    }
    document = {"type": "batch_assets.GeneratedDataset", "attributes": attributes}
    (defs / "defs.yaml").write_text(yaml.safe_dump(document))
    config = yaml.safe_load((settings.PROJECT / "deploy" / "local" / "dagster.yaml").read_text())
    for name, value in {
        "DAGSTER_HOME": folder,
        "BATCH_ASSETS_DEFS": defs.parent,
        "BATCH_ASSETS_STORE": tmp_path / "s",
    }.items():
        monkeypatch.setenv(name, str(value))
    for name in ("BATCH_ASSETS_FLEET", "BATCH_ASSETS_FLEET_DB", "BATCH_ASSETS_API_DB", "BATCH_ASSETS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with contextlib.ExitStack() as stack:
        if request.param == "postgres":
            url = stack.enter_context(postgres_url(request.getfixturevalue("server")))
            config["storage"] = {"postgres": {"postgres_url": url}}
            monkeypatch.setenv("BATCH_ASSETS_FLEET_DB", url)
            monkeypatch.setenv("BATCH_ASSETS_API_DB", url)
        (folder / "dagster.yaml").write_text(yaml.safe_dump(config))
        yield folder


@pytest.fixture
def engine(tmp_path: Path, home: Path) -> Iterator[Simulator]:
    engine = Simulator(tmp_path, ["--speed", "1", "--max-num-seqs", "16"])
    engine.start()
    entry = {"name": "hosted", "kind": "endpoint", "url": engine.url, "usd_per_million_tokens": PRICES}
    (home / "fleet.yaml").write_text(yaml.safe_dump({"engines": [{**entry, "max_num_seqs": 16}]}))
    try:
        yield engine
    finally:
        engine.stop()


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "batch_assets.cli.main", *words]


def done(*words: str) -> str:
    ended = subprocess.run(command(*words), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[psutil.Process]:
    """A command and all that it starts; killed at the end."""
    with (folder / "output.log").open("ab") as log:
        child = subprocess.Popen(command(*words), stdout=log, stderr=log)
    process = psutil.Process(child.pid)
    try:
        yield process
    finally:
        kill_all(process)
        child.wait()


def kill_all(process: psutil.Process) -> None:
    """kill -9 of a process and of everything below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*process.children(recursive=True), process]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, timeout=30)


def committed(store: DatasetStore) -> set[str]:
    return {info.path for info in store.objects.list("d/batches/")}


def more_than(store: DatasetStore, batches: int) -> Callable[[], bool]:
    return lambda: len(committed(store)) > batches


def lose(home: Path) -> None:
    """Home and database are gone; what a person keeps with the code is there."""
    kept = {name: (home / name).read_text() for name in ("dagster.yaml", "fleet.yaml")}
    shutil.rmtree(home)
    home.mkdir()
    for name, text in kept.items():
        (home / name).write_text(text)
    if url := os.environ.get("BATCH_ASSETS_FLEET_DB"):
        server = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
        with server.connect() as connection:
            connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


def test_a_platform_that_lost_its_databases_goes_on(home: Path, engine: Simulator, tmp_path: Path) -> None:
    store = DatasetStore(open_objects(settings.store_root()), "d")
    batches = ROWS // BATCH_ROWS
    with started(tmp_path, "run", "d", "--no-progress") as running:
        eventually(more_than(store, batches // 4), 120, "a quarter of the batches")
        made = json.loads(done("backup", "--json"))
        eventually(more_than(store, len(committed(store)) + batches // 6), 120, "more batches")
        kill_all(running)
    finished = committed(store)
    asked_before = len([one for one in engine.events() if one["event"] == "received"])
    lose(home)

    told = json.loads(done("restore", "--json"))
    assert told["backup"] == made["id"]
    (dataset,) = told["datasets"]
    assert 0 < dataset["reported"] <= len(finished)
    assert len([one for one in engine.events() if one["event"] == "received"]) == asked_before
    with started(tmp_path, "ui", "--port", str(engine_port())):  # nobody asks for anything
        eventually(store.current_published, 180, "the table of the request that was open")
    asked_after = len([one for one in engine.events() if one["event"] == "received"]) - asked_before
    assert asked_after <= ROWS - len(finished) * BATCH_ROWS  # of committed batches no row is asked again
    assert "agree" in done("verify", "d")
    pattern = store.objects.uri(f"d/published/{store.current_published()}/part-*.parquet")
    import polars as pl

    table = pl.read_parquet(pattern)
    assert table.height == table["row_id"].n_unique() == ROWS
    assert table["error"].null_count() == ROWS
    with contextlib.closing(FleetDatabase(settings.fleet_database())) as fleet_db:
        spent = sum(charge.usd.total for charge in fleet_db.charges_of("d"))
        of_rows = table["usd"].sum()
        print(
            f"\nasked {asked_before} + {asked_after} for {ROWS} rows; spent {spent:.3f}, rows {of_rows:.3f}", flush=True
        )
        assert 0.9 * of_rows <= spent <= 1.1 * of_rows
        assert fleet_db.fleet() == []


def engine_port() -> int:
    from gpu_runner.providers.engine_process import free_port

    return free_port()
