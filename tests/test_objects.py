"""Objects: create-only, ordered listing, whole files only; the same on a folder and on S3."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import polars as pl
import pytest

from resources.objects import LocalObjects, Objects, StoreError, open_objects, self_test, temporary_folder


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


def test_listing_goes_over_more_than_one_page(any_objects: Objects) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: any_objects.put(f"d/{i:05d}/x", b"1"), range(1100)))
    assert paths(any_objects, "d/") == [f"d/{i:05d}/x" for i in range(1100)]
    assert paths(any_objects, "d/", "d/01097/x") == ["d/01098/x", "d/01099/x"]


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


def test_a_file_that_is_still_being_written_is_no_object(local_objects: LocalObjects) -> None:
    local_objects.put("d/a", b"1")
    (local_objects.folder / "d" / ".writing-0123").write_bytes(b"torn")
    assert paths(local_objects, "") == ["d/a"]


def test_a_killed_writer_leaves_no_object(local_objects: LocalObjects) -> None:
    code = (
        "import os, sys\n"
        "from resources.objects import LocalObjects, open_objects\n"
        "LocalObjects._sync = staticmethod(lambda file: os._exit(9))\n"
        "open_objects(sys.argv[1]).create('d/a', b'x' * 1000000)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, local_objects.root], cwd=Path(__file__).parents[1], check=False)
    assert run.returncode == 9
    assert [file.name[:9] for file in (local_objects.folder / "d").iterdir()] == [".writing-"]
    assert paths(local_objects, "") == []
    assert local_objects.create("d/a", b"whole")


def test_a_failed_write_leaves_nothing_behind(local_objects: LocalObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalObjects, "_sync", staticmethod(full))
    for write in (local_objects.create, local_objects.put):
        with pytest.raises(OSError, match="No space left"):
            write("d/a", b"1")
    assert list((local_objects.folder / "d").iterdir()) == []


def test_a_folder_that_a_delete_takes_away_is_made_again(
    local_objects: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalObjects._make_folder
    made: list[Path] = []

    def taken_away(self: LocalObjects, folder: Path) -> None:
        real(self, folder)
        made.append(folder)
        if folder.name == "d" and made.count(folder) < 3:
            folder.rmdir()

    monkeypatch.setattr(LocalObjects, "_make_folder", taken_away)
    assert local_objects.create("d/a", b"1")
    assert local_objects.get("d/a") == b"1"


@pytest.mark.parametrize("there_before", [True, False])
def test_a_root_that_was_there_and_is_gone_is_not_made_again(tmp_path: Path, there_before: bool) -> None:
    folder = tmp_path / "store"
    if there_before:
        folder.mkdir()
    objects = open_objects(str(folder))
    assert objects.create("a", b"1")
    objects.delete(["a"])
    assert objects.create("a/b", b"1")  # an empty root is still there
    folder.rename(tmp_path / "away")
    for write in (objects.create, objects.put):
        with pytest.raises(StoreError, match="mount it again"):
            write("a/c", b"2")
    assert not folder.exists()
    (tmp_path / "away").rename(folder)
    assert objects.create("a/c", b"2")


def test_a_folder_that_vanishes_during_a_listing_is_passed_over(local_objects: LocalObjects) -> None:
    for name in ("d/a/1", "d/b/1", "d/c/1"):
        local_objects.put(name, b"1")
    listing = local_objects.list("d/")
    assert next(listing).path == "d/a/1"
    local_objects.delete(["d/b/1"])
    assert [info.path for info in listing] == ["d/c/1"]


def test_a_new_folder_is_synced_into_the_one_above(
    local_objects: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(LocalObjects, "_sync_folder", staticmethod(synced.append))
    local_objects.create("d/00000/a", b"1")
    root = local_objects.folder
    assert synced == [root.parent, root, root / "d", root / "d" / "00000"]
    synced.clear()
    local_objects.create("d/00000/b", b"1")
    assert synced == [root / "d" / "00000"]


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/x"])
def test_a_path_outside_the_root_is_refused(local_objects: Objects, path: str) -> None:
    with pytest.raises(StoreError, match="below the root"):
        local_objects.put(path, b"1")


@pytest.mark.parametrize("root", ["gs://bucket/x", "s3://", "s3://key:secret@bucket/x", "http://host/x"])
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


@pytest.fixture
def odd_s3(s3_objects: Objects, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An S3 server that answers every request with the statuses in the list, one after the other, the last for ever."""
    statuses: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD = do_PUT = do_DELETE = answer

        def log_message(self, *said: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield statuses
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_store_that_ignores_the_condition_fails_its_self_test(odd_s3: list[int]) -> None:
    odd_s3.append(200)
    with pytest.raises(StoreError, match="refuse a second create"):
        self_test(open_objects("s3://bucket/x"))


def test_a_bucket_that_denies_or_is_not_there_fails_its_self_test(odd_s3: list[int]) -> None:
    odd_s3.append(403)
    with pytest.raises(StoreError, match="cannot write here") as caught:
        self_test(open_objects("s3://bucket/x"))
    assert "\n" not in str(caught.value)


def test_a_create_whose_reply_was_lost_is_ours(s3_objects: Objects) -> None:
    """The PUT arrived and its reply did not: the client's own retry then finds the object there, with our bytes."""
    s3_objects.put("a/b", b"ours")
    assert s3_objects.create("a/b", b"ours")


def test_a_conflict_with_nothing_there_is_tried_again(odd_s3: list[int]) -> None:
    odd_s3 += [409, 404, 412, 404, 200]
    assert open_objects("s3://bucket/x").create("a/b", b"1")


def test_s3_without_credentials_is_refused(s3_objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(StoreError, match="cannot write here"):
        self_test(open_objects("s3://bucket/x"))


def test_work_files_are_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_ASSETS_WORKDIR", str(tmp_path))
    with temporary_folder() as folder:
        assert folder.parent == tmp_path
        (folder / "x").write_bytes(b"1")
    assert list(tmp_path.iterdir()) == []
