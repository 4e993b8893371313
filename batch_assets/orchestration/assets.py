"""The assets of a dataset: source → prompts → rows → dataset, dead_letters. Policy that they share stands here once.

No postponed annotations in modules with Dagster decorators: Dagster reads the classes of config and resources.
"""

import functools
import hashlib
import operator
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import dagster as dg

from batch_assets import settings
from batch_assets.asset_metadata.materialization import (
    column_lineage,
    export_metadata,
    judged_metadata,
    passed_metadata,
    reuse_metadata,
    shown_rows,
    snapshot_metadata,
    table_metadata,
    view_link,
)
from batch_assets.capacity_planning.clock_scale import scale_words
from batch_assets.capacity_planning.cost_curve import curve_markdown
from batch_assets.capacity_planning.planner_input import FleetView, propose
from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.catalog import ledger
from batch_assets.catalog.publications import ledger_state
from batch_assets.dagster_internals.kept_connections import keep_connections
from batch_assets.dagster_internals.run_cancellation import cancellation_in_words
from batch_assets.exports.declared_export import export_declared, is_exported
from batch_assets.filtering.passed_table import PassedStore, filtered, is_current
from batch_assets.filtering.wanted_rows import rounds_follow, wanted_rows
from batch_assets.generation.op import RowsConfig, generate_rows
from batch_assets.generation.range_plan import vector_length
from batch_assets.generation.store_reads import while_store_answers
from batch_assets.judging.judged_table import is_current as votes_are_counted
from batch_assets.judging.judged_table import judged, rows_store
from batch_assets.orchestration.active_request import begin_or_go_on, request_under_way, same_chain
from batch_assets.orchestration.asset_checks import check_results, check_specs
from batch_assets.orchestration.automation import refresh_condition
from batch_assets.orchestration.chain_shares import step_tags
from batch_assets.orchestration.freshness import freshness
from batch_assets.orchestration.made_anew import Regeneration, mark, settle_simulated
from batch_assets.orchestration.reconcile import empty_store, reconcile, void_publications
from batch_assets.orchestration.source_place import (
    PartOfSource,
    at_its_place,
    part_of_source,
    refuse_simulated,
    store_of,
)
from batch_assets.orchestration.trial import trial_rows, wanted_entries
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.dead_letters import dead_letters
from batch_assets.publishing.publish import IncompleteSnapshot, publish
from batch_assets.publishing.published_table import published_table
from batch_assets.snapshot.builder import build_snapshot, delete_streamed
from batch_assets.snapshot.reuse import ReusableRows, find_reusable, refuse_unknown
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.chain import wanting
from batch_assets.spec.discovery import Datasets, declarations, known_datasets
from batch_assets.spec.endpoint_limits import endpoint_limits
from batch_assets.spec.errors import SpecError
from batch_assets.spec.export_options import ExportError
from batch_assets.spec.exports import ExportSpec
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.request_options import OPTION_TAGS, InvalidTag, begin, begin_unless_busy, simulates
from batch_assets.spec.row_rules import WantSpec, rules_digest
from batch_assets.spec.source import TABLE, SourceSpec
from batch_assets.tags import CHAIN_TAG, ENDPOINT_TAG, REFRESH_TAG, REGENERATE_TAG, STREAMING_TAG, UPSTREAM_TAG
from gpu_runner.fleet_database.accounting.bill_split import Split
from gpu_runner.fleet_database.database import FleetDatabase, FleetDatabaseError
from gpu_runner.models.names import name_problem
from gpu_runner.planner.types import ControlTiming
from gpu_runner.providers.base import ProviderError, ProviderUnclear
from resources.fleet.resource import FleetConfigError, GpuFleet
from resources.fleet.simulation import is_simulation
from resources.objects.opening import self_test, temporary_folder
from resources.objects.store_health import StoreAway
from resources.pricing.price_files import PricingError
from resources.store.dataset_store import BatchStore, DatasetStore, SnapshotManifest
from resources.store.reusable_answers import ReusableAnswers
from resources.store.row_condition import BadCondition

KEY_CHUNK = 10_000  # one INSERT of 80,000 keys fails on Postgres and on some SQLite builds


class PromptsConfig(dg.Config):
    """Run config of `prompts`."""

    model: str | None = None


def _about(spec: GeneratedDatasetSpec, what: str, kinds: set[str]) -> dict[str, Any]:
    """What every asset of the dataset says of itself."""
    description = f"{spec.description}\n\n{what}" if spec.description else what
    owners = list(spec.owners)
    return {"group_name": spec.name, "owners": owners, "tags": spec.tags, "kinds": kinds, "description": description}


