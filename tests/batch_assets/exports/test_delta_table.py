"""Exports to Delta tables: once for each version, also after a kill; whole, by partition, appended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from support.snapshots import commit, questions, write_snapshot

from batch_assets.exports import delta_table
from batch_assets.exports.declared_export import WrittenExport, export_declared, is_exported
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.spec.errors import SpecError
from batch_assets.spec.export_options import ExportError
from batch_assets.spec.exports import ExportSpec
from batch_assets.spec.models import load_spec
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore

DELTA: dict[str, Any] = {"name": "lake", "format": "delta", "columns": ["row_id", "topic", "level", "output"]}


def published(objects: Objects, workdir: Path, rows: int = 50) -> DatasetStore:
    store = DatasetStore(objects, "sums")
    manifest = write_snapshot(store, questions(rows))
    commit(store, manifest, dead=["id-000003"])
    publish(store, manifest, card=Card(), now=float(rows), workdir=workdir, part_rows=20)
    return store


def write(store: DatasetStore, base: Path, **options: Any) -> WrittenExport:
    return export_declared(store, ExportSpec.model_validate({**DELTA, **options}), base=base)


def opened(found: WrittenExport) -> DeltaTable:
    return DeltaTable(delta_table._uri(found.place), storage_options=delta_table._storage(found.place))


def lines(found: WrittenExport) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.table(opened(found).to_pyarrow_dataset().to_table()).to_pylist()
    return sorted(rows, key=lambda row: (row["row_id"], row.get("table_version", "")))


def test_a_table_is_written_once_for_each_version(local_objects: Objects, tmp_path: Path) -> None:
    store, spec = published(local_objects, tmp_path), ExportSpec.model_validate(DELTA)
    assert not is_exported(store, spec, tmp_path)
    found = write(store, tmp_path)
    assert is_exported(store, spec, tmp_path)
    assert found.record.rows == {"train": 49} and found.record.left_out == {"error": 1}
    assert [row["row_id"] for row in lines(found)] == [f"id-{i:06d}" for i in range(50) if i != 3]
    assert set(lines(found)[0]) == {"row_id", "topic", "level", "output"}
    again = write(store, tmp_path)
    assert opened(again).version() == 0 and again.record == found.record
    published(local_objects, tmp_path, 60)
    assert not is_exported(store, spec, tmp_path)
    third = write(store, tmp_path)
    assert opened(third).version() == 1 and len(lines(third)) == 59
    assert third.record.rows == {"train": 59} and sum(file.rows for file in third.record.files) == 59


def test_an_older_version_that_comes_back_is_written_again(local_objects: Objects, tmp_path: Path) -> None:
    store = published(local_objects, tmp_path)
    write(store, tmp_path)
    assert len(lines(write(store, tmp_path, where="level >= 3"))) < 49
    back = write(store, tmp_path)
    assert len(lines(back)) == 49 and opened(back).version() == 2


def test_each_version_is_appended_once_and_named(local_objects: Objects, tmp_path: Path) -> None:
    store = published(local_objects, tmp_path)
    first = write(store, tmp_path, mode="append")
    write(store, tmp_path, mode="append")
    published(local_objects, tmp_path, 60)
    second = write(store, tmp_path, mode="append")
    write(store, tmp_path, mode="append")
    assert opened(second).version() == 1
    counted = {first.record.version: 49, second.record.version: 59}
    found = [row["table_version"] for row in lines(second)]
    assert {version: found.count(version) for version in counted} == counted
    assert second.record.rows == {"train": 59}


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_while_more_rows_are_to_come_nothing_is_appended(local_objects: Objects, tmp_path: Path, mode: str) -> None:
    """A dataset that wants rows publishes a table after each round: a table that grows has the last one alone."""
    store, spec = published(local_objects, tmp_path), ExportSpec.model_validate(DELTA | {"mode": mode})
    round_ = export_declared(store, spec, base=tmp_path, final=False)
    assert is_exported(store, spec, tmp_path) == (mode == "overwrite")
    assert round_.record.rows == ({} if mode == "append" else {"train": 49})
    published(local_objects, tmp_path, 60)
    assert len(lines(export_declared(store, spec, base=tmp_path))) == 59
    assert is_exported(store, spec, tmp_path)


def test_only_partitions_with_rows_are_replaced(local_objects: Objects, tmp_path: Path) -> None:
    store = published(local_objects, tmp_path)
    whole = write(store, tmp_path, partition_by=["topic"])
    before = {row["row_id"]: row for row in lines(whole)}
    found = write(store, tmp_path, partition_by=["topic"], where="topic = 'topic 1' AND level >= 3")
    now = {row["row_id"]: row for row in lines(found)}
    assert {row["topic"] for row in now.values()} == {row["topic"] for row in before.values()}
    kept = {key: row for key, row in before.items() if row["topic"] != "topic 1" or row["level"] >= 3}
    assert now == kept and len(kept) < len(before)
    assert opened(found).metadata().partition_columns == ["topic"]


def test_text_of_partitions_is_no_condition(local_objects: Objects, tmp_path: Path) -> None:
    assert delta_table._equal('a"b', "it's') OR ('1'='1") == "\"a\"\"b\" = 'it''s'') OR (''1''=''1'"
    assert delta_table._equal("a", None) == '"a" IS NULL' and delta_table._equal("a", True) == '"a" = true'
    with pytest.raises(ExportError, match="expected partitions by texts, whole numbers or truth values"):
        delta_table._equal("a", 0.5)


def test_duckdb_reads_what_was_written_and_columns_keep_their_types(local_objects: Objects, tmp_path: Path) -> None:
    found = write(published(local_objects, tmp_path), tmp_path, columns=[])
    found_lines = opened(found).to_pyarrow_dataset().to_table()
    assert {"prompt", "output", "usd", "started_at", "batch"} <= set(found_lines.column_names)
    assert duckdb.sql("SELECT count(*) FROM found_lines WHERE prompt[1].role = 'user'").fetchall() == [(49,)]


ON_S3 = """
import sys
from pathlib import Path
import pyarrow as pa
from deltalake import DeltaTable
from batch_assets.exports import delta_table
from batch_assets.exports.declared_export import export_declared
from batch_assets.spec.exports import ExportSpec
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore
store = DatasetStore(open_objects(sys.argv[1]), "sums")
spec = ExportSpec.model_validate_json(sys.argv[2])
for _ in range(2):
    found = export_declared(store, spec, base=Path("."))
