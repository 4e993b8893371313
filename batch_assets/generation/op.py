"""The GPU op: a contiguous range of batches in, one ledger entry per committed batch out."""

import contextlib
import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import dagster as dg
from pydantic import ValidationError

from batch_assets.asset_metadata.batch_rows import ShownBatches
from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.catalog import ledger
from batch_assets.catalog.catalog_reader import Catalog
from batch_assets.dagster_internals.event_batches import log_together
from batch_assets.dagster_internals.kept_connections import keep_connections
from batch_assets.dagster_internals.run_cancellation import cancellation_in_words
from batch_assets.gates.quality_gates import GateBounds, QualityGates, Rule, ScoreBound
from batch_assets.generation.engine_supervisor import DONE, WAITS, EngineSupervisor, StepKind, StepResult, failed
from batch_assets.generation.loop_thread import LoopThread
from batch_assets.generation.progress_report import ProgressReport, RunProgress
from batch_assets.generation.range_run import Intent, RangePlan, RangeRun, RunClaims, RunIdentity, plan_range
from batch_assets.generation.store_reads import StoreReads, silence, while_store_answers
from batch_assets.spec.endpoint_limits import endpoint_limits
from batch_assets.spec.gates import GatesSpec
from batch_assets.spec.judge import JudgeSpec
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.request_options import InvalidTag, begin_unless_busy, request_of, request_options, simulates
from batch_assets.tags import BACKFILL_TAG, ENDPOINT_TAG, REFUSED_TAG, REQUEST_TAG, ROWS_TAG
from gpu_runner.fleet_database.database import FleetDatabase, FleetDatabaseError, RunEnded
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.fleet_database.wait_reason import WaitKind, WaitReason
from gpu_runner.offers.offer import Objective
from gpu_runner.offers.workload import Workload
from gpu_runner.request_limits import NO_LIMITS
from gpu_runner.rows import Generation
from resources.engine_options import EngineOptions
from resources.fleet.resource import FleetConfigError, GpuFleet, Requirement
from resources.fleet.simulation import is_simulation
from resources.objects.opening import self_test
from resources.objects.store_health import Probe, StoreAway, StoreHealth
from resources.pricing.price_files import PricingError
from resources.store.dataset_store import BatchEntry, BatchFooter, DatasetStore, SnapshotManifest
from resources.store.row_condition import BadCondition

CatalogEntry = tuple[int, ledger.LedgerVersion]  # storage id of the newest event, and what it says

NEIGHBOURS = 100
WAIT_SECONDS = 0.2
CANCEL_SECONDS = 2.0
FLUSH_SECONDS = 2.0
REPORT_SECONDS = 2.0
MOST_ENTRIES = 500
WRITE_SECONDS = 600.0  # longer than any write: a second one must not begin beside it
WORK_SECONDS = 10.0
NAMED_BATCHES = 20


class RowsConfig(dg.Config):
    """Run config of the rows op. Without it a run generates what is missing and nothing else."""

    regenerate: bool = False
    redrive: bool = False
    redrive_error: str = ""  # only dead letters of this error
    only: str = ""  # the batches of the range that are meant, with spaces between them; "": all


class LedgerEntries:
    """Writes the ledger entries of what was committed since. In the main thread: a database write blocks no row.

    The first at once, then those of two seconds together: a write costs as much for one entry as for a dozen.
    """

    def __init__(self, context: dg.AssetExecutionContext, run: RangeRun) -> None:
        self.context, self.run, self._next = context, run, 0.0

    def write(self, *, all_of_them: bool = False) -> None:
        """At most `MOST_ENTRIES`: a lost lease is noticed also while batches come faster than they are written."""
        if not all_of_them and time.monotonic() < self._next:
            return
        found: list[BatchFooter] = []
        with contextlib.suppress(queue.Empty):
            while all_of_them or len(found) < MOST_ENTRIES:
                found.append(self.run.committed.get_nowait())
        if found:
            store, snapshot = self.run.store, self.run.manifest.snapshot
            events = (ledger.batch_event(store, one, snapshot, self.run.shown_rows(one.key)) for one in found)
            log_together(self.context, events)
            self._next = time.monotonic() + REPORT_SECONDS


