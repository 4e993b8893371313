"""Objects in a folder: whole files only, synced, and nothing written where the store was."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resources.objects.opening import LocalObjects, Objects, StoreError, open_objects
from resources.objects.store_folder import MARKER, StoreFolder


def paths(objects: Objects, prefix: str, start_after: str = "") -> list[str]:
    return [info.path for info in objects.list(prefix, start_after)]


def test_a_file_that_is_still_being_written_is_no_object(local_objects: LocalObjects) -> None:
    local_objects.put("d/a", b"1")
    (local_objects.folder / "d" / ".writing-0123").write_bytes(b"torn")
    assert paths(local_objects, "") == ["d/a"]


def test_a_killed_writer_leaves_no_object(local_objects: LocalObjects) -> None:
    code = (
        "import os, sys\n"
        "from resources.objects.opening import LocalObjects, open_objects\n"
        "LocalObjects._sync = staticmethod(lambda file: os._exit(9))\n"
        "open_objects(sys.argv[1]).create('d/a', b'x' * 1000000)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, local_objects.root], cwd=Path(__file__).parents[3], check=False)
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
    real = StoreFolder._enter
    entered: list[str] = []

    def taken_away(self: StoreFolder, root: int, folder: str) -> int:
        descriptor = real(self, root, folder)
        entered.append(folder)
        if len(entered) < 3:
            (self.path / folder).rmdir()
        return descriptor

    monkeypatch.setattr(StoreFolder, "_enter", taken_away)
    assert local_objects.create("d/a", b"1")
    assert local_objects.get("d/a") == b"1"
    assert entered == ["d"] * 3


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

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.extend([path] if path.is_dir() else [])

    monkeypatch.setattr(os, "fsync", fsync)
    local_objects.create("d/00000/a", b"1")
    root = local_objects.folder
    assert synced == [root.parent, root, root, root / "d", root / "d" / "00000"]  # the marker, too
    synced.clear()
    local_objects.create("d/00000/b", b"1")
    assert synced == [root / "d" / "00000"]


WRITES: dict[str, Callable[[Objects, str], object]] = {
    "create": lambda objects, path: objects.create(path, b"2"),
    "put": lambda objects, path: objects.put(path, b"2"),
    "upload": lambda objects, path: objects.upload(path, Path(__file__)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("seen_by", ["the writer", "another process, later"])
def test_an_empty_folder_where_the_store_was_takes_no_write(tmp_path: Path, write: str, seen_by: str) -> None:
    folder = tmp_path / "store"
    objects = open_objects(str(folder))
    assert objects.create("a/b", b"1")
    if seen_by != "the writer":
        objects = open_objects(str(folder))
    folder.rename(tmp_path / "away")
    folder.mkdir()
    for path in ("a/c", "a/b", "c"):
        with pytest.raises(StoreError, match="is it mounted"):
            WRITES[write](objects, path)
    assert list(folder.iterdir()) == []
    folder.rmdir()
    (tmp_path / "away").rename(folder)
    WRITES[write](objects, "a/c")
    assert paths(objects, "") == ["a/b", "a/c"]


@pytest.mark.parametrize("write", WRITES)
def test_a_store_that_is_swapped_for_an_empty_folder_in_mid_write_is_what_is_written_to_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """At every step of a write the folder of the store is renamed away, and an empty one put there."""
    folder, away = tmp_path / "store", tmp_path / "away"
    objects = open_objects(str(folder))
    assert objects.create("a/b", b"1")

    def swap() -> None:
        folder.rename(away)
        folder.mkdir()

    for step in range(1, 50):
        with monkeypatch.context() as patched:
            before_call(patched, step, swap)
            refused = False
            try:
                WRITES[write](objects, f"n{step}/x")
            except StoreError:
                refused = True
        if not away.exists():  # the write was over before this step
            break
        assert list(folder.iterdir()) == [], f"step {step}: written into the empty folder"
        folder.rmdir()
        away.rename(folder)
        assert objects.exists(f"n{step}/x") != refused
    assert 5 < step < 49


def before_call(patched: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """`act` comes right before the call of the file system that has this number."""
    calls = 0

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            nonlocal calls
            calls += 1
            if calls == number:
                act()
            return real(*args, **more)

        return call

    for name in ("open", "fsync", "link", "replace", "stat"):
        patched.setattr(os, name, counted(getattr(os, name)))


def test_another_store_in_its_place_takes_no_write(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    objects, other = open_objects(str(folder)), open_objects(str(tmp_path / "other"))
    assert objects.create("a", b"1")
    assert other.create("a", b"1")
    folder.rename(tmp_path / "away")
    (tmp_path / "other").rename(folder)
    with pytest.raises(StoreError, match="another store"):
        objects.put("b", b"1")
    assert open_objects(str(folder)).create("b", b"1")


READS: dict[str, Callable[[Objects, str], object]] = {
    "get": lambda objects, path: objects.get(path),
    "open": lambda objects, path: objects.open(path),
    "exists": lambda objects, path: objects.exists(path),
    "list": lambda objects, path: list(objects.list(path)),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("place", ["no folder", "an empty folder", "another store"])
def test_nothing_is_found_missing_where_the_store_is_not(tmp_path: Path, read: str, place: str) -> None:
    folder, other = tmp_path / "store", tmp_path / "other"
    objects = open_objects(str(folder))
    assert objects.create("a/b", b"1")
    folder.rename(tmp_path / "away")
    if place == "an empty folder":
        folder.mkdir()
    elif place == "another store":
        assert open_objects(str(other)).create("c", b"1")
        other.rename(folder)
    with pytest.raises(StoreError, match="mount"):
        READS[read](objects, "a/b")
    if place != "no folder":
        folder.rename(other)
    (tmp_path / "away").rename(folder)
    assert objects.get("a/b") == b"1" and not objects.exists("a/c") and list(objects.list("c")) == []


def test_a_store_that_nobody_has_made_yet_is_empty(tmp_path: Path) -> None:
    objects = open_objects(str(tmp_path / "store"))
    assert not objects.exists("a") and list(objects.list("")) == []
    with pytest.raises(FileNotFoundError):
        objects.get("a")


def test_a_store_from_before_there_were_markers_gets_one_and_its_empty_mount_point_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    (folder / "d").mkdir(parents=True)
    (folder / "d" / "a").write_bytes(b"1")
    objects = open_objects(str(folder))
    folder.rename(tmp_path / "away")
    folder.mkdir()
    with pytest.raises(StoreError, match="is it mounted"):
        objects.put("d/b", b"1")
    assert list(folder.iterdir()) == []
    folder.rmdir()
    (tmp_path / "away").rename(folder)
    objects.put("d/b", b"1")
    assert sorted(file.name for file in folder.iterdir()) == [MARKER, "d"]


def test_of_many_first_writers_one_leaves_the_marker(tmp_path: Path) -> None:
    stores = [open_objects(str(tmp_path / "store")) for _ in range(8)]
    together = threading.Barrier(8)

    def write(number: int) -> None:
        together.wait()
        stores[number].put(f"d/{number}", b"1")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert len(paths(stores[0], "d/")) == 8
    for number in range(8):
        write_again = stores[number].create(f"e/{number}", b"1")
        assert write_again


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/x"])
def test_a_path_outside_the_root_is_refused(local_objects: Objects, path: str) -> None:
    with pytest.raises(StoreError, match="below the root"):
        local_objects.put(path, b"1")
