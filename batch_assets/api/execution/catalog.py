"""Tells Dagster's catalog of every part that is written: a materialization of `api/batches`, without a run.

The partition is the batch's id and the key of a part. Reports are made in a thread of their own, behind the
work: a catalog that is away or slow delays no row. What a killed process did not report is found in the store later.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import dagster as dg

from batch_assets.api.batches.snapshot import SNAPSHOT, batch_store
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords
from batch_assets.dagster_internals.event_batches import report_together
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import BatchFooter

log = logging.getLogger(__name__)

KEY = dg.AssetKey(["api", "batches"])
PARTITIONS = "api_batches"
TOGETHER = 200
MOST_WAITING = 10_000
RETRY_SECONDS = 5.0
LOOK_SECONDS = 30.0


def partition_of(batch_id: str, key: str) -> str:
    """The partition key of a part of a batch."""
    return f"{batch_id}_{key}"


def part_of(partition: str) -> tuple[str, str]:
    """(batch id, key of its part) of a partition key."""
    batch_id, _, key = partition.rpartition("_")
    return batch_id, key


def materialization(batch_id: str, footer: BatchFooter) -> dg.AssetMaterialization:
    """The entry of a part, made from its footer alone: reporting it again gives the same entry."""
    partition = partition_of(batch_id, footer.key)
    return dg.AssetMaterialization(KEY, partition=partition, metadata=part_metadata(batch_id, footer))


def part_metadata(batch_id: str, footer: BatchFooter) -> dict[str, dg.MetadataValue]:
    """What the catalog is told of a part."""
    return {
        "dagster/partition_row_count": dg.MetadataValue.int(footer.rows),
        "rows": dg.MetadataValue.int(footer.rows),
        "ok": dg.MetadataValue.int(footer.ok),
        "dead": dg.MetadataValue.int(footer.dead),
        "prompt_tokens": dg.MetadataValue.int(footer.prompt_tokens),
        "completion_tokens": dg.MetadataValue.int(footer.completion_tokens),
        "seconds": dg.MetadataValue.float(round(footer.seconds, 3)),
        "model": dg.MetadataValue.text(footer.model),
        "engine": dg.MetadataValue.text(footer.engine),
        "batch": dg.MetadataValue.text(batch_id),
    }


class CatalogReports:
    """`committed` and `decided` may be called from any thread; they never wait."""

    def __init__(
        self, home: Path, batches: BatchRecords, objects: Objects, open_instance: Callable[[Path], dg.DagsterInstance]
    ) -> None:
        self._home, self._batches, self._objects, self._open = home, batches, objects, open_instance
        self._queue: queue.Queue[tuple[str, BatchFooter]] = queue.Queue(MOST_WAITING)
        self._decisions: queue.Queue[dg.AssetObservation] = queue.Queue(MOST_WAITING)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="catalog-reports", daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def close(self, seconds: float = 3.0) -> None:
        """End; what is left is reported by the next process."""
        self._closed.set()
        self._thread.join(seconds)

    def committed(self, batch_id: str, footer: BatchFooter) -> None:
        """A part was written. With too many waiting, it is found in the store later."""
        try:
            self._queue.put_nowait((batch_id, footer))
        except queue.Full:
            log.warning("catalog: %d reports wait; batch %s is reported from the store", MOST_WAITING, batch_id)

    def decided(self, said: dg.AssetObservation) -> None:
        """Why a model has so many engines. What a killed process did not report is in the fleet's database."""
        with contextlib.suppress(queue.Full):
            self._decisions.put_nowait(said)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with self._open(self._home) as instance:
                    self._report_until_closed(instance)
            except Exception as error:
                log.warning("catalog: %s", type(error).__name__)
                self._closed.wait(RETRY_SECONDS)

    def _report_until_closed(self, instance: dg.DagsterInstance) -> None:
        since_look = LOOK_SECONDS
        while not self._closed.is_set():
            self._report_decisions(instance)
            found = self._taken()
            if found:
                report(instance, found)
            elif since_look >= LOOK_SECONDS:
                since_look = 0.0
                self._report_missing(instance)
            else:
                self._closed.wait(0.5)
                since_look += 0.5

    def _report_decisions(self, instance: dg.DagsterInstance) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._closed.is_set():
                instance.report_runless_asset_event(self._decisions.get_nowait())

    def _taken(self) -> list[tuple[str, BatchFooter]]:
        found: list[tuple[str, BatchFooter]] = []
        while len(found) < TOGETHER:
            try:
                found.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return found

    def _report_missing(self, instance: dg.DagsterInstance) -> None:
        """Ended batches of which the catalog may miss some: compare, report, and note that all are there."""
        while records := self._batches.unreported():
            for record in records:
                if self._closed.is_set():
                    return
                report(instance, missing(lambda named: materialized(instance, named), self._objects, record))
                self._batches.set_reported(record.id)


def materialized(instance: dg.DagsterInstance, partitions: Sequence[str]) -> set[str]:
    """Those of the partitions that the catalog has. It is asked for no other: it keeps those of all batches ever."""
    storage, kind = instance.event_log_storage, dg.DagsterEventType.ASSET_MATERIALIZATION
    found: set[str] = set()
    for start in range(0, len(partitions), TOGETHER):
        found.update(storage.get_latest_storage_id_by_partition(KEY, kind, {*partitions[start : start + TOGETHER]}))
    return found


def missing(
    there: Callable[[Sequence[str]], Collection[str]], objects: Objects, record: BatchRecord
) -> list[tuple[str, BatchFooter]]:
    """What the store has of a batch and the catalog has not. `there`: which of some partitions the catalog has.

    What is damaged or gone cannot be reported, now or later.
    """
    store = batch_store(objects, record.id)
    found: list[tuple[str, BatchFooter]] = []
    try:
        current = store.current_objects(store.entries(SNAPSHOT))
    except CorruptObject:
        log.warning("catalog: batch %s is not reported: the index of its lines is damaged", record.id)
        return found
    known = there([partition_of(record.id, key) for key in current])
    for key, batch in current.items():
        if partition_of(record.id, key) not in known:
            try:
                found.append((record.id, store.footer(batch)))
            except (CorruptObject, FileNotFoundError):
                log.warning("catalog: batch %s: %s is not reported: it is damaged or gone", record.id, batch.name)
    return found


def report(instance: dg.DagsterInstance, found: Sequence[tuple[str, BatchFooter]]) -> None:
    """Add the partitions and their materializations."""
    if not found:
        return
    instance.add_dynamic_partitions(PARTITIONS, [partition_of(batch_id, footer.key) for batch_id, footer in found])
    report_together(instance, (materialization(batch_id, footer) for batch_id, footer in found))
