"""Lineage begins with the files that datasets read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.defs_folders import own_folder, write

from batch_assets.dataset_loading import load_datasets
from batch_assets.definitions import defs
from batch_assets.orchestration.source_assets import files_assets, places
from batch_assets.spec.models import load_spec
from batch_assets.spec.source import SourceSpec

pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCH_ASSETS_DEFS", str(tmp_path / "defs"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    return tmp_path / "defs"


def graph_now() -> Any:
    found: dg.Definitions = defs()
    return found.resolve_asset_graph()


@pytest.mark.parametrize(
    ("path", "key", "uri"),
    [
        ("questions.jsonl", "file/qa/questions.jsonl", "file://{defs}/qa/questions.jsonl"),
        ("./x/../a b.csv", "file/qa/a b.csv", "file://{defs}/qa/a%20b.csv"),
        ("../shared/*.parquet", "file/shared", "file://{defs}/shared"),
        ("*.csv", "file/qa", "file://{defs}/qa"),
        ("/data/2026/part-?.csv", "file/data/2026", "file:///data/2026"),
        ("s3://bucket/tickets/**/*.jsonl.gz", "s3/bucket/tickets", "s3://bucket/tickets"),
        ("S3://bucket/one.csv", "s3/bucket/one.csv", "s3://bucket/one.csv"),
        ("s3://bucket/*.csv", "s3/bucket", "s3://bucket"),
        ("hf://datasets/a/b/data/train-*.parquet", "hf/datasets/a/b/data", "hf://datasets/a/b/data"),
        ("hf://datasets/a/b@v1/x.csv", "hf/datasets/a/b@v1/x.csv", "hf://datasets/a/b@v1/x.csv"),
        ("hf://datasets/a/b", "hf/datasets/a/b", "hf://datasets/a/b"),
    ],
)
def test_a_place_has_a_key_and_an_address(folder: Path, path: str, key: str, uri: str):
    (found,) = places(SourceSpec(path=path), folder / "qa")
    assert (found.key.to_user_string(), found.uri) == (key, uri.format(defs=folder))


def test_the_lists_of_a_grid_are_places_too(folder: Path):
    grid: dict[str, Any] = {
        "a": {"csv": "words.csv", "column": "a"},
        "b": {"csv": "words.csv", "column": "b"},
        "c": ["x"],
    }
    assert [one.key.path for one in places(SourceSpec.model_validate({"grid": grid}), folder)] == [
        ["file", "words.csv"]
    ]
    assert list(places(SourceSpec.model_validate({"grid": {"c": ["x"]}}), folder)) == []


def test_files_that_two_datasets_read_are_one_asset_before_both(folder: Path):
    write(folder, "one", source={"path": "../words.csv"})
    write(folder, "two", source={"path": "../words.csv", "format": "tsv"})
    graph = graph_now()
    key = dg.AssetKey(["file", "words.csv"])
    assert graph.get(key).child_keys == {dg.AssetKey([name, "source"]) for name in ("one", "two")}
    (spec,) = files_assets(load_datasets().datasets, ())
    assert (spec.group_name, spec.kinds) == ("sources", {"csv", "tsv"})
    assert spec.metadata["dagster/uri"] == (folder / "words.csv").as_uri()
    assert not graph.get(key).is_executable


def test_an_asset_of_others_with_that_key_is_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    folder = own_folder(tmp_path / "project", monkeypatch)
    write(folder, "good", source={"path": "words"})
    (folder / "theirs.py").write_text(
        "import dagster as dg\n\n@dg.asset(key=['file', 'good', 'words'])\ndef of_others(): ...\n"
    )
    graph = graph_now()
    node = graph.get(dg.AssetKey(["file", "good", "words"]))
    assert node.is_executable and node.child_keys == {dg.AssetKey(["good", "source"])}


def test_what_a_spec_declares_is_not_read(folder: Path):
    wanted = {"name": "d", "source": {"path": "~nobody_at_all/x.csv"}, "prompt": {"user": "{{ q }}"}, "model": "m"}
    found = files_assets({"d": (load_spec(wanted, "defs.yaml"), folder)}, ())
    assert [one.key.path[0] for one in found] == ["file"]