def _asset(**options: Any) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """`dg.asset`; its types cannot be told apart when some of its arguments come from `_about`."""
    return cast("Callable[[Callable[..., Any]], dg.AssetsDefinition]", dg.asset(**options))


def partitions(dataset: str) -> dg.DynamicPartitionsDefinition:
    """One partition per batch, in batch order."""
    return dg.DynamicPartitionsDefinition(name=dataset)


def prompts_asset(
    spec: GeneratedDatasetSpec, code_version: str, base: Path, broken: SpecError | None = None
) -> dg.AssetsDefinition:
    """The source as read once. Costs no GPU money. Relative paths of the source start at `base`.

    `broken`: why the spec is not the one that stands in its file now. Then nothing is read.
    """

    @_asset(
        key=ledger.prompts_key(spec.name),
        deps=[dg.AssetKey([spec.name, "source"])],
        code_version=code_version,
        automation_condition=refresh_condition(spec),
        **_about(
            spec, "The source, rendered into prompts and cut into batches. Costs no GPU time.", {"parquet", "jinja"}
        ),
    )
    def prompts(
        context: dg.AssetExecutionContext, config: PromptsConfig, store: BatchStore, fleet: GpuFleet
    ) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster looks for the bare name
        if broken is not None:
            raise dg.Failure(str(broken), allow_retries=False)
        if config.model and (problem := name_problem(config.model)):
            raise dg.Failure(f"run config: model: expected a model as the engine knows it, but {problem}")
        wanted = spec.model_copy(update={"model": config.model}) if config.model else spec
        data = _opened(context, store, spec.name)
        started = time.monotonic()

        def answers() -> bool:
            data.objects.exists(f"{spec.name}/snapshots/CURRENT")  # before the first snapshot there is none
            return True

        try:
            with cancellation_in_words(context, lambda: _canceled(spec.name)):
                manifest, planned = while_store_answers(
                    lambda: read_source(context, wanted, base, data, fleet),
                    answers,
                    note=lambda words: context.log.warning(words or "the store answers again"),
                )
        except (SourceError, InvalidTag, FleetConfigError, StoreAway, BadCondition) as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        return dg.MaterializeResult(
            data_version=dg.DataVersion(manifest.snapshot),
            metadata=snapshot_metadata(data, manifest) | planned | {"seconds": round(time.monotonic() - started, 3)},
        )

    return prompts


def read_source(
    context: dg.AssetExecutionContext, spec: GeneratedDatasetSpec, base: Path, store: DatasetStore, fleet: GpuFleet
) -> tuple[SnapshotManifest, dict[str, Any]]:
    """Make the snapshot current, register its batches, compare catalog and store; returns it with the plan's metadata.

    Raises SourceError, InvalidTag, FleetConfigError.
    """
    tags, part = dict(context.run.tags), None
    if STREAMING_TAG not in tags:
        spec = at_its_place(spec, context.instance, store.objects)
    refuse_empty_store(context.instance, store)  # before anything is written there
    self_test(store.objects)
    _refuse_unknown_reuse(spec, store)
    with temporary_folder() as folder, fleet.alive(context.run.run_id, spec.name, "reading the source") as fleet_db:
        if STREAMING_TAG in tags:
            part = _committed_so_far(context, spec, store, folder)
            spec = part.spec
        if endpoint := tags.get(ENDPOINT_TAG):
            fleet.config().engines_for(spec.model, endpoint, spec.engine)  # refused here, before anything is begun
        if REFRESH_TAG in tags:
            trial_rows(tags)  # refused here, before anything is begun
            endpoint_limits(tags)
            if spec.want is not None:  # its rounds are a chain of their own, where they are not steps of another one
                tags = {UPSTREAM_TAG: spec.accepted_by} | tags
            if UPSTREAM_TAG in tags:
                tags |= _share_of_chain(context, {spec.name: (spec, base)}, tags, store, fleet_db)
        known = fleet_db.target(spec.name)
        goes_on = known is not None and same_chain(context.instance, known.request, tags.get(CHAIN_TAG))
        if REFRESH_TAG in tags and not goes_on:
            busy = request_under_way(context.instance, fleet_db, spec, store, base) is not None
            (begin_unless_busy if busy else begin)(fleet_db, spec, context.run.run_id, tags)
        so_far = None if part is None else part.so_far
        wanted = wanted_rows(spec, store, {name: one for name, (one, _) in known_datasets().items()})
        manifest = build_snapshot(spec, store, now=time.time(), workdir=folder, base=base, so_far=so_far, wanted=wanted)
        found = _found_reusable(store, manifest, spec.reuse, folder / "reuse") if spec.reuse else None
        register_batches(context.instance, store, manifest)
        for sentence in reconcile(context.instance, store):
            context.log.warning(sentence)
        if outdated(store, spec, base):
            _publish_again(context.instance, store, manifest)
        if REFRESH_TAG in tags:
            settle_engine(context, spec, store, fleet, manifest, part)
            if goes_on:  # only now: the rows so far are under the request before until they have a successor
                begin_or_go_on(context.instance, fleet_db, spec, context.run.run_id, tags)
        ensure_pool(context.instance, spec.name, fleet_db.instances(spec.name) + 1)
        planned = plan_metadata(context, spec, base, store, fleet, fleet_db, tags)
        return manifest, planned | ({} if found is None else reuse_metadata(found))


