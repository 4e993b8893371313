"""Objects: create-only, ordered listing, whole files only; the same on a folder and on S3."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl
import pytest

from resources.objects.opening import LocalObjects, Objects, StoreError, open_objects, self_test, temporary_folder


def paths(objects: Objects, prefix: str, start_after: str = "") -> list[str]:
    return [info.path for info in objects.list(prefix, start_after)]


def test_the_first_create_wins(any_objects: Objects) -> None:
    assert any_objects.create("a/b", b"first")
    assert not any_objects.create("a/b", b"second")
    assert any_objects.get("a/b") == b"first"


def test_of_many_creates_at_once_exactly_one_wins(any_objects: Objects) -> None:
    together = threading.Barrier(8)

    def write(number: int) -> bool:
        together.wait()
        return any_objects.create("a/b", b"writer %d" % number)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(write, range(8)))
    assert won.count(True) == 1
    assert any_objects.get("a/b") == b"writer %d" % won.index(True)


@pytest.mark.slow
def test_put_replaces_and_upload_takes_a_file(any_objects: Objects, tmp_path: Path) -> None:
    any_objects.put("a/b", b"first")
    any_objects.put("a/b", b"second")
    assert any_objects.get("a/b") == b"second"
    file = tmp_path / "large"
    file.write_bytes(os.urandom(12 << 20))
    any_objects.upload("a/b", file)
    assert any_objects.get("a/b") == file.read_bytes()


def test_what_is_not_there_is_not_found(any_objects: Objects) -> None:
    assert not any_objects.exists("a/b")
    assert paths(any_objects, "a/") == []
    any_objects.delete(["a/b"])
    with pytest.raises(FileNotFoundError):
        any_objects.get("a/b")
    with pytest.raises(FileNotFoundError):
        any_objects.open("a/b")


def test_listing_is_in_the_order_of_whole_paths_and_starts_after(any_objects: Objects) -> None:
    """Folders sort by their name with `/`, as S3 does: `a-1` and `a.1` come before `a/1`."""
    names = ["d/a-1", "d/a.1", "d/a/1", "d/a/2", "d/a0", "d/b", "d/b/1", "e/1", "d2"]
    if isinstance(any_objects, LocalObjects):
        names.remove("d/b")  # a file cannot also be a folder on disk
    for name in names:
        any_objects.put(name, name.encode())
    inside = sorted(name for name in names if name.startswith("d/"))
    assert paths(any_objects, "d/") == inside
    for start in ("d/", "d/a", "d/a-1", "d/a/1", "d/a/15", "d/a/2", "d/b", "d/zzz"):
        assert paths(any_objects, "d/", start) == [name for name in inside if name > start], start
    assert paths(any_objects, "") == sorted(names)
    assert {info.path: info.size for info in any_objects.list("e/")} == {"e/1": 3}


@pytest.mark.slow
def test_listing_goes_over_more_than_one_page(any_objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "100")  # of a page; S3's has 1,000
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: any_objects.put(f"d/{i:05d}/x", b"1"), range(210)))
    assert paths(any_objects, "d/") == [f"d/{i:05d}/x" for i in range(210)]
    assert paths(any_objects, "d/", "d/00207/x") == ["d/00208/x", "d/00209/x"]


def test_an_object_is_read_in_ranges(any_objects: Objects) -> None:
    data = os.urandom(300_000)
    any_objects.put("a/b", data)
    with any_objects.open("a/b") as file:
        assert file.read(10) == data[:10]
        file.seek(-5, os.SEEK_END)
        assert file.read() == data[-5:]
        file.seek(100_000)
        file.seek(50_000, os.SEEK_CUR)
        assert file.read(100_000) == data[150_000:250_000]
        assert file.tell() == 250_000
        assert file.seek(0, os.SEEK_END) == 300_000
        assert file.read(1) == b""


def test_polars_reads_an_object_by_its_uri(any_objects: Objects, tmp_path: Path) -> None:
    pl.DataFrame({"a": [1, 2]}).write_parquet(tmp_path / "x.parquet")
    any_objects.upload("t/x.parquet", tmp_path / "x.parquet")
    scan = pl.scan_parquet(any_objects.uri("t/*.parquet"), storage_options=any_objects.storage_options())
    assert scan.collect()["a"].to_list() == [1, 2]


def test_delete_takes_many_and_empty_folders_go(any_objects: Objects) -> None:
    for i in range(5):
        any_objects.put(f"d/{i}/x", b"1")
    any_objects.delete([f"d/{i}/x" for i in range(4)] + ["d/9/x"])
    assert paths(any_objects, "d/") == ["d/4/x"]
    if isinstance(any_objects, LocalObjects):
        assert [folder.name for folder in (any_objects.folder / "d").iterdir()] == ["4"]


@pytest.mark.parametrize("root", ["az://bucket/x", "s3://", "s3://key:secret@bucket/x", "http://host/x"])
def test_a_root_of_another_kind_is_refused_without_quoting_keys(root: str) -> None:
    with pytest.raises(StoreError, match="store root") as caught:
        open_objects(root)
    assert "secret" not in str(caught.value)


def test_roots_are_folders_file_urls_and_buckets(tmp_path: Path) -> None:
    assert open_objects(str(tmp_path)).root == str(tmp_path)
    assert open_objects(f"file://{tmp_path}").root == str(tmp_path)
    assert open_objects("s3://bucket/some/prefix/").root == "s3://bucket/some/prefix"
    assert open_objects("s3://bucket").uri("a/b") == "s3://bucket/a/b"


def test_a_good_store_passes_its_self_test(any_objects: Objects) -> None:
    self_test(any_objects)
    assert paths(any_objects, "") == []


def test_a_store_that_overwrites_fails_its_self_test(any_objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(self: Objects, path: str, data: bytes) -> bool:
        self.put(path, data)
        return True

    monkeypatch.setattr(type(any_objects), "create", overwrite)
    with pytest.raises(StoreError, match="refuse a second create"):
        self_test(any_objects)


def test_a_folder_that_cannot_be_written_fails_its_self_test(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot write here"):
        self_test(open_objects(str(tmp_path / "file" / "store")))


def test_work_files_are_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_ASSETS_WORKDIR", str(tmp_path))
    with temporary_folder() as folder:
        assert folder.parent == tmp_path
        (folder / "x").write_bytes(b"1")
    assert list(tmp_path.iterdir()) == []
