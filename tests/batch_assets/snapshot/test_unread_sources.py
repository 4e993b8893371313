"""A source whose files are as they were is not read again; whatever was written to them is seen."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from batch_assets.snapshot.builder import build_snapshot, changed_rows
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

LINES = '{"q": "a"}\n{"q": "b"}\n'


class Source:
    """A dataset of one file, and how often it was read."""

    def __init__(self, folder: Path, objects: Objects, path: str = "rows.jsonl") -> None:
        self.folder, self.path, self.reads, self.file = folder, path, 0, folder / "rows.jsonl"
        self.store = DatasetStore(objects, "rows")

    def spec(self, **more: Any) -> GeneratedDatasetSpec:
        about = {"name": "rows", "source": {"path": self.path}, "prompt": {"user": "{{ q }}"}, "model": "tiny"}
        return load_spec(about | more, "defs.yaml")

    def build(self, *, later: float = 60.0, **more: Any) -> SnapshotManifest:
        """A refresh so many seconds from now."""
        workdir = self.folder / f"work-{time.monotonic_ns()}"
        now = time.time() + later
        found = build_snapshot(self.spec(**more), self.store, now=now, workdir=workdir, base=self.folder)
        self.reads += workdir.exists()  # what is read is staged there
        return found


@pytest.fixture
def source(tmp_path: Path, local_objects: Objects) -> Source:
    (tmp_path / "rows.jsonl").write_text(LINES)
    return Source(tmp_path, local_objects)


def test_files_that_are_as_they_were_are_not_read_again(source: Source):
    first = source.build()
    assert source.build() == first and source.reads == 1
    workdir = source.folder / "plan"
    counts = changed_rows(source.spec(), source.store, workdir=workdir, base=source.folder)
    assert counts is not None and (counts.rows, counts.unchanged, workdir.exists()) == (2, 2, False)


def test_a_write_that_leaves_size_and_time_of_a_file_is_seen(source: Source):
    source.build()
    before = source.file.stat()
    source.file.write_text(LINES.replace("b", "c"))
    os.utime(source.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = source.file.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert (source.build().added, source.reads) == (1, 2)


def test_another_file_in_its_place_is_seen(source: Source):
    source.build()
    (source.folder / "new").write_text(LINES.replace("b", "c"))
    (source.folder / "new").replace(source.file)
    assert (source.build().added, source.reads) == (1, 2)


def test_a_file_that_was_touched_is_read_once_more_and_gives_the_same_snapshot(source: Source):
    first = source.build()
    source.file.touch()
    assert source.build().snapshot == first.snapshot and source.reads == 2
    assert source.build().snapshot == first.snapshot and source.reads == 2


def test_a_file_that_was_just_written_is_read_again_the_next_time(source: Source):
    first = source.build(later=0)
    assert first.read_digest is None
    assert source.build().snapshot == first.snapshot and source.reads == 2
    assert source.build().snapshot == first.snapshot and source.reads == 2


def test_another_prompt_and_another_file_of_the_glob_are_seen(source: Source):
    source.path = "*.jsonl"
    source.build()
    assert source.build(prompt={"user": "Say {{ q }}"}).added == 2
    assert source.build().added == 2
    (source.folder / "more.jsonl").write_text('{"q": "d"}\n')
    assert source.build().rows == 3
    (source.folder / "more.jsonl").unlink()
    assert source.build().rows == 2


def test_a_damaged_snapshot_is_made_again(source: Source):
    first = source.build()
    source.store.objects.delete([source.store.snapshot_path(first.snapshot, first.shards[0].path)])
    assert source.build().snapshot == first.snapshot and source.reads == 2
    assert source.store.objects.exists(source.store.snapshot_path(first.snapshot, first.shards[0].path))


@pytest.mark.slow
def test_objects_of_a_bucket_are_told_apart_by_their_etags(tmp_path: Path, local_objects: Objects, s3_objects: Objects):
    s3_objects.put("rows.jsonl", LINES.encode())
    source = Source(tmp_path, local_objects, f"s3://bucket/{tmp_path.name}/rows.jsonl")
    first = source.build()
    assert source.build() == first and source.reads == 1
    s3_objects.put("rows.jsonl", LINES.replace("b", "c").encode())
    assert (source.build().added, source.reads) == (1, 2)
