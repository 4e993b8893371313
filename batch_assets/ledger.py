"""The ledger: one AssetMaterialization per committed batch, and the few ways in which we read it.

The store decides what is done; the catalog says so to people and to Dagster. Everything that leans on Dagster
internals stands here, and `tests/test_ledger.py` fails when they change.
"""

from __future__ import annotations

from dataclasses import dataclass

import dagster as dg

from batch_assets.clock_scale import scale_words
from resources.leased import LeasedEngine
from resources.moving import Decision
from resources.store import BatchFooter, BatchObject, DatasetStore

CODE_VERSION = "1"
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
RETRY_NUMBER_TAG = "dagster/retry_number"
PRIORITY_TAG = "dagster/priority"


@dataclass(frozen=True, slots=True)
class LedgerVersion:
    """What an entry says of its batch. As a tag: the data version, with `-gN` from the first further generation on.

    Other rows for the same prompts are other data to whoever reads them, so Dagster shows the table as stale after a
    regenerate or re-drive.
    """

    data_version: str
    generation: int

    @property
    def tag(self) -> str:
        """Value of Dagster's data version tag."""
        return f"{self.data_version}-g{self.generation}" if self.generation else self.data_version

    @classmethod
    def parse(cls, tag: str) -> LedgerVersion:
        """Inverse of `tag`; a foreign value is a version that no snapshot asks for."""
        version, separator, generation = tag.rpartition("-g")
        return cls(version, int(generation)) if separator and generation.isdigit() else cls(tag, 0)


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
        "reused": dg.MetadataValue.int(footer.reused),
        "prompt_tokens": dg.MetadataValue.int(footer.prompt_tokens),
        "completion_tokens": dg.MetadataValue.int(footer.completion_tokens),
        "seconds": dg.MetadataValue.float(round(footer.seconds, 3)),
        **({} if footer.usd is None else {"usd": dg.MetadataValue.float(round(footer.usd, 8))}),
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
        tags=version_tags(store.dataset, LedgerVersion(footer.data_version, footer.generation).tag, snapshot),
    )


def empty_event(dataset: str, key: str, snapshot: str) -> dg.AssetMaterialization:
    """The entry of a batch that has no rows any more: without it a backfill over its key would end as failed."""
    return dg.AssetMaterialization(
        asset_key=rows_key(dataset),
        partition=key,
        metadata={"rows": dg.MetadataValue.int(0), "dagster/partition_row_count": dg.MetadataValue.int(0)},
        tags=version_tags(dataset, EMPTY_VERSION, snapshot),
    )


def move_event(dataset: str, decision: Decision) -> dg.AssetObservation:
    """Why a run moved to another instance, and what that saves; an observation, because no batch changed."""
    old, new = decision.old, decision.new
    return dg.AssetObservation(
        asset_key=rows_key(dataset),
        description=decision.sentence,
        metadata={
            "decision": dg.MetadataValue.text("move"),
            "instance": dg.MetadataValue.text(decision.instance),
            "from": dg.MetadataValue.text(old.name),
            "to": dg.MetadataValue.text(new.name),
            "from_usd_per_hour": dg.MetadataValue.float(old.price_per_hour),
            "to_usd_per_hour": dg.MetadataValue.float(new.price_per_hour),
            "from_tokens_per_second": dg.MetadataValue.float(round(decision.old_tokens_per_second, 1)),
            "to_tokens_per_second": dg.MetadataValue.float(round(decision.new_tokens_per_second, 1)),
            "boot_seconds": dg.MetadataValue.float(new.boot_seconds),
            "tokens_left": dg.MetadataValue.int(round(decision.tokens_left)),
            "saved_usd": dg.MetadataValue.float(round(decision.saved_usd, 6)),
            "reason": dg.MetadataValue.text(decision.sentence),
        },
    )


def lease_event(dataset: str, leased: LeasedEngine) -> dg.AssetObservation:
    """Which instance a run leased, at which price, and why this one."""
    return dg.AssetObservation(
        asset_key=rows_key(dataset),
        description=f"{leased.name}: {leased.why}",
        metadata={
            "decision": dg.MetadataValue.text("lease"),
            **_instance(leased),
            "reason": dg.MetadataValue.text(leased.why),
        },
    )


def bill_event(dataset: str, leased: LeasedEngine, reason: str) -> dg.AssetObservation:
    """What a lease did and cost until it was given back: the speed is that of the provider's clock."""
    spent = leased.spending.spent()
    price = leased.spending.usd_per_second or 0.0
    tokens = spent.prompt_tokens + spent.completion_tokens
    seconds = spent.useful_seconds * leased.clock
    return dg.AssetObservation(
        asset_key=rows_key(dataset),
        description=f"{leased.name} given back: {reason}",
        metadata={
            "decision": dg.MetadataValue.text("give back"),
            **_instance(leased),
            "rows": dg.MetadataValue.int(spent.rows),
            "prompt_tokens": dg.MetadataValue.int(spent.prompt_tokens),
            "completion_tokens": dg.MetadataValue.int(spent.completion_tokens),
            "tokens_per_second": dg.MetadataValue.float(round(tokens / seconds, 1) if seconds else 0.0),
            "useful_usd": dg.MetadataValue.float(round(spent.useful_seconds * price, 8)),
            "wasted_usd": dg.MetadataValue.float(round(spent.wasted_seconds * price, 8)),
            "reason": dg.MetadataValue.text(reason),
        },
    )


def _instance(leased: LeasedEngine) -> dict[str, dg.MetadataValue]:
    assert leased.offer is not None
    scale = scale_words({leased.offer.provider: leased.clock})
    return {
        "instance": dg.MetadataValue.text(leased.name),
        "epoch": dg.MetadataValue.int(leased.epoch),
        "offer": dg.MetadataValue.text(leased.offer.name),
        "gpu": dg.MetadataValue.text(f"{leased.offer.gpus}x {leased.offer.gpu}"),
        "usd_per_hour": dg.MetadataValue.float(leased.offer.price_per_hour),
        **({"clock": dg.MetadataValue.text(scale)} if scale else {}),
    }


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


def ledger_versions(instance: dg.DagsterInstance, dataset: str) -> dict[str, LedgerVersion]:
    """Newest entry of every batch in the catalog: 0.04 s at 10,000 keys, as only one indexed tag is read."""
    tags = instance.event_log_storage.get_latest_tags_by_partition(
        rows_key(dataset), dg.DagsterEventType.ASSET_MATERIALIZATION, tag_keys=[DATA_VERSION_TAG]
    )
    return {key: LedgerVersion.parse(found[DATA_VERSION_TAG]) for key, found in tags.items()}


def will_be_retried(run: dg.DagsterRun) -> bool:
    """True for a failed run whose automatic retry Dagster has promised but not yet started."""
    return run.tags.get(WILL_RETRY_TAG) == "true" and RETRY_RUN_TAG not in run.tags
