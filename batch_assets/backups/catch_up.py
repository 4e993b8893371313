"""What a restored backup does not know, from the store and the providers: older backup + store = truth.

Batches that were committed after the backup are put into the catalog, so that nothing is asked again. Runs of the
backup have ended: those of requests that are open are started again by Dagster and the launcher. No instance of the
backup is used again, and machines that were rented after it are ended. What rows cost that were made after it counts
for the budgets, as far as the store knows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

from batch_assets.catalog import ledger
from batch_assets.dagster_internals.event_batches import report_together
from batch_assets.orchestration.assets import register_batches
from gpu_runner.fleet_database.after_restore import REASON
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.base import ProviderError, ProviderUnclear
from resources.fleet.resource import GpuFleet
from resources.objects.object_read_ahead import read_ahead, threads_for
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import BatchFooter, BatchObject, DatasetStore

_UNDER_WAY = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
SWEEPS = 5
Kinds = Collection[tuple[str, str]]  # providers and instance types


@dataclass(slots=True)
class CaughtUp:
    """What was done for one dataset. `usd` and `rows`: of rows that were made after the backup; `problems` for people.

    `usd` is a lower bound: boots, idle time and what was lost is in no row.
    """

    dataset: str
    reported: int = 0
    usd: float = 0.0
    rows: int = 0
    problems: list[str] = field(default_factory=list)


def end_runs(instance: dg.DagsterInstance) -> int:
    """Runs that were under way when the backup was made have no worker any more; returns how many there were."""
    runs = instance.get_runs(dg.RunsFilter(statuses=_UNDER_WAY))
    for run in runs:
        if run.status is dg.DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run, REASON)
        else:
            instance.report_run_failed(run, REASON)
    return len(runs)


def settle_fleet(
    fleet: GpuFleet, fleet_db: FleetDatabase, backup_at: float, pause: Callable[[float], None] = time.sleep
) -> tuple[list[str], set[tuple[str, str]]]:
    """Nothing that the backup believes of machines holds, and no machine of ours goes on. Returns what was done, and
    the kinds of instances that are billed until now: what their rows cost is in that bill.
    """
    said: list[str] = []
    listed: dict[str, set[str]] = {}
    for provider in fleet.providers(fleet.config()).values():
        try:
            machines = provider.list(fleet_db.tag())
            listed[provider.name] = {one.name for one in machines if one.state != "ended"}
        except (ProviderError, ProviderUnclear) as error:
            said.append(f"{provider.name} does not list its machines: {error}")
    known = {one.name: one for one in fleet_db.fleet()}
    unknown = sum(name not in known for names in listed.values() for name in names)
    billed = {
        (one.provider, one.instance_type) for one in known.values() if one.name in listed.get(one.provider, {one.name})
    }
    ending, ended = fleet_db.distrust(backup_at, listed)
    said.append(
        f"fleet: {ending} instances of the backup are being ended, {ended} have ended, "
        f"{unknown} machines were rented after it and are being ended"
    )
    for _ in range(SWEEPS):
        new = [sentence for sentence in fleet.sweep(fleet_db) if sentence not in said]
        said += new
        if not new:  # what is still ending, the platform's own reaper ends
            break
        pause(1.0)
    return said, billed


def catch_up(
    instance: dg.DagsterInstance,
    fleet_db: FleetDatabase,
    store: DatasetStore,
    since: float,
    billed: Kinds,
    say: Callable[[str], object] = lambda _: None,
) -> CaughtUp:
    """Put into the catalog what the store has of a dataset and the backup has not; book what it cost.

    `since`: when the backup was begun (Unix seconds). An object that is damaged stays out, and is named.
    """
    done = CaughtUp(store.dataset)
    try:
        snapshot = store.current_snapshot()
        if snapshot is None:
            return done
        manifest, entries = store.manifest(snapshot), store.entries(snapshot)
    except CorruptObject as error:
        done.problems.append(str(error))
        return done
    register_batches(instance, store, manifest)
    current = store.current_objects(entries)
    versions = ledger.ledger_versions(instance, store.dataset)
    new = [batch for batch in current.values() if _is_new(batch, versions.get(batch.key))]
    if new:
        say(f"{store.dataset}: {len(new):,} batches were committed after the backup")

    def readable() -> Iterator[dg.AssetMaterialization]:
        for found in read_ahead(lambda batch: _read(store, batch), new, threads_for(store.objects)):
            if isinstance(found, CorruptObject):
                done.problems.append(str(found))
                continue
            table, footer = found
            _add(done, table, since, billed)
            yield ledger.batch_event(store, footer, snapshot)

    done.reported = report_together(instance, readable())
    for table in _journaled(store, set(current)):
        _add(done, table, since, billed)
    if done.usd:
        fleet_db.charge_restored(store.dataset, done.usd, done.rows)
    return done


def _is_new(batch: BatchObject, said: ledger.LedgerVersion | None) -> bool:
    """The catalog has no word of this object. One that it has called void or wants made anew, it knows."""
    return said is None or batch.generation > said.used_for(batch.data_version)


def _read(store: DatasetStore, batch: BatchObject) -> tuple[pa.Table, BatchFooter] | CorruptObject:
    try:
        return store.read_batch(batch)
    except CorruptObject as error:
        return error


def _journaled(store: DatasetStore, committed: Collection[str]) -> Iterator[pa.Table]:
    """Finished rows of batches that are open, one segment after the other."""
    for info in store.objects.list(f"{store.dataset}/journal/"):
        try:
            found = store.journal.read(info.path)
        except FileNotFoundError:
            continue
        outcomes = [one for key, rows in found.items() if key not in committed for one in rows]
        yield pa.table(
            {
                "usd": pa.array([one.usd for one in outcomes], pa.float64()),
                "started_at": pa.array([one.started_at for one in outcomes], pa.float64()),
                "seconds": pa.array([one.seconds for one in outcomes], pa.float64()),
                "provider": pa.array([one.origin.provider for one in outcomes], pa.string()),
                "instance_type": pa.array([one.origin.instance_type for one in outcomes], pa.string()),
            }
        )


def _add(done: CaughtUp, table: pa.Table, since: float, billed: Kinds) -> None:
    """Count the rows of a table that were made after the backup, on what is in no bill."""
    ended = pc.add(seconds_of(table.column("started_at")), table.column("seconds"))
    late = pc.greater_equal(ended, since)
    table = table.filter(pc.and_(late, pc.is_valid(table.column("usd"))))
    kinds = zip(table.column("provider").to_pylist(), table.column("instance_type").to_pylist(), strict=True)
    costs = [usd for kind, usd in zip(kinds, table.column("usd").to_pylist(), strict=True) if tuple(kind) not in billed]
    done.rows += len(costs)
    done.usd += sum(costs)


def seconds_of(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Unix seconds of a column of times, or of numbers of them."""
    if not pa.types.is_timestamp(column.type):
        return column
    return pc.divide(pc.cast(pc.cast(column, pa.timestamp("us", column.type.tz)), pa.int64()), 1e6)


def datasets_of(instance: dg.DagsterInstance, declared: Sequence[str], objects: Objects) -> list[DatasetStore]:
    """Those that are declared, and those that the backup's catalog knows."""
    known = {key.path[0] for key in instance.all_asset_keys() if len(key.path) == 2 and key.path[1] == "rows"}
    return [DatasetStore(objects, name) for name in sorted({*known, *declared})]
