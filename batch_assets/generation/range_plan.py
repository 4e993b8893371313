"""What a run finds done in its range, and what it has to do: the snapshot's batches compared with the store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

import pyarrow as pa

from batch_assets.catalog.ledger import LedgerVersion
from batch_assets.worker.part_journal import JournalWriter
from gpu_runner.rows import Outcome
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import (
    BatchEntry,
    BatchFooter,
    BatchObject,
    DatasetStore,
    SnapshotManifest,
    check_object,
)
from resources.store.reusable_answers import ReusableAnswers


def mixed(dataset: str, *, simulated: bool) -> str:
    """Why no more rows are written, for people. `simulated`: by a simulator beside a model's rows, else vice versa."""
    if simulated:
        return (
            f"{dataset}: expected an engine that is not simulated, as the dataset has rows of a real model, found an "
            "engine simulator. Nothing was written. Give `batch-assets run` the real engine again, or declare the "
            "dataset under another name to have simulated rows"
        )
    return (
        f"{dataset}: expected a simulated engine, as other batches of the dataset are simulated, found a real one. "
        f"Nothing was written. The job `{dataset}_refresh` or `batch-assets run {dataset}` makes all of them anew"
    )


# Looked at until one has a vector: objects of earlier snapshots and batches of dead letters have none that counts.
MOST_OBJECTS = 200


def vector_length(store: DatasetStore, manifest: SnapshotManifest, reuse: bool | Sequence[str] = False) -> int | None:
    """Length of a committed vector of this snapshot; None for other tasks, and before there is one.

    Those that are taken from other datasets (`reuse`) count where none is committed yet. Ranges that run at the same
    time before the first commit may each settle on a length of their own.
    """
    generation = manifest.settings()
    if generation.task != "embedding":
        return None
    asked = generation.sampling.get("dimensions")
    if type(asked) is int and asked > 0:
        return asked
    taken = _taken(store, manifest, reuse) if reuse else iter(())
    for table in chain(islice(_committed(store, manifest), MOST_OBJECTS), islice(taken, MOST_OBJECTS)):
        try:
            column = table().column("output")
        except (CorruptObject, FileNotFoundError):
            continue
        if found := next((len(vector) for vector in column if vector.is_valid), None):
            return found
    return None


def _committed(store: DatasetStore, manifest: SnapshotManifest) -> Iterator[Callable[[], pa.Table]]:
    for batch in _current(store, manifest):
        yield partial(store.batch_table, batch)


def _taken(
    store: DatasetStore, manifest: SnapshotManifest, reuse: bool | Sequence[str]
) -> Iterator[Callable[[], pa.Table]]:
    answers = ReusableAnswers(store.objects, store.dataset, reuse)
    for batch in answers.of_snapshot(manifest.snapshot).values():
        yield partial(answers.table, batch)


def _current(store: DatasetStore, manifest: SnapshotManifest) -> Iterator[BatchObject]:
    """Committed batches of the snapshot, found by listing no further than needed."""
    versions = {entry.key: entry.data_version for entry in store.entries(manifest.snapshot)}
    for batch, _ in store.batch_infos():
        if versions.get(batch.key) == batch.data_version:
            yield batch


Purpose = str  # "" for the normal work; the root run id for a regenerate or a re-drive, whose journal is its own

NO_CONDITIONS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Work:
    """What a run has to do with one batch: write `generation`, keeping the outcomes of `keep` that still fit.

    `anew`: rows of this object that meet the condition `where` are asked again, without one all of them; of the journal
    only what came after it is taken.
    """

    entry: BatchEntry
    generation: int
    keep: tuple[BatchObject, ...] = ()
    keep_dead: bool = True
    anew: BatchObject | None = None
    where: str = ""
    dropped_error: str = ""

    def keeps(self, outcome: Outcome) -> bool:
        """Whether an earlier outcome stands: not that of a dead letter that is to be tried again."""
        other = bool(self.dropped_error) and outcome.error != self.dropped_error
        return outcome.ok or self.keep_dead or other


@dataclass(frozen=True, slots=True)
class RangePlan:
    """What is done already (footers to report again) and what is to do, in key order."""

    done: list[BatchFooter]
    todo: list[Work]


