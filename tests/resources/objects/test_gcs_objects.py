"""A bucket of Google Cloud Storage, as a server on loopback that speaks its API."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl
import pytest
from support.fake_gcs import FakeGcs, fake_gcs

from resources.objects.opening import Objects, StoreError, open_objects, self_test


@pytest.fixture
def gcs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with fake_gcs() as found:
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(found.credentials(tmp_path / "key.json")))
        yield found


@pytest.fixture
def objects(gcs: FakeGcs) -> Objects:
    return open_objects("gs://bucket/some/prefix")


def test_the_first_create_wins(objects: Objects, gcs: FakeGcs) -> None:
    assert objects.create("a/b", b"first") and not objects.create("a/b", b"second")
    assert objects.get("a/b") == b"first" and list(gcs.objects) == [("bucket", "some/prefix/a/b")]
    self_test(objects)
    together = threading.Barrier(8)

    def write(number: int) -> bool:
        together.wait()
        return objects.create("a/c", b"writer %d" % number)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(write, range(8))).count(True) == 1


def test_objects_are_put_read_listed_and_deleted(objects: Objects, tmp_path: Path) -> None:
    for name in ("a/1", "a/2", "a/3", "a/4", "b/5"):
        objects.put(name, name.encode())
    assert [info.path for info in objects.list("a/")] == ["a/1", "a/2", "a/3", "a/4"]
    assert [info.path for info in objects.list("a/", "a/2")] == ["a/3", "a/4"]
    objects.delete(["a/1", "a/9"])
    assert not objects.exists("a/1") and objects.exists("a/2")
    with pytest.raises(FileNotFoundError):
        objects.get("a/1")
    with objects.open("b/5") as file:
        file.seek(2)
        assert file.read() == b"5"
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * (48 << 10))
    objects.upload("c", large)
    assert objects.get("c") == large.read_bytes()


def test_polars_reads_a_table_there(objects: Objects, tmp_path: Path) -> None:
    pl.DataFrame({"q": ["one", "two"]}).write_parquet(tmp_path / "t.parquet")
    objects.upload("t.parquet", tmp_path / "t.parquet")
    found = pl.scan_parquet(objects.uri("t.parquet"), storage_options=objects.storage_options()).collect()
    assert found["q"].to_list() == ["one", "two"]


@pytest.mark.parametrize("root", ["gs://", "gs://user:secret@bucket", "gs://bucket/x?key=secret"])
def test_an_address_with_more_than_a_place_is_refused_and_not_shown(root: str) -> None:
    with pytest.raises(StoreError) as error:
        open_objects(root)
    assert "expected gs://bucket/prefix" in str(error.value) and "secret" not in str(error.value)


def test_the_key_stays_in_the_environment(objects: Objects, gcs: FakeGcs, tmp_path: Path) -> None:
    key = json.loads((tmp_path / "key.json").read_text())
    assert key["gcs_base_url"] == gcs.url
    assert objects.root == "gs://bucket/some/prefix" and objects.uri("a") == "gs://bucket/some/prefix/a"