def generate_rows(
    context: dg.AssetExecutionContext,
    spec: GeneratedDatasetSpec,
    folder: Path,
    store: DatasetStore,
    fleet: GpuFleet,
    config: RowsConfig,
) -> Iterator[None]:
    """Body of the `rows` asset: commits and reports batches as they complete, yields nothing.

    Raises dg.Failure naming the batches that are not committed at the end. Interrupting it gives the lease back once.
    """
    running: list[RangeRun] = []
    with cancellation_in_words(context, lambda: _canceled(store.dataset, running)):
        _generate_range(context, spec, folder, store, fleet, config, running)
    yield from ()


def keys_of(keys: Sequence[str], only: str) -> list[str]:
    """The batches of a range that its run is for. `only`: as in the run's config. Raises dg.Failure for others."""
    meant = frozenset(only.split())
    if unknown := meant - set(keys):
        raise dg.Failure(
            f"config `only`: expected batches of the run's range, {keys[0]} to {keys[-1]}, found {min(unknown)}",
            allow_retries=False,
        )
    return [key for key in keys if key in meant] if meant else list(keys)


def _canceled(dataset: str, running: Sequence[RangeRun]) -> str:
    """What a run says that somebody has ended."""
    done = "nothing was generated"
    if running:
        run = running[0]
        done = f"{run.batches - len(run.missing()):,} of its {run.batches:,} batches are committed, finished rows kept"
    return f"Canceled on request: {done}. `batch-assets run {dataset}` goes on from there"


def _generate_range(
    context: dg.AssetExecutionContext,
    spec: GeneratedDatasetSpec,
    folder: Path,
    store: DatasetStore,
    fleet: GpuFleet,
    config: RowsConfig,
    running: list[RangeRun],
) -> None:
    """`running` gets what is being generated, so that an interrupt finds how far it is."""
    keep_connections(context.instance, kept=1)  # a server has room for some hundred, and there may be as many runs
    keys = keys_of(context.partition_keys, config.only)
    manifest = _manifest(store)
    wanted = set(keys)
    entries = [entry for entry in store.entries(manifest.snapshot) if entry.key in wanted]
    gone = sorted(wanted - {entry.key for entry in entries})
    log_together(context, (ledger.empty_event(store.dataset, key, manifest.snapshot) for key in gone))
    with contextlib.ExitStack() as stack:
        fleet_db = stack.enter_context(fleet.open_database())
        heartbeat = fleet.heartbeat(fleet_db, context.run.run_id)
        stack.enter_context(heartbeat.beating(store.dataset, keys[0], keys[-1]))
        intent = Intent(
            context.run.root_run_id or context.run.run_id, config.regenerate, config.redrive, config.redrive_error
        )
        # Before the store is listed: what the catalog has by now is there, or it is lost.
        known = ledger.ledger_entries(context.instance, spec.name)
        versions = {key: version for key, (_, version) in known.items()}
        catalog = Catalog(context.instance, spec.name)
        conditions = _conditions(catalog, {key: known[key] for key in keys if key in known})
        plan = _planned(store, manifest, heartbeat, lambda: plan_range(store, entries, intent, versions, conditions))
        log_together(context, (ledger.batch_event(store, footer, manifest.snapshot) for footer in plan.done))
        if plan.todo:
            identity = RunIdentity(context.run.run_id, intent, (keys[0], keys[-1]), gaps=bool(config.only))
            objective = _join_request(context, spec, fleet_db)
            claims = RunClaims(fleet_db, context.run.run_id, store.dataset, heartbeat.ttl)
            run = RangeRun(
                store,
                manifest,
                plan,
                identity,
                fence=lambda: _may_write(fleet_db, heartbeat),
                claims=claims,
                reuse=spec.reuse,
                simulated=_is_simulation(context, spec, fleet, manifest),
                neighbours=_neighbours(catalog, store.entries(manifest.snapshot), known),
                user_elsewhere=_user_engine(spec, manifest.settings()) is not None,
                gates=None if config.redrive else _gates(spec, manifest, plan),
                scores=() if spec.judge is None else spec.judge.scores,
                shown=ShownBatches(manifest.batches) if spec.show_samples else None,
            )
            running.append(run)
            need = _requirement(context, spec, run, objective, WorkloadEstimator(spec, store, folder).look)
            _generate(context, fleet, fleet_db, heartbeat, need, run)