def _committed_so_far(
    context: dg.AssetExecutionContext, spec: GeneratedDatasetSpec, store: DatasetStore, folder: Path
) -> PartOfSource:
    """What a step of a chain reads while the step before is made. Raises InvalidTag, SourceError."""
    found = known_datasets().get(spec.source.dataset or "")
    if found is None or not spec.source.streaming:
        raise InvalidTag(STREAMING_TAG, f"expected a dataset with source.streaming, found {spec.name}")
    place = folder / "so_far"
    place.mkdir()
    return part_of_source(spec, found[0], context.instance, store.objects, place)


def outdated(store: DatasetStore, spec: GeneratedDatasetSpec, base: Path) -> bool:
    """Whether what is made of the published table is not there as the spec says it now."""
    if spec.judge is not None and not votes_are_counted(store, spec.judge):
        return True
    rules, rows = spec.rules, rows_store(spec, store)
    if rules is not None and not is_current(rows, rules, base, PassedStore(store), _want_of(spec)):
        return True
    return not all(is_exported(store, export, base) for export in spec.exports)


def _want_of(spec: GeneratedDatasetSpec) -> WantSpec | None:
    """How many of the rows that pass here are wanted: by the dataset itself, or by one before it."""
    found = wanting(_specs_with(spec), spec.name)
    return None if found is None else found.want


def _specs_with(spec: GeneratedDatasetSpec) -> dict[str, GeneratedDatasetSpec]:
    """Those of all datasets; one that is declared in Python stands in no file."""
    return {name: one for name, (one, _) in known_datasets().items()} | {spec.name: spec}


def _publish_again(instance: dg.DagsterInstance, store: DatasetStore, manifest: SnapshotManifest) -> None:
    """Have the table published again where it was for this snapshot, as its filter or an export is another one, or lost
    files. The table's own files stay; no row is asked."""
    entries, versions = store.entries(manifest.snapshot), ledger.ledger_versions(instance, store.dataset)
    if not ledger.missing(entries, versions):
        void_publications(instance, store.dataset, ledger_state(manifest.snapshot, entries, versions), "success")


def _share_of_chain(
    context: dg.AssetExecutionContext,
    step: Datasets,
    tags: Mapping[str, str],
    store: DatasetStore,
    fleet_db: FleetDatabase,
) -> dict[str, str]:
    """Tags of a run that is a step of a chain, with its deadline and its budget. Its range runs get them from it."""
    (name,), last = step, tags[UPSTREAM_TAG]
    known = step | known_datasets()  # a dataset that is declared in Python stands in no file
    found = {UPSTREAM_TAG: last} | step_tags(
        context.instance, fleet_db, context.run, name, last, known, lambda one: DatasetStore(store.objects, one)
    )
    context.instance.add_run_tags(context.run.run_id, found)
    return found


