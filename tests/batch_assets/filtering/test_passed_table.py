"""`filter:`: rows that pass and rows that fall out, by which rule, on a folder and on S3; kills, versions, sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
import yaml
from support.snapshots import SourceRow, commit, questions, write_snapshot
from typer.testing import CliRunner

import batch_assets
from batch_assets.asset_metadata.materialization import passed_metadata
from batch_assets.cli.dataset_commands.declared_changes import DeclaredChanges
from batch_assets.cli.main import app
from batch_assets.component import dataset_definitions, spec_version
from batch_assets.filtering.passed_table import (
    FilterReport,
    PassedStore,
    filtered,
    is_current,
)
from batch_assets.orchestration.source_place import older_part
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import PublishedTable, published_table
from batch_assets.spec.discovery import declarations
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.spec.row_rules import RowRule
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore
from resources.store.row_condition import BadCondition

RULES = {"level": {"where": "level >= 2", "remove": True}, "topic": {"where": "topic = 'topic 0'"}}


def rules(written: Mapping[str, Any] = RULES) -> dict[str, RowRule]:
    return {name: RowRule.model_validate(rule) for name, rule in written.items()}


def declared(**more: Any) -> GeneratedDatasetSpec:
    own = {"name": "sums", "source": {"path": "x.csv"}, "prompt": {"user": "{{ q }}"}, "model": "m", "id": "n"}
    return load_spec(own | {"keep_columns": ["topic", "level"]} | more, "defs.yaml")


def published(objects: Objects, workdir: Path, rows: int = 50, now: float = 1.0) -> DatasetStore:
    store = DatasetStore(objects, "sums")
    manifest = write_snapshot(store, questions(rows))
    commit(store, manifest, dead=["id-000003"])
    publish(store, manifest, card=Card(), now=now, workdir=workdir, part_rows=20)
    return store


def run(store: DatasetStore, workdir: Path, written: Mapping[str, Any] = RULES) -> tuple[PublishedTable, FilterReport]:
    return filtered(store, rules(written), base=workdir, now=2.0, workdir=workdir, part_rows=10)


def read(objects: Objects, path: str) -> pl.DataFrame:
    return pl.scan_parquet(objects.uri(path), storage_options=objects.storage_options()).collect()


@pytest.mark.parametrize("column", ["flags", "Flags"])
def test_a_column_called_as_that_of_rows_that_pass_is_refused_when_the_file_is_read(column: str) -> None:
    schema = {"type": "object", "properties": {column: {"type": "string"}}, "required": [column]}
    for key, more in [
        ("keep_columns.1", {"keep_columns": ["topic", column]}),
        ("output.columns", {"output": {"json_schema": schema, "columns": True}}),
    ]:
        assert declared(**more).filter is None
        with pytest.raises(SpecError, match=rf"{key}: expected no such column beside a filter, found '{column}'"):
            declared(filter={"short": {"where": "completion_tokens < 9", "remove": True}}, **more)


def test_a_table_made_before_with_a_column_flags_is_not_filtered(local_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(local_objects, "sums")
    manifest = write_snapshot(store, [SourceRow(f"id-{n}", "q", {"Flags": "a"}) for n in range(3)])
    commit(store, manifest)
    publish(store, manifest, card=Card(), now=1.0, workdir=tmp_path)
    with pytest.raises(BadCondition, match="no column called flags in the table, found Flags: "):
        run(store, tmp_path, {"short": {"where": "completion_tokens < 9"}})


@pytest.mark.slow
def test_rows_pass_or_fall_out_by_rules_and_keep_their_flags(any_objects: Objects, tmp_path: Path) -> None:
    store = published(any_objects, tmp_path)
    before = published_table(store)
    table, report = run(store, tmp_path)
    passed, fallen = read(any_objects, f"{table.path}/part-*"), read(any_objects, f"{table.path}/fallen-*")
    whole = range(50)
    assert passed["row_id"].to_list() == [f"id-{i:06d}" for i in whole if i % 5 >= 2 and i != 3]
    assert passed["flags"].to_list() == [["topic"] if i % 3 else [] for i in whole if i % 5 >= 2 and i != 3]
    assert fallen["row_id"].to_list() == [f"id-{i:06d}" for i in whole if i % 5 < 2 or i == 3]
    assert fallen.filter(pl.col("row_id") == "id-000003")["flags"].to_list() == [["error"]]
    assert fallen.filter(pl.col("row_id") == "id-000001")["flags"].to_list() == [["level", "topic"]]
    assert (table.rows, table.ok, table.dead, report.passed, report.fallen) == (29, 29, 0, 29, 21)
    assert report.removed == {"error": 1, "level": 20, "topic": 0}
    assert report.flagged == {"error": 1, "level": 20, "topic": sum(1 for i in whole if i % 3)}
    assert table.completion_tokens == passed["completion_tokens"].sum()
    assert published_table(store) == before, "the dataset's own table stays as it is"
    assert not list(tmp_path.glob("*.parquet"))


def test_rows_that_pass_stand_on_their_page_and_none_where_none_pass(local_objects: Objects, tmp_path: Path) -> None:
    store = published(local_objects, tmp_path)
    table, report = run(store, tmp_path)
    told = passed_metadata(store, table, report, samples=True)
    assert list(told)[:2] == ["first_rows", "sample_rows"] and str(told["sample_rows"].value).startswith(
        "10 of 29 rows"
    )
    nothing = {"level": {"where": "level > 99", "remove": True}}
    table, report = run(store, tmp_path, nothing)
    assert (table.rows, next(iter(passed_metadata(store, table, report, samples=True)))) == (0, "rows")


def test_a_changed_rule_makes_another_version_and_the_same_rule_none(local_objects: Objects, tmp_path: Path) -> None:
    store = published(local_objects, tmp_path)
    assert not is_current(store, rules(), tmp_path)
    first, _ = run(store, tmp_path)
    assert (
        is_current(store, rules(), tmp_path)
        and filtered(store, rules(), base=tmp_path, now=9.0, workdir=tmp_path)[0] == first
    )
    other = {**RULES, "level": {"where": "level >= 4", "remove": True}}
    assert not is_current(store, rules(other), tmp_path)
    second, report = run(store, tmp_path, other)
    assert second.version != first.version and report.passed == 10
    assert published_table(PassedStore(store)) == second
    assert published_table(PassedStore(store), first.version) == first, "the two newest versions are kept"


def test_a_lost_file_of_fallen_rows_is_made_again(local_objects: Objects, tmp_path: Path) -> None:
    store = published(local_objects, tmp_path)
    table, report = run(store, tmp_path)
    path = f"{table.path}/{report.files[0].name}"
    data = local_objects.get(path)
    local_objects.put(path, data[:-1] + b"x")
    assert run(store, tmp_path) == (table.model_copy(update={"created_at": 2.0}), report)
    assert local_objects.get(path) == data


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.slow
def test_a_kill_at_any_write_leaves_the_former_rows_and_its_retry_makes_the_same_files(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = published(local_objects, tmp_path)
    former, _ = run(store, tmp_path, {"level": {"where": "level >= 4", "remove": True}})
    left, number = 0, 0

    def dying(method: Any) -> Any:
        def write(*given: Any) -> Any:
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            return method(*given)

        return write

    objects = type(local_objects)
    while True:
        with monkeypatch.context() as patch:
            patch.setattr(objects, "put", dying(objects.put))
            patch.setattr(objects, "upload", dying(objects.upload))
            left = number
            try:
                table, report = run(store, tmp_path)
                break
            except Killed:
                number += 1
        assert published_table(PassedStore(store)) == former
    assert number == 3 + 3 + 3, "files of passed and of fallen rows, report, manifest, pointer"
    assert len(read(local_objects, f"{table.path}/part-*")) == report.passed == 29


def test_scripts_exports_and_datasets_read_the_rows_that_pass(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_ASSETS_STORE", local_objects.root)
    store = published(local_objects, tmp_path)
    runner = CliRunner()
    arguments = ["export", "sums", "--passed", "--format", "jsonl", "--to", str(tmp_path / "out")]
    none = runner.invoke(app, arguments)
    assert none.exit_code == 2 and "where the dataset has a `filter`" in none.stderr
    table, _ = run(store, tmp_path)
    found = batch_assets.table("sums", passed=True)
    assert (found.version, found.lazy().collect().height, found.columns[-1]) == (table.version, 29, "flags")
    assert runner.invoke(app, arguments).exit_code == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "train-00000.jsonl").read_text().splitlines()]
    assert len(lines) == 29 and lines[0]["flags"] == ["topic"]


def test_a_table_without_rows_that_pass_can_be_read(local_objects: Objects, tmp_path: Path) -> None:
    store = published(local_objects, tmp_path)
    table, report = run(store, tmp_path, {"none": {"where": "level > 100", "remove": True}})
    assert (table.rows, report.fallen, read(local_objects, f"{table.path}/part-*").height) == (0, 50, 0)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"a": {"where": "levle >= 2"}}, "filter.a.where: expected a column of the table, found 'levle'"),
        ({"a": {}}, "filter.a: expected exactly one of"),
        ({"a": {"where": "sum(level) > 2"}}, "sum() looks at many rows"),
        ({"error": {"where": "level > 2"}}, "another name for a rule"),
        ({}, "filter"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_when_the_file_is_read(written: Any, said: str) -> None:
    with pytest.raises(SpecError) as error:
        declared(filter=written)
    assert said in str(error.value)


def test_a_rule_that_does_not_fit_the_values_names_itself(local_objects: Objects, tmp_path: Path) -> None:
    store = published(local_objects, tmp_path)
    with pytest.raises(BadCondition, match=r"filter\.topic: "):
        run(store, tmp_path, {"topic": {"where": "topic + 1"}})


def test_a_filter_is_an_asset_after_the_table_and_asks_for_no_row(tmp_path: Path) -> None:
    plain, with_filter = declared(), declared(filter=RULES)
    assert spec_version(plain) == spec_version(with_filter)

    def deps(spec: GeneratedDatasetSpec) -> list[list[str]] | None:
        made = [one for one in dataset_definitions(spec, tmp_path).assets or () if isinstance(one, dg.AssetsDefinition)]
        specs = {one.key.to_user_string(): one for each in made for one in each.specs}
        return [list(dep.asset_key.path) for dep in specs["sums/passed"].deps] if "sums/passed" in specs else None

    assert deps(with_filter) == [["sums", "dataset"]] and deps(plain) is None


def test_a_dataset_that_reads_passed_rows_needs_one_with_a_filter(tmp_path: Path) -> None:
    first: dict[str, Any] = {"name": "a", "source": {"grid": {"q": ["b"]}}, "model": "m", "prompt": {"user": "{{ q }}"}}
    second = {**first, "name": "b", "source": {"dataset": "a", "passed": True}, "prompt": {"user": "{{ output }}"}}
    file = tmp_path / "a" / "defs.yaml"
    file.parent.mkdir()

    def write(*specs: dict[str, Any]) -> None:
        documents = [{"type": "batch_assets.GeneratedDataset", "attributes": one} for one in specs]
        file.write_text(yaml.safe_dump_all(documents))

    write(first, second)
    (broken,) = declarations(tmp_path).broken
    assert "source.passed: expected a dataset with a filter, found 'a', which has no `filter`" in str(broken.error)
    write({**first, "filter": {"long": {"where": "completion_tokens < 9", "remove": True}}}, second)
    assert not declarations(tmp_path).broken


def test_rows_that_passed_of_an_older_table_are_said(local_objects: Objects, tmp_path: Path) -> None:
    passing = declared(source={"dataset": "sums", "passed": True}, name="next").source
    store = published(local_objects, tmp_path)
    assert older_part(passing, local_objects) == ""  # there are none: that is an error of its own
    first, _ = run(store, tmp_path)
    assert older_part(passing, local_objects) == ""
    published(local_objects, tmp_path, rows=60)
    said = older_part(passing, local_objects)
    assert said.startswith("the rows that pass of sums are of an older table (")
    assert said.endswith("`batch-assets run sums` brings them up to date")
    assert DeclaredChanges(older=said).lines("next") == [f"next: {said}"]
    assert older_part(declared(source={"dataset": "sums"}, name="next").source, local_objects) == ""
    assert run(store, tmp_path)[0].version != first.version
    assert older_part(passing, local_objects) == ""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"path": "x.csv", "passed": True}, "source.passed: expected passed beside a dataset only"),
        ({"dataset": "a", "passed": True, "include_errors": True}, "expected one of passed and include_errors"),
        ({"dataset": "a", "passed": True, "streaming": True}, "expected one of passed and streaming"),
    ],
)
def test_passed_rows_are_of_a_whole_table_of_a_dataset(source: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        declared(source=source)
    assert said in str(error.value)
