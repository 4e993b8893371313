"""`output.columns`: the properties of the schema as typed columns of the published table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import polars as pl
import pyarrow as pa
import pytest
from support.snapshots import SourceRow, commit, questions, write_snapshot
from support.specs import spec

from batch_assets.asset_metadata.materialization import table_metadata
from batch_assets.asset_metadata.sample_rows import sample_markdown
from batch_assets.component import spec_version
from batch_assets.publishing import output_columns as module
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.output_columns import OutputColumns
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import PublishedTable
from batch_assets.publishing.quality import Thresholds, quality
from batch_assets.publishing.verify import verify
from batch_assets.spec.errors import SpecError
from gpu_runner.rows import Row
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["good", "bad"], "description": "How the writer\nfeels"},
        "score": {"type": "integer"},
        "share": {"type": "number"},
        "sure": {"type": ["boolean", "null"]},
        "words": {"type": "array", "items": {"type": "string"}},
        "who": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
        "rest": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    },
    "required": ["mood", "score"],
}
TYPES = {
    "mood": pa.string(),
    "score": pa.int64(),
    "share": pa.float64(),
    "sure": pa.bool_(),
    "words": pa.list_(pa.string()),
    "who": pa.struct([("name", pa.string()), ("age", pa.int64())]),
    "rest": pa.string(),
}
WHOLE = {
    "mood": "good",
    "score": 3,
    "share": 1,
    "sure": None,
    "words": ["a", "b"],
    "who": {"name": "x", "age": 4},
    "rest": 5,
    "more": 1,
}
OTHERS = ["no JSON", '["a"]', '{"mood":"good","score":"3"}', '{"mood":"bad","score":2}']


def answer(row: Row, number: int) -> str:
    return orjson.dumps(WHOLE).decode() if number % 5 == 0 else OTHERS[number % 5 - 1]


class Published:
    """A snapshot with JSON outputs, some of which do not match, and what is published of it."""

    def __init__(self, folder: Path, objects: Objects) -> None:
        self.folder, self.store = folder, DatasetStore(objects, "d")
        rows = questions(20)
        copies = {"copy-1": rows[0].row_id, "copy-2": rows[1].row_id}
        self.manifest = write_snapshot(self.store, rows, json_schema=SCHEMA, duplicates=copies)
        commit(self.store, self.manifest, dead=[rows[5].row_id], answer=answer)

    def publish(self, *, output_columns: bool = True, manifest: SnapshotManifest | None = None) -> PublishedTable:
        return publish(
            self.store,
            manifest or self.manifest,
            card=Card(),
            now=1.0,
            workdir=self.folder,
            output_columns=output_columns,
        )

    def frame(self, table: PublishedTable) -> pl.DataFrame:
        return pl.read_parquet(table.glob(self.store.objects))


@pytest.fixture
def made(tmp_path: Path, local_objects: Objects) -> Published:
    return Published(tmp_path, local_objects)


def test_the_columns_have_the_schemas_types_and_stand_behind_the_output(made: Published) -> None:
    table = made.publish()
    names = [column.name for column in table.columns]
    at = names.index("output") + 1
    assert names[at : at + 7] == list(TYPES)
    assert {column.name: column.type for column in table.columns if column.name in TYPES} == {
        name: str(kind) for name, kind in TYPES.items()
    }
    frame = made.frame(table)
    assert frame["mood"].dtype == pl.String and frame["words"].dtype == pl.List(pl.String)
    first = frame.row(0, named=True)
    assert {name: first[name] for name in TYPES} == {
        "mood": "good",
        "score": 3,
        "share": 1.0,
        "sure": None,
        "words": ["a", "b"],
        "who": {"name": "x", "age": 4},
        "rest": "5",
    }
    assert first["output"] == orjson.dumps(WHOLE).decode()


def test_an_output_that_does_not_match_is_null_and_counted_once(made: Published) -> None:
    table = made.publish()
    frame = made.frame(table)
    asked = frame.filter(pl.col("duplicate_of").is_null())
    assert table.output_mismatches == 12 == asked.filter(pl.col("mood").is_null() & pl.col("error").is_null()).height
    assert asked.filter(pl.col("mood") == "bad")["score"].to_list() == [2, 2, 2, 2]
    copies = frame.filter(pl.col("duplicate_of").is_not_null())
    assert copies["mood"].to_list() == ["good", None]
    assert asked.filter(pl.col("error").is_not_null())["mood"].to_list() == [None]
    card = made.store.objects.get(f"{table.path}/README.md").decode()
    assert "| outputs without columns | 12 |" in card and "| `mood` | string | How the writer feels |" in card
    said = table_metadata(made.store, table, None)
    assert said["output_mismatches"] == 12
    shown = {column.name: column for column in said["columns"].schema.columns}
    assert shown["score"].type == "int64" and shown["mood"].description == "How the writer feels"
    assert "name: string" in (shown["who"].description or "")
    assert "good" in sample_markdown(made.store, table)


def test_a_table_without_the_key_is_as_before_and_each_is_a_version_of_its_own(made: Published) -> None:
    plain = made.publish(output_columns=False)
    assert plain.output_mismatches is None and not {column.name for column in plain.columns} & TYPES.keys()
    assert not [one for one in verify(made.store, {}).differences if "table" in one.kind]
    table = made.publish()
    assert table.version != plain.version and (table.rows, table.ok) == (plain.rows, plain.ok)
    assert not [one for one in verify(made.store, {}).differences if "table" in one.kind]
    assert made.publish().version == table.version
    figures = {one.name: one for one in quality(made.store, table, made.manifest, Thresholds())}
    assert figures["one_outcome_per_row"].passed and figures["schema_valid_rate"].value == pytest.approx(7 / 19)
    shaping = {"json_schema": SCHEMA}
    assert spec_version(spec(output=shaping)) == spec_version(spec(output={**shaping, "columns": True}))


def test_a_snapshot_of_before_with_other_columns_keeps_those_that_it_has(
    tmp_path: Path, local_objects: Objects
) -> None:
    store = DatasetStore(local_objects, "d")
    rows = [SourceRow("a", "q", {"Mood": "kept"})]
    manifest = write_snapshot(store, rows, json_schema=SCHEMA)
    commit(store, manifest, answer=lambda row, number: orjson.dumps(WHOLE).decode())
    table = publish(store, manifest, card=Card(), now=1.0, workdir=tmp_path, output_columns=True)
    names = [column.name for column in table.columns]
    assert "Mood" in names and "mood" not in names and "score" in names
    assert OutputColumns.of(write_snapshot(store, rows), []) is None
    assert OutputColumns.of(write_snapshot(store, rows, json_schema={"type": "array"}), []) is None


def test_outputs_are_read_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 100)
    sizes: list[int] = []

    class Counting(OutputColumns):
        def _row(self, text: str | None, *, count: bool) -> dict[str, Any] | None:
            sizes.append(len(text or ""))
            return super()._row(text, count=count)

    columns = Counting(module.column_types({"type": "object", "properties": {"a": {"type": "string"}}}), {})
    texts = [orjson.dumps({"a": "x" * (i * 7 % 90)}).decode() for i in range(50)] + [None, '{"a":"' + "y" * 500 + '"}']
    outputs = pa.chunked_array([texts[:20], [], texts[20:]], pa.string())
    found = columns.add(pa.table({"output": outputs}), count=True)
    assert found.column("a").to_pylist() == [None if text is None else orjson.loads(text)["a"] for text in texts]
    assert found.column("a").num_chunks > 20 and len(sizes) == 52
    assert columns.add(pa.table({"output": pa.chunked_array([], pa.string())}), count=True).num_rows == 0


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"output": {"columns": True}}, "output.json_schema beside it"),
        ({"output": {"columns": True, "regex": "a"}}, "output.json_schema beside it"),
        ({"output": {"columns": True, "json_schema": {"type": "array", "items": {}}}}, "an object with properties"),
        ({"output": {"columns": True, "json_schema": {"type": "object"}}}, "an object with properties"),
        *[
            ({"output": {"columns": True, "json_schema": {"properties": {name: {}}}}}, "names no other column has")
            for name in ("model", "Output", "batch", "kept", "KEPT", "row_id", "duplicate_of")
        ],
        ({"output": {"columns": True, "json_schema": {"properties": {"a": {}, "A": {}}}}}, "no other column has"),
        *[
            ({"output": {"columns": True, "json_schema": {"properties": {name: {}}}}}, "printable characters")
            for name in ("", " ", "a\nb", "x" * 256, "\u202eabc", "a\0")
        ],
        (
            {"samples": 2, "output": {"columns": True, "json_schema": {"properties": {"sample_index": {}}}}},
            "names no other column has",
        ),
    ],
)
def test_columns_that_cannot_be_are_refused_when_the_file_is_read(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as found:
        spec(keep_columns=["kept"], **attributes)
    assert words in str(found.value) and "output.columns" in str(found.value)
    assert spec(output={"json_schema": {"properties": {"model": {}}}}).output.columns is False


@pytest.mark.parametrize(
    ("name", "found", "help"),
    [
        ("Kept", "the property 'Kept' and the column 'kept' of keep_columns", "or the column one under source.rename"),
        ("usd", "the property 'usd' and a column that the table has itself", "another name in the schema"),
        ("A", "the property 'A' and the property 'a'", "another name in the schema"),
    ],
)
def test_a_name_that_stands_twice_is_said_with_the_other_one_and_what_to_do(name: str, found: str, help: str) -> None:
    """It was said to be found, and not what has it already."""
    with pytest.raises(SpecError) as error:
        spec(keep_columns=["kept"], output={"columns": True, "json_schema": {"properties": {"a": {}, name: {}}}})
    assert f"found {found}" in str(error.value) and help in str(error.value)