def settle_engine(
    context: dg.AssetExecutionContext,
    spec: GeneratedDatasetSpec,
    store: DatasetStore,
    fleet: GpuFleet,
    manifest: SnapshotManifest,
    part: PartOfSource | None = None,
) -> None:
    """Before anything is rented: is there an engine for what is missing, and does it go with the rows there are?

    `part`: what was read of a dataset that is not complete. Raises FleetConfigError, SourceError, InvalidTag.
    """
    tags = context.run.tags
    again = Regeneration.of_tag(tags[REGENERATE_TAG]) if REGENERATE_TAG in tags else None
    endpoint = tags.get(ENDPOINT_TAG) or os.environ.get("BATCH_ASSETS_ENDPOINT")
    config, simulate = fleet.config(), simulates(tags)
    entries = store.entries(manifest.snapshot)
    # First: a simulator that nobody asked for is no engine, and no reason to speak of rows that were made up.
    if again is not None or ledger.missing(entries, ledger.ledger_versions(context.instance, spec.name)):
        config.check_asked(spec.model, endpoint, simulate=simulate)
    said = settle_simulated(
        context.instance,
        store,
        manifest.snapshot,
        lambda: is_simulation(config, spec.model, spec.task, endpoint, spec.engine),
        regenerates=again is not None,
    )
    if said:
        context.log.warning(said)
    if spec.source.dataset is not None and (
        again is not None or ledger.missing(entries, ledger.ledger_versions(context.instance, spec.name))
    ):
        read = _read_table(spec.source, manifest, store) if part is None else part.simulated
        refuse_simulated(
            spec.source.dataset, read, lambda: is_simulation(config, spec.model, spec.task, endpoint, spec.engine)
        )
    if again is not None:
        wanted = wanted_entries(entries, tags)
        context.log.warning(mark(context.instance, store, manifest.snapshot, wanted, again))


def _read_table(source: SourceSpec, manifest: SnapshotManifest, store: DatasetStore) -> bool:
    """Whether a simulator wrote some of the table of another dataset that a snapshot has read."""
    table = published_table(store_of(source, store.objects), manifest.upstream_version)
    return table is not None and table.simulated


def _refuse_unknown_reuse(spec: GeneratedDatasetSpec, store: DatasetStore) -> None:
    """Raise SourceError for a name of `reuse` that is of no dataset. Of one that is declared in Python nobody knows
    which others are."""
    declared = known_datasets()
    if spec.reuse and spec.name in declared:
        broken = {name for file in declarations().broken for name in file.names}
        refuse_unknown(spec.reuse, {*declared, *broken}, store.objects)


def _found_reusable(
    store: DatasetStore, manifest: SnapshotManifest, reuse: bool | Sequence[str], workdir: Path
) -> ReusableRows:
    length = vector_length(store, manifest, reuse)
    return find_reusable(store, manifest, reuse, workdir=workdir, vector_length=length)


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
    fleet_db: FleetDatabase,
    tags: Mapping[str, str],
) -> dict[str, Any]:
    """What the rows that are missing now would cost, and by when they would be there: before anything is rented.

    A plan that cannot be made is no reason to fail: then it says why.
    """
    try:
        versions = ledger.ledger_versions(context.instance, spec.name)
        work = WorkloadEstimator(spec, store, folder).look([key for key, found in versions.items() if found.anew])
        if not work.rows:
            return {"plan": "nothing is missing"}
        wished = {tag: tags[tag] for tag in OPTION_TAGS if tag in tags}
        timing = ControlTiming.of_sensor(settings.capacity_seconds())
        if REFRESH_TAG in tags:  # `read_source` has settled what is under way before it began
            request = fleet_db.target(spec.name)
        else:
            request = request_under_way(context.instance, fleet_db, spec, store, folder)
        found = propose(FleetView.look(fleet, fleet_db), fleet_db, spec, work, wished, timing, request)
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


def _model_kind(spec: GeneratedDatasetSpec) -> str:
    """What makes the rows. Not which engine: that is up to fleet.yaml, and may be another one at each run."""
    return "embedding" if spec.task == "embedding" else "llm"


def rows_asset(spec: GeneratedDatasetSpec, folder: Path) -> dg.AssetsDefinition:
    """The batches, generated by the GPU op."""

    @_asset(
        key=ledger.rows_key(spec.name),
        deps=[ledger.prompts_key(spec.name)],
        partitions_def=partitions(spec.name),
        backfill_policy=dg.BackfillPolicy.multi_run(spec.batches_per_run),
        pool=spec.name,
        output_required=False,
        code_version=ledger.CODE_VERSION,
        **_about(spec, _rows_text(spec), {_model_kind(spec), "parquet"}),
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
        "generated and published by itself. A batch whose rows have changed since is materialized, too: the check "
        "`batches_current` of `dataset` counts these."
    )


