"""Deletes what nobody can read any more: contents of files, and what the store keeps of batches without files.

What the store keeps of a batch (its lines, journal and objects, `api/batches/ID/`) goes once the batch has ended and
its input and result files are deleted or expired. It is noted as deleted by a sweep that finds nothing left: one that
was ended half-way is done again, and so is what a worker wrote that had lost the batch and did not know it yet.

Contents without a record stay: they may be another service's, or a user's whose records were lost or restored.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable

from batch_assets.api.batches.snapshot import batch_folder
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords
from batch_assets.api.database.file_records import FileRecords
from batch_assets.api.execution.results import unnamed_contents
from batch_assets.api.store_threads import StoreThreads
from resources.objects.opening import Objects

log = logging.getLogger(__name__)

SWEEP_SECONDS = 60.0
TOGETHER = 100


class Stopped(Exception):
    """The worker ends; the next one goes on."""


class Sweeper:
    """`run` until cancelled. Several workers may sweep at once: each deletion may be repeated."""

    def __init__(self, batches: BatchRecords, files: FileRecords, objects: Objects, clock: Callable[[], float]) -> None:
        self._batches, self._files, self._objects, self._clock = batches, files, objects, clock
        self._stop = threading.Event()

    async def run(self) -> None:
        """Sweep now and then, in a thread of its own."""
        thread = StoreThreads(1, "batches-sweeper")
        try:
            while True:
                try:
                    await thread.call(self.sweep)
                except Stopped:
                    return
                except Exception as error:  # the store or the records are away: what is left is swept the next time
                    log.warning("deleted files: %s", type(error).__name__)
                await asyncio.sleep(SWEEP_SECONDS)
        finally:
            self._stop.set()
            thread.close()

    def sweep(self) -> None:
        """Everything that can be deleted now. Raises as the store and the records."""
        while files := self._files.expired(self._clock(), TOGETHER):
            for file in files:
                self._delete([file.path])
                self._files.forget(file.id)
        for batch in self._batches.without_files(self._clock()):
            self._clear(batch)

    def _clear(self, batch: BatchRecord) -> None:
        self._batches.set_reported(batch.id)  # nothing is left to be reported from
        found = [info.path for info in self._objects.list(batch_folder(batch.id) + "/")]
        self._delete(found)
        if not found:
            self._delete(unnamed_contents(batch))
            self._batches.set_contents_deleted(batch.id, int(self._clock()))

    def _delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            if self._stop.is_set():
                raise Stopped
            self._objects.delete([path])
