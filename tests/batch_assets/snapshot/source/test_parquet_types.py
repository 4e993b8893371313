"""Parquet as pandas, Polars and DuckDB write it: what their types become, and files of one glob that differ."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.row_filter import Where
from batch_assets.snapshot.source.block import Block
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.reader import read_source
from batch_assets.spec.models import load_spec
from batch_assets.spec.source import SourceSpec
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore


def write(folder: Path, name: str, **columns: Any) -> None:
    pq.write_table(pa.table(columns), folder / name)


def blocks(folder: Path, columns: Sequence[str], path: str = "*.parquet") -> list[Block]:
    return list(read_source(SourceSpec(path=path), columns, folder))


def values(folder: Path, column: str, path: str = "*.parquet") -> list[Any]:
    return [value for block in blocks(folder, [column], path) for value in block.columns[column]]


def kept(folder: Path, objects: Objects, **attributes: Any) -> pa.Table:
    """The rows of a snapshot of all files in a folder."""
    least = {"name": "q", "source": {"path": "*.parquet"}, "prompt": {"user": "{{ q }}"}, "model": "m"}
    store = DatasetStore(objects, "q")
    spec = load_spec(least | attributes, "defs.yaml")
    made = build_snapshot(spec, store, now=1.0, workdir=folder / "work", base=folder)
    paths = [store.snapshot_path(made.snapshot, shard.path) for shard in made.shards]
    return pa.concat_tables(pq.read_table(pa.BufferReader(objects.get(path))) for path in paths)


ONLY_NULLS = [
    (pa.nulls(1), pa.array(["x"]), pa.string()),
    (pa.nulls(1), pa.array([{"a": 1}]), pa.struct([("a", pa.int64())])),
    (pa.array([[]], pa.list_(pa.null())), pa.array([["x"]]), pa.list_(pa.string())),
    (pa.array([{"a": None}], pa.struct([("a", pa.null())])), pa.array([{"a": 1}]), pa.struct([("a", pa.int64())])),
]


@pytest.mark.slow
@pytest.mark.parametrize(("empty", "full", "kind"), ONLY_NULLS)
@pytest.mark.parametrize("first", ["empty", "full"])
def test_a_column_of_nulls_in_one_file_has_the_type_of_the_others(
    tmp_path: Path, local_objects: Objects, empty: pa.Array, full: pa.Array, kind: pa.DataType, first: str
) -> None:
    write(tmp_path, "a.parquet" if first == "empty" else "c.parquet", q=["a"], n=empty)
    write(tmp_path, "b.parquet", q=["b"], n=full)
    table = kept(tmp_path, local_objects, keep_columns=["n"])
    assert table.schema.field("n").type == kind
    assert sorted(table["n"].to_pylist(), key=str) == sorted([*empty.to_pylist(), *full.to_pylist()], key=str)


def test_lists_and_objects_of_two_libraries_are_of_one_type(tmp_path: Path, local_objects: Objects) -> None:
    write(tmp_path, "a.parquet", q=["a"], n=[["x"]], s=[{"t": "x"}])
    pl.DataFrame({"q": ["b"], "n": [["y"]], "s": [{"t": "y"}]}).write_parquet(tmp_path / "b.parquet")
    shared = pa.array([["z"]], pa.list_(pa.dictionary(pa.int32(), pa.string())))
    write(tmp_path, "c.parquet", q=["c"], n=shared, s=[{"t": "z"}])
    table = kept(tmp_path, local_objects, keep_columns=["n", "s"])
    assert (table.schema.field("n").type, table.schema.field("s").type) == (
        pa.list_(pa.string()),
        pa.struct([("t", pa.string())]),
    )
    assert table["n"].to_pylist() == [["x"], ["y"], ["z"]]


def test_a_file_without_rows_says_nothing_of_types(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", q=pa.array([], pa.float64()))
    write(tmp_path, "b.parquet", q=["b"])
    write(tmp_path, "c.parquet", q=pa.array([], pa.null()))
    assert values(tmp_path, "q") == ["b"]


def test_numbers_that_drift_between_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", n=[1])
    write(tmp_path, "b.parquet", n=[1.5])
    said = r"b\.parquet: expected int64 in column 'n' as in a\.parquet, found double; write it with one type in all"
    with pytest.raises(SourceError, match=said):
        values(tmp_path, "n")


AB, BA = pa.struct([("a", pa.int64()), ("b", pa.string())]), pa.struct([("b", pa.string()), ("a", pa.int64())])
ITEM = {"a": 1, "b": "x"}


def _times(count: int, unit: str) -> pa.Array:
    return pa.array([count], pa.timestamp(unit, "UTC"))


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (pa.array([ITEM], AB), pa.array([{"b": "y", "a": 2}], BA), AB),
        (pa.array([[ITEM]], pa.list_(AB)), pa.array([[ITEM, None]], pa.list_(BA)), pa.list_(AB)),
        (pa.array([{"s": ITEM}]), pa.array([{"s": ITEM}], pa.struct([("s", BA)])), pa.struct([("s", AB)])),
        (pa.array([1], pa.int32()), pa.array([1 << 40]), pa.int64()),
        (pa.array([1 << 40]), pa.array([1], pa.int32()), pa.int64()),
        (pa.array([200], pa.uint8()), pa.array([-1], pa.int16()), pa.int16()),
        (pa.array([[1]], pa.list_(pa.int32())), pa.array([[1 << 40]]), pa.list_(pa.int64())),
        (pa.array([1]).cast(pa.int8()).dictionary_encode(), pa.array([1 << 40]), pa.int64()),
        (pa.array([0.1], pa.float32()), pa.array([0.1]), pa.float64()),
        (_times(1, "ms"), _times(1, "us"), pa.timestamp("us", "UTC")),
        (pa.array([1], pa.time32("ms")), pa.array([1000], pa.time64("ns")), pa.time64("ns")),
        (pa.array(["a"], pa.large_string()), pa.array(["b"]).dictionary_encode(), pa.string()),
    ],
)
def test_types_of_two_files_that_hold_the_same_values_are_one(
    tmp_path: Path, local_objects: Objects, one: pa.Array, other: pa.Array, kind: pa.DataType
) -> None:
    write(tmp_path, "a.parquet", q=["a"], n=one)
    alone = [str(value) for value in values(tmp_path, "n")]
    write(tmp_path, "b.parquet", q=["b"], n=other)
    assert str(values(tmp_path, "n")[0]) == alone[0]  # a further file changes no prompt
    table = kept(tmp_path, local_objects, keep_columns=["n"])
    assert table.schema.field("n").type == kind
    assert {str(item) for item in table["n"].to_pylist()} == {str(item) for item in values(tmp_path, "n")}


def test_a_type_that_no_other_holds_is_refused_with_the_file_that_has_the_widest(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", n=pa.array([1], pa.int32()))
    write(tmp_path, "b.parquet", n=[1])
    write(tmp_path, "c.parquet", n=pa.array([1], pa.uint64()))
    with pytest.raises(SourceError, match=r"c\.parquet: expected int64 in column 'n' as in b\.parquet, found uint64"):
        values(tmp_path, "n")


def test_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", at=pa.array([10**9, 1, None], pa.time64("ns")))
    assert values(tmp_path, "at") == [datetime.time(0, 0, 1), "00:00:00.000000001", None]
    write(tmp_path, "a.parquet", at=pa.array([[10**9], [1]], pa.list_(pa.time64("ns"))))
    (block,) = blocks(tmp_path, ["at"])
    assert block.columns["at"] == [[datetime.time(0, 0, 1)]]
    assert [reject.line for reject in block.rejects] == [2]


def test_uuids_are_text_in_prompts_ids_and_conditions(tmp_path: Path, local_objects: Objects) -> None:
    named = [uuid.UUID(int=1), uuid.UUID(int=2), None]
    write(tmp_path, "a.parquet", q=["a", "b", "c"], u=pa.array([u and u.bytes for u in named], pa.uuid()))
    assert values(tmp_path, "u") == [str(named[0]), str(named[1]), None]
    source = {"path": "*.parquet", "where": f"u = '{named[1]}'"}
    table = kept(tmp_path, local_objects, source=source, id="u", keep_columns=["u"], prompt={"user": "{{ u }}"})
    assert table["row_id"].to_pylist() == [str(named[1])]
    assert table["u"].to_pylist() == [named[1] and named[1].bytes]


@pytest.mark.parametrize(
    ("array", "first"),
    [
        (pa.array([0, 10**18], pa.timestamp("us")), datetime.datetime(1970, 1, 1)),
        (pa.array([0, -(2**31)], pa.date32()), datetime.date(1970, 1, 1)),
        (pa.array([[0], [1]], pa.list_(pa.timestamp("ns"))), [datetime.datetime(1970, 1, 1)]),
    ],
)
def test_a_moment_that_python_has_not_is_one_bad_row(tmp_path: Path, array: pa.Array, first: Any) -> None:
    write(tmp_path, "a.parquet", when=array)
    (block,) = blocks(tmp_path, ["when"])
    assert (block.lines, block.columns["when"]) == ([1], [first])
    (reject,) = block.rejects
    assert (reject.line, "cast the column to text" in reject.reason) == (2, True)


def test_nanoseconds_become_the_same_values_with_and_without_pandas(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", span=pa.array([86_400 * 10**9, 5, None], pa.duration("ns")))
    found = values(tmp_path, "span")
    assert found == [datetime.timedelta(days=1), "0:00:00.000000005", None]
    assert type(found[0]) is datetime.timedelta  # not pandas' own, which prints otherwise
    write(tmp_path, "a.parquet", when=pa.array([[1000]], pa.list_(pa.timestamp("ns"))))
    ((moment,),) = values(tmp_path, "when")
    assert type(moment) is datetime.datetime


def test_a_type_that_arrow_cannot_read_is_no_broken_file(tmp_path: Path) -> None:
    pl.DataFrame({"q": ["a"], "n": pl.Series([1 << 100], dtype=pl.Int128)}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"^a\.parquet: expected columns of types that Arrow can read.*more than 64"):
        values(tmp_path, "q")


def test_a_condition_on_decimals_of_more_than_38_digits_is_refused(tmp_path: Path) -> None:
    number = pa.array([decimal.Decimal("1" * 50)], pa.decimal256(60, 2))
    write(tmp_path, "a.parquet", n=number, parts=pa.array([[number[0].as_py()]], pa.list_(number.type)))
    for name in ("n", "parts"):
        with pytest.raises(SourceError, match=rf"source\.where: expected decimals of at most 38 .* column '{name}'"):
            Where(f"{name} IS NOT NULL").split(blocks(tmp_path, [name])[0])


def test_rows_that_are_all_skipped_are_refused_with_the_first_reasons(tmp_path: Path, local_objects: Objects) -> None:
    write(tmp_path, "a.parquet", q=pa.nulls(5, pa.string()))
    with pytest.raises(SourceError, match=r"all 5 were rejected\):\n  a\.parquet, line 1: .*\n.*\n.*\n  … and 2 more"):
        kept(tmp_path, local_objects, on_bad_row="skip")