def table_asset(spec: GeneratedDatasetSpec, base: Path) -> dg.AssetsDefinition:
    """The published table, with its checks. Files of the prompt start at `base`."""
    key = ledger.table_key(spec.name)

    @_asset(
        key=key,
        deps=[ledger.rows_key(spec.name)],
        check_specs=check_specs(spec, key),
        freshness_policy=freshness(spec),
        **_about(spec, "The table: one line per source row, in a few large Parquet files.", {"parquet", "table"}),
    )
    def dataset(context: dg.AssetExecutionContext, store: BatchStore, fleet: GpuFleet) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster looks for the bare name
        data = _opened(context, store, spec.name)
        reusable = ReusableAnswers(data.objects, spec.name, spec.reuse).paths()  # of this snapshot or older ones
        manifest = current_manifest(data)
        if manifest.streaming is not None:
            said = f"{manifest.streaming} of {spec.source.dataset} are read: there is no table before all are there"
            raise dg.Failure(f"{spec.name}: {said}", allow_retries=False)
        tags = [f"{key}:{value}" for key, value in spec.tags.items()]
        # Garbage if the snapshot is complete now; what comes later is not ours.
        garbage = data.journal.ordinary_segments() + reusable
        try:
            with (
                cancellation_in_words(context, lambda: _canceled(spec.name)),
                temporary_folder() as folder,
                fleet.alive(context.run.run_id, spec.name, "publishing the table") as fleet_db,
            ):
                target = fleet_db.target(spec.name)  # as it is when the last row is there
                bill, standing = bill_of(fleet_db, spec.name), paid_now(fleet_db, spec.name)
                simulated = bill_of(fleet_db, spec.name, fleet.simulated_providers(fleet_db))
                card = Card(spec.description or "", spec.owners, tags, bill, spec.show_samples, standing, simulated)
                table = publish(
                    data,
                    manifest,
                    card=card,
                    now=time.time(),
                    workdir=folder,
                    include_prompt=spec.include_prompt,
                    output_columns=spec.output.columns,
                )
                versions = ledger.ledger_versions(context.instance, spec.name)
                checks = check_results(spec, data, manifest, table, versions, target)
                if _lives(fleet_db, context.run.run_id):  # else its successor deletes what is garbage by then
                    data.objects.delete(garbage)
                    if spec.source.streaming:
                        delete_streamed(data)
                shown = shown_rows(data, table, samples=spec.show_samples)
                shown |= view_link(table) | table_metadata(data, table, bill, final=not standing)
                shown |= column_lineage(spec, base, table)
        except IncompleteSnapshot as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        return dg.MaterializeResult(
            data_version=dg.DataVersion(table.version),
            metadata=shown,
            check_results=checks,
        )

    return dataset


def judged_asset(spec: GeneratedDatasetSpec) -> dg.AssetsDefinition:
    """The rows that a dataset with a judge has judged, with what the votes say."""

    @_asset(
        key=ledger.judged_key(spec.name),
        deps=[ledger.table_key(spec.name)],
        **_about(spec, "The judged rows, one line each, with what the votes say.", {"parquet"}),
    )
    def counted(context: dg.AssetExecutionContext, store: BatchStore, fleet: GpuFleet) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster looks for the bare name
        data = _opened(context, store, spec.name)
        try:
            with (
                cancellation_in_words(context, lambda: _canceled(spec.name)),
                temporary_folder() as workdir,
                fleet.alive(context.run.run_id, spec.name, "counting votes"),
            ):
                table, report = judged(data, spec, now=time.time(), workdir=workdir)
        except BadCondition as error:
            raise dg.Failure(f"{spec.name}: {error}", allow_retries=False) from None
        return dg.MaterializeResult(
            data_version=dg.DataVersion(table.version),
            metadata=judged_metadata(data, table, report, samples=spec.show_samples),
        )

    return counted


def passed_asset(spec: GeneratedDatasetSpec, folder: Path) -> dg.AssetsDefinition:
    """The rows of the table that pass the filter, with those that fall out beside them."""
    rules = spec.rules
    assert rules is not None, "a dataset without a filter has no such asset"

    @_asset(
        key=ledger.passed_key(spec.name),
        deps=[ledger.table_key(spec.name) if spec.judge is None else ledger.judged_key(spec.name)],
        code_version=rules_digest(rules, spec.want),
        **_about(spec, "The rows of the table that pass the filter. Those that fall out lie beside.", {"parquet"}),
    )
    def passed(context: dg.AssetExecutionContext, store: BatchStore, fleet: GpuFleet) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster looks for the bare name
        data = _opened(context, store, spec.name)
        try:
            with (
                cancellation_in_words(context, lambda: _canceled(spec.name)),
                temporary_folder() as workdir,
                fleet.alive(context.run.run_id, spec.name, "filtering the table"),
            ):
                rows, target = rows_store(spec, data), PassedStore(data)
                table, report = filtered(
                    rows, rules, base=folder, now=time.time(), workdir=workdir, target=target, want=_want_of(spec)
                )
        except BadCondition as error:
            raise dg.Failure(f"{spec.name}: {error}", allow_retries=False) from None
        return dg.MaterializeResult(
            data_version=dg.DataVersion(table.version),
            metadata=passed_metadata(data, table, report, samples=spec.show_samples, judged=spec.judge is not None),
        )

    return passed


