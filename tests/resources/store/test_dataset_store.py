"""The store of one dataset: snapshots, batch objects that are commits, and a journal that may be torn."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
from collections.abc import Callable, Sequence
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.snapshots import commit, current_path, outcome, overwrite, questions, write_snapshot

from gpu_runner.rows import Outcome
from resources.objects.opening import CorruptObject, LocalObjects, Objects
from resources.store.dataset_store import (
    FOOTER_KEY,
    BatchEntry,
    BatchFooter,
    BatchObject,
    DatasetStore,
    SnapshotManifest,
)


@pytest.fixture
def store(local_objects: Objects) -> DatasetStore:
    return DatasetStore(local_objects, "sums")


def outcomes_of(store: DatasetStore, manifest: SnapshotManifest, key: str) -> tuple[BatchEntry, list[Outcome]]:
    entry = next(entry for entry in store.entries(manifest.snapshot) if entry.key == key)
    ((_, rows),) = store.rows(manifest, [entry])
    return entry, [outcome(row, number, dead=number == 1) for number, row in enumerate(rows)]


def footer_of(entry: BatchEntry, outcomes: Sequence[Outcome], **said: object) -> BatchFooter:
    named = {"snapshot": "s", "generation": 0, "epoch": 1, "run_id": "run-1", "root_run_id": "run-1", **said}
    return BatchFooter.of("sums", entry, outcomes, **named)


def test_a_snapshot_is_read_back_batch_by_batch(any_objects: Objects) -> None:
    store = DatasetStore(any_objects, "sums")
    assert store.current_snapshot() is None
    manifest = write_snapshot(store, questions(47))
    assert store.current_snapshot() == manifest.snapshot
    assert store.manifest(manifest.snapshot) == manifest
    entries = store.entries(manifest.snapshot)
    assert [entry.rows for entry in entries] == [10, 10, 10, 10, 7]
    found = list(store.rows(manifest, entries[1:]))
    assert [entry.key for entry, _ in found] == ["00001", "00002", "00003", "00004"]
    assert [row.row_id for _, rows in found for row in rows] == [f"id-{i:06d}" for i in range(10, 47)]
    assert found[0][1][0].prompt == b'[{"role":"user","content":"What is 10 plus 10?"}]'
    with pytest.raises(CorruptObject, match="expected the manifest of a snapshot, found none"):
        store.manifest("0123456789abcdef")


def test_rows_that_are_not_what_the_snapshot_says_are_refused(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(20))
    entry = store.entries(manifest.snapshot)[0]
    wrong = dataclasses.replace(entry, row_group=1)
    with pytest.raises(CorruptObject, match="expected data version"):
        list(store.rows(manifest, [wrong]))


def test_a_commit_is_read_back_as_it_was_written(any_objects: Objects) -> None:
    store = DatasetStore(any_objects, "sums")
    manifest = write_snapshot(store, questions(20))
    entry, outcomes = outcomes_of(store, manifest, "00001")
    footer = footer_of(entry, outcomes)
    assert store.commit(footer, outcomes, "chat") == (footer, True)
    batch = BatchObject("00001", entry.data_version, 0)
    assert store.footer(batch) == footer
    assert store.outcomes(batch) == outcomes
    assert (footer.rows, footer.ok, footer.dead) == (10, 9, 1)


def test_vectors_are_read_back_as_they_were_written(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(5), task="embedding")
    commit(store, manifest, dead=["id-000002"])
    (batch,) = store.current_objects(store.entries(manifest.snapshot)).values()
    assert [found.output for found in store.outcomes(batch)][1:4] == [(1.0, 1.0, 0.5), None, (3.0, 1.0, 0.5)]


def test_the_second_writer_of_a_batch_adopts_what_the_first_wrote(any_objects: Objects) -> None:
    store = DatasetStore(any_objects, "sums")
    manifest = write_snapshot(store, questions(10))
    entry, outcomes = outcomes_of(store, manifest, "00000")
    first = footer_of(entry, outcomes)
    store.commit(first, outcomes, "chat")
    later = [dataclasses.replace(found, output="another answer", error=None) for found in outcomes]
    adopted, won = store.commit(footer_of(entry, later, run_id="run-2", epoch=2), later, "chat")
    assert (adopted, won) == (first, False)
    assert store.outcomes(BatchObject("00000", entry.data_version, 0)) == outcomes


def test_outcomes_of_other_rows_are_never_committed(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(20))
    entry, outcomes = outcomes_of(store, manifest, "00000")
    _, others = outcomes_of(store, manifest, "00001")
    for wrong in (others, outcomes[:-1], [*outcomes[1:], outcomes[0]]):
        with pytest.raises(CorruptObject, match="refused to commit"):
            store.commit(footer_of(entry, wrong), wrong, "chat")
    assert store.objects_by_batch() == {}


@pytest.mark.slow
def test_the_highest_generation_at_the_snapshots_data_version_is_current(any_objects: Objects) -> None:
    store = DatasetStore(any_objects, "sums")
    manifest = write_snapshot(store, questions(30))
    for generation in (0, 1, 10, 9, 2):
        commit(store, manifest, keys=["00001"], generation=generation)
    commit(store, manifest, keys=["00002"])
    entries = store.entries(manifest.snapshot)
    store.objects.put(f"sums/batches/00001/{'0' * 16}-g99.parquet", b"another data version")
    store.objects.put("sums/batches/00001/notes.txt", b"no object")
    current = store.current_objects(entries)
    assert {key: batch.generation for key, batch in current.items()} == {"00001": 10, "00002": 0}
    found = store.objects_by_batch("00001", "00001")
    assert [batch.generation for batch in found["00001"]] == [99, 0, 1, 2, 9, 10]
    assert list(found) == ["00001"]
    assert store.current_objects(entries[:1]) == store.current_objects([]) == {}


def corrupt(data: bytes, kind: str) -> bytes:
    if kind == "another footer":
        sink = io.BytesIO()
        pq.write_table(pq.read_table(io.BytesIO(data)).replace_schema_metadata({FOOTER_KEY: b"{}"}), sink)
        return sink.getvalue()
    return {"empty": b"", "half": data[: len(data) // 2], "no footer": data[:-8] + b"\0" * 8, "text": b"PAR1" * 9}[kind]


@pytest.mark.parametrize("kind", ["empty", "half", "no footer", "text", "another footer"])
def test_a_torn_object_is_corrupt_whichever_way_it_is_read(store: DatasetStore, kind: str) -> None:
    manifest = write_snapshot(store, questions(10))
    commit(store, manifest)
    path = current_path(store, manifest, "00000")
    (batch,) = store.current_objects(store.entries(manifest.snapshot)).values()
    overwrite(store, path, corrupt(store.objects.get(path), kind))
    for read in (store.footer, store.batch_table, store.outcomes):
        with pytest.raises(CorruptObject, match=path):
            read(batch)


class UnreadableObjects(LocalObjects):
    """A store that opens its objects, and then does not give their bytes."""

    failure: Exception | None = None

    def get(self, path: str, most: int = 1 << 30) -> bytes:
        if self.failure is not None:
            raise self.failure
        return super().get(path, most)

    def open(self, path: str) -> BinaryIO:
        opened = super().open(path)
        return opened if self.failure is None else cast(BinaryIO, _Unreadable(opened, self.failure))


class _Unreadable(io.RawIOBase):
    """A file that can be positioned, and not read."""

    def __init__(self, opened: BinaryIO, failure: Exception) -> None:
        self._opened, self._failure = opened, failure

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._opened.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._opened.seek(offset, whence)
        return self._opened.tell()

    def readinto(self, buffer: object) -> int:
        raise self._failure


READS: dict[str, Callable[[DatasetStore, SnapshotManifest, BatchObject], object]] = {
    "entries": lambda store, manifest, batch: store.entries(manifest.snapshot),
    "rows": lambda store, manifest, batch: list(
        store.rows(manifest, [BatchEntry("00000", 10, batch.data_version, 0, 0)])
    ),
    "footer": lambda store, manifest, batch: store.footer(batch),
    "outcomes": lambda store, manifest, batch: store.outcomes(batch),
}
ANSWERS = {
    **{errno.errorcode[code]: OSError(code, os.strerror(code)) for code in (errno.EIO, errno.ESTALE, errno.EACCES)},
    "a time-out": TimeoutError("no answer"),
    "a connection": ConnectionResetError("closed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_store_that_does_not_give_the_bytes_says_nothing_about_the_object(
    local_objects: LocalObjects, read: str, answer: str
) -> None:
    objects = UnreadableObjects(local_objects.folder)
    store = DatasetStore(objects, "sums")
    manifest = write_snapshot(store, questions(10))
    commit(store, manifest)
    (batch,) = store.current_objects(store.entries(manifest.snapshot)).values()
    objects.failure = ANSWERS[answer]
    with pytest.raises(type(objects.failure)) as raised:
        READS[read](store, manifest, batch)
    assert raised.value is objects.failure
    objects.failure = None
    READS[read](store, manifest, batch)


def test_an_object_under_another_batchs_name_is_corrupt(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(20))
    commit(store, manifest)
    current = store.current_objects(store.entries(manifest.snapshot))
    data = store.objects.get(store.batch_path(current["00000"]))
    overwrite(store, store.batch_path(current["00001"]), data)
    for read in (store.footer, store.batch_table):
        with pytest.raises(CorruptObject, match="names batch 00000"):
            read(current["00001"])


def test_an_object_that_is_gone_is_not_called_corrupt(any_objects: Objects) -> None:
    store = DatasetStore(any_objects, "sums")
    for read in (store.footer, store.batch_table):
        with pytest.raises(FileNotFoundError):
            read(BatchObject("00000", "0" * 16, 0))


def test_the_journal_is_read_back_by_batch(any_objects: Objects) -> None:
    store = DatasetStore(any_objects, "sums")
    manifest = write_snapshot(store, questions(30))
    batches = {key: outcomes_of(store, manifest, key)[1][:4] for key in ("00000", "00002")}
    path = store.journal.append(("00000", "00009"), "", "run-1", 7, batches, "chat")
    assert store.journal.segments(("00002", "00002")) == [path]
    assert store.journal.read(path) == batches


def test_vectors_survive_the_journal(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(3), task="embedding")
    ((_, rows),) = store.rows(manifest, store.entries(manifest.snapshot))
    batches = {"00000": [outcome(row, i, task="embedding", dead=i == 1) for i, row in enumerate(rows)]}
    path = store.journal.append(("00000", "00000"), "", "run-1", 0, batches, "embedding")
    assert store.journal.read(path) == batches


def test_journal_segments_are_found_by_overlap_and_purpose(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(10))
    batches = {"00000": outcomes_of(store, manifest, "00000")[1]}
    root = "1f2e-4d5c-root"
    ranges = [("00000", "00009"), ("00010", "00019"), ("00005", "00014")]
    low, high, across = (store.journal.append(found, "", "run-1", 0, batches, "chat") for found in ranges)
    redrive = store.journal.append(("00000", "00009"), root, "run-2", 0, batches, "chat")
    assert sorted(store.journal.segments(("00000", "00004"))) == [low]
    assert sorted(store.journal.segments(("00009", "00010"))) == sorted([low, across, high])
    assert store.journal.segments(("00000", "00099"), root) == [redrive]
    assert store.journal.segments(("00020", "00029")) == []
    assert sorted(store.journal.ordinary_segments()) == sorted([low, across, high])


def test_a_torn_journal_segment_is_as_good_as_none(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(10))
    batches = {"00000": outcomes_of(store, manifest, "00000")[1]}
    path = store.journal.append(("00000", "00000"), "", "run-1", 0, batches, "chat")
    whole = store.objects.get(path)
    for length in range(0, len(whole), 97):
        overwrite(store, path, whole[:length])
        assert store.journal.read(path) == {}, length
    for place in range(0, len(whole), 31):
        overwrite(store, path, whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert store.journal.read(path) == {}, place
    store.objects.delete([path])
    with pytest.raises(FileNotFoundError):  # gone, or its store is: the caller has to tell
        store.journal.read(path)


def test_committed_pages_carry_checksums(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(10))
    commit(store, manifest)
    path = current_path(store, manifest, "00000")
    (batch,) = store.current_objects(store.entries(manifest.snapshot)).values()
    data = store.objects.get(path)
    place = data.index(b"answer")
    overwrite(store, path, data[:place] + b"b" + data[place + 1 :])
    with pq.ParquetFile(pa.BufferReader(store.objects.get(path))) as unchecked:
        assert unchecked.metadata.num_rows == 10
    with pytest.raises(CorruptObject):
        store.batch_table(batch)


def test_readers_see_a_published_version_once_it_is_switched_to(any_objects: Objects) -> None:
    store = DatasetStore(any_objects, "sums")
    assert store.current_published() is None
    store.publish("0123456789abcdef")
    assert store.current_published() == "0123456789abcdef"
    assert store.published_path("v", "part-00000.parquet") == "sums/published/v/part-00000.parquet"
