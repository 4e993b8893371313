"""What we rely on in Dagster's private modules is there, so that a new version of Dagster fails here first."""

from __future__ import annotations

import ast
from pathlib import Path

import dagster as dg
import pytest

from batch_assets import dagster_internals

ROOT = Path(dagster_internals.__file__).parents[2]
PARTS = {
    "SqlEventLogStorageTable": ["id", "event", "dagster_event_type", "asset_key", "partition", "run_id", "timestamp"],
    "AssetEventTagsTable": ["event_id", "key", "value"],
    "BulkActionStatus": ["REQUESTED", "COMPLETED", "CANCELING", "CANCELED"],
    "InstigatorType": ["SENSOR"],
}


@pytest.mark.parametrize("name", dagster_internals.__all__)
def test_a_name_is_there(name: str) -> None:
    package = __import__(dagster_internals.__name__, fromlist=[name])  # some are modules
    assert getattr(package, name) is not None


@pytest.mark.parametrize("name", PARTS)
def test_what_is_used_of_it_is_there(name: str) -> None:
    found = getattr(dagster_internals, name)
    there = set(getattr(found, "c", found).keys()) if hasattr(found, "c") else {member.name for member in found}
    assert set(PARTS[name]) <= there


def test_an_instance_on_this_machine_keeps_its_events_in_sql(tmp_path: Path) -> None:
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        storage = instance.event_log_storage
        assert isinstance(storage, dagster_internals.SqlEventLogStorage)
        assert isinstance(storage, dagster_internals.EventLogStorage)


def test_a_sensors_state_has_the_times_that_are_set_back() -> None:
    state = dagster_internals.SensorInstigatorData(last_tick_timestamp=1.0)
    assert state._asdict()["last_tick_timestamp"] == 1.0


def test_a_schedules_times_come_in_order() -> None:
    times = dagster_internals.schedule_times(0.0, "0 6 * * *", "UTC")
    assert [next(times).timestamp() for _ in range(2)] == [6 * 3600.0, 30 * 3600.0]


def test_no_other_module_imports_private_names_of_dagster() -> None:
    private = {}
    for folder in ("batch_assets", "resources", "gpu_runner"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()  # parsed only where such a name stands: to parse all takes a second
            if "dagster._" not in text and "dagster_webserver._" not in text:
                continue
            names = [name for name in _imported(text) if name.startswith(("dagster._", "dagster_webserver._"))]
            if names:
                private[str(path.relative_to(ROOT))] = names
    assert private
    assert all(name.startswith("batch_assets/dagster_internals/") for name in private)


def _imported(text: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(text)))
    named = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return named + [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