table = DeltaTable(delta_table._uri(found.place), storage_options=delta_table._storage(found.place))
print(table.version(), len(pa.table(table.to_pyarrow_dataset().to_table())), found.record.rows["train"])
"""


@pytest.mark.slow
def test_a_bucket_of_s3_has_it_too(s3_objects: Objects, tmp_path: Path) -> None:
    """In a process of its own: deltalake holds Python's lock while it waits for the server of the test."""
    published(s3_objects, tmp_path)
    spec = ExportSpec.model_validate(DELTA).model_dump_json(exclude_unset=True)
    found = subprocess.run(
        [sys.executable, "-c", ON_S3, s3_objects.root, spec], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.stdout.split() == ["0", "49", "49"], found.stderr[-2000:]


KILLED = """
import os, sys
from pathlib import Path
from batch_assets.exports import delta_table
from batch_assets.exports.declared_export import export_declared
from batch_assets.spec.exports import ExportSpec
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore
store, spec, when = sys.argv[1:]
if when == "after":
    delta_table._record = lambda *given: os.kill(os.getpid(), 9)
else:
    batches = delta_table._Lines.batches
    def dying(self):
        yield next(batches(self))
        os.kill(os.getpid(), 9)
    delta_table._Lines.batches = dying
export_declared(DatasetStore(open_objects(store), "sums"), ExportSpec.model_validate_json(spec), base=Path(store))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("when", "mode"), [("before", "overwrite"), ("after", "append"), ("after", "overwrite")])
def test_a_kill_around_the_commit_writes_nothing_twice(
    when: str, mode: str, local_objects: Objects, tmp_path: Path
) -> None:
    store = published(local_objects, tmp_path)
    spec = ExportSpec.model_validate({**DELTA, "mode": mode})
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, local_objects.root, spec.model_dump_json(exclude_unset=True), when], timeout=60
    )
    assert killed.returncode == -9
    found = write(store, tmp_path, mode=mode)
    assert opened(found).version() == 0 and len(lines(found)) == 49
    assert found.record.rows == {"train": 49}


def test_a_table_of_somebody_else_is_not_overwritten(local_objects: Objects, tmp_path: Path) -> None:
    from deltalake import write_deltalake

    store = published(local_objects, tmp_path)
    write_deltalake(str(tmp_path / "theirs"), pa.table({"row_id": ["x"]}))
    with pytest.raises(ExportError, match="expected an empty folder, or a table of this export, found another table"):
        write(store, tmp_path, to="theirs")
    appended = write(store, tmp_path, to="theirs", mode="append")
    assert len(lines(appended)) == 50
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"expected an empty folder or a Delta table, found thesis.txt"):
        write(store, tmp_path, to="notes")


def test_a_damaged_table_stops_it_and_leaves_no_commit(local_objects: Objects, tmp_path: Path) -> None:
    from batch_assets.publishing.published_table import published_table

    store = published(local_objects, tmp_path)
    table = published_table(store)
    assert table is not None
    path = f"{table.path}/{table.files[1].name}"
    data = local_objects.get(path)
    local_objects.put(path, data[:100] + bytes(len(data) - 200) + data[-100:])
    with pytest.raises(Exception, match=r"cannot be read"):
        write(store, tmp_path)
    local_objects.put(path, data)
    assert opened(write(store, tmp_path)).version() == 0


def test_without_the_package_it_says_so(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = published(local_objects, tmp_path)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ExportError, match=r"pip install 'batch-assets\[delta\]'"):
        write(store, tmp_path)


@pytest.mark.parametrize(
    ("export", "said"),
    [
        ({"format": "parquet", "mode": "append"}, "exports.0.mode: expected it beside format delta only"),
        ({"format": "parquet", "partition_by": ["topic"]}, "exports.0.partition_by: expected it beside format delta"),
        ({"mode": "merge"}, "exports.0.mode"),
        ({"to": "gs://bucket/x"}, "exports.0.to: expected a folder or s3://bucket/prefix for format delta"),
        ({"partition_by": ["wisdom"]}, "exports.0.partition_by: expected columns of the Delta table, found 'wisdom'"),
        ({"push": {"repo": "a/b"}}, "exports.0.push: expected none beside format delta"),
        ({"validation": 0.1}, "exports.0.validation: expected none beside format delta"),
    ],
)
def test_wrong_options_are_refused_when_the_file_is_read(export: dict[str, Any], said: str) -> None:
    own = {"name": "sums", "source": {"path": "x.csv"}, "prompt": {"user": "{{ q }}"}, "model": "m", "id": "n"}
    with pytest.raises(SpecError) as error:
        load_spec(own | {"keep_columns": ["topic", "level"], "exports": [{**DELTA, **export}]}, "defs.yaml")
    assert said in str(error.value)
