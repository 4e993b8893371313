"""Finished rows of batches that are still open: segments that a killed run leaves for the next one.

A segment is an Arrow stream (zstd) and eight bytes of its SHA-256. One that is torn is as good as none: its rows are
generated again.
"""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from gpu_runner.rows import Outcome, Task
from resources.objects.opening import Objects
from resources.store.outcome_tables import outcomes_from, outcomes_table, without_empty_columns

_CHECKSUM_BYTES = 8


class Journal:
    """The journal of one dataset. Safe to use from several threads."""

    def __init__(self, objects: Objects, dataset: str) -> None:
        self.objects = objects
        self.dataset = dataset

    def append(
        self,
        key_range: tuple[str, str],
        purpose: str,
        run_id: str,
        sequence: int,
        batches: Mapping[str, Sequence[Outcome]],
        task: Task,
    ) -> str:
        """Write one segment of finished rows of open batches; returns its path.

        `purpose` is empty for ordinary work; a regenerate or re-drive keeps a journal of its own under its root run id.
        """
        tables = []
        for key, outcomes in batches.items():
            table = outcomes_table(outcomes, task)
            tables.append(table.append_column("batch", pa.array([key] * len(outcomes), pa.string())))
        sink = io.BytesIO()
        whole = without_empty_columns(pa.concat_tables(tables))
        with pa.ipc.new_stream(sink, whole.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(whole)
        folder = "-".join((*key_range, purpose) if purpose else key_range)
        path = f"{self.dataset}/journal/{folder}/{run_id}-{sequence:06d}.arrow"
        data = sink.getvalue()
        self.objects.put(path, data + _checksum(data))
        return path

    def segments(self, key_range: tuple[str, str], purpose: str = "") -> list[str]:
        """Segments of every run with this purpose whose range overlaps `key_range`."""
        prefix = f"{self.dataset}/journal/"
        found_segments = []
        for info in self.objects.list(prefix):
            folder = info.path[len(prefix) :].partition("/")[0]
            first, last, found = (*folder.split("-", 2), "")[:3]
            if first <= key_range[1] and last >= key_range[0] and found == purpose:
                found_segments.append(info.path)
        return found_segments

    def read(self, path: str) -> dict[str, list[Outcome]]:
        """Outcomes of one segment by batch key; empty when it is torn (its rows are generated again). Of conversations
        that go on, those that have `begun`, too (`note_furthest`).

        Raises FileNotFoundError when it is gone.
        """
        whole = self.objects.get(path)
        try:
            data, checksum = whole[:-_CHECKSUM_BYTES], whole[-_CHECKSUM_BYTES:]
            if _checksum(data) != checksum:
                return {}
            table = pa.ipc.open_stream(data).read_all()
        except (pa.ArrowException, OSError):
            return {}
        batches: dict[str, list[Outcome]] = defaultdict(list)
        for key, outcome in zip(table.column("batch").to_pylist(), outcomes_from(table), strict=True):
            batches[key].append(outcome)
        return dict(batches)

    def ordinary_segments(self) -> list[str]:
        """Every segment of ordinary work: garbage once all batches of the snapshot are committed."""
        prefix = f"{self.dataset}/journal/"
        folders = ((info.path, info.path[len(prefix) :].partition("/")[0]) for info in self.objects.list(prefix))
        return [path for path, folder in folders if folder.count("-") == 1]


def note_furthest(known: dict[tuple[str, str], Outcome], rows: Iterable[Outcome]) -> None:
    """Add rows of a segment to those of others, by row id and row key. Of a conversation its outcome counts, else the
    record that has come furthest; segments come in no order.
    """
    for row in rows:
        before = known.get((row.row_id, row.row_key))
        if before is None or not row.begun or (before.begun and row.texts >= before.texts):
            known[row.row_id, row.row_key] = row


def _checksum(data: bytes) -> bytes:
    """What ends a journal segment: Arrow's compressed buffers have no checksum of their own."""
    return hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]
