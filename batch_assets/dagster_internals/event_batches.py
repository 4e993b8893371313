"""Events about many partitions of an asset, written with few statements.

Dagster writes each event by itself: on Postgres over a connection of its own, on SQLite into two files that are each
opened, written and synchronised with the disk. A run over 500 batches writes 500 planned events when it is created, and
500 materializations. Dagster can buffer events that belong together (`DagsterEventBatchMetadata`), where
DAGSTER_EVENT_BATCH_SIZE is set; its Postgres storage then writes materializations and observations together, but
planned events one by one, and its SQLite storage everything. Here both write all three together.

An event is the same, whichever way it was written, but for its time: of materializations and observations no two of a
group are of one millisecond, as Dagster's UI lists one event of an asset for each. Those of groups that follow each
other at once may be. When a group cannot be written,
Dagster writes its events one by one. Of a run that is for some partitions of its range (`only` in the config of its
op), planned events of the others are left out. What is private to Dagster is held by
`tests/batch_assets/dagster_internals/test_event_batches.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, islice

import dagster as dg
import sqlalchemy as sa
from dagster._core.events import (
    DagsterEvent,
    DagsterEventBatchMetadata,
    StepMaterializationData,
    generate_event_batch_id,
)
from dagster._core.events.log import EventLogEntry
from dagster._core.instance.utils import RUNLESS_JOB_NAME, RUNLESS_RUN_ID
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage

REPLACED = "store_event_batch"
ROWS = "__rows"  # end of the names of ops whose runs may be for some partitions of their range
APART = 0.00101  # seconds between two events: more than a millisecond, as their times are rounded
SIZE_VARIABLE, SIZE = "DAGSTER_EVENT_BATCH_SIZE", 500
KINDS = frozenset(
    {
        dg.DagsterEventType.ASSET_MATERIALIZATION,
        dg.DagsterEventType.ASSET_OBSERVATION,
        dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED,
    }
)

Store = Callable[[Sequence[EventLogEntry]], None]


def write_together(instance: dg.DagsterInstance) -> None:
    """Have this instance of this process write events that belong together with few statements."""
    os.environ.setdefault(SIZE_VARIABLE, str(SIZE))
    storage = instance.event_log_storage
    if REPLACED in vars(storage):
        return
    if type(storage) is SqliteEventLogStorage:
        setattr(storage, REPLACED, _in_groups(_sqlite(storage), _config_of(instance)))
    elif isinstance(storage, SqlEventLogStorage) and hasattr(storage, "postgres_url"):
        setattr(storage, REPLACED, _in_groups(_postgres(storage), _config_of(instance)))


def log_together(context: dg.AssetExecutionContext, events: Iterable[dg.AssetMaterialization]) -> None:
    """`context.log_event` for several materializations."""
    write_together(context.instance)
    step, into = context.op_execution_context._step_execution_context, context.op_execution_context._events
    for event, batch in _numbered(events):
        into.append(DagsterEvent.asset_materialization(step, event, batch))


def report_together(instance: dg.DagsterInstance, events: Iterable[dg.AssetMaterialization]) -> int:
    """`instance.report_runless_asset_event` for several materializations; returns how many."""
    write_together(instance)
    count = 0
    for event, batch in _numbered(events):
        reported = DagsterEvent(
            event_type_value=dg.DagsterEventType.ASSET_MATERIALIZATION.value,
            event_specific_data=StepMaterializationData(event),
            job_name=RUNLESS_JOB_NAME,
        )
        instance.report_dagster_event(reported, RUNLESS_RUN_ID, batch_metadata=batch)
        count += 1
    return count


def _numbered(
    events: Iterable[dg.AssetMaterialization],
) -> Iterator[tuple[dg.AssetMaterialization, DagsterEventBatchMetadata]]:
    """Each event with whether it is the last of its group. A group is begun when all its events are there."""
    left = iter(events)
    while group := list(islice(left, SIZE)):
        name = generate_event_batch_id()  # type: ignore[no-untyped-call]
        for number, event in enumerate(group, start=1):
            yield event, DagsterEventBatchMetadata(name, number == len(group))


def only_of(run_config: object, op: str = "") -> frozenset[str] | None:
    """The partitions of its range that a run is for, as the config of an op of rows names them; None: all, and for any
    other op. `op`: of this one, or else of whichever there is.
    """
    ops = run_config.get("ops") if isinstance(run_config, Mapping) else None
    for name, found in (ops if isinstance(ops, Mapping) else {}).items():
        for key in ("config", "only"):
            found = found.get(key) if isinstance(found, Mapping) else None
        if name.endswith(ROWS) and op in ("", name) and isinstance(found, str) and found.split():
            return frozenset(found.split())
    return None


Configured = Callable[[str], object]  # the config of a run


def _config_of(instance: dg.DagsterInstance) -> Configured:
    @lru_cache(maxsize=64)
    def of(run_id: str) -> object:
        run = instance.get_run_by_id(run_id)
        return None if run is None else run.run_config

    return of


def _meant(events: list[EventLogEntry], config: Configured) -> list[EventLogEntry]:
    """Without planned events of partitions that the run leaves alone: Dagster plans its whole range."""
    if events[0].dagster_event_type != dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED:
        return events
    return [one for one in events if _is_meant(one.get_dagster_event(), config(one.run_id))]


def _is_meant(event: dg.DagsterEvent, config: object) -> bool:
    only = None if event.asset_key is None else only_of(config, event.asset_key.to_python_identifier())
    return only is None or event.partition in only


def _in_groups(store: Store, config: Configured) -> Store:
    """One write for each kind of event of a run, in order."""

    def of(event: EventLogEntry) -> tuple[str, dg.DagsterEventType | None]:
        return event.run_id, event.dagster_event_type

    def store_event_batch(events: Sequence[EventLogEntry]) -> None:
        for _, group in groupby(events, of):
            if meant := _meant(list(group), config):
                store(_apart(meant))

    return store_event_batch


def _apart(events: Sequence[EventLogEntry]) -> Sequence[EventLogEntry]:
    """The last keeps its time; those before it are as much earlier as it takes, half a second for 500."""
    if events[0].dagster_event_type == dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED:
        return events
    at, found = math.inf, []
    for event in reversed(events):
        at = min(event.timestamp, at - APART)
        found.append(event._replace(timestamp=at))
    return found[::-1]


def _postgres(storage: SqlEventLogStorage) -> Store:
    def store(events: Sequence[EventLogEntry]) -> None:
        if events[0].dagster_event_type not in KINDS:
            for event in events:
                storage.store_event(event)
            return
        with storage.index_transaction() as connection:
            rows = [storage._event_to_row(event) for event in events]
            insert = SqlEventLogStorageTable.insert().returning(
                SqlEventLogStorageTable.c.id, sort_by_parameter_order=True
            )
            _index(storage, connection, events, [int(number) for number in connection.scalars(insert, rows)])

    return store


def _sqlite(storage: SqliteEventLogStorage) -> Store:
    def store(events: Sequence[EventLogEntry]) -> None:
        if events[0].dagster_event_type not in KINDS:
            for event in events:
                storage.store_event(event)
            return
        rows = [storage._event_to_row(event) for event in events]
        with storage.run_connection(events[0].run_id) as connection:
            connection.execute(SqlEventLogStorageTable.insert(), rows)
        with storage.index_transaction() as connection:
            inserts = (connection.execute(SqlEventLogStorageTable.insert().values(**row)) for row in rows)
            keys = [insert.inserted_primary_key for insert in inserts]
            _index(storage, connection, events, [int(key[0]) for key in keys if key is not None])

    return store


def _index(
    storage: SqlEventLogStorage, connection: sa.Connection, events: Sequence[EventLogEntry], ids: Sequence[int]
) -> None:
    """Tags of all events, and of each asset what its newest event says."""
    if len(ids) != len(events):
        raise RuntimeError(f"expected an id of each of {len(events)} events, found {len(ids)}")
    storage._store_asset_event_tags(connection, events, ids)
    newest = {event.get_dagster_event().asset_key: (event, number) for event, number in zip(events, ids, strict=True)}
    for event, number in newest.values():
        storage._store_asset_event(connection, event, number)
