"""`rebuild-ledger`: what a new home lacks comes from the store."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from support.defs_folders import write
from support.snapshots import commit, questions, write_snapshot
from typer.testing import CliRunner

from batch_assets.cli.main import app
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore


def test_batches_are_partitions_again_so_that_runs_can_be_started_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, folder in {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store", "BATCH_ASSETS_DEFS": "defs"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name in ("BATCH_ASSETS_FLEET_DB", "BATCH_ASSETS_FLEET", "BATCH_ASSETS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    write(tmp_path / "defs", "good")
    store = DatasetStore(open_objects(str(tmp_path / "store")), "good")
    commit(store, write_snapshot(store, questions(10), batch_rows=4), keys=["00000", "00002"])
    found = CliRunner().invoke(app, ["rebuild-ledger", "good"])
    assert (found.exit_code, found.stdout) == (0, "good: 2 of 3 batches reported again\n"), found.stderr
    with dg.DagsterInstance.from_config(str(tmp_path / "home")) as instance:
        assert instance.get_dynamic_partitions("good") == ["00000", "00001", "00002"]
