"""Everything else that is read from outside is bounded too: pages of other servers, files, objects."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pytest
from support.hostile_server import HostileServer, endless, whole

from gpu_runner.bounded_http.small_pages import TooLarge, read_file, read_page
from gpu_runner.models.model_files import ModelFilesUnreadable, read_folder, read_hub
from gpu_runner.providers.engine_process import answers, served_length
from resources.fleet.fleet_config import FleetConfig, FleetConfigError
from resources.objects.opening import LocalObjects, StoreError
from resources.pricing.price_files import PricingError, read_yaml
from resources.store.dataset_store import DatasetStore

MB = 1 << 20


def test_an_endless_page_is_left() -> None:
    with HostileServer({"/": endless()}) as server:
        with urllib.request.urlopen(server.url, timeout=5) as answer, pytest.raises(TooLarge):
            read_page(answer, MB, 60.0)
        assert server.sent < 30 * MB


def test_an_endless_model_config_of_a_hub_is_an_error_that_says_so() -> None:
    with HostileServer({"/a/b/resolve/main/config.json": endless()}) as server:
        with pytest.raises(ModelFilesUnreadable, match="more than 33,554,432 bytes"):
            read_hub("a/b", hub=server.url)
        assert server.sent < 60 * MB


@pytest.mark.parametrize("text", [b"[" * 100_000, b"[" + b"[]," * 3 * MB + b"0]"], ids=["deep", "many values"])
def test_a_model_config_that_would_not_fit_is_an_error_that_says_so(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelFilesUnreadable):
        read_folder(tmp_path)


def test_a_local_engine_s_endless_pages_are_left() -> None:
    with HostileServer({"/v1/models": endless(), "/health": endless()}) as server:
        assert served_length(server.url) is None
        assert answers(server.url)
        assert server.sent < 40 * MB


@pytest.mark.parametrize("length", ["-1", "1e30", "true", "9223372036854775808", "[]"])
def test_a_local_engine_s_context_that_cannot_be_is_not_told(length: str) -> None:
    with HostileServer({"/v1/models": whole(b'{"data":[{"max_model_len":%s}]}' % length.encode())}) as server:
        assert served_length(server.url) is None


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(OSError, match="no regular file"):
        read_file(tmp_path / "pipe.yaml", MB)
    with pytest.raises(FleetConfigError, match="expected a file, found a folder, a pipe or a device"):
        FleetConfig.load(tmp_path / "pipe.yaml")
    with pytest.raises(PricingError, match="expected a file, found a folder, a pipe or a device"):
        read_yaml(tmp_path / "pipe.yaml")


def test_files_of_absurd_size_are_not_read(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(3 << 30)  # a hole: takes no disk
    with pytest.raises(FleetConfigError, match="expected at most 1,048,576 bytes"):
        FleetConfig.load(large)
    with pytest.raises(PricingError, match="expected at most 16,777,216 bytes"):
        read_yaml(large)


def test_objects_of_absurd_size_are_not_read(tmp_path: Path) -> None:
    objects, store = LocalObjects(tmp_path), DatasetStore(LocalObjects(tmp_path), "d")
    for path in ("d/snapshots/CURRENT", "d/published/CURRENT", "d/snapshots/s/manifest.json"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / path).open("wb") as file:
            file.truncate(3 << 30)
    for read in (store.current_snapshot, store.current_published, lambda: store.manifest("s")):
        with pytest.raises(StoreError, match="expected an object of at most"):
            read()
    with pytest.raises(StoreError, match=r"at most 2,147,483,648 bytes, found 3,221,225,472"):
        objects.get("d/snapshots/CURRENT")