def export_asset(spec: GeneratedDatasetSpec, export: ExportSpec, folder: Path) -> dg.AssetsDefinition:
    """Files that are made of the table, of the rows that pass the filter, or of the judged ones. While too few rows are
    accepted, which the filter says, the files are neither pushed nor appended."""
    made_of = dg.AssetKey([spec.name, export.part or TABLE])
    once = export.push is not None or export.appends
    counted = [ledger.passed_key(spec.name)] if once and spec.rules is not None else []

    @_asset(
        key=ledger.export_key(spec.name, export.name),
        deps=list(dict.fromkeys([made_of, *counted])),
        code_version=hashlib.sha256(export.model_dump_json(exclude_defaults=True).encode()).hexdigest()[:16],
        **_about(spec, f"The table as files of the form {export.format}.", {"file"}),
    )
    def files(context: dg.AssetExecutionContext, store: BatchStore, fleet: GpuFleet) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster looks for the bare name
        data = _opened(context, store, spec.name)
        try:
            with (
                cancellation_in_words(context, lambda: _canceled(spec.name)),
                fleet.alive(context.run.run_id, spec.name, f"writing the export {export.name}"),
            ):
                final = not rounds_follow(spec.name, data.objects, _specs_with(spec))
                written = export_declared(data, export, base=folder, of=spec, final=final)
        except ExportError as error:
            raise dg.Failure(f"{spec.name}: exports: {export.name}: {error}", allow_retries=False) from None
        return dg.MaterializeResult(data_version=dg.DataVersion(written.version), metadata=export_metadata(written))

    return files


def _opened(context: dg.AssetExecutionContext, store: BatchStore, dataset: str) -> DatasetStore:
    """The dataset's store. From here on the run keeps its connection to Dagster's database: one, as a server has room
    for some hundred, and there may be as many runs.
    """
    keep_connections(context.instance, kept=1)
    return store.dataset(dataset)


def _canceled(dataset: str) -> str:
    return f"Canceled on request: nothing that was there is changed. `batch-assets run {dataset}` does it again"


def _lives(fleet_db: FleetDatabase, run_id: str) -> bool:
    """The run is known as living. The database is asked: a process that was stopped wakes up knowing nothing."""
    try:
        beat = fleet_db.run_beat(run_id)
    except FleetDatabaseError:
        return False
    return beat is not None and beat.state != "ended"


def current_manifest(store: DatasetStore) -> SnapshotManifest:
    """The snapshot that is current now. Raises dg.Failure before the first."""
    snapshot = store.current_snapshot()
    if snapshot is None:
        raise dg.Failure(
            f"no snapshot in the store; materialize {store.dataset}/prompts first",
            allow_retries=False,
        )
    return store.manifest(snapshot)


def bill_of(fleet_db: FleetDatabase, dataset: str, providers: Container[str] | None = None) -> Split | None:
    """US dollars of all instances rented for a dataset, by what they went into; None when there were none.

    `providers`: only theirs.
    """
    parts = [charge.usd for charge in fleet_db.charges_of(dataset) if providers is None or charge.provider in providers]
    return functools.reduce(operator.add, parts) if parts else None


def paid_now(fleet_db: FleetDatabase, dataset: str) -> int:
    """How many instances that the dataset pays for have not ended."""
    return sum(one.payer == dataset for one in fleet_db.fleet())


def dead_letters_asset(spec: GeneratedDatasetSpec) -> dg.AssetsDefinition:
    """The rows without a completion."""

    @_asset(
        key=[spec.name, "dead_letters"],
        deps=[ledger.rows_key(spec.name)],
        **_about(spec, "Rows without a completion, with reason, tries and instance.", {"parquet"}),
    )
    def dead_letter_list(context: dg.AssetExecutionContext, store: BatchStore, fleet: GpuFleet) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster looks for the bare name
        data = _opened(context, store, spec.name)
        with (
            cancellation_in_words(context, lambda: _canceled(spec.name)),
            fleet.alive(context.run.run_id, spec.name, "listing the dead letters"),
        ):
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
