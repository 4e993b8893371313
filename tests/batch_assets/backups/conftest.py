"""A DAGSTER_HOME of this environment whose databases are on SQLite, or on Postgres."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
import yaml
from support.fleet_databases import postgres_url

from batch_assets import settings
from gpu_runner.fleet_database.database import FleetDatabase
from resources.objects.opening import Objects, open_objects


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A DAGSTER_HOME of this environment, all of whose databases are on one kind of server."""
    folder = tmp_path / "home"
    folder.mkdir()
    config = yaml.safe_load((settings.PROJECT / "deploy" / "local" / "dagster.yaml").read_text())
    monkeypatch.setenv("DAGSTER_HOME", str(folder))
    monkeypatch.setenv("BATCH_ASSETS_STORE", str(tmp_path / "store"))
    with contextlib.ExitStack() as stack:
        if getattr(request, "param", "sqlite") == "postgres":
            url = stack.enter_context(postgres_url(request.getfixturevalue("server")))
            config["storage"] = {"postgres": {"postgres_url": url}}
            monkeypatch.setenv("BATCH_ASSETS_FLEET_DB", url)
            monkeypatch.setenv("BATCH_ASSETS_API_DB", url)
        (folder / "dagster.yaml").write_text(yaml.safe_dump(config))
        yield folder


@pytest.fixture
def instance(home: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.get_runs_count()
        instance.all_instigator_state()
        yield instance


@pytest.fixture
def fleet_db(instance: dg.DagsterInstance) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(settings.fleet_database())) as fleet_db:
        yield fleet_db


@pytest.fixture
def objects(home: Path) -> Objects:
    return open_objects(settings.store_root())
