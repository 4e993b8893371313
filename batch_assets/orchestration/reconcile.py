"""Makes the catalog say again what the store has, and has made again what the store lost.

The store decides. An object that the catalog does not know is reported. A batch whose object is gone or was changed is
marked void: it counts as missing, so that the launcher generates it for the request that stands, as its next
generation. A table that is gone or damaged has its publication marked void, so that the publisher publishes again.
Work comes in slices of some thousand batches, each one listing; a slice that looks as it did before costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import dagster as dg

from batch_assets.catalog import ledger
from batch_assets.catalog.backfills import range_runs
from batch_assets.catalog.catalog_reader import BatchReport, Catalog
from batch_assets.catalog.publications import ledger_state, publish_runs
from batch_assets.dagster_internals.event_batches import report_together
from batch_assets.orchestration.store_check import object_infos, snapshot_problems, table_problems
from batch_assets.publishing.published_table import published_table, table_versions
from batch_assets.tags import PUBLISH_VOID_TAG
from resources.objects.opening import CorruptObject, ObjectInfo, StoreError
from resources.store.dataset_store import BatchEntry, BatchFooter, BatchObject, DatasetStore, check_object

SLICE_BATCHES = 5_000
CHECKS = 50  # objects read whole per slice
FEW = 3  # batches that may be lost at once without anybody being asked
GONE, CHANGED = "its object is gone", "its object is not as it was written"

Versions = Mapping[str, tuple[int, ledger.LedgerVersion]]


@dataclass(frozen=True, slots=True)
class Lost:
    """A batch that the catalog has and the store has not, or not as it was written. `sha256`: of what was written."""

    key: str
    version: ledger.LedgerVersion
    reason: str
    sha256: str | None


@dataclass(slots=True)
class Findings:
    """What differs. `problems` are sentences on what only a person or a refresh can mend."""

    snapshot: str | None = None
    lost: list[Lost] = field(default_factory=list)
    unreported: list[BatchFooter] = field(default_factory=list)
    table: str = ""
    state: str = ""
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Seen:
    """A slice at the last look: a hash of all that was seen, and what each object looked like."""

    looks: int
    etags: dict[BatchObject, str]


class Reconciler:
    """Compares one dataset's store with its catalog, slice by slice, and remembers what did not change."""

    def __init__(self, instance: dg.DagsterInstance, store: DatasetStore) -> None:
        self.instance, self.store = instance, store
        self._snapshot: str | None = None
        self._entries: list[BatchEntry] = []
        self._seen: dict[int, _Seen] = {}
        self._agreed: int | None = None

    def unchanged(self, newest: int | None) -> bool:
        """Nothing of a dataset that agreed at its last look has changed since: one listing, and no query.

        `newest`: storage id of the newest materialization of its batches. Only of datasets of one slice.
        """
        if self._agreed is None or self.slices() > 1:
            return False
        return self._agreed == hash((newest, self._listed()))

    def _listed(self) -> tuple[ObjectInfo, ...]:
        folder = f"{self.store.dataset}/"
        journal = f"{folder}journal/"
        return tuple(info for info in self.store.objects.list(folder) if not info.path.startswith(journal))

    def look_once(self, newest: int | None) -> Findings:
        """Compare the first slice, and remember how everything looked when there was nothing to say.

        Of a dataset of several slices nothing is remembered: they are listed one by one.
        """
        if self.slices() > 1:
            self._agreed = None
            return self.look()
        listed = self._listed()
        looks = hash((newest, listed))
        if newest is None and not listed:  # never asked for: nothing to compare, and no query for each of many datasets
            self._agreed = looks
            return Findings()
        found = self.look()
        clean = not (found.lost or found.unreported or found.table or found.problems)
        self._agreed = looks if clean and (0 not in self._seen or self._seen[0].looks) else None
        return found

    def slices(self) -> int:
        """Number of slices of the current snapshot; the first one looks at snapshot and table as well."""
        return max(1, -(-len(self._entries) // SLICE_BATCHES))

    @property
    def batches(self) -> int:
        """Batches of the snapshot at the last look."""
        return len(self._entries)

    def look(self, number: int = 0) -> Findings:
        """Compare one slice; changes nothing."""
        found = Findings()
        versions = ledger.ledger_entries(self.instance, self.store.dataset)  # before the store: what it has is there
        try:
            found.snapshot = self._read_snapshot()
        except CorruptObject as error:
            found.problems.append(str(error))
            return found
        if found.snapshot is None:
            if known := sum(not version.void for _, version in versions.values()):
                found.problems.append(empty_store(self.store, known))
            return found
        entries = self._entries[number * SLICE_BATCHES : (number + 1) * SLICE_BATCHES]
        self._compare(number, entries, versions, found)
        if number == 0:
            problems = list(snapshot_problems(self.store, found.snapshot))
            found.problems += [f"{one.expected}: {one.found}; {one.todo}" for one in problems]
            if not found.lost and not found.unreported:
                self._look_at_table(versions, found)
        if found.lost and self.store.current_snapshot() != found.snapshot:
            raise StoreError(f"{self.store.objects.root}: went away while it was listed: is it mounted?")
        return found

    def _read_snapshot(self) -> str | None:
        snapshot = self.store.current_snapshot()
        if snapshot is not None and snapshot != self._snapshot:
            self._entries = self.store.entries(snapshot)
            self._snapshot, self._seen = snapshot, {}
        return snapshot

    def _compare(self, number: int, entries: Sequence[BatchEntry], versions: Versions, found: Findings) -> None:
        infos = object_infos(self.store, entries)
        known = [(entry.key, versions[entry.key][0]) for entry in entries if entry.key in versions]
        looks = hash((tuple(infos.values()), tuple(known)))
        before = self._seen.get(number)
        if before is not None and before.looks == looks:
            return
        etags = before.etags if before is not None else {}
        reports = Catalog(self.instance, self.store.dataset).fetch([one for _, one in known])
        busy = [run.keys for run in range_runs(self.instance, self.store.dataset, "") if run.outcome == "unfinished"]
        newest = _newest(entries, infos)
        look = _SliceLook(self.store, infos, etags, CHECKS)
        for entry in entries:
            storage_id, said = versions.get(entry.key, (0, None))
            batch = newest.get(entry.key)
            lost = look.lost(entry, batch, said, reports.get(storage_id))
            if lost is not None:
                found.lost.append(lost)
            elif not any(entry.key in keys for keys in busy):  # a run reports its batches itself
                footer = look.unreported(entry, batch, said, reports.get(storage_id))
                found.unreported += [] if footer is None else [footer]
        etags = {batch: info.etag for batch, info in infos.items()} | look.unchecked
        whole = not found.lost and not found.unreported and not look.unchecked
        self._seen[number] = _Seen(looks if whole else 0, etags)

    def _look_at_table(self, versions: Versions, found: Findings) -> None:
        assert found.snapshot is not None
        own = {entry.key: versions[entry.key][1] for entry in self._entries if entry.key in versions}
        if any(own.get(entry.key, _NONE).data_version != entry.data_version for entry in self._entries):
            return
        found.state = ledger_state(found.snapshot, self._entries, own)
        done = publish_runs(self.store.dataset, found.state, dg.DagsterRunStatus.SUCCESS)
        if all(PUBLISH_VOID_TAG in run.tags for run in self.instance.get_runs(done, limit=3)):
            return  # not published yet
        problems = [f"{one.expected}: {one.found}" for one in table_problems(self.store)]
        if not problems:
            objects = {key: BatchObject(key, said.data_version, said.generation) for key, said in own.items()}
            expected, table = table_versions(found.snapshot, objects), published_table(self.store)
            if table is not None and table.version not in expected:
                problems = [f"expected table {' or '.join(expected)}, found {table.version}"]
        found.table = "; ".join(problems[:3])


_NONE = ledger.LedgerVersion("", 0)


@dataclass(slots=True)
class _SliceLook:
    """Decides on one batch after the other; reads at most `checks` objects. `unchecked`: looked at again next time."""

    store: DatasetStore
    infos: Mapping[BatchObject, ObjectInfo]
    etags: Mapping[BatchObject, str]
    checks: int
    unchecked: dict[BatchObject, str] = field(default_factory=dict)

    def lost(
        self,
        entry: BatchEntry,
        batch: BatchObject | None,
        said: ledger.LedgerVersion | None,
        report: BatchReport | None,
    ) -> Lost | None:
        """The batch is in the catalog, and its object is not in the store as it was written."""
        if said is None or said.data_version != entry.data_version:
            return None
        sha256 = None if report is None else report.sha256
        if batch is None or batch.generation < said.generation:
            gone = BatchObject(entry.key, said.data_version, said.generation)
            there = self.store.objects.exists(self.store.batch_path(gone))  # a listing may lag behind
            return None if there else Lost(entry.key, said, GONE, sha256)
        if batch.generation > said.generation:
            return None
        info = self.infos[batch]
        if report is not None and report.bytes not in (None, info.size):
            return Lost(entry.key, said, CHANGED, sha256)
        if batch in self.etags and self.etags[batch] != info.etag:
            if not self._room(batch):
                return None
            if self._sound(entry, batch, sha256) is None:
                return Lost(entry.key, said, CHANGED, sha256)
        return None

    def unreported(
        self,
        entry: BatchEntry,
        batch: BatchObject | None,
        said: ledger.LedgerVersion | None,
        report: BatchReport | None,
    ) -> BatchFooter | None:
        """What the object says, when the catalog says something else of the batch and the object is sound."""
        if batch is None:
            return None
        used = -1 if said is None else said.used_for(entry.data_version)
        sha256 = None
        if batch.generation <= used:
            if said is None or not said.void or batch.generation < used or report is None:
                return None
            sha256 = report.sha256
            if sha256 is None:
                return None
            if self.etags.get(batch) == self.infos[batch].etag:
                return None  # looked at before
        return self._sound(entry, batch, sha256) if self._room(batch) else None

    def _room(self, batch: BatchObject) -> bool:
        self.checks -= 1
        if self.checks < 0:
            self.unchecked[batch] = self.etags.get(batch, "")
        return self.checks >= 0

    def _sound(self, entry: BatchEntry, batch: BatchObject, sha256: str | None) -> BatchFooter | None:
        try:
            footer = check_object(self.store, entry, batch)
        except (CorruptObject, FileNotFoundError):
            return None
        return footer if sha256 in (None, footer.sha256) else None


def _newest(entries: Sequence[BatchEntry], infos: Mapping[BatchObject, ObjectInfo]) -> dict[str, BatchObject]:
    wanted = {entry.key: entry.data_version for entry in entries}
    newest: dict[str, BatchObject] = {}
    for batch in sorted(infos):
        if wanted.get(batch.key) == batch.data_version:
            newest[batch.key] = batch
    return newest


def too_many(found: Findings, batches: int) -> bool:
    """So much is gone at once that rather a disk is not mounted than batches are lost: nobody pays before asking."""
    return len(found.lost) > FEW and 2 * len(found.lost) > batches


def empty_store(store: DatasetStore, known: int) -> str:
    """What to say when the catalog has batches, and the store not even a snapshot."""
    return (
        f"{store.dataset}: the catalog has {known} batches, but the store {store.objects.root} has nothing of the "
        "dataset: is it mounted, and is BATCH_ASSETS_STORE the same as before? Put it back, or give the dataset up: "
        f"`dagster asset wipe {store.dataset}/rows --noprompt` makes a new beginning"
    )


def heal(instance: dg.DagsterInstance, store: DatasetStore, found: Findings) -> Iterator[str]:
    """Write down what was found, so that launcher and publisher act on it; yields what was done, in words."""
    snapshot = found.snapshot or ""
    voids = (ledger.void_event(store.dataset, it.key, it.version, snapshot, it.reason, it.sha256) for it in found.lost)
    again = (ledger.batch_event(store, footer, snapshot) for footer in found.unreported)
    report_together(instance, chain(voids, again))
    if found.lost:
        named = ", ".join(f"{lost.key} ({lost.reason})" for lost in found.lost[:5])
        more = f" and {len(found.lost) - 5} more" if len(found.lost) > 5 else ""
        yield f"{store.dataset}: {len(found.lost)} batches are void and will be generated again: {named}{more}"
    if found.unreported:
        yield f"{store.dataset}: {len(found.unreported)} batches reported again from the store"
    if found.table:
        void_publications(instance, store.dataset, found.state, "success")
        # A tag writes no event: without one the publisher would not look at the dataset for minutes.
        lost_table = dg.AssetObservation(
            ledger.table_key(store.dataset), description=f"the table is lost: {found.table}"
        )
        instance.report_runless_asset_event(lost_table)
        yield f"{store.dataset}: the table will be published again: {found.table}"


def void_publications(instance: dg.DagsterInstance, dataset: str, state: str, which: str) -> None:
    """Publications of this state count no more: the successful ones, as their table is lost, or those that failed."""
    for run in instance.get_runs(publish_runs(dataset, state)):
        success = run.status == dg.DagsterRunStatus.SUCCESS
        if run.is_finished and success == (which == "success") and PUBLISH_VOID_TAG not in run.tags:
            instance.add_run_tags(run.run_id, {PUBLISH_VOID_TAG: "true"})


def reconcile(instance: dg.DagsterInstance, store: DatasetStore) -> list[str]:
    """Everything of one dataset at once, for a refresh: whoever asks for it wants what is lost made again."""
    said: list[str] = []
    reconciler, number = Reconciler(instance, store), 0
    while number < reconciler.slices():
        said += heal(instance, store, reconciler.look(number))
        number += 1
    found = reconciler.look()
    if found.state:
        void_publications(instance, store.dataset, found.state, "failure")
    return said
