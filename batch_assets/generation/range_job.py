"""One range of a dataset's batches as a job: what is left of it, its journal, its committed objects, its claims.

A batch is a part: it is committed as one object. Rows come from `range_run`, outcomes from the `JobWorker`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence

from batch_assets.asset_metadata.batch_rows import ShownBatches, batch_rows_markdown, shown_prompts
from batch_assets.gates.quality_gates import GateTrip, QualityGates, marked_rows, mean_score
from batch_assets.generation.range_plan import RangePlan, RunIdentity, Work
from batch_assets.worker.part_journal import PartJournal
from gpu_runner.fleet_database.database import Claim, FleetDatabase, FleetDatabaseError
from gpu_runner.rows import Outcome, Row
from resources.objects.opening import StoreError, self_test
from resources.objects.store_health import StoreHealth, is_store_trouble
from resources.store.dataset_store import BatchFooter, BatchObject, DatasetStore, SnapshotManifest

log = logging.getLogger(__name__)


class RunClaims:
    """One run's claims in the fleet's database: they keep two runs of one range from asking for the same rows.

    `silent`: seconds without a heartbeat after which a run is dead.
    """

    def __init__(self, fleet_db: FleetDatabase, run_id: str, dataset: str, silent: float) -> None:
        self._book, self._run_id, self._dataset, self._silent = fleet_db, run_id, dataset, silent

    def take(self, objects: Sequence[str]) -> Claim:
        """Claim one of these; none while the fleet's database does not answer."""
        try:
            return self._book.claim(self._run_id, self._dataset, objects, self._silent)
        except FleetDatabaseError as error:
            log.warning("run %s: no batch claimed: %s", self._run_id, type(error).__name__)
            return Claim()

    def release(self, objects: Sequence[str]) -> bool:
        """Give claims up. False while the fleet's database does not answer."""
        try:
            self._book.release_claims(self._run_id, self._dataset, objects)
        except FleetDatabaseError:
            return False
        return True


