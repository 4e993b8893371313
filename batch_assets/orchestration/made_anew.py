"""Which batches a refresh has made anew, although they are there: simulated ones, once a real engine is asked for.

A table never has rows of an engine simulator and of a model. Marked batches count as missing, see `ledger.anew_event`.
"""

from __future__ import annotations

from collections.abc import Callable

import dagster as dg

from batch_assets.catalog.ledger import anew_event
from batch_assets.catalog.reader import Catalog
from batch_assets.generation.mixed_rows import mixed
from batch_assets.snapshot.source.errors import SourceError
from resources.store.dataset_store import DatasetStore

SIMULATED_REASON = "its rows are simulated, and an engine that is not was asked for"


def settle_simulated(
    instance: dg.DagsterInstance, store: DatasetStore, snapshot: str, simulation: Callable[[], bool]
) -> str:
    """Mark simulated batches where `simulation` says that the rows to come are not; returns what was done, or "".

    `simulation` is asked only where there are batches. Raises SourceError where simulated rows would come beside those
    of a model.
    """
    entries = {entry.key: entry for entry in store.entries(snapshot)}
    reports = {key: found for key, found in Catalog(instance, store.dataset).reports().items() if found.path}
    done = {key for key in entries if key in reports and reports[key].version.data_version == entries[key].data_version}
    played = sorted(key for key in done if reports[key].simulated)
    real = any(not found.simulated for found in reports.values())
    if not played and (not real or len(done) == len(entries)):
        return ""
    if simulation():
        if real and (played or len(done) < len(entries)):
            raise SourceError(mixed(store.dataset, simulated=True))
        return ""
    for key in played:
        used = reports[key].version.generation
        instance.report_runless_asset_event(anew_event(store.dataset, entries[key], used, snapshot, SIMULATED_REASON))
    return f"{store.dataset}: {len(played):,} simulated batches will be made anew by a real engine" if played else ""
