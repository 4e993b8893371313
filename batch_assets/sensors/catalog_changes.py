"""Which datasets the catalog has news of: one look at the event log for all of them.

Requests, snapshots, committed batches and the ends of runs all write events, so that a dataset without a new event
needs no look of its own. Dagster has no public query for "every asset and run with an event since": what we lean on
here is held by `tests/batch_assets/sensors/test_many_datasets.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator

import dagster as dg
import sqlalchemy as sa

from batch_assets.catalog.ledger import table_key
from batch_assets.dagster_internals import EVENT_TYPE_TO_PIPELINE_RUN_STATUS, SqlEventLogStorage
from batch_assets.dagster_internals import SqlEventLogStorageTable as EVENTS
from batch_assets.tags import REDRIVE_TAG, REFRESH_TAG

# Postgres hands out ids before the commit: an event may appear behind one that was read already.
OVERLAP_SECONDS = 15.0
MOST_RUNS = 500  # with news since the last look; more, and every dataset is looked at
# Not all about assets: Dagster's freshness daemon writes an event for each asset of a new deployment.
_ASSET_EVENTS = [dg.DagsterEventType.ASSET_MATERIALIZATION.value, dg.DagsterEventType.ASSET_WIPED.value]
_OBSERVED = dg.DagsterEventType.ASSET_OBSERVATION.value  # of a table: that it is lost. Of batches: what a run decided
_STATUS_EVENTS = [kind.value for kind in EVENT_TYPE_TO_PIPELINE_RUN_STATUS]
_JOBS = ("_refresh", "_redrive", "_publish")


class CatalogChanges:
    """Datasets with new events since the last look. Kept in memory: the first look finds that all may have changed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque()  # when we looked, and the newest event then

    def since_last_look(self, instance: dg.DagsterInstance, names: Collection[str]) -> set[str]:
        """Those of `names` that have news; all of them where it cannot be told."""
        storage = instance.event_log_storage
        if not isinstance(storage, SqlEventLogStorage):
            return set(names)
        now, newest = self._clock(), storage.get_maximum_record_id() or 0
        while len(self._marks) > 1 and now - self._marks[1][0] > OVERLAP_SECONDS:
            self._marks.popleft()
        known = self._marks[0][1] if self._marks else None
        if known is not None and newest < self._marks[-1][1]:  # the event log was wiped, or restored from a backup
            self._marks.clear()
            known = None
        found = set(names)
        if known is not None:
            named = _named(instance, storage, known) if newest > known else set()
            found = found if named is None else found & named
        self._marks.append((now, newest))  # only now: after an error all of it is read again
        return found


def _named(instance: dg.DagsterInstance, storage: SqlEventLogStorage, after: int) -> set[str] | None:
    """First part of the asset keys, and the datasets of the runs, with events after this id; None for too many runs."""
    kind, key = EVENTS.c.dagster_event_type, EVENTS.c.asset_key
    new = sa.and_(EVENTS.c.id > after, kind.in_([*_ASSET_EVENTS, _OBSERVED]), key.is_not(None))
    of_assets = sa.select(kind, key).where(new).distinct()
    of_runs = (
        sa.select(EVENTS.c.run_id)
        .where(EVENTS.c.id > after, EVENTS.c.dagster_event_type.in_(_STATUS_EVENTS))
        .distinct()
        .limit(MOST_RUNS + 1)
    )
    with storage.index_connection() as connection:
        told = [(kind, dg.AssetKey.from_db_string(text)) for kind, text in connection.execute(of_assets)]
        runs = [run_id for (run_id,) in connection.execute(of_runs)]
    if len(runs) > MOST_RUNS:
        return None
    keys = [key for kind, key in told if key is not None and (kind != _OBSERVED or key == table_key(key.path[0]))]
    found = {key.path[0] for key in keys}
    for run in instance.get_runs(dg.RunsFilter(run_ids=runs)) if runs else ():
        found |= set(datasets_of(run))
    return found


def datasets_of(run: dg.DagsterRun) -> Iterator[str]:
    """Names that a run may be for: of its assets, its tags and its job."""
    yield from (key.path[0] for key in run.asset_selection or ())
    yield from (run.tags[tag] for tag in (REFRESH_TAG, REDRIVE_TAG) if tag in run.tags)
    yield from (run.job_name.removesuffix(ending) for ending in _JOBS if run.job_name.endswith(ending))