class RangeJob:
    """For several threads. `works`: what is to do, by key.

    `fence` says whether this run may still clean up after itself: one that was declared dead deletes nothing, its
    successor does. `claims` keep it from asking for rows that another run of these batches asks for. `reports` has the
    footer of every batch that this run committed or found committed, for the ledger. `epoch`: of the lease that rows
    come from. `reused`: rows of each opened batch whose outcome was in an earlier object, of this dataset or another;
    `journaled`: those that other runs had asked for, by run.
    `gates` look at every new outcome of a model; `trips` has those that have tripped, for whoever pauses the request.
    `scores`: fields of a judge's votes whose mean each batch has.
    `shown`: of which batches some rows are shown in the catalog; None: of none.
    """

    over = False  # what comes is always kept
    unwritten = True  # claims on committed batches are given up with each look, whether rows wait or not

    def __init__(
        self,
        store: DatasetStore,
        manifest: SnapshotManifest,
        plan: RangePlan,
        identity: RunIdentity,
        *,
        fence: Callable[[], bool],
        claims: RunClaims | None,
        health: StoreHealth,
        gates: QualityGates | None = None,
        scores: Sequence[str] = (),
        shown: ShownBatches | None = None,
    ) -> None:
        self.store, self.manifest, self.identity, self.health = store, manifest, identity, health
        self.task = manifest.settings().task
        self.works = {work.entry.key: work for work in plan.todo}
        self.rows = sum(work.entry.rows for work in plan.todo)
        self.claims, self._fence = claims, fence
        self.reports: queue.SimpleQueue[BatchFooter] = queue.SimpleQueue()
        self.reused: dict[str, int] = {}
        self.journaled: dict[str, Mapping[str, int]] = {}
        self._gates, self._scores, self._shown = gates, scores, shown
        self._prompts: dict[str, dict[str, str]] = {}
        self._rows: dict[str, str] = {}
        self.trips: queue.SimpleQueue[GateTrip] = queue.SimpleQueue()
        self.epoch = 0
        self.failure: Exception | None = None  # why a batch cannot be committed, whatever is tried
        self._committed: set[str] = {footer.key for footer in plan.done}
        self._released: set[str] = set(self._committed)
        self.journal = PartJournal(
            store, identity.writer, self.task, closed=self._committed.__contains__, writing=self.writing
        )

    @property
    def name(self) -> str:
        """As its batches say whose they are."""
        return self.identity.run_id

    @property
    def keys(self) -> set[str]:
        """Of all batches of the range that have rows."""
        return self.works.keys() | self._committed

    def missing(self) -> list[str]:
        """Keys that are not committed."""
        return [key for key in self.works if key not in self._committed]

    def store_is_there(self) -> bool:
        """The store has the snapshot of this run: it is the one that was there at the start, and it answers."""
        return self.store.objects.exists(self.store.snapshot_path(self.manifest.snapshot, "manifest.json"))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A write in the body. Never into what is left where the store was, as an empty mount point."""
        with self.health.call("write"):
            if not self.store_is_there():
                raise StoreError(f"{self.store.objects.root}: the store has not the snapshot of this run any more")
            yield

    def test_write(self) -> None:
        """Write something small. Blocks; `health` knows what became of it."""
        with self.writing():
            self_test(self.store.objects)

    def object_of(self, work: Work) -> BatchObject:
        """The object that this run is to write for a batch."""
        return BatchObject(work.entry.key, work.entry.data_version, work.generation)

    def adopt(self, work: Work, footer: BatchFooter) -> None:
        """Another run has committed this batch meanwhile: it is reported, and its rows are no work of ours."""
        self.rows -= work.entry.rows
        self._committed.add(work.entry.key)
        self._prompts.pop(work.entry.key, None)
        self.reports.put(footer)

    def opened(self, key: str, rows: Sequence[Row]) -> None:
        """A batch is read: of those that may be shown the beginnings of some prompts are kept until it is committed."""
        if self._shown is not None and self._shown.shows(key, failed=True):
            self._prompts[key] = shown_prompts(rows)

    def shown_rows(self, key: str) -> str:
        """Rows of a committed batch as Markdown, once; empty where they are not shown."""
        return self._rows.pop(key, "")

    def release_committed(self) -> None:
        """Give up the claims on committed batches; those of the last ones end with the run. Blocks."""
        keys = [key for key in list(self._committed) if key not in self._released]
        names = [self.object_of(self.works[key]).name for key in keys]
        if self.claims is None or not keys or self.claims.release(names):
            self._released.update(keys)

    # what the worker calls

    def note(self, part: str, outcome: Outcome) -> None:
        """A row has its outcome."""
        self.journal.note(part, outcome)
        if self._gates is not None and not outcome.begun and not outcome.origin.simulated:
            for trip in self._gates.note(outcome):
                self.trips.put(trip)

    def is_whole(self, part: str, outcomes: Sequence[Outcome]) -> bool:
        """No row of a batch is left out."""
        return True

    def write_journal(self) -> None:
        """Write finished rows of open batches. Blocks."""
        self.journal.flush()

    def tidy(self) -> None:
        """Delete segments of committed batches, and give up the claims on these. Blocks."""
        self.drop_finished()
        self.release_committed()

    def drop_finished(self) -> None:
        """Delete segments of committed batches, where the store answers and this run may. Blocks."""
        self.journal.drop_finished(
            self._committed.__contains__, lambda: not self.health.silent_seconds() and self._fence()
        )

    def commit(self, part: str, outcomes: Sequence[Outcome]) -> BatchFooter:
        """Write the object of a batch. Blocks.

        Called again while the store does not answer: what is finished is worth waiting for. Who gives leases back and
        at last ends the run watches `health`.
        """
        try:
            return self._commit(part, outcomes)
        except Exception as error:
            if not is_store_trouble(error):
                self.failure = error
            raise

    def _commit(self, key: str, outcomes: Sequence[Outcome]) -> BatchFooter:
        work = self.works[key]
        marked, looked_at = self._gates.counted(outcomes) if self._gates is not None else ({}, {})
        footer = BatchFooter.of(
            self.store.dataset,
            work.entry,
            outcomes,
            snapshot=self.manifest.snapshot,
            generation=work.generation,
            epoch=self.epoch,
            run_id=self.identity.run_id,
            root_run_id=self.identity.intent.root_run_id,
            reused=self.reused.get(key, 0),
            journaled=self.journaled.get(key),
            marked=marked_rows(outcomes, () if self._gates is None else self._gates.phrases) | marked,
            looked_at=looked_at,
            mean_score=mean_score(outcomes, self._scores),
        )
        if (
            self._shown is not None
            and key in self._prompts
            and self._shown.shows(key, failed=not all(outcome.ok for outcome in outcomes))
        ):
            self._rows[key] = batch_rows_markdown(self._prompts[key], outcomes)
        with self.writing():
            return self.store.commit(footer, outcomes, self.task)[0]

    def committed(self, footer: BatchFooter) -> None:
        """A batch is in the store."""
        self._committed.add(footer.key)
        self._prompts.pop(footer.key, None)
        self.journal.forget(footer.key)
        self.reports.put(footer)
