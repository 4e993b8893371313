"""The assets of a dataset: source → prompts → rows → dataset, dead_letters. Policy that they share stands here once.

No postponed annotations in modules with Dagster decorators: Dagster reads the classes of config and resources.
"""

import datetime
import functools
import itertools
import operator
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import dagster as dg

from batch_assets import ledger
from batch_assets.card import MEANING, Card
from batch_assets.checks import check_results, check_specs
from batch_assets.clock_scale import scale_words
from batch_assets.curve import curve_markdown
from batch_assets.dead_letters import dead_letters
from batch_assets.ingest import source_name
from batch_assets.launcher import ENDPOINT_TAG, REFRESH_TAG
from batch_assets.moments import Deadline, clock_changes, next_moments, parse_deadline
from batch_assets.planning import Surroundings, propose
from batch_assets.prompts import build_snapshot
from batch_assets.publish import IncompleteSnapshot, PublishedTable, publish
from batch_assets.reconcile import empty_store, reconcile
from batch_assets.rows import RowsConfig, generate_rows
from batch_assets.source_errors import SourceError
from batch_assets.spec import GeneratedDatasetSpec
from batch_assets.wishes import WISH_TAGS, WishError, begin_unless_busy
from batch_assets.work_in_hand import WorkInHand
from gpu_runner.accounts import Split
from gpu_runner.fleet import FleetBook
from gpu_runner.model_names import name_problem
from gpu_runner.providers.base import ProviderError, ProviderUnclear
from resources.fleet import FleetConfigError, GpuFleet
from resources.objects import self_test, temporary_folder
from resources.price_files import PricingError
from resources.store import BatchStore, DatasetStore, SnapshotManifest

SCHEDULE_TICKS = 60
SOME_MONDAY = 1_704_067_200.0  # 2024-01-01: schedules are looked at from here, whenever the code is loaded
WEEK = 7 * 86400.0
DAYS_OF_A_YEAR = 366
KEY_CHUNK = 10_000  # one INSERT of 80,000 keys fails on Postgres and on some SQLite builds


class PromptsConfig(dg.Config):
    """Run config of `prompts`."""

    model: str | None = None


def _about(spec: GeneratedDatasetSpec, what: str, kinds: set[str]) -> dict[str, Any]:
    """What every asset of the dataset says of itself."""
    description = f"{spec.description}\n\n{what}" if spec.description else what
    owners = list(spec.owners)
    return {"group_name": spec.name, "owners": owners, "tags": spec.tags, "kinds": kinds, "description": description}


def partitions(dataset: str) -> dg.DynamicPartitionsDefinition:
    """One partition per batch, in batch order."""
    return dg.DynamicPartitionsDefinition(name=dataset)


def source_asset(spec: GeneratedDatasetSpec) -> dg.AssetSpec:
    """Where the rows come from: shown in the lineage, never materialized here."""
    path = spec.source.path
    kinds = {"yaml"} if path is None else {spec.source.format or _ending(path)}
    if path is not None and path.lower().startswith("s3://"):
        kinds.add("s3")
    return dg.AssetSpec(
        key=[spec.name, "source"],
        group_name=spec.name,
        kinds=kinds,
        description=f"Read by `prompts`: {source_name(spec)}.",
    )


def _ending(path: str) -> str:
    """Format in a file name, without what packed it."""
    endings = [ending.lstrip(".") for ending in PurePosixPath(path.lower()).suffixes]
    return next((ending for ending in reversed(endings) if ending.isalnum() and ending not in ("gz", "zst")), "file")


