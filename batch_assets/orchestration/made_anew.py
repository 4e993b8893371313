"""Which batches a refresh has made anew, although they are there: simulated ones, once a real engine is asked for, and
those whose rows somebody wants asked again.

A table never has rows of an engine simulator and of a model. Marked batches count as missing, see `ledger.anew_event`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from batch_assets.catalog.catalog_reader import BatchReport, Catalog, current_reports
from batch_assets.catalog.ledger import anew_event
from batch_assets.dagster_internals.event_batches import report_together
from batch_assets.generation.range_plan import mixed
from batch_assets.snapshot.source.errors import SourceError
from resources.store.dataset_store import BatchEntry, BatchObject, DatasetStore
from resources.store.row_condition import RowCondition

SIMULATED_REASON = "its rows are simulated, and an engine that is not was asked for"
ALL = "all"


@dataclass(frozen=True, slots=True)
class Regeneration:
    """Rows to be asked again: all, or those of the current batches that meet the condition `where`."""

    where: str = ""

    @classmethod
    def of_tag(cls, text: str) -> Regeneration:
        """What the tag batch/regenerate says. Raises BadCondition."""
        if text == ALL:
            return cls()
        RowCondition(text)
        return cls(text)

    def tag(self) -> str:
        """Inverse of `of_tag`."""
        return self.where or ALL

    def counts(
        self, store: DatasetStore, entries: Sequence[BatchEntry], reports: Mapping[str, BatchReport]
    ) -> Iterator[tuple[BatchEntry, int]]:
        """The batches with rows to be asked again, and how many those are. With `where`, reads every current batch.

        Raises BadCondition, CorruptObject.
        """
        if not self.where:
            yield from ((entry, entry.rows) for entry in entries)
            return
        condition, current = RowCondition(self.where), current_reports(entries, reports)
        for entry in entries:
            if (report := current.get(entry.key)) is not None:
                batch = BatchObject(entry.key, entry.data_version, report.version.generation)
                if rows := len(condition.rows(store.batch_table(batch))):
                    yield entry, rows


def mark(
    instance: dg.DagsterInstance,
    store: DatasetStore,
    snapshot: str,
    entries: Sequence[BatchEntry],
    wanted: Regeneration,
) -> str:
    """Mark the batches of these that the regeneration is about; returns what was done. Raises BadCondition."""
    reports = Catalog(instance, store.dataset).reports()
    rows = 0

    def marks() -> Iterator[dg.AssetMaterialization]:
        nonlocal rows
        for entry, count in wanted.counts(store, entries, reports):
            found = reports.get(entry.key)
            used = -1 if found is None else found.version.used_for(entry.data_version)
            former = "" if found is None else found.model
            rows += count
            yield anew_event(
                store.dataset, entry, used, snapshot, "it was asked for", where=wanted.where, former=former
            )

    batches = report_together(instance, marks())
    return f"{store.dataset}: {rows:,} rows of {batches:,} batches are asked again"


def settle_simulated(
    instance: dg.DagsterInstance,
    store: DatasetStore,
    snapshot: str,
    simulation: Callable[[], bool],
    *,
    regenerates: bool = False,
) -> str:
    """Mark simulated batches where `simulation` says that the rows to come are not; returns what was done, or "".

    `simulation` is asked only where there are batches. `regenerates`: rows are asked again, whatever there is. Raises
    SourceError where simulated rows would come over or beside those of a model.
    """
    entries = {entry.key: entry for entry in store.entries(snapshot)}
    reports = Catalog(instance, store.dataset).reports()
    done = current_reports(list(entries.values()), reports)
    played = sorted(key for key, report in done.items() if report.simulated)
    real = any(report.simulated is False for report in reports.values())
    asks = regenerates or len(done) < len(entries)
    if not played and not (real and asks):
        return ""
    if simulation():
        if real and (played or asks):
            raise SourceError(mixed(store.dataset, simulated=True))
        return ""
    marks = (
        anew_event(
            store.dataset,
            entries[key],
            reports[key].version.generation,
            snapshot,
            SIMULATED_REASON,
            former=reports[key].model,
        )
        for key in played
    )
    report_together(instance, marks)
    return f"{store.dataset}: {len(played):,} simulated batches will be made anew by a real engine" if played else ""
