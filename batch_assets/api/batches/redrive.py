"""Lines of an ended batch that have no answer are asked for once more: as a batch of their own.

An ended batch never changes, so that its files stay what their readers have seen. The new one has the tenant, endpoint,
window and metadata of the old one, and `metadata.redrive_of` where there is room for one more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import orjson

from batch_assets.api.batches.create import MOST_PAIRS, CreateBatch
from batch_assets.api.batches.snapshot import SNAPSHOT, batch_store
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords, new_batch_id
from batch_assets.api.database.file_records import LONGEST_LIFE, FileRecord, FileRecords, Purpose
from batch_assets.api.database.states import TERMINAL, BatchStatus
from gpu_runner.errors import ExitStatus, UserFacingError
from resources.objects.opening import Objects, temporary_folder
from resources.store.dataset_store import BatchFooter

REDRIVE_OF = "redrive_of"
READS = 8  # at once


class RedriveRefused(UserFacingError):
    """The lines of this batch cannot be asked for once more."""

    exit_status = ExitStatus.WRONG_REQUEST


@dataclass(frozen=True, slots=True)
class RedrivenPart:
    """A part of the old batch. `lines`: how many of them are asked for once more."""

    footer: BatchFooter
    lines: int


@dataclass(frozen=True, slots=True)
class Redrive:
    """`batch_id`: of the new batch; None: every line has its answer."""

    parts: list[RedrivenPart]
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
        source = self._files.get(old.tenant, old.input_file_id, now)
        if source is None:
            said = "expected its input file, found none: it was deleted or has expired"
            raise RedriveRefused(f"batch {batch_id}: {said}")
        try:
            with temporary_folder() as folder:
                path = Path(folder) / "lines"
                parts = self._write_lines(old, keys, path)
                if not any(part.lines for part in parts):
                    return Redrive(parts, None)
                made = self._made(old, source, request, path, now, sum(part.lines for part in parts))
        except FileNotFoundError:
            raise RedriveRefused(f"batch {batch_id}: it is being deleted with its files") from None
        if made.state in TERMINAL and made.state is not BatchStatus.COMPLETED:
            said = f"this request has made batch {made.id} before, which is {made.status}"
            raise RedriveRefused(f"batch {batch_id}: {said}; ask for it by a new run")
        return Redrive(parts, made.id)

    def _ended(self, batch_id: str) -> BatchRecord:
        found = self._batches.of_any_tenant(batch_id)
        if found is None:
            raise RedriveRefused(f"batch {batch_id}: expected a batch of this service's records, found none")
        if found.state not in TERMINAL:
            raise RedriveRefused(f"batch {batch_id}: expected one that has ended, found one that is {found.status}")
        return found

    def _write_lines(self, old: BatchRecord, keys: Collection[str], path: Path) -> list[RedrivenPart]:
        """Write the lines without an answer as an input file, in their order. Parts that have all are not read."""
        store = batch_store(self._objects, old.id)
        if not self._objects.exists(store.snapshot_path(SNAPSHOT, "batches.parquet")):
            said = "they were deleted with its files"
            raise RedriveRefused(f"batch {old.id}: expected its lines in the store, found none: {said}")
        entries = {entry.key: entry for entry in store.entries(SNAPSHOT) if entry.key in keys}
        current = store.current_objects(list(entries.values()))
        if without := sorted(set(keys) - current.keys()):
            raise RedriveRefused(f"batch {old.id}: part {without[0]} has no results")
        with ThreadPoolExecutor(READS) as pool:
            footers = list(pool.map(lambda key: store.footer(current[key]), entries))
        lines = dict.fromkeys(entries, 0)
        dead = [entries[footer.key] for footer in footers if footer.dead]
        with path.open("wb") as file:
            for entry, table in store.prompt_tables(store.manifest(SNAPSHOT), dead, ("row_id", "prompt")):
                answered = {outcome.row_id for outcome in store.outcomes(current[entry.key]) if outcome.ok}
                ids, bodies = (table.column(name).to_pylist() for name in ("row_id", "prompt"))
                for custom_id, body in zip(ids, bodies, strict=True):
                    if custom_id not in answered:
                        file.write(_line(custom_id, old.endpoint, body))
                        lines[entry.key] += 1
        return [RedrivenPart(footer, lines[footer.key]) for footer in footers]

    def _made(
        self, old: BatchRecord, source: FileRecord, request: str, path: Path, now: int, lines: int
    ) -> BatchRecord:
        """The new batch, or the one that the same request has made before. Its input lives no longer than `source`."""
        wanted = _record(old, request, now)
        if (before := self._batches.made_before(wanted)) is not None:
            return before
        if self._files.get(old.tenant, wanted.input_file_id, now) is None:
            until = now + LONGEST_LIFE if source.expires_at is None else min(now + LONGEST_LIFE, source.expires_at)
            name, size = f"{old.id}_redrive.jsonl", path.stat().st_size
            file = FileRecord(wanted.input_file_id, old.tenant, Purpose.BATCH, name, size, now, until, lines)
            self._objects.upload(file.path, path)
            self._files.add(file)
        return self._batches.create(wanted)


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