def prompts_asset(spec: GeneratedDatasetSpec, code_version: str, base: Path) -> dg.AssetsDefinition:
    """The source as read once. Costs no GPU money. Relative paths of the source start at `base`."""

    @dg.asset(
        key=ledger.prompts_key(spec.name),
        deps=[dg.AssetKey([spec.name, "source"])],
        code_version=code_version,
        **_about(
            spec, "The source, rendered into prompts and cut into batches. Costs no GPU time.", {"parquet", "jinja"}
        ),
    )
    def prompts(
        context: dg.AssetExecutionContext, config: PromptsConfig, store: BatchStore, fleet: GpuFleet
    ) -> dg.MaterializeResult:
        if config.model and (problem := name_problem(config.model)):
            raise dg.Failure(f"run config: model: expected a model as the engine knows it, but {problem}")
        wanted = spec.model_copy(update={"model": config.model}) if config.model else spec
        data = store.dataset(spec.name)
        started = time.monotonic()
        try:
            refuse_empty_store(context.instance, data)  # before anything is written there
            self_test(data.objects)
            with temporary_folder() as folder, fleet.alive(context.run.run_id, spec.name, "reading the source") as book:
                if endpoint := context.run.tags.get(ENDPOINT_TAG):
                    fleet.config().engines_for(wanted.model, endpoint)  # refused here, before anything is begun
                if REFRESH_TAG in context.run.tags:
                    begin_unless_busy(book, spec, context.run.run_id, context.run.tags)
                manifest = build_snapshot(wanted, data, now=time.time(), workdir=folder, base=base)
                register_batches(context.instance, data, manifest)
                for sentence in reconcile(context.instance, data):
                    context.log.warning(sentence)
                ensure_pool(context.instance, spec.name, book.instances(spec.name) + 1)
                planned = plan_metadata(context, wanted, base, data, fleet, book)
        except (SourceError, WishError, FleetConfigError) as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        return dg.MaterializeResult(
            data_version=dg.DataVersion(manifest.snapshot),
            metadata=snapshot_metadata(data, manifest) | planned | {"seconds": round(time.monotonic() - started, 3)},
        )

    return prompts


def refuse_empty_store(instance: dg.DagsterInstance, store: DatasetStore) -> None:
    """A disk that is not mounted looks like a new store: nothing is paid twice for that. Raises SourceError."""
    versions = ledger.ledger_versions(instance, store.dataset).values()
    known = sum(not version.void for version in versions)
    if known and next(store.objects.list(f"{store.dataset}/"), None) is None:
        raise SourceError(empty_store(store, known))


def plan_metadata(
    context: dg.AssetExecutionContext,
    spec: GeneratedDatasetSpec,
    folder: Path,
    store: DatasetStore,
    fleet: GpuFleet,
    book: FleetBook,
) -> dict[str, Any]:
    """What the rows that are missing now would cost, and by when they would be there: before anything is rented.

    A plan that cannot be made is no reason to fail: then it says why.
    """
    try:
        work = WorkInHand(spec, store, folder).look()
        if not work.rows:
            return {"plan": "nothing is missing"}
        wished = {tag: context.run.tags[tag] for tag in WISH_TAGS if tag in context.run.tags}
        found = propose(Surroundings.look(fleet, book), book, spec, work, wished)
    except (FleetConfigError, PricingError, ProviderError, ProviderUnclear) as error:
        return {"plan": f"no plan: {error}"}
    target, chosen = found.target, found.plan.chosen
    said: dict[str, Any] = {
        "plan": found.plan.reason,
        "plan_curve": dg.MetadataValue.md(curve_markdown(found.plan, target.deadline, target.budget_usd)),
        "plan_feasible": found.plan.feasible,
        **({"clock": scale} if (scale := scale_words(found.clocks)) else {}),
    }
    if chosen is not None:
        said["plan_instances"] = found.plan.instances
        said |= {"plan_usd_p50": round(chosen.usd.p50, 6), "plan_usd_p95": round(chosen.usd.p95, 6)}
        said |= {
            "plan_hours_p50": round(chosen.finish.p50 / 3600, 6),
            "plan_hours_p95": round(chosen.finish.p95 / 3600, 6),
        }
    return said


def register_batches(instance: dg.DagsterInstance, store: DatasetStore, manifest: SnapshotManifest) -> None:
    """Add partition keys at the tail, in batch order. Keys are never deleted: that would kill a live backfill."""
    known = set(instance.get_dynamic_partitions(store.dataset))
    new = [entry.key for entry in store.entries(manifest.snapshot) if entry.key not in known]
    for start in range(0, len(new), KEY_CHUNK):
        instance.add_dynamic_partitions(store.dataset, new[start : start + KEY_CHUNK])


def set_pool(instance: dg.DagsterInstance, pool: str, slots: int) -> None:
    """Give the pool so many slots; written only when that is another number."""
    storage = instance.event_log_storage
    if next((one.limit for one in storage.get_pool_limits() if one.name == pool), None) != slots:
        storage.set_concurrency_slots(pool, slots)


def ensure_pool(instance: dg.DagsterInstance, pool: str, slots: int) -> None:
    """Create the pool unless it is there: its limit does not hold on the first dequeue otherwise."""
    storage = instance.event_log_storage
    if pool not in {limit.name for limit in storage.get_pool_limits()}:
        storage.set_concurrency_slots(pool, slots)


