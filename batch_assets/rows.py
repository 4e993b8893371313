"""The GPU op: a contiguous range of batches in, one ledger entry per committed batch out (DESIGN section 5)."""

import contextlib
import gc
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import dagster as dg

from batch_assets import ledger
from batch_assets.crew import WAITS, Crew
from batch_assets.launcher import ENDPOINT_TAG, REQUEST_TAG
from batch_assets.loop_thread import LoopThread
from batch_assets.range_run import Intent, RangeRun, RunClaims, RunIdentity, plan_range
from batch_assets.spec import GeneratedDatasetSpec
from batch_assets.wishes import BACKFILL_TAG, WishError, begin_unless_busy, request_of, wishes
from batch_assets.work_in_hand import WorkInHand
from gpu_runner.fleet import BookError, FleetBook, RunEnded
from gpu_runner.heart import Heart
from gpu_runner.offers import Objective
from gpu_runner.workload import Workload
from resources.fleet import FleetConfigError, GpuFleet, Requirement
from resources.objects import self_test
from resources.price_files import PricingError
from resources.store import DatasetStore, SnapshotManifest
from resources.store_health import Probe

WAIT_SECONDS = 0.2
CANCEL_SECONDS = 2.0
FLUSH_SECONDS = 2.0
REPORT_SECONDS = 1.0
WRITE_SECONDS = 600.0  # longer than any write: a second one must not begin beside it
WORK_SECONDS = 10.0
NAMED_BATCHES = 20


class RowsConfig(dg.Config):
    """Run config of the rows op. Without it a run generates what is missing and nothing else."""

    regenerate: bool = False
    redrive: bool = False


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
    keys = list(context.partition_keys)
    manifest = _manifest(store)
    wanted = set(keys)
    entries = [entry for entry in store.entries(manifest.snapshot) if entry.key in wanted]
    for key in sorted(wanted - {entry.key for entry in entries}):
        context.log_event(ledger.empty_event(store.dataset, key, manifest.snapshot))
    with contextlib.ExitStack() as stack:
        book = stack.enter_context(fleet.open_book())
        heart = fleet.heart(book, context.run.run_id)
        stack.enter_context(heart.beating(store.dataset, keys[0], keys[-1]))
        intent = Intent(context.run.root_run_id or context.run.run_id, config.regenerate, config.redrive)
        # Before the store is listed: what the catalog has by now is there, or it is lost.
        versions = ledger.ledger_versions(context.instance, spec.name)
        plan = plan_range(store, entries, intent, versions)
        for footer in plan.done:
            context.log_event(ledger.batch_event(store, footer, manifest.snapshot))
        if plan.todo:
            identity = RunIdentity(context.run.run_id, intent, (keys[0], keys[-1]))
            objective = _join_request(context, spec, book)
            claims = RunClaims(book, context.run.run_id, store.dataset, heart.ttl)
            run = RangeRun(store, manifest, plan, identity, fence=lambda: _may_write(book, heart), claims=claims)
            need = _requirement(context, spec, run, objective, WorkInHand(spec, store, folder).look)
            _generate(context, fleet, book, heart, need, run)
    yield from ()


def _manifest(store: DatasetStore) -> SnapshotManifest:
    snapshot = store.current_snapshot()
    if snapshot is None:
        raise dg.Failure(f"{store.dataset}: no snapshot in the store; materialize {store.dataset}/prompts first")
    return store.manifest(snapshot)


