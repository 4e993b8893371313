"""Folders that say the value of a column, `lang=de/part-0.parquet`, as Hive, Spark, Polars and DuckDB write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.reader import read_source
from batch_assets.spec.models import load_spec
from batch_assets.spec.source import SourceSpec
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore


def rows_of(base: Path, path: str, *columns: str) -> list[tuple[Any, ...]]:
    blocks = list(read_source(SourceSpec(path=path), columns, base))
    assert not [reject for block in blocks for reject in block.rejects]
    return [row for block in blocks for row in zip(*(block.columns[name] for name in columns), strict=True)]


def put(file: Path, content: bytes | dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        pq.write_table(pa.table(content), file)


CONTENTS: list[tuple[str, bytes | dict[str, Any]]] = [
    ("parquet", {"q": ["a", "b"]}),
    ("csv", b"q\na\nb\n"),
    ("tsv", b"q\na\nb\n"),
    ("jsonl", b'{"q": "a"}\n{"q": "b"}\n'),
    ("json", b'[{"q": "a"}, {"q": "b"}]'),
]


@pytest.mark.parametrize(("ending", "content"), CONTENTS)
def test_folders_name_columns_that_the_files_lack(tmp_path: Path, ending: str, content: Any) -> None:
    for folder in ("lang=de", "lang=a%2Fb%20c", "lang=__HIVE_DEFAULT_PARTITION__"):
        put(tmp_path / "d" / "year=2024" / folder / f"part.{ending}", content)
    found = rows_of(tmp_path, f"d/**/*.{ending}", "q", "lang", "year")
    assert found == [(q, lang, "2024") for lang in (None, "a/b c", "de") for q in "ab"]
    assert rows_of(tmp_path, f"d/year=2024/lang=de/part.{ending}", "lang") == [("de",), ("de",)]
    with pytest.raises(SourceError, match=r"expected column 'lnag', found .*Did you mean 'lang'\?"):
        rows_of(tmp_path, f"d/**/*.{ending}", "q", "lnag")


def test_a_column_of_the_file_comes_before_that_of_its_folder(tmp_path: Path) -> None:
    put(tmp_path / "lang=de" / "a.parquet", {"q": ["a"], "lang": ["x"]})
    put(tmp_path / "lang=de" / "a.csv", b"q,lang\na,x\n")
    put(tmp_path / "lang=de" / "a.jsonl", b'{"q": "a", "lang": "x"}\n{"q": "b", "lang": null}\n{"q": "c"}\n')
    assert rows_of(tmp_path, "*/*.parquet", "lang") == rows_of(tmp_path, "*/*.csv", "lang") == [("x",)]
    assert rows_of(tmp_path, "*/*.jsonl", "lang") == [("x",), (None,), ("de",)]


def test_a_folder_beside_a_file_with_numbers_in_that_column_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "year=1" / "a.parquet", {"q": ["a"], "year": [1]})
    put(tmp_path / "year=2" / "a.parquet", {"q": ["a"]})
    said = r"year=2/a\.parquet: expected int64 in column 'year' as in year=1/a\.parquet, found string"
    with pytest.raises(SourceError, match=said):
        rows_of(tmp_path, "*/*.parquet", "year")


def test_a_prompt_that_writes_a_column_as_a_field_of_its_row_is_told_how(tmp_path: Path) -> None:
    put(tmp_path / "lang=de" / "a.csv", b"q\na\n")
    with pytest.raises(SourceError, match=r"written plainly, \{\{ q \}\}, not row\.column"):
        rows_of(tmp_path, "*/*.csv", "row")


def test_such_columns_are_asked_kept_and_filtered_by(tmp_path: Path, local_objects: Objects) -> None:
    table = pl.DataFrame({"q": ["a", "b", "c"], "lang": ["de", "en", "de"], "day": [1, 2, 3]})
    pq.write_to_dataset(table.to_arrow(), tmp_path / "d", partition_cols=["lang", "day"])
    attributes = {
        "name": "q",
        "source": {"path": "d/**/*.parquet", "where": "lang = 'de' AND CAST(day AS INT) > 1"},
        "prompt": {"user": "{{ q }} in {{ lang }}"},
        "model": "m",
        "keep_columns": ["lang", "day"],
    }
    store = DatasetStore(local_objects, "q")
    spec = load_spec(attributes, "defs.yaml")
    made = build_snapshot(spec, store, now=1.0, workdir=tmp_path / "work", base=tmp_path)
    (shard,) = made.shards
    (row,) = pq.read_table(
        pa.BufferReader(local_objects.get(store.snapshot_path(made.snapshot, shard.path)))
    ).to_pylist()
    assert b"c in de" in row["prompt"] and (row["lang"], row["day"]) == ("de", "3")