def snapshot_metadata(store: DatasetStore, manifest: SnapshotManifest) -> dict[str, Any]:
    """Counts of the snapshot; numbers stay numbers, Dagster plots them."""

    def file(name: str) -> dg.PathMetadataValue:
        return dg.MetadataValue.path(store.objects.uri(store.snapshot_path(manifest.snapshot, name)))

    counts = ("rows", "batches", "source_rows", "rejected", "duplicates", "added", "changed", "removed", "unchanged")
    found: dict[str, Any] = {
        **{name: getattr(manifest, name) for name in counts},
        "dagster/row_count": manifest.rows,
        "snapshot": manifest.snapshot,
        "model": str(manifest.generation["model"]),
        "manifest": file("manifest.json"),
    }
    return found | ({"rejects": file("rejects.parquet")} if manifest.rejected else {})


def rows_asset(spec: GeneratedDatasetSpec, folder: Path) -> dg.AssetsDefinition:
    """The batches, generated by the GPU op."""

    @dg.asset(
        key=ledger.rows_key(spec.name),
        deps=[ledger.prompts_key(spec.name)],
        partitions_def=partitions(spec.name),
        backfill_policy=dg.BackfillPolicy.multi_run(spec.batches_per_run),
        pool=spec.name,
        output_required=False,
        code_version=ledger.CODE_VERSION,
        **_about(spec, _rows_text(spec), {"vllm", "parquet"}),
    )
    def rows(
        context: dg.AssetExecutionContext, config: RowsConfig, store: BatchStore, fleet: GpuFleet
    ) -> Iterator[Any]:
        yield from generate_rows(context, spec, folder, store.dataset(spec.name), fleet, config)

    return rows


def _rows_text(spec: GeneratedDatasetSpec) -> str:
    return (
        f"Batches of {spec.batch_rows} rows, written by {spec.model}. There are no partitions until `prompts` has been "
        f"materialized. The job `{spec.name}_refresh` does everything: it reads the source, then what is missing is "
        "generated and published by itself."
    )


def freshness(spec: GeneratedDatasetSpec) -> dg.FreshnessPolicy | None:
    """By when analysts may expect a new table: where a schedule refreshes it and each refresh has a deadline.

    A cron policy where the deadline is a schedule itself and each of its moments has a refresh of its own; else the
    longest time between two tables.
    """
    if spec.schedule is None or spec.deadline is None:
        return None
    deadline = parse_deadline(spec.deadline, spec.timezone)
    if deadline.moment is not None:
        return None
    # Also where the clock is set: a day of 23 hours has the shortest time between two tables, one of 25 the longest.
    changes = clock_changes(spec.timezone, SOME_MONDAY, DAYS_OF_A_YEAR)
    found = [
        _pace(spec.schedule, deadline, since, spec.timezone)
        for since in (SOME_MONDAY, *(one - WEEK for one in changes))
    ]
    longest = max(one.longest for one in found)
    if deadline.cron is not None and all(one.paired for one in found):
        bound = datetime.timedelta(seconds=round(min(longest, *(one.shortest_gap for one in found))))
        return dg.FreshnessPolicy.cron(deadline_cron=deadline.cron, lower_bound_delta=bound, timezone=spec.timezone)
    between = max(one.between for one in found)
    return dg.FreshnessPolicy.time_window(fail_window=datetime.timedelta(seconds=round(between + longest)))


@dataclass(frozen=True, slots=True)
class _Pace:
    """Seconds: the longest from a refresh to its deadline, the longest between two refreshes, the shortest between two
    deadlines. `paired`: each deadline has a refresh of its own."""

    longest: float
    between: float
    shortest_gap: float
    paired: bool


def _pace(schedule: str, deadline: Deadline, since: float, zone: str) -> _Pace:
    """How refreshes and deadlines follow each other from `since` on."""
    ticks = next_moments(schedule, since, SCHEDULE_TICKS, zone)
    due = [deadline.at(tick) for tick in ticks]
    longest = max(at - tick for at, tick in zip(due, ticks, strict=True))
    between = max(later - earlier for earlier, later in itertools.pairwise(ticks))
    if deadline.cron is None:
        return _Pace(longest, between, longest, paired=False)
    moments = next_moments(deadline.cron, since, SCHEDULE_TICKS, zone)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    seen = {one for one in moments[1:] if one <= ticks[-1]}
    return _Pace(longest, between, min(gaps), paired=bool(seen) and set(due) >= seen)