@dataclass(frozen=True, slots=True)
class Intent:
    """Why a run was started. `root_run_id` stays the same over its retries, so that they continue it."""

    root_run_id: str
    regenerate: bool = False
    redrive: bool = False
    redrive_error: str = ""

    @property
    def purpose(self) -> Purpose:
        """Name of the journal that this run's retries read."""
        return self.root_run_id if self.regenerate or self.redrive else ""


def plan_range(
    store: DatasetStore,
    entries: Sequence[BatchEntry],
    intent: Intent,
    versions: Mapping[str, LedgerVersion] | None = None,
    conditions: Mapping[str, str] = NO_CONDITIONS,
) -> RangePlan:
    """Compare the snapshot's batches with the store. Lists, reads every current object whole; writes nothing.

    `versions`: what the catalog said before this call. The name of an object is used once: one that is torn, void in
    the catalog, or gone although the catalog has it, is replaced by the next generation. `conditions`: which rows of
    batches that are to be made anew are asked again.
    """
    if not entries:
        return RangePlan([], [])
    found = store.objects_by_batch(entries[0].key, entries[-1].key)
    plan = RangePlan([], [])
    with ThreadPoolExecutor(8) as pool:
        for footer, work in pool.map(
            lambda entry: _plan_batch(
                store, entry, found.get(entry.key, []), intent, versions.get(entry.key) if versions else None
            ),
            entries,
        ):
            if footer is not None:
                plan.done.append(footer)
            if work is not None:
                where = conditions.get(work.entry.key, "") if work.anew else ""
                plan.todo.append(replace(work, where=where) if where else work)
    return plan


def _plan_batch(
    store: DatasetStore,
    entry: BatchEntry,
    objects: list[BatchObject],
    intent: Intent,
    said: LedgerVersion | None,
) -> tuple[BatchFooter | None, Work | None]:
    used = -1 if said is None else said.used_for(entry.data_version)
    current = [batch for batch in objects if batch.data_version == entry.data_version]
    newest_there = current[-1].generation if current else -1
    if said is not None and said.anew and newest_there <= used:
        return None, Work(entry, used + 1, anew=BatchObject(entry.key, entry.data_version, used))
    void = used if said is not None and said.void else -1
    if not current or newest_there < used or newest_there == void:
        sound = tuple(batch for batch in objects if batch not in current or batch.generation != void)
        return None, _again(entry, max(used, newest_there) + 1, sound, intent)
    newest = current[-1]
    try:
        footer = check_object(store, entry, newest)
    except (CorruptObject, FileNotFoundError):
        earlier = tuple(batch for batch in objects if batch != newest)
        return None, _again(entry, newest.generation + 1, earlier, intent)
    if footer.root_run_id == intent.root_run_id:
        return footer, None
    if intent.regenerate:
        return None, Work(entry, newest.generation + 1)
    if intent.redrive and footer.dead:
        return None, Work(entry, newest.generation + 1, (newest,), False, dropped_error=intent.redrive_error)
    return footer, None


def _again(entry: BatchEntry, generation: int, sound: tuple[BatchObject, ...], intent: Intent) -> Work:
    """A batch without a current object that can be used: made anew, from what is sound as far as the intent allows."""
    kept = () if intent.regenerate else sound
    return Work(entry, generation, kept, not intent.redrive, dropped_error=intent.redrive_error)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Which run this is, and the range that names its journal. `gaps`: batches of the range are others'."""

    run_id: str
    intent: Intent
    key_range: tuple[str, str]
    gaps: bool = False

    @property
    def writer(self) -> JournalWriter:
        """As whom it writes to the journal."""
        return JournalWriter(self.run_id, self.key_range, self.intent.purpose)

    def has_all(self, first: str, last: str, keys: Collection[str]) -> bool:
        """Whether every batch from `first` to `last` is this run's. `keys`: of its batches. Of a range with gaps that
        is known of single batches.
        """
        if self.gaps:
            return first == last and first in keys
        return self.key_range[0] <= first and last <= self.key_range[1]
