"""The GPU op: a contiguous range of batches in, one ledger entry per committed batch out (DESIGN section 5)."""

import contextlib
import gc
import math
import os
import queue
import time
from collections.abc import Iterator

import dagster as dg

from batch_assets import ledger
from batch_assets.loop_thread import LoopThread
from batch_assets.range_run import Intent, RangeRun, RunIdentity, plan_range
from gpu_runner.engine import EngineLost, EngineRefused
from gpu_runner.fleet import FleetBook, RunEnded
from gpu_runner.heart import Heart
from resources.fleet import EngineStartError, FleetConfigError, GpuFleet, LeasedEngine, Requirement
from resources.objects import self_test
from resources.store import DatasetStore, SnapshotManifest

ENDPOINT_TAG = "batch/endpoint"
WAIT_SECONDS = 0.2
CANCEL_SECONDS = 2.0
FLUSH_SECONDS = 2.0
REPORT_SECONDS = 1.0
REST_SECONDS = 15.0
FRUITLESS_ENGINES = 15  # bisecting a batch for a row that kills engines takes at most 9 (DESIGN section 5)
FAILED_STARTS = 3
NAMED_BATCHES = 20


class RowsConfig(dg.Config):
    """Run config of the rows op. Without it a run generates what is missing and nothing else."""

    regenerate: bool = False
    redrive: bool = False


def generate_rows(
    context: dg.AssetExecutionContext, store: DatasetStore, fleet: GpuFleet, config: RowsConfig
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
        plan = plan_range(store, entries, intent)
        for footer in plan.done:
            context.log_event(ledger.batch_event(store, footer, manifest.snapshot))
        if plan.todo:
            identity = RunIdentity(context.run.run_id, intent, (keys[0], keys[-1]))
            _generate(context, fleet, book, heart, RangeRun(store, manifest, plan, identity))
    yield from ()


def _manifest(store: DatasetStore) -> SnapshotManifest:
    snapshot = store.current_snapshot()
    if snapshot is None:
        raise dg.Failure(f"{store.dataset}: no snapshot in the store; materialize {store.dataset}/prompts first")
    return store.manifest(snapshot)


def _generate(context: dg.AssetExecutionContext, fleet: GpuFleet, book: FleetBook, heart: Heart, run: RangeRun) -> None:
    """Lease after lease until every batch is committed; what cannot be cured fails the run with the missing batches."""
    need = Requirement(
        dataset=run.store.dataset,
        model=run.generation.model,
        task=run.generation.task,
        endpoint=context.run.tags.get(ENDPOINT_TAG) or os.environ.get("BATCH_ASSETS_ENDPOINT"),
    )
    self_test(run.store.objects)  # no GPU is held with nowhere safe to write
    heart.rows_done = lambda: run.progress().rows_done
    reason = ""
    with contextlib.closing(run), rare_collections(), LoopThread() as loop:
        try:
            reason = _serve_until_done(context, fleet, book, heart, need, run, loop)
        finally:
            loop.submit(run.flush()).wait(FLUSH_SECONDS)
            _report(context, run, math.inf)
    if missing := run.missing():
        named = ", ".join(missing[:NAMED_BATCHES]) + (" …" if len(missing) > NAMED_BATCHES else "")
        raise dg.Failure(
            f"{len(missing)} of {run.batches} batches are not committed: {named}. {reason}",
            metadata={"missing_batches": len(missing)},
            allow_retries=False,
        )


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


def _serve_until_done(
    context: dg.AssetExecutionContext,
    fleet: GpuFleet,
    book: FleetBook,
    heart: Heart,
    need: Requirement,
    run: RangeRun,
    loop: LoopThread,
) -> str:
    """Lease after lease until nothing is missing. Returns why it gave up, or "" at the end."""
    fruitless, failed_starts, unused = 0, 0, 0
    before = run.progress()
    while _needs_engine(context, loop, run):
        try:
            with fleet.lease(need, book, heart, say=context.log.info) as leased:
                context.log.info(f"leased {leased.name} ({leased.instance_type}), epoch {leased.epoch}")
                failed_starts = 0
                reason = _serve(context, loop, heart, run, leased)
        except EngineStartError as error:
            reason, failed_starts = str(error), failed_starts + 1
            if failed_starts >= FAILED_STARTS:
                return f"{failed_starts} engines in a row did not start; the last one: {reason}"
        except (EngineRefused, FleetConfigError, RunEnded) as error:
            return str(error)
        if reason:
            context.log.warning(f"{reason}; asking for another engine")
            now = run.progress()
            fruitless = fruitless + 1 if now.rows_done == before.rows_done else 0
            unused = unused + 1 if now.requests == before.requests else 0
            before = now
            if fruitless >= FRUITLESS_ENGINES:
                return f"{fruitless} engines in a row finished no row; the last one: {reason}"
            # A server behind a proxy answers 503 at once for as long as it starts: minutes.
            time.sleep(min(REST_SECONDS, WAIT_SECONDS * 2**unused))
    return ""


def _needs_engine(context: dg.AssetExecutionContext, loop: LoopThread, run: RangeRun) -> bool:
    """Commit what is complete without an engine (journal, copies of earlier objects); True when rows are left."""
    preparing = loop.submit(run.prepare())
    try:
        while not preparing.wait(WAIT_SECONDS):
            _report(context, run)
        return preparing.result()
    finally:
        preparing.cancel(CANCEL_SECONDS)


def _serve(
    context: dg.AssetExecutionContext, loop: LoopThread, heart: Heart, run: RangeRun, leased: LeasedEngine
) -> str:
    """One engine's share. Returns why it ended early, or "" when all is committed. Leaves no request in flight."""
    serving = loop.submit(run.serve(leased))
    try:
        while not serving.wait(WAIT_SECONDS):
            _report(context, run)
            if not heart.check():
                return f"lease on {leased.name} lost (epoch {leased.epoch})"
        serving.result()
        return ""
    except EngineLost as error:
        return f"engine {leased.name} lost: {error}"
    finally:
        serving.cancel(CANCEL_SECONDS)


def _report(context: dg.AssetExecutionContext, run: RangeRun, seconds: float = REPORT_SECONDS) -> None:
    """Write the ledger entries of what was committed since. In the main thread: a database write blocks no row.

    Returns after `seconds`, so that a lost lease is noticed also while batches come faster than entries are written.
    """
    until = time.monotonic() + seconds
    with contextlib.suppress(queue.Empty):
        while time.monotonic() < until:
            footer = run.committed.get_nowait()
            context.log_event(ledger.batch_event(run.store, footer, run.manifest.snapshot))
