"""A dataset may read the table of any Dagster asset, where its newest materialization says that it lies."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.dataset_project import dataset_project

from batch_assets.catalog.asset_places import of_asset
from batch_assets.component import dataset_definitions, spec_version
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.reader import read_source
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec

KEY = dg.AssetKey(["raw", "questions"])


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as found:
        yield found


def spec(**source: Any) -> GeneratedDatasetSpec:
    wanted = {"asset": "raw/questions", **source}
    return load_spec({"name": "d", "source": wanted, "prompt": {"user": "{{ q }}"}, "model": "m"}, "defs.yaml")


def reported(instance: dg.DagsterInstance, partition: str | None = None, **metadata: Any) -> None:
    instance.report_runless_asset_event(
        dg.AssetMaterialization(KEY, metadata={k.replace("uri", "dagster/uri"): v for k, v in metadata.items()},
                                partition=partition)
    )  # fmt: skip


def values(found: GeneratedDatasetSpec) -> list[Any]:
    return [value for block in read_source(found.source, ["q"], Path("/nowhere")) for value in block.columns["q"]]


def refused(instance: dg.DagsterInstance, **source: Any) -> str:
    with pytest.raises(SourceError) as error:
        of_asset(spec(**source), instance)
    return str(error.value)


def parquet(file: Path, *words: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"q": list(words)}), file)
    return file


def test_the_newest_materialization_says_which_file_is_read(instance: dg.DagsterInstance, tmp_path: Path):
    reported(instance, path=dg.MetadataValue.path(str(parquet(tmp_path / "old.parquet", "old"))))
    reported(instance, path=str(parquet(tmp_path / "new [1].parquet", "new")))
    found = of_asset(spec(), instance)
    assert (values(found), found.source.asset) == (["new"], None)


def test_an_object_whose_name_has_brackets_is_that_object(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("batch_assets.catalog.asset_places.is_folder", lambda _: False)
    reported(instance, path="s3://bucket/new [1].parquet")
    path = str(of_asset(spec(), instance).source.path)
    assert fnmatch.fnmatchcase("s3://bucket/new [1].parquet", path)


def test_the_uri_counts_before_the_path(instance: dg.DagsterInstance, tmp_path: Path):
    file = tmp_path / "a b.csv"
    file.write_text("q\nfrom the uri\n")
    reported(instance, uri=dg.MetadataValue.url(file.as_uri()), path="/nowhere.csv")
    assert values(of_asset(spec(), instance)) == ["from the uri"]


@pytest.mark.parametrize(("ending", "source"), [("parquet", {}), ("jsonl", {"format": "jsonl"})])
def test_of_a_folder_all_files_of_the_format_are_read(
    instance: dg.DagsterInstance, tmp_path: Path, ending: str, source: dict[str, str]
):
    folder = tmp_path / "table [v1]"
    parquet(folder / "part-0.parquet", "a")
    parquet(folder / "more" / "part-1.parquet", "b")
    (folder / "x.jsonl").write_text(json.dumps({"q": "line"}) + "\n")
    (folder / "_SUCCESS").write_text("")
    reported(instance, uri=f"{folder}/")
    assert sorted(values(of_asset(spec(**source), instance))) == (["a", "b"] if ending == "parquet" else ["line"])


def test_an_asset_that_was_never_materialized_is_an_error_that_names_one_spelt_alike(instance: dg.DagsterInstance):
    said = refused(instance)
    assert "expected an asset that was materialized in this Dagster, found none of raw/questions" in said
    reported(instance, path="/x.csv")
    assert "Did you mean 'raw/questions'?" in refused(instance, asset="raw/question")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"rows": 3}, "found neither; its metadata: rows"),
        ({"path": 3}, "found neither; its metadata: path"),
        ({"path": "table.csv"}, "expected the place of raw/questions as a whole path, found 'table.csv'"),
        ({"uri": "az://bucket/x.csv"}, "found az://…"),
        ({"uri": "s3://user:word@bucket/x.csv"}, "without user, password or query"),
        ({"path": "/x.csv", "partition": "2026-01-01"}, "expected an asset without partitions"),
    ],
)
def test_a_place_that_cannot_be_read_is_named_and_no_secret_in_it(
    instance: dg.DagsterInstance, metadata: dict[str, Any], words: str
):
    reported(instance, **metadata)
    said = refused(instance)
    assert words in said and "word@" not in said


def test_the_kernels_own_files_are_refused_as_those_of_a_path_are(instance: dg.DagsterInstance):
    reported(instance, path="/proc/self/status")
    with pytest.raises(SourceError, match="the operating system's own"):
        values(of_asset(spec(format="csv"), instance))


def test_a_delta_table_is_refused(instance: dg.DagsterInstance, tmp_path: Path):
    parquet(tmp_path / "t" / "part-0.parquet", "deleted")
    (tmp_path / "t" / "_delta_log").mkdir()
    reported(instance, path=str(tmp_path / "t"))
    assert "a Delta table" in refused(instance)


def test_prompts_reads_the_asset_and_says_so_in_the_lineage(tmp_path: Path):
    with dataset_project(tmp_path, source={"asset": "raw/questions"}, id=None) as site:
        failed = site.materialize("prompts")
        assert not failed.success and "found none of raw/questions" in site.reason()
        site.source(["one", "two", "three"])
        reported(site.instance, path=str(tmp_path / "questions.jsonl"))
        assert site.materialize("prompts").success
        assert site.manifest().rows == 3
    graph = dataset_definitions(spec(), tmp_path)
    (source,) = [one for one in graph.assets or () if isinstance(one, dg.AssetSpec)]
    assert [dep.asset_key for dep in source.deps] == [KEY]


@pytest.mark.parametrize("wrong", ["", "/raw", "raw//x", "raw/", "a\nb"])
def test_a_key_that_is_none_is_refused_when_the_file_is_read(wrong: str):
    with pytest.raises(SpecError, match=r"source\.asset"):
        spec(asset=wrong)


def test_a_dataset_that_reads_a_path_has_the_code_version_that_it_had_before_there_were_assets():
    written = {"name": "d", "source": {"path": "x.csv"}, "prompt": {"user": "{{ q }}"}, "model": "m"}
    assert spec_version(load_spec(written, "f")) == "3eea5ac00822da1c"
