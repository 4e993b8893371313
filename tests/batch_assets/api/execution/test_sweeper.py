"""What is deleted, when, and that a sweep which was ended half-way is done again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from batch_assets.api.batches.snapshot import batch_folder
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords
from batch_assets.api.database.file_records import FileRecord, FileRecords, content_path
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.states import ACCEPT, COMPLETE, FINALIZE, REFUSE
from batch_assets.api.execution.results import unnamed_contents
from batch_assets.api.execution.sweeper import Sweeper
from resources.objects.opening import LocalObjects, StoreError

NOW = 1_000.0


class DyingStore(LocalObjects):
    """A store that is away after `left` more deletions."""

    left = 10**9

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            if self.left == 0:
                raise StoreError("away")
            self.left -= 1
            super().delete([path])


@dataclass
class SweptStore:
    records: Records
    objects: DyingStore
    now: float = NOW

    def __post_init__(self) -> None:
        self.batches, self.files = BatchRecords(self.records), FileRecords(self.records)
        self.sweeper = Sweeper(self.batches, self.files, self.objects, lambda: self.now)

    def kept(self) -> list[str]:
        return [info.path for info in self.objects.list("api/")]

    def file(self, name: str) -> FileRecord:
        file = FileRecord(name, "t", "batch", "f", 1, 1)
        self.objects.put(file.path, b"x")
        return file

    def batch(self, name: str) -> BatchRecord:
        """A completed batch with an input, an output and an error file, and four objects of its own."""
        self.files.add(self.file(f"{name}-input"))
        record = BatchRecord(name, "t", "/v1/embeddings", f"{name}-input", "24h", 1, 2, "d")
        self.batches.create(record)
        held = self.batches.claim(name, "worker", 1.0, 5.0)
        assert held is not None
        for path in ("snapshots/input/a", "batches/00000/b", "journal/c", "batches/00001/d"):
            self.objects.put(f"{batch_folder(name)}/{path}", b"x")
        assert self.batches.move(held, ACCEPT, 1) and self.batches.move(held, FINALIZE, 1)
        files = [self.file(f"{name}-output"), self.file(f"{name}-error")]
        ids = {f"{kind}_file_id": f"{name}-{kind}" for kind in ("output", "error")}
        assert self.batches.move(held, COMPLETE, 1, files, **ids)
        found = self.batches.get("t", name)
        assert found is not None
        return found

    def delete_files(self, name: str, *kinds: str) -> None:
        for kind in kinds:
            assert self.files.delete("t", f"{name}-{kind}", self.now)


@pytest.fixture
def site(tmp_path: Path) -> SweptStore:
    return SweptStore(Records(f"sqlite:///{tmp_path / 'api.db'}"), DyingStore(tmp_path / "store"))


def test_a_batch_is_deleted_once_all_its_files_are(site: SweptStore) -> None:
    for name in ("batch_a", "batch_b"):
        site.batch(name)
    others = [path for path in site.kept() if "batch_b" in path]
    site.delete_files("batch_a", "input", "output")
    site.sweeper.sweep()
    assert f"{batch_folder('batch_a')}/journal/c" in site.kept()  # its error file can be read still
    site.delete_files("batch_a", "error")
    site.sweeper.sweep()
    assert site.kept() == others
    assert [batch.id for batch in site.batches.without_files(NOW)] == ["batch_a"]
    site.sweeper.sweep()
    assert site.batches.without_files(NOW) == [] and site.kept() == others
    assert site.batches.get("t", "batch_a") is not None and site.batches.unreported() == []


def test_files_that_expire_are_files_that_are_deleted(site: SweptStore) -> None:
    site.batch("batch_a")
    for kind in ("input", "output", "error"):
        site.files.delete("t", f"batch_a-{kind}", NOW + 50)
    site.sweeper.sweep()
    assert len(site.kept()) == 7
    site.now = NOW + 50
    site.sweeper.sweep()
    assert site.kept() == []


@pytest.mark.parametrize("left", range(7))
def test_a_sweep_that_ends_half_way_is_done_again(site: SweptStore, left: int) -> None:
    site.batch("batch_a")
    site.delete_files("batch_a", "input", "output", "error")
    site.objects.left = left
    with pytest.raises(StoreError):
        site.sweeper.sweep()
    site.objects.left = 10**9
    assert site.kept()
    again = Sweeper(site.batches, site.files, site.objects, lambda: NOW)  # of the next process
    again.sweep()
    again.sweep()
    assert site.kept() == [] and site.batches.without_files(NOW) == []


def test_what_a_worker_wrote_that_had_lost_the_batch_goes_too(site: SweptStore) -> None:
    batch = site.batch("batch_a")
    site.delete_files("batch_a", "input", "output", "error")
    site.sweeper.sweep()
    (output, error) = unnamed_contents(batch)
    site.objects.put(output, b"x")
    site.objects.put(f"{batch_folder('batch_a')}/journal/late", b"x")
    site.sweeper.sweep()
    assert site.kept() == [output]
    site.sweeper.sweep()
    assert site.kept() == [] and error not in site.kept()


def test_a_batch_whose_input_was_refused_keeps_nothing(site: SweptStore) -> None:
    site.files.add(site.file("file-in"))
    site.batches.create(BatchRecord("batch_a", "t", "/v1/embeddings", "file-in", "24h", 1, 2, "d"))
    site.objects.put(f"{batch_folder('batch_a')}/snapshots/input/shard", b"x")
    site.sweeper.sweep()
    assert len(site.kept()) == 2  # it is validated still
    held = site.batches.claim("batch_a", "worker", 1.0, 5.0)
    assert held is not None and site.batches.move(held, REFUSE, 1)
    site.sweeper.sweep()
    assert site.kept() == [content_path("file-in")]


def test_contents_without_a_record_stay(site: SweptStore) -> None:
    """They are another service's on the same store, or a user's whose records were restored from a copy."""
    site.files.add(site.file("file-known"))
    site.file("file-another's")
    for _ in range(130):
        site.sweeper.sweep()
    assert site.kept() == [content_path("file-another's"), content_path("file-known")]