def _generate(
    context: dg.AssetExecutionContext,
    fleet: GpuFleet,
    book: FleetBook,
    heart: Heart,
    need: Requirement,
    run: RangeRun,
) -> None:
    """Engine after engine until every batch is committed; what cannot be cured fails the run with what is missing."""
    self_test(run.store.objects)  # no GPU is held with nowhere safe to write
    heart.rows_done = lambda: run.progress().rows_done
    reason = ""
    with contextlib.closing(run), rare_collections(), LoopThread() as loop, probed(run, loop):
        try:
            if _needs_engine(context, loop, run, heart):
                reason = _serve(context, run, _crew(context, fleet, book, heart, need, run, loop))
        except (FleetConfigError, PricingError, RunEnded) as error:
            reason = str(error)
        finally:
            flushing = loop.submit(run.flush())
            if flushing.wait(FLUSH_SECONDS):
                with contextlib.suppress(Exception):  # a store that is away; why the run ends is said below
                    flushing.result()
            _report(context, run, math.inf)
    if missing := run.missing():
        named = ", ".join(missing[:NAMED_BATCHES]) + (" …" if len(missing) > NAMED_BATCHES else "")
        raise dg.Failure(
            f"{len(missing)} of {run.batches} batches are not committed: {named}. {reason}",
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


def _join_request(context: dg.AssetExecutionContext, spec: GeneratedDatasetSpec, book: FleetBook) -> Objective:
    """The run's objective. Its request is written down, unless another one is under way: its budget holds at once.

    The capacity sensor decides which request counts when there are several.
    """
    run = context.run
    request = request_of(run.root_run_id or run.run_id, run.tags)
    try:
        wanted = wishes(spec, run.tags)
        begin_unless_busy(book, spec, request, run.tags)
    except WishError as error:
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
        endpoint=context.run.tags.get(ENDPOINT_TAG) or os.environ.get("BATCH_ASSETS_ENDPOINT"),
        accept=hardware.accept(),
        objective=objective,
        max_model_len=hardware.max_model_len,
        declared=hardware.declared(run.generation.model),
        work=Remembered(lambda: _work(context, run, work), WORK_SECONDS),
    )


def _work(context: dg.AssetExecutionContext, run: RangeRun, look: Callable[[], Workload]) -> Workload:
    """What an instance is rented for: the rest of the dataset when that was asked for, else this run's rows.

    An instance passes from run to run, so its boot is shared. Rows that are generated anew are missing nowhere.
    """
    whole, own = look(), max(1, run.rows - run.progress().rows_done)
    asked_for = context.run.tags.keys() & {REQUEST_TAG, BACKFILL_TAG}
    return replace(whole, rows=max(own, whole.rows) if asked_for else own)


def _may_write(book: FleetBook, heart: Heart) -> bool:
    """The book knows this run as living; asked of the book, because a stopped process wakes up knowing nothing."""
    try:
        return book.beat(heart.run_id, heart.state, heart.note, heart.rows_done())
    except BookError:
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


def _crew(
    context: dg.AssetExecutionContext,
    fleet: GpuFleet,
    book: FleetBook,
    heart: Heart,
    need: Requirement,
    run: RangeRun,
    loop: LoopThread,
) -> Crew:
    return Crew(
        fleet.renter(book, heart, need),
        heart,
        need,
        run,
        loop,
        say=context.log.info,
        warn=context.log.warning,
        decided=lambda decision: context.log_event(ledger.move_event(need.dataset, decision)),
        leased=lambda leased: context.log_event(ledger.lease_event(need.dataset, leased)),
        given_back=lambda leased, why: context.log_event(ledger.bill_event(need.dataset, leased, why)),
    )


def _serve(context: dg.AssetExecutionContext, run: RangeRun, crew: Crew) -> str:
    """Until nothing is missing: "", or why not. Leaves no request in flight and no lease."""
    try:
        while (reason := crew.step()) is None:
            _report(context, run)
            crew.wait(WAIT_SECONDS)
        return reason
    finally:
        crew.end()


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


def _needs_engine(context: dg.AssetExecutionContext, loop: LoopThread, run: RangeRun, heart: Heart) -> bool:
    """Commit what is complete without an engine (journal, copies of earlier objects); True when rows are left.

    While another run holds all that is left, this waits: no engine is rented beside it. Raises RunEnded.
    """
    preparing = loop.submit(run.prepare())
    try:
        while not preparing.wait(WAIT_SECONDS):
            _report(context, run)
            heart.note = WAITS if run.waits else ""
            if heart.ended.is_set():
                raise RunEnded(heart.run_id)
        heart.note = ""
        return preparing.result()
    finally:
        preparing.cancel(CANCEL_SECONDS)


def _report(context: dg.AssetExecutionContext, run: RangeRun, seconds: float = REPORT_SECONDS) -> None:
    """Write the ledger entries of what was committed since. In the main thread: a database write blocks no row.

    Returns after `seconds`, so that a lost lease is noticed also while batches come faster than entries are written.
    """
    until = time.monotonic() + seconds
    with contextlib.suppress(queue.Empty):
        while time.monotonic() < until:
            footer = run.committed.get_nowait()
            context.log_event(ledger.batch_event(run.store, footer, run.manifest.snapshot))