def _planned(
    store: DatasetStore, manifest: SnapshotManifest, heartbeat: Heartbeat, plan: Callable[[], RangePlan]
) -> RangePlan:
    """The plan, made while the store is there: a folder whose mount is gone lists no batch, and all would be made anew.

    Raises dg.Failure when the store stays away.
    """
    health = StoreHealth()

    def is_there() -> bool:
        return store.objects.exists(store.snapshot_path(manifest.snapshot, "manifest.json"))

    def note(words: str) -> None:
        heartbeat.tell(words, WaitReason(WaitKind.STORE) if words else None)

    with contextlib.closing(StoreReads(health, is_there)) as reads:
        try:
            return while_store_answers(lambda: reads.look(plan), is_there, note=note, health=health)
        except StoreAway as error:
            raise dg.Failure(str(error), allow_retries=False) from None


def _is_simulation(
    context: dg.AssetExecutionContext, spec: GeneratedDatasetSpec, fleet: GpuFleet, manifest: SnapshotManifest
) -> bool | None:
    """Whether the rows will be a simulator's; None where there is no engine to be had, which is said later."""
    generation = manifest.settings()
    options = _engine_options(spec, generation)
    try:
        return is_simulation(fleet.config(), generation.model, generation.task, _endpoint(context), options)
    except FleetConfigError:
        return None


def _endpoint(context: dg.AssetExecutionContext) -> str | None:
    return context.run.tags.get(ENDPOINT_TAG) or os.environ.get("BATCH_ASSETS_ENDPOINT")


