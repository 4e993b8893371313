"""A bucket that answers with errors, or not at all: a sensor's tick ends in time, and says so."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from support.sensor_dataset import SPEC, S, SensorDataset

from batch_assets.definitions import platform
from batch_assets.sensors import capacity_sensor, many_datasets, open_datasets, reconcile_sensor
from batch_assets.tags import REFRESH_TAG
from resources.objects import opening as objects
from resources.store.dataset_store import BatchStore

NAMES = ["d0", "d1", "d2"]
TICK_SECONDS = 60  # that the daemon waits for a sensor


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchStore]:
    """A store whose server accepts connections and never answers."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield BatchStore(root="s3://bucket/x")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    """Three datasets with a request each."""
    with contextlib.ExitStack() as stack:
        specs = ({**SPEC, "name": name} for name in NAMES)
        site = SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack, *specs)
        for name in NAMES:
            site.end(site.run(S.STARTED, {REFRESH_TAG: name}, job_name=f"{name}_refresh"))
        yield site


@pytest.mark.slow
@pytest.mark.parametrize("sensor", ["launcher", "publisher", "reconcile", "capacity"])
def test_a_tick_ends_in_time_while_the_store_does_not_answer(
    site: SensorDataset, silent: BatchStore, monkeypatch: pytest.MonkeyPatch, sensor: str
):
    """All bounds a hundredth of what they are."""
    for name in ("SENSOR_RETRY_SECONDS", "SENSOR_REQUEST_SECONDS"):
        monkeypatch.setattr(objects, name, getattr(objects, name, 0.0) / 100)
    monkeypatch.setattr(many_datasets, "TICK_SECONDS", many_datasets.TICK_SECONDS / 100)
    monkeypatch.setattr(reconcile_sensor, "TICK_SECONDS", reconcile_sensor.TICK_SECONDS / 100)
    monkeypatch.setattr(open_datasets, "LOOK_SECONDS", open_datasets.LOOK_SECONDS / 100)
    with site.fleet.open_database() as fleet_db:
        for name in NAMES:
            fleet_db.begin_request(name, "a request")
    own = platform(site.datasets, site.specs, silent, site.fleet).sensors or ()
    sensors = {one.name: one for one in own if isinstance(one, dg.SensorDefinition)}
    sensors["capacity"] = capacity_sensor.capacity_sensor(lambda: site.specs, 30)
    sensors["reconcile"] = reconcile_sensor.reconcile_sensor(lambda: site.specs, silent)
    resources = {"store": silent, "fleet": site.fleet}
    repository = site.definitions.get_repository_def()
    with dg.build_sensor_context(site.instance, repository_def=repository, resources=resources) as context:
        said = sensors[sensor].evaluate_tick(context).skip_message or ""
    assert "d0" in said
