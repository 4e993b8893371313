"""`refresh: when_upstream_changes`, as Dagster's own evaluation of automation conditions has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.events import AssetMaterializationPlannedData
from dagster._core.test_utils import create_run_for_test

from batch_assets.catalog import ledger
from batch_assets.component import dataset_definitions, spec_version
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.tags import DATA_VERSION_TAG

PROMPTS = ledger.prompts_key("answers")
TABLE = ledger.table_key("topics")
pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as found:
        yield found


def spec(name: str, source: dict[str, Any], **more: Any) -> GeneratedDatasetSpec:
    return load_spec({"name": name, "source": source, "prompt": {"user": "{{ q }}"}, "model": "m", **more}, "f")


def definitions(**more: Any) -> dg.Definitions:
    """`answers`, which read the table of `topics`."""
    topics, answers = spec("topics", {"grid": {"q": ["a"]}}), spec("answers", {"asset": "topics/dataset"}, **more)
    resources = {"store": dg.ResourceDefinition.none_resource(), "fleet": dg.ResourceDefinition.none_resource()}
    parts = [dataset_definitions(one, Path("/nowhere")) for one in (topics, answers)]
    return dg.Definitions.merge(*parts, dg.Definitions(resources=resources))


class Automation:
    """The automation of a definition, tick by tick."""

    def __init__(self, instance: dg.DagsterInstance, defs: dg.Definitions) -> None:
        self.instance, self.defs, self._cursor = instance, defs, None

    def requests(self) -> int:
        found = dg.evaluate_automation_conditions(defs=self.defs, instance=self.instance, cursor=self._cursor)
        self._cursor = found.cursor
        return found.get_num_requested(PROMPTS)

    def published(self, version: str) -> None:
        event = dg.AssetMaterialization(TABLE, tags={DATA_VERSION_TAG: version})
        self.instance.report_runless_asset_event(event)


@pytest.fixture
def automation(instance: dg.DagsterInstance) -> Automation:
    found = Automation(instance, definitions(refresh="when_upstream_changes"))
    assert found.requests() == 0
    return found


def test_a_new_version_of_the_table_asks_for_one_refresh(automation: Automation):
    automation.published("1")
    assert automation.requests() == 1
    assert automation.requests() == 0
    automation.published("2")
    assert automation.requests() == 1


def test_a_table_that_is_published_again_as_it_was_asks_for_none(automation: Automation):
    automation.published("1")
    assert automation.requests() == 1
    automation.published("1")
    assert automation.requests() == 0


def test_a_version_that_comes_right_after_the_request_is_read_too(automation: Automation):
    """The run may have read the one before."""
    automation.published("1")
    assert automation.requests() == 1
    automation.published("2")
    assert [automation.requests(), automation.requests()] == [1, 0]


def test_a_version_that_comes_while_the_source_is_read_is_read_after_that(automation: Automation):
    automation.published("1")
    assert automation.requests() == 1
    run_id = reading(automation)
    automation.published("2")
    assert [automation.requests(), automation.requests()] == [0, 0]
    run = automation.instance.get_run_by_id(run_id)
    assert run is not None
    automation.instance.report_run_canceled(run)
    assert [automation.requests(), automation.requests()] == [1, 0]


def reading(automation: Automation) -> str:
    """A run of `prompts` that has begun; returns its id."""
    job = automation.defs.resolve_job_def("answers_refresh")
    run = create_run_for_test(automation.instance, "answers_refresh", status=dg.DagsterRunStatus.STARTED)
    planned = AssetMaterializationPlannedData(PROMPTS)
    event = dg.DagsterEvent(
        dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value, job.name, event_specific_data=planned
    )
    automation.instance.report_dagster_event(event, run.run_id)
    return run.run_id


def test_by_default_nothing_happens(instance: dg.DagsterInstance):
    plain = definitions()
    assert plain.resolve_asset_graph().get(PROMPTS).automation_condition is None
    assert not plain.sensors
    assert spec_version(spec("d", {"asset": "a"})) == spec_version(
        spec("d", {"asset": "a"}, refresh="when_upstream_changes")
    )


def test_its_sensor_is_on_and_its_runs_are_refreshes():
    (sensor,) = definitions(refresh="when_upstream_changes").sensors or ()
    assert isinstance(sensor, dg.AutomationConditionSensorDefinition)
    assert (sensor.name, sensor.default_status) == ("answers_refresh_automation", dg.DefaultSensorStatus.RUNNING)
    assert sensor.run_tags == {"batch/refresh": "answers", "batch/automatic": "true"}


def test_a_dataset_of_files_cannot_ask_for_it():
    with pytest.raises(SpecError, match="refresh: expected a source that is the table of another dataset or asset"):
        spec("d", {"path": "x.csv"}, refresh="when_upstream_changes")
