"""Lines of an ended batch that have no answer are asked for once more: as a batch of their own.

An ended batch never changes, so that its files stay what their readers have seen. The new one has the tenant, endpoint,
window and metadata of the old one, and `metadata.redrive_of`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import orjson

from batch_assets.api.batches.create import MOST_PAIRS, CreateBatch
from batch_assets.api.batches.snapshot import SNAPSHOT, batch_store
from batch_assets.api.records.batches import BatchRecord, BatchRecords, new_batch_id
from batch_assets.api.records.files import LONGEST_LIFE, FileRecord, FileRecords, Purpose
from batch_assets.api.records.states import TERMINAL
from gpu_runner.errors import ExitStatus, UserFacingError
from resources.objects.opening import Objects, temporary_folder
from resources.store.dataset_store import BatchEntry, BatchFooter, DatasetStore

REDRIVE_OF = "redrive_of"


class RedriveRefused(UserFacingError):
    """The lines of this batch cannot be asked for once more."""

    exit_status = ExitStatus.WRONG_REQUEST


@dataclass(frozen=True, slots=True)
class Part:
    """250 rows of the old batch. `lines`: how many of them are asked for once more."""

    footer: BatchFooter
    lines: int


@dataclass(frozen=True, slots=True)
class Redrive:
    """`batch_id`: of the new batch; None: every line has its answer."""

    parts: list[Part]
    batch_id: str | None


class BatchRedrive:
    """`redrive` may be repeated under the same `request`: it makes one batch."""

    def __init__(self, batches: BatchRecords, files: FileRecords, objects: Objects) -> None:
        self._batches, self._files, self._objects = batches, files, objects

    def redrive(self, batch_id: str, keys: Collection[str], request: str, now: int) -> Redrive:
        """Make a batch of the lines without an answer among the parts `keys` of an ended batch.

        `request`: what asks for it, as a run's id. Raises RedriveRefused; CorruptObject, and as store and records.
        """
        old = self._ended(batch_id)
        store = batch_store(self._objects, batch_id)
        entries = [entry for entry in self._entries(store, batch_id) if entry.key in keys]
        if missing := sorted(set(keys) - {entry.key for entry in entries}):
            raise RedriveRefused(f"batch {batch_id}: it has no part {missing[0]}")
        with temporary_folder() as folder:
            path = Path(folder) / "lines"
            parts = _write_lines(store, old, entries, path)
            if not any(part.lines for part in parts):
                return Redrive(parts, None)
            wanted = _record(old, request, now)
            if (made := self._batches.made_before(wanted)) is None:
                self._add_file(old, wanted.input_file_id, path, now)
                made = self._batches.create(wanted)
        return Redrive(parts, made.id)

    def _ended(self, batch_id: str) -> BatchRecord:
        found = self._batches.of_any_tenant(batch_id)
        if found is None:
            raise RedriveRefused(f"batch {batch_id}: expected a batch of this service's records, found none")
        if found.state not in TERMINAL:
            raise RedriveRefused(f"batch {batch_id}: expected one that has ended, found one that is {found.status}")
        return found

    @staticmethod
    def _entries(store: DatasetStore, batch_id: str) -> list[BatchEntry]:
        if not store.objects.exists(store.snapshot_path(SNAPSHOT, "batches.parquet")):
            said = "they were deleted with its files"
            raise RedriveRefused(f"batch {batch_id}: expected its lines in the store, found none: {said}")
        return store.entries(SNAPSHOT)

    def _add_file(self, old: BatchRecord, file_id: str, path: Path, now: int) -> None:
        """The input file of the new batch, unless an earlier try has added it."""
        if self._files.get(old.tenant, file_id, now) is not None:
            return
        name, size = f"{old.id}_redrive.jsonl", path.stat().st_size
        file = FileRecord(file_id, old.tenant, Purpose.BATCH, name, size, now, now + LONGEST_LIFE)
        self._objects.upload(file.path, path)
        self._files.add(file)


def _write_lines(store: DatasetStore, old: BatchRecord, entries: list[BatchEntry], path: Path) -> list[Part]:
    """Write the lines without an answer as an input file, in their order."""
    current = store.current_objects(entries)
    written = [entry for entry in entries if entry.key in current]
    parts = []
    with path.open("wb") as file:
        for entry, table in store.prompt_tables(store.manifest(SNAPSHOT), written, ("row_id", "prompt")):
            batch, lines = current[entry.key], 0
            answered = {outcome.row_id for outcome in store.outcomes(batch) if outcome.ok}
            ids, bodies = (table.column(name).to_pylist() for name in ("row_id", "prompt"))
            for custom_id, body in zip(ids, bodies, strict=True):
                if custom_id not in answered:
                    file.write(_line(custom_id, old.endpoint, body))
                    lines += 1
            parts.append(Part(store.footer(batch), lines))
    return parts


def _line(custom_id: str, url: str, body: bytes) -> bytes:
    found = {"custom_id": custom_id, "method": "POST", "url": url, "body": orjson.Fragment(body)}
    return orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)


def _record(old: BatchRecord, request: str, now: int) -> BatchRecord:
    """The new batch. The same request gives the same file and key."""
    key = f"redrive:{request}:{old.id}"
    file_id = f"file-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    metadata = old.metadata_values()
    if len(metadata) < MOST_PAIRS or REDRIVE_OF in metadata:
        metadata[REDRIVE_OF] = old.id
    asked = CreateBatch(
        input_file_id=file_id,
        endpoint=old.endpoint,
        completion_window=old.completion_window,
        metadata=metadata,
    )
    return BatchRecord(
        id=new_batch_id(),
        tenant=old.tenant,
        endpoint=old.endpoint,
        input_file_id=file_id,
        completion_window=old.completion_window,
        created_at=now,
        expires_at=now + old.expires_at - old.created_at,
        digest=asked.digest(),
        metadata=json.dumps(metadata),
        output_seconds=old.output_seconds,
        idempotency_key=key,
    )
