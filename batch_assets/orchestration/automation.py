"""`refresh: when_upstream_changes`: Dagster's declarative automation of a dataset that reads the table of another."""

from __future__ import annotations

import dagster as dg

from batch_assets.catalog import ledger
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.source import table_read_by
from batch_assets.tags import AUTOMATIC_TAG, REFRESH_TAG

SECONDS = 30


def refresh_condition(spec: GeneratedDatasetSpec) -> dg.AutomationCondition[dg.AssetKey] | None:
    """When `prompts` is to be materialized by itself: the table has a new version, and has had none since that was
    asked for last. One that comes while `prompts` reads is read after that. None: never."""
    table = table_read_by(spec.source)
    if spec.refresh is None or table is None:
        return None
    changed = dg.AutomationCondition.asset_matches(
        dg.AssetKey.from_user_string(table), dg.AutomationCondition.data_version_changed()
    )
    # At the tick after a request, a version that is new then came after it.
    read = dg.AutomationCondition.newly_requested() & ~changed
    waits = changed.since(read).with_label("the table has a new version")
    return waits & ~dg.AutomationCondition.in_progress()


def refresh_automation(spec: GeneratedDatasetSpec) -> list[dg.AutomationConditionSensorDefinition]:
    """The sensor that evaluates the condition: on from the start, to be switched off in the UI. Its runs are refreshes,
    so what is new is generated and published."""
    if spec.refresh is None:
        return []
    return [
        dg.AutomationConditionSensorDefinition(
            f"{spec.name}_refresh_automation",
            target=dg.AssetSelection.assets(ledger.prompts_key(spec.name)),
            run_tags={REFRESH_TAG: spec.name, AUTOMATIC_TAG: "true"},
            default_status=dg.DefaultSensorStatus.RUNNING,
            minimum_interval_seconds=SECONDS,
            description=f"Refreshes {spec.name} when the table that it reads has a new version.",
        )
    ]