def table_asset(spec: GeneratedDatasetSpec) -> dg.AssetsDefinition:
    """The published table, with its checks."""
    key = ledger.table_key(spec.name)

    @dg.asset(
        key=key,
        deps=[ledger.rows_key(spec.name)],
        check_specs=check_specs(spec, key),
        freshness_policy=freshness(spec),
        **_about(spec, "The table: one line per source row, in a few large Parquet files.", {"parquet", "table"}),
    )
    def dataset(context: dg.AssetExecutionContext, store: BatchStore, fleet: GpuFleet) -> dg.MaterializeResult:
        data = store.dataset(spec.name)
        manifest = current_manifest(data)
        tags = [f"{key}:{value}" for key, value in spec.tags.items()]
        journal = data.ordinary_journal()  # garbage if the snapshot is complete now; what comes later is not ours
        try:
            with (
                temporary_folder() as folder,
                fleet.alive(context.run.run_id, spec.name, "publishing the table") as book,
            ):
                target = book.target(spec.name)  # as it is when the last row is there
                bill = bill_of(book, spec.name)
                card = Card(spec.description or "", spec.owners, tags, bill)
                table = publish(data, manifest, card=card, now=time.time(), workdir=folder)
                versions = ledger.ledger_versions(context.instance, spec.name)
                checks = check_results(spec, data, manifest, table, versions, target)
        except IncompleteSnapshot as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        data.objects.delete(journal)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(table.version), metadata=table_metadata(data, table, bill), check_results=checks
        )

    return dataset


def current_manifest(store: DatasetStore) -> SnapshotManifest:
    """The snapshot that is current now. Raises dg.Failure before the first."""
    snapshot = store.current_snapshot()
    if snapshot is None:
        raise dg.Failure(
            f"{store.dataset}: no snapshot in the store; materialize {store.dataset}/prompts first",
            allow_retries=False,
        )
    return store.manifest(snapshot)


def bill_of(book: FleetBook, dataset: str) -> Split | None:
    """US dollars of all instances rented for a dataset, by what they went into; None when there were none."""
    parts = [charge.usd for charge in book.charges() if charge.dataset == dataset]
    return functools.reduce(operator.add, parts) if parts else None


def table_metadata(store: DatasetStore, table: PublishedTable, bill: Split | None) -> dict[str, Any]:
    """Counts, schema, cost and places of a published table. `usd` is the useful part of the bill."""
    counts = ("rows", "ok", "dead", "duplicates", "batches", "prompt_tokens", "completion_tokens", "bytes")
    columns = [
        dg.TableColumn(column.name, column.type, description=MEANING.get(column.name, "column of the source"))
        for column in table.columns
    ]
    found: dict[str, Any] = {
        **{name: getattr(table, name) for name in counts},
        "dagster/row_count": table.rows,
        "dagster/column_schema": dg.TableSchema(columns),
        "dagster/uri": table.uri(store.objects),
        "snapshot": table.snapshot,
        "files": dg.MetadataValue.path(table.glob(store.objects)),
        "simulated": table.simulated,
    }
    billed = {} if bill is None else {"usd_billed": round(bill.total, 6), "usd_useful": round(bill.useful, 6)}
    return found | ({"usd": table.usd} if table.usd is not None else {}) | billed


def dead_letters_asset(spec: GeneratedDatasetSpec) -> dg.AssetsDefinition:
    """The rows without a completion."""

    @dg.asset(
        key=[spec.name, "dead_letters"],
        deps=[ledger.rows_key(spec.name)],
        **_about(spec, "Rows without a completion, with reason, tries and instance.", {"parquet"}),
    )
    def dead_letter_list(context: dg.AssetExecutionContext, store: BatchStore, fleet: GpuFleet) -> dg.MaterializeResult:
        data = store.dataset(spec.name)
        with fleet.alive(context.run.run_id, spec.name, "listing the dead letters"):
            found = dead_letters(data, current_manifest(data))
        return dg.MaterializeResult(
            data_version=dg.DataVersion(found.version),
            metadata={
                "rows": found.rows,
                "dagster/row_count": found.rows,
                "batches": len(found.batches),
                "by_error": dg.MetadataValue.json(dict(found.by_error)),
                "by_instance_type": dg.MetadataValue.json(dict(found.by_instance_type)),
                "file": dg.MetadataValue.path(data.objects.uri(found.path)),
                "snapshot": found.snapshot,
            },
        )

    return dead_letter_list
