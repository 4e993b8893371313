"""Every asset of the definitions, as a snapshot: a changed key, group, kind, dependency or check shows in review."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

SNAPSHOT = Path(__file__).parents[1] / "fixtures" / "snapshot_of_specs.json"


@pytest.fixture(scope="module")
def definitions() -> dg.Definitions:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("BATCH_ASSETS_DEFS", raising=False)
        from batch_assets.definitions import defs

        loaded: dg.Definitions = defs()
        return loaded


def described(definitions: dg.Definitions) -> dict[str, Any]:
    graph = definitions.resolve_asset_graph()
    found: dict[str, Any] = {}
    for key in sorted(graph.get_all_asset_keys()):
        node = graph.get(key)
        found[key.to_user_string()] = {
            "group": node.group_name,
            "kinds": sorted(node.kinds),
            "deps": sorted(parent.to_user_string() for parent in node.parent_keys),
            "partitions": getattr(node.partitions_def, "name", None),
            "batches_per_run": node.backfill_policy.max_partitions_per_run if node.backfill_policy else None,
            "pools": sorted(node.pools or ()),
            "checks": sorted(check.name for check in node.check_keys),
            "owners": sorted(node.owners),
        }
    return found


def test_the_assets_are_those_of_the_snapshot(definitions: dg.Definitions):
    """To accept a change: write what this test prints into tests/fixtures/snapshot_of_specs.json."""
    found = described(definitions)
    assert found == json.loads(SNAPSHOT.read_text()), json.dumps(found, indent=1)


def test_every_dataset_has_its_jobs_and_sensors(definitions: dg.Definitions):
    repository = definitions.get_repository_def()
    jobs = {job.name for job in repository.get_all_jobs()}
    sensors = {sensor.name: sensor for sensor in repository.sensor_defs}
    assert {"example_refresh", "example_redrive", "example_publish"} <= jobs
    assert {"watchdog", "reaper", "capacity", "cost_report", "launcher", "publisher"} <= set(sensors)
    assert all(sensor.default_status == dg.DefaultSensorStatus.RUNNING for sensor in sensors.values())


def test_the_example_makes_five_thousand_prompts(tmp_path: Path):
    from batch_assets.snapshot.builder import build_snapshot
    from batch_assets.spec.discovery import declared
    from resources.objects.opening import open_objects
    from resources.store.dataset_store import DatasetStore

    store = DatasetStore(open_objects(str(tmp_path / "store")), "example")
    work = tmp_path / "work"
    work.mkdir()
    spec, folder = declared()["example"]
    manifest = build_snapshot(spec, store, now=0.0, workdir=work, base=folder)
    assert (manifest.rows, manifest.batches, manifest.rejected, manifest.duplicates) == (5000, 20, 0, 0)
