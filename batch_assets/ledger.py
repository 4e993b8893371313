"""The ledger: one AssetMaterialization per committed batch, and the few ways in which we read it.

The store decides what is done; the catalog says so to people and to Dagster. Everything that leans on Dagster
internals stands here, and `tests/test_ledger.py` fails when they change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import dagster as dg

from resources.store import BatchFooter, BatchObject, DatasetStore

CODE_VERSION = "1"
GENERATION_TAG = "batch/generation"
EMPTY_VERSION = "no-rows"

# Names of Dagster's own tags (dagster/_core/definitions/data_version.py, dagster/_core/storage/tags.py).
# An event carries all five of the first group, or its staleness is wrong for ever.
DATA_VERSION_TAG = "dagster/data_version"
CODE_VERSION_TAG = "dagster/code_version"
INPUT_DATA_VERSION_TAG = "dagster/input_data_version"
INPUT_EVENT_POINTER_TAG = "dagster/input_event_pointer"
USER_PROVIDED_TAG = "dagster/data_version_is_user_provided"
PARTITION_TAG = "dagster/partition"
RANGE_START_TAG = "dagster/asset_partition_range_start"
RANGE_END_TAG = "dagster/asset_partition_range_end"
WILL_RETRY_TAG = "dagster/will_retry"
RETRY_RUN_TAG = "dagster/auto_retry_run_id"


def rows_key(dataset: str) -> dg.AssetKey:
    """Asset key of the dataset's batches."""
    return dg.AssetKey([dataset, "rows"])


def prompts_key(dataset: str) -> dg.AssetKey:
    """Asset key of the dataset's snapshots."""
    return dg.AssetKey([dataset, "prompts"])


def batch_event(store: DatasetStore, footer: BatchFooter, snapshot: str) -> dg.AssetMaterialization:
    """The ledger entry of a committed batch, made from its footer alone: reporting it again gives the same entry."""
    batch = BatchObject(footer.key, footer.data_version, footer.generation)
    metadata: dict[str, dg.MetadataValue] = {
        "dagster/partition_row_count": dg.MetadataValue.int(footer.rows),
        "rows": dg.MetadataValue.int(footer.rows),
        "ok": dg.MetadataValue.int(footer.ok),
        "dead": dg.MetadataValue.int(footer.dead),
        "prompt_tokens": dg.MetadataValue.int(footer.prompt_tokens),
        "completion_tokens": dg.MetadataValue.int(footer.completion_tokens),
        "seconds": dg.MetadataValue.float(round(footer.seconds, 3)),
        "rows_per_second": dg.MetadataValue.float(round(footer.rows / footer.seconds, 3) if footer.seconds else 0.0),
        "model": dg.MetadataValue.text(footer.model),
        "engine": dg.MetadataValue.text(footer.engine),
        "generation": dg.MetadataValue.int(footer.generation),
        "run": dg.MetadataValue.dagster_run(footer.run_id),
        "object": dg.MetadataValue.path(store.objects.uri(store.batch_path(batch))),
    }
    return dg.AssetMaterialization(
        asset_key=rows_key(store.dataset),
        partition=footer.key,
        metadata=metadata,
        tags=version_tags(store.dataset, footer.data_version, snapshot) | {GENERATION_TAG: str(footer.generation)},
    )


def empty_event(dataset: str, key: str, snapshot: str) -> dg.AssetMaterialization:
    """The entry of a batch that has no rows any more: without it a backfill over its key would end as failed."""
    return dg.AssetMaterialization(
        asset_key=rows_key(dataset),
        partition=key,
        metadata={"rows": dg.MetadataValue.int(0), "dagster/partition_row_count": dg.MetadataValue.int(0)},
        tags=version_tags(dataset, EMPTY_VERSION, snapshot),
    )


def version_tags(dataset: str, data_version: str, snapshot: str) -> dict[str, str]:
    """The tags from which Dagster computes staleness of a hand-logged event."""
    upstream = prompts_key(dataset).to_user_string()
    return {
        DATA_VERSION_TAG: data_version,
        CODE_VERSION_TAG: CODE_VERSION,
        f"{INPUT_DATA_VERSION_TAG}/{upstream}": snapshot,
        f"{INPUT_EVENT_POINTER_TAG}/{upstream}": "NULL",
        USER_PROVIDED_TAG: "true",
    }


@dataclass(frozen=True, slots=True)
class LedgerVersion:
    """What the newest entry of a batch says."""

    data_version: str
    generation: int


def ledger_versions(instance: dg.DagsterInstance, dataset: str) -> dict[str, LedgerVersion]:
    """Newest entry of every batch in the catalog: 0.04 s at 10,000 keys, as only tags are read."""
    tags: Mapping[str, Mapping[str, str]] = instance.event_log_storage.get_latest_tags_by_partition(
        rows_key(dataset),
        dg.DagsterEventType.ASSET_MATERIALIZATION,
        tag_keys=[DATA_VERSION_TAG, GENERATION_TAG],
    )
    return {
        key: LedgerVersion(found[DATA_VERSION_TAG], int(found.get(GENERATION_TAG, "0")))
        for key, found in tags.items()
        if DATA_VERSION_TAG in found
    }


def will_be_retried(run: dg.DagsterRun) -> bool:
    """True for a failed run whose automatic retry Dagster has promised but not yet started."""
    return run.tags.get(WILL_RETRY_TAG) == "true" and RETRY_RUN_TAG not in run.tags
