"""Parquet with large cells: pages are measured before they are read, and few rows are in memory at once."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_assets.snapshot.source import parquet as source_parquet
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.parquet_pages import Page, pages
from batch_assets.snapshot.source.reader import read_source
from batch_assets.spec.source import SourceSpec

MEGABYTE = "x" * (1 << 20)


def blocks_of(folder: Path) -> list[int]:
    """Rows of each block of a.parquet."""
    return [len(block.lines) for block in read_source(SourceSpec(path="a.parquet"), ["q"], folder)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dictionary": False},
        {"data_page_version": "2.0"},
        {"write_page_checksum": True, "compression": "zstd"},
        {"write_batch_size": 3, "data_page_size": 1000},
    ],
)
def test_the_pages_of_a_chunk_are_all_of_its_bytes(options: dict[str, Any]) -> None:
    stream = io.BytesIO()
    texts = [f"{i % 500} " * 20 for i in range(3000)]
    columns = {
        "q": texts,
        "n": list(range(3000)),
        "f": [i / 3 for i in range(3000)],
        "list": [[i] for i in range(3000)],
    }
    pq.write_table(pa.table(columns), stream, **options)
    group = pq.ParquetFile(stream).metadata.row_group(0)
    for number in range(group.num_columns):
        chunk = group.column(number)
        first = min(at for at in (chunk.dictionary_page_offset, chunk.data_page_offset) if at is not None)
        found = list(pages(stream, first, chunk.total_compressed_size))
        assert sum(page.stored for page in found) == chunk.total_compressed_size
        assert chunk.dictionary_page_offset is None or found[0].shared == len(
            set(map(str, columns_of(columns)[number]))
        )


def columns_of(columns: dict[str, list[Any]]) -> list[list[Any]]:
    return list(columns.values())


@pytest.mark.parametrize(
    "data", [b"", b"\x15", b"\x15\x04\x15", b"\xff" * 5000, b"\x00" * 50, b"\x1c" * 5000, b"\x19\x01"]
)
def test_bytes_that_are_no_page_header_are_no_pages(data: bytes) -> None:
    assert list(pages(io.BytesIO(data), 0, 1 << 20)) == []


def test_a_header_may_hold_a_value_of_a_megabyte() -> None:
    # PageHeader: type 0, sizes 5 and 3, then field 5, a struct with a text of a megabyte in it.
    text = MEGABYTE.encode()
    header = b"\x15\x00\x15\x0a\x15\x06\x2c\x18" + b"\x80\x80\x40" + text + b"\x00\x00"
    assert list(pages(io.BytesIO(header + b"abc"), 0, len(header) + 3)) == [Page(len(header) + 3, 5)]


def test_a_large_page_behind_small_ones_is_refused_with_its_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_parquet, "MAX_PAGE", 16 << 20)
    texts = ["s" * 2000] * 1024 + [f"{i} {MEGABYTE}" for i in range(20)]
    pq.write_table(pa.table({"q": texts}), tmp_path / "a.parquet", use_dictionary=False, compression="zstd")
    with pytest.raises(SourceError, match=r"a\.parquet: expected pages .* 'q', found one of 20 MiB in row group 0,"):
        blocks_of(tmp_path)


def test_a_large_value_that_many_rows_share_is_read_for_few_of_them_at_once(tmp_path: Path) -> None:
    pq.write_table(pa.table({"q": [MEGABYTE] * 40 + ["short"] * 500}), tmp_path / "a.parquet", row_group_size=40)
    found = blocks_of(tmp_path)
    assert sum(found) == 540 and found[:4] == [15, 15, 10, 40]


def test_memory_that_ends_is_told_with_file_column_and_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"q": ["a"] * 100, "n": list(range(100))}), tmp_path / "a.parquet", row_group_size=50)
    real = pq.ParquetFile.iter_batches

    def ends(self: Any, *rest: Any, row_groups: list[int], **more: Any) -> Any:
        if row_groups == [1]:
            raise pa.ArrowMemoryError("realloc of size 1024007104 failed")
        return real(self, *rest, row_groups=row_groups, **more)

    def later(*rest: Any, **more: Any) -> Any:
        yield from ends(*rest, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", later)
    said = (
        r"a\.parquet, row 51 and after: expected memory for pages of column 'q' in row group 1 .*give the process more"
    )
    with pytest.raises(SourceError, match=said):
        blocks_of(tmp_path)