def bounds_of(gates: GatesSpec, rows: int, run_rows: int, judge: JudgeSpec | None = None) -> GateBounds:
    """The gates of a dataset of so many rows, for a run that has some of them: the more there are, the longer is the
    stretch of bad rows that trips them."""
    length, similar, score = gates.length, gates.near_repeated, None
    if judge is not None and gates.min_judge_score is not None:
        score = ScoreBound(tuple(judge.scores), *judge.bounds, gates.min_judge_score)
    return GateBounds(
        dead=gates.max_dead_rate,
        invalid=gates.max_invalid_rate,
        empty=gates.max_empty_rate,
        cut=gates.max_cut_rate,
        refused=gates.max_refused_rate,
        repeated=gates.max_repeated_rate,
        near_repeated=None if similar is None else similar.max_rate,
        similarity=1.0 if similar is None else similar.similarity,
        length=None if length is None else length.max_rate,
        letters=(0, None) if length is None else (length.min_letters, length.max_letters),
        wrong_language=None if gates.language is None else gates.language.max_rate,
        languages=() if gates.language is None else tuple(gates.language.allowed),
        phrases=tuple(gates.refusals),
        rules=tuple(Rule(name, one.where, one.max_rate) for name, one in gates.rules.items()),
        least_rows=max(gates.least_rows, min(rows // 200, run_rows // 10)),
        score=score,
    )


def _gates(spec: GeneratedDatasetSpec, manifest: SnapshotManifest, plan: RangePlan) -> QualityGates:
    """Raises dg.Failure, before anything is rented for them."""
    settings = manifest.settings()
    bounds = bounds_of(spec.gates, manifest.rows, sum(work.entry.rows for work in plan.todo), spec.judge)
    try:
        return QualityGates(bounds, max_tokens=settings.most_tokens, json_schema=settings.json_schema)
    except BadCondition as error:
        raise dg.Failure(f"{spec.name}: gates: {error}", allow_retries=False) from None


def _conditions(catalog: Catalog, known: Mapping[str, CatalogEntry]) -> dict[str, str]:
    """Which rows are asked again of those batches that are to be made anew, by their keys."""
    found = catalog.fetch([number for number, version in known.values() if version.anew])
    return {key: found[number].where for key, (number, _) in known.items() if number in found and found[number].where}


def _neighbours(catalog: Catalog, entries: Sequence[BatchEntry], known: Mapping[str, CatalogEntry]) -> frozenset[bool]:
    """Whether batches of the snapshot are simulated, and whether any that the catalog has are not.

    The newest ones tell, for a refresh marks all simulated batches before a real row is written: a run reads as little
    of the catalog for 80,000 batches as for 100.
    """
    written = {key: entry for key, entry in known.items() if not entry[1].void}
    versions = {entry.key: entry.data_version for entry in entries}
    current = {number for key, (number, version) in written.items() if versions.get(key) == version.data_version}
    asked = {*sorted(current)[-NEIGHBOURS:], *sorted(number for number, _ in written.values())[-NEIGHBOURS:]}
    found = catalog.fetch(sorted(asked))
    simulated = {True for number, report in found.items() if number in current and report.simulated}
    return frozenset(simulated | {False for report in found.values() if report.simulated is False})


def _manifest(store: DatasetStore) -> SnapshotManifest:
    snapshot = store.current_snapshot()
    if snapshot is None:
        raise dg.Failure(f"no snapshot in the store; materialize {store.dataset}/prompts first")
    return store.manifest(snapshot)


def _generate(
    context: dg.AssetExecutionContext,
    fleet: GpuFleet,
    fleet_db: FleetDatabase,
    heartbeat: Heartbeat,
    need: Requirement,
    run: RangeRun,
) -> None:
    """Engine after engine until every batch is committed; what cannot be cured fails the run with what is missing.

    A run whose engine refuses every request says so in a tag: the launcher starts none like it.
    """
    self_test(run.store.objects)  # no GPU is held with nowhere safe to write
    heartbeat.rows_done = lambda: run.progress().rows_done
    result, written = DONE, LedgerEntries(context, run)
    with contextlib.closing(run), rare_collections(), LoopThread() as loop, probed(run, loop):
        try:
            if _needs_engine(written, loop, run, heartbeat):
                supervisor = _supervisor(context, fleet, fleet_db, heartbeat, need, run, loop)
                result = _serve(context, run, written, supervisor, ProgressReport(run.rows, time.monotonic), fleet_db)
        except (FleetConfigError, PricingError, RunEnded, StoreAway) as error:
            result = failed(error)
        finally:
            flushing = loop.submit(run.flush())
            if flushing.wait(FLUSH_SECONDS):
                with contextlib.suppress(Exception):  # a store that is away; why the run ends is said below
                    flushing.result()
            written.write(all_of_them=True)
    if missing := run.missing():
        if result.refused:
            context.instance.add_run_tags(context.run.run_id, {REFUSED_TAG: context.run.run_id})
        named = ", ".join(missing[:NAMED_BATCHES]) + (" …" if len(missing) > NAMED_BATCHES else "")
        raise dg.Failure(
            f"{len(missing)} of {run.batches} batches are not committed: {named}. {result.failure}",
            metadata={"missing_batches": len(missing)},
            allow_retries=False,
        )


def probed(run: RangeRun, loop: LoopThread, seconds: float = 5.0) -> Probe:
    """Watches the run's store every so many seconds."""

    def write() -> None:
        writing = loop.submit(run.write_again())
        if writing.wait(WRITE_SECONDS):
            writing.result()

    return Probe(run.health, run.store_is_there, write, seconds)


def _join_request(context: dg.AssetExecutionContext, spec: GeneratedDatasetSpec, fleet_db: FleetDatabase) -> Objective:
    """The run's objective. Its request is written down, unless another one is under way: its budget holds at once.

    The capacity sensor decides which request counts when there are several.
    """
    run = context.run
    request = request_of(run.root_run_id or run.run_id, run.tags)
    try:
        wanted = request_options(spec, run.tags)
        begin_unless_busy(fleet_db, spec, request, run.tags)
    except InvalidTag as error:
        raise dg.Failure(f"{error}. Start it again with another tag.", allow_retries=False) from None
    return wanted.objective


def _requirement(
    context: dg.AssetExecutionContext,
    spec: GeneratedDatasetSpec,
    run: RangeRun,
    objective: Objective,
    work: Callable[[], Workload],
) -> Requirement:
    """What the run needs of an engine. The model is that of the snapshot, which `batch-assets run --model` may set."""
    hardware = spec.hardware
    return Requirement(
        dataset=run.store.dataset,
        model=run.generation.model,
        task=run.generation.task,
        endpoint=_endpoint(context),
        accept=hardware.accept(),
        objective=objective,
        max_model_len=hardware.max_model_len,
        declared=spec.declared(run.generation.model),
        engine=_engine_options(spec, run.generation),
        simulate=simulates(context.run.tags),
        limits=endpoint_limits(context.run.tags) if _endpoint(context) else NO_LIMITS,
        batches=True,
        user_engine=_user_engine(spec, run.generation),
        user_model="" if (asked := run.generation.of_user_elsewhere) is None else asked.model,
        work=Remembered(lambda: _work(context, run, work), WORK_SECONDS),
    )


def _user_engine(spec: GeneratedDatasetSpec, generation: Generation) -> str | None:
    """The engine that plays the user, where that is not the one that answers. Its name is no part of the snapshot, as
    its model is: raises dg.Failure where the spec does not name it for the snapshot's model.
    """
    asked, user = generation.of_user_elsewhere, spec.prompt.user_model
    if asked is None:
        return None
    if user is not None and user.engine is not None:
        if user.model == asked.model:
            return user.engine
        found = f"{user.model} on engine {user.engine}"
    else:
        adapters = (one.name for one in _engine_options(spec, generation).adapters)
        if asked.model in (generation.model, generation.asked_model, *adapters):
            return None
        found = "no engine of fleet.yaml for it"
    raise dg.Failure(
        f"prompt.user_model: expected {asked.model}, which plays the user of this snapshot, found {found} in the "
        "dataset's file. Start a refresh, or put back what the file said when the snapshot was made.",
        allow_retries=False,
    )


def _engine_options(spec: GeneratedDatasetSpec, generation: Generation) -> EngineOptions:
    """The engine's arguments: those that change answers are the snapshot's, as its row keys are."""
    try:
        return spec.engine.with_identity(generation.engine or {})
    except ValidationError as error:
        keys = ", ".join(str(one["loc"][0]) for one in error.errors(include_url=False) if one["loc"])
        raise dg.Failure(
            f"engine: expected arguments that this version knows in the snapshot, found others ({keys}). "
            "Start a refresh, or run the version that made the snapshot.",
            allow_retries=False,
        ) from None


def _work(context: dg.AssetExecutionContext, run: RangeRun, look: Callable[[], Workload]) -> Workload:
    """What an instance is rented for: the rest of the dataset when that was asked for, else (also in a trial) this
    run's rows.

    An instance passes from run to run, so its boot is shared. Rows that are generated anew are missing nowhere.
    """
    whole, own = look(), max(1, run.rows - run.progress().rows_done)
    asked_for = context.run.tags.keys() & {REQUEST_TAG, BACKFILL_TAG} and ROWS_TAG not in context.run.tags
    return replace(whole, rows=max(own, whole.rows) if asked_for else own)


def _may_write(fleet_db: FleetDatabase, heartbeat: Heartbeat) -> bool:
    """This run is known as living. The database is asked: a process that was stopped wakes up knowing nothing."""
    try:
        return fleet_db.beat(heartbeat.run_id, heartbeat.state, heartbeat.activity, heartbeat.rows_done())
    except FleetDatabaseError:
        return False


class Remembered:
    """An answer that costs a listing of the store, asked for again after some seconds. For several threads."""

    def __init__(self, look: Callable[[], Workload], seconds: float) -> None:
        self._look, self._seconds = look, seconds
        self._guard = threading.Lock()
        self._until = 0.0
        self._found: Workload | None = None

    def __call__(self) -> Workload:
        with self._guard:
            if self._found is None or time.monotonic() >= self._until:
                self._found = self._look()
                self._until = time.monotonic() + self._seconds
            return self._found


def _supervisor(
    context: dg.AssetExecutionContext,
    fleet: GpuFleet,
    fleet_db: FleetDatabase,
    heartbeat: Heartbeat,
    need: Requirement,
    run: RangeRun,
    loop: LoopThread,
) -> EngineSupervisor:
    return EngineSupervisor(
        fleet.client(fleet_db, heartbeat, need),
        heartbeat,
        need,
        run,
        loop,
        say=context.log.info,
        warn=context.log.warning,
        decided=lambda decision: context.log_event(ledger.move_event(need.dataset, decision)),
        leased=lambda leased: context.log_event(ledger.lease_event(need.dataset, leased)),
        given_back=lambda leased, why: context.log_event(ledger.bill_event(need.dataset, leased, why)),
        paused=lambda trip: context.log_event(ledger.gate_event(need.dataset, trip)),
    )


def _serve(
    context: dg.AssetExecutionContext,
    run: RangeRun,
    written: LedgerEntries,
    supervisor: EngineSupervisor,
    progress: ProgressReport,
    fleet_db: FleetDatabase,
) -> StepResult:
    """Until nothing is missing, or the run cannot go on: the result says why. Leaves no request in flight, no lease."""
    dataset = run.store.dataset

    def tell(report: RunProgress) -> None:
        found = replace(report, usd_spent=_spent(fleet_db, dataset))
        words, rate = found.sentence(), found.rows_per_second
        context.log_event(
            ledger.progress_event(
                dataset, found.rows_done, found.rows, rate, words, found.seconds_left, found.usd_spent
            )
        )

    try:
        while (result := supervisor.step()).kind is StepKind.CONTINUE:
            written.write()
            if found := progress.due(run.progress().rows_done, supervisor.heartbeat.activity.note):
                tell(found)
            supervisor.wait(WAIT_SECONDS)
        tell(progress.last(run.progress().rows_done, result.failure))
        return result
    finally:
        supervisor.end()


def _spent(fleet_db: FleetDatabase, dataset: str) -> float | None:
    """US dollars that the request under way has cost by its last plan; None without one."""
    try:
        target = fleet_db.target(dataset)
    except FleetDatabaseError:
        return None
    return None if target is None or target.plan is None else target.plan.usd_spent


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Fewer, cheaper garbage collections: thousands of live requests made them a third of the CPU per row."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _needs_engine(written: LedgerEntries, loop: LoopThread, run: RangeRun, heartbeat: Heartbeat) -> bool:
    """Commit what is complete without an engine (journal, copies of earlier objects); True when rows are left.

    While another run holds all that is left, this waits: no engine is rented beside it. It waits for a store that is
    away too, for as long as a run that generates. Raises RunEnded, StoreAway.
    """
    preparing = loop.submit(run.prepare())
    try:
        while not preparing.wait(WAIT_SECONDS):
            written.write()
            if words := silence(run.health):
                heartbeat.tell(words, WaitReason(WaitKind.STORE))
            else:
                _tell_of_other_runs(run, heartbeat)
            if heartbeat.ended.is_set():
                raise RunEnded(heartbeat.run_id)
        heartbeat.tell("")
        return preparing.result()
    finally:
        preparing.cancel(CANCEL_SECONDS)


def _tell_of_other_runs(run: RangeRun, heartbeat: Heartbeat) -> None:
    if run.waits:
        heartbeat.tell(WAITS, WaitReason(WaitKind.OTHER_RUN))
    else:
        heartbeat.tell("")
