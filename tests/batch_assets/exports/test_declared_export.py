"""`exports:` of a defs.yaml: versions beside each other, what is there is not written again, kills at every write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from support.dataset_project import MODEL, dataset_project
from support.plain_engine import plain_engine
from support.snapshots import commit, questions, write_snapshot
from typer.testing import CliRunner

from batch_assets.asset_metadata.materialization import export_metadata
from batch_assets.cli.main import app
from batch_assets.component import dataset_definitions, spec_version
from batch_assets.dagster_internals import UnresolvedAssetJobDefinition
from batch_assets.exports.declared_export import WrittenExport, export_declared, is_exported
from batch_assets.orchestration.assets import outdated
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.spec.errors import SpecError
from batch_assets.spec.export_options import ExportError
from batch_assets.spec.exports import ExportSpec
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.tags import DATA_VERSION_TAG
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore

SFT: Mapping[str, Any] = {"name": "sft", "format": "messages", "part_rows": 20}


def declared(*exports: Mapping[str, Any], **more: Any) -> GeneratedDatasetSpec:
    own = {"name": "sums", "source": {"path": "x.csv"}, "prompt": {"user": "{{ q }}"}, "model": "m", "id": "n"}
    return load_spec(own | {"keep_columns": ["topic", "level"], "exports": list(exports)} | more, "defs.yaml")


def published(objects: Objects, workdir: Path, rows: int = 50) -> DatasetStore:
    store = DatasetStore(objects, "sums")
    manifest = write_snapshot(store, questions(rows))
    commit(store, manifest, dead=["id-000003"])
    publish(store, manifest, card=Card(), now=float(rows), workdir=workdir, part_rows=20)
    return store


def write(store: DatasetStore, base: Path, **options: Any) -> WrittenExport:
    return export_declared(store, ExportSpec.model_validate({**SFT, **options}), base=base)


def files_of(objects: Objects, prefix: str = "") -> dict[str, bytes]:
    return {info.path: objects.get(info.path) for info in objects.list(prefix)}


@pytest.mark.slow
def test_an_export_is_a_version_in_the_store_that_current_names(any_objects: Objects, tmp_path: Path) -> None:
    store = published(any_objects, tmp_path)
    found = write(store, tmp_path)
    assert found.record.complete and found.record.rows == {"train": 49} and found.record.left_out == {"error": 1}
    assert any_objects.get("sums/exports/sft/CURRENT").decode() == found.version
    names = {path.removeprefix(f"sums/exports/sft/{found.version}/") for path in files_of(any_objects, "sums/exports/")}
    assert names == {"sums/exports/sft/CURRENT", "export.json", *(f"train-0000{number}.jsonl" for number in range(3))}
    told = export_metadata(found)
    assert (told["rows"], told["rows_train"], told["files"]) == (49, 49, 3)
    assert told["bytes"] == sum(len(found.files.get(file.name)) for file in found.record.files)
    assert told["dagster/uri"] == found.files.root == f"{any_objects.root}/sums/exports/sft/{found.version}"


def test_what_is_there_is_not_written_again(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, spec = published(local_objects, tmp_path), ExportSpec.model_validate(SFT)
    assert not is_exported(store, spec, tmp_path)
    before = write(store, tmp_path)
    assert is_exported(store, spec, tmp_path)
    with monkeypatch.context() as patch:
        for method in ("put", "upload", "create", "delete"):
            patch.setattr(type(local_objects), method, lambda *_: pytest.fail("nothing is to be written"))
        assert write(store, tmp_path).record == before.record


def test_another_table_or_other_options_make_a_version_and_the_one_before_is_kept(
    local_objects: Objects, tmp_path: Path
) -> None:
    store = published(local_objects, tmp_path)
    first = write(store, tmp_path)
    other = write(store, tmp_path, validation=0.5, split_by="topic")
    assert not is_exported(store, ExportSpec.model_validate(SFT), tmp_path)
    published(local_objects, tmp_path, 60)
    third = write(store, tmp_path)
    assert third.record.rows == {"train": 59}
    there = {path.split("/")[3] for path in files_of(local_objects, "sums/exports/sft/")}
    assert there == {"CURRENT", other.version, third.version} and first.version not in there


def test_a_lost_file_is_made_again_and_the_same(local_objects: Objects, tmp_path: Path) -> None:
    store = published(local_objects, tmp_path)
    found = write(store, tmp_path)
    path = f"sums/exports/sft/{found.version}/train-00000.jsonl"
    data = local_objects.get(path)
    local_objects.delete([path])
    assert not is_exported(store, ExportSpec.model_validate(SFT), tmp_path)
    assert write(store, tmp_path).record == found.record and local_objects.get(path) == data


class Killed(BaseException):
    """The process ends here."""


def test_a_kill_at_any_write_leaves_the_former_files_and_its_retry_makes_the_same(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = published(local_objects, tmp_path)
    former = write(store, tmp_path)
    alone = write(store, tmp_path, to=str(tmp_path / "alone"), validation=0.5, split_by="topic")
    left, number = 0, 0

    def dying(method: Any) -> Any:
        def called(*given: Any) -> Any:
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            return method(*given)

        return called

    objects = type(local_objects)
    while True:
        with monkeypatch.context() as patch:
            patch.setattr(objects, "put", dying(objects.put))
            patch.setattr(objects, "upload", dying(objects.upload))
            left = number
            try:
                found = write(store, tmp_path, validation=0.5, split_by="topic")
                break
            except Killed:
                number += 1
        assert local_objects.get("sums/exports/sft/CURRENT").decode() == former.version
        assert local_objects.exists(f"sums/exports/sft/{former.version}/train-00000.jsonl")
    assert number >= 4, "record, files of both sides, record, pointer"
    assert found.version == alone.version
    assert files_of(found.files) == files_of(alone.files)


def test_a_place_of_its_own_begins_at_the_file(local_objects: Objects, tmp_path: Path) -> None:
    store = published(local_objects, tmp_path)
    found = write(store, tmp_path / "defs", to="out/sft")
    assert Path(found.files.root) == tmp_path / "defs" / "out" / "sft" / found.version
    assert (tmp_path / "defs" / "out" / "sft" / "CURRENT").read_text() == found.version


def test_without_a_table_it_says_what_makes_one(local_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(local_objects, "sums")
    with pytest.raises(ExportError, match=r"expected a published table of sums, found none; .*run"):
        write(store, tmp_path)
    with pytest.raises(ExportError, match="expected rows that pass its filter of sums"):
        write(store, tmp_path, passed=True)


@pytest.mark.parametrize(
    ("exports", "said"),
    [
        ([{"name": "a", "format": "csv"}], "exports.0.format"),
        ([{"name": "a"}], "exports.0.format"),
        ([{"name": "A b", "format": "jsonl"}], "exports.0.name: expected 1 to 63 characters"),
        ([SFT, SFT], "exports.1.name: expected each name once, found 'sft'"),
        ([{**SFT, "to": "x/"}, {**SFT, "name": "b", "to": "x"}], "exports.1.to: expected a place for each export"),
        ([{**SFT, "to": "https://example.org"}], "exports.0.to: expected a folder or s3://bucket/prefix"),
        ([{**SFT, "map": {"prompt": "wisdom"}}], "exports.0.map: expected a column of the table, found 'wisdom'"),
        ([{**SFT, "map": {"worse": "topic"}}], "exports.0.map: expected prompt=COLUMN"),
        ([{**SFT, "columns": ["wisdom"]}], "exports.0.columns: expected a column of the table, found 'wisdom'"),
        ([{**SFT, "where": "wisdom > 3"}], "exports.0.where: expected a condition that fits the table"),
        ([{**SFT, "validation": 1.0}], "exports.0.validation"),
        ([{**SFT, "split_by": "topic"}], "exports.0.split_by: expected validation beside it"),
        ([{**SFT, "passed": True}], "exports.0.passed: expected a filter beside it, found none"),
        ([{**SFT, "colums": ["topic"]}], "exports.0.colums"),
        ([{"name": "a", "format": "preference"}], "exports.0.map: expected a column for chosen of preference"),
        (
            [{"name": "a", "format": "preference", "group_by": "topic"}],
            "exports.0.group_by: expected both",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused_when_the_file_is_read(exports: list[Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        declared(*exports)
    assert said in str(error.value)


def test_a_file_without_exports_keeps_its_code_version() -> None:
    assert spec_version(declared()) == spec_version(declared(SFT))


def test_each_export_is_an_asset_that_the_job_of_the_table_renews(tmp_path: Path) -> None:
    rule = {"short": {"length": {"column": "output", "min": 1}}}
    hub = {**SFT, "name": "hub", "push": {"repo": "me/sums"}}
    spec = declared(SFT, {**SFT, "name": "good", "passed": True}, hub, filter=rule)
    found = dataset_definitions(spec, tmp_path)
    assets = [one for one in found.assets or () if isinstance(one, dg.AssetsDefinition)]
    deps = {
        one.key.to_user_string(): [dep.asset_key.path[-1] for each in one.specs for dep in each.deps] for one in assets
    }
    assert (deps["sums/exports/sft"], deps["sums/exports/good"]) == (["dataset"], ["passed"])
    assert deps["sums/exports/hub"] == ["dataset", "passed"], "whether enough are accepted is known before a push"
    (publish_job,) = (one for one in found.jobs or () if one.name == "sums_publish")
    assert isinstance(publish_job, UnresolvedAssetJobDefinition)
    assert {dg.AssetKey(["sums", "exports", name]) for name in ("sft", "good")} <= publish_job.selection.resolve(assets)


@pytest.mark.slow
def test_the_asset_writes_it_and_a_refresh_publishes_again_where_files_are_lost(tmp_path: Path) -> None:
    with plain_engine(MODEL) as engine, dataset_project(tmp_path, exports=[SFT]) as site:
        site.source(["one", "two", "three"])
        assert site.materialize("prompts").success
        assert not site.materialize("exports/sft").success
        assert "expected a published table of d, found none" in site.reason()
        assert site.run_rows("00000", "00000", engine.url).success
        assert site.materialize("dataset").success and site.materialize("exports/sft").success
        event = site.instance.get_latest_materialization_event(dg.AssetKey(["d", "exports", "sft"]))
        assert event is not None and event.asset_materialization is not None
        told = {key: value.value for key, value in event.asset_materialization.metadata.items()}
        assert (told["rows"], told["files"], told["rows_left_out"]) == (3, 1, 0)
        assert (event.asset_materialization.tags or {})[DATA_VERSION_TAG] == told["version"]
        (spec,) = site.specs["d"][0].exports
        assert is_exported(site.store, spec, tmp_path)
        file = Path(str(told["path"])) / "train-00000.jsonl"
        assert [line["messages"][0]["content"] for line in map(json.loads, file.read_text().splitlines())] == [
            "one",
            "two",
            "three",
        ]
        file.unlink()
        assert outdated(site.store, site.specs["d"][0], tmp_path)
        assert site.materialize("exports/sft").success and file.exists()
        assert not outdated(site.store, site.specs["d"][0], tmp_path)


def test_the_command_writes_what_the_asset_does(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_ASSETS_STORE", local_objects.root)
    monkeypatch.setenv("BATCH_ASSETS_DEFS", str(tmp_path / "defs"))
    (tmp_path / "defs" / "sums").mkdir(parents=True)
    text = {"type": "batch_assets.GeneratedDataset", "attributes": declared(SFT).model_dump(exclude_unset=True)}
    (tmp_path / "defs" / "sums" / "defs.yaml").write_text(yaml.safe_dump(text))
    store = published(local_objects, tmp_path)
    found = CliRunner().invoke(app, ["export", "sums", "--declared", "sft", "--json"])
    assert found.exit_code == 0, found.output
    version = json.loads(found.stdout)["to"].rpartition("/")[2]
    assert write(store, tmp_path).version == version
    wrong = CliRunner().invoke(app, ["export", "sums", "--declared", "stf"])
    assert wrong.exit_code == 2 and "expected an export of sums (sft)" in wrong.stderr
    both = CliRunner().invoke(app, ["export", "sums", "--declared", "sft", "--to", "x"])
    assert both.exit_code == 2 and "expected no other option beside it" in both.stderr
    none = CliRunner().invoke(app, ["export", "sums"])
    assert none.exit_code == 2 and "expected --to and --format, or --declared" in none.stderr
