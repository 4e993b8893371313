"""Files that are of another kind than their names say, or laid out otherwise: named, with what to do."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from batch_assets.snapshot.source.errors import Reject, SourceError
from batch_assets.snapshot.source.reader import read_source
from batch_assets.snapshot.source.size import estimated_lines
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import load_spec
from batch_assets.spec.source import SourceSpec


def rows_of(base: Path, name: str, data: bytes, **source: Any) -> tuple[list[tuple[int, Any]], list[Reject]]:
    """((line, value of q), rejects) of one file."""
    (base / name).write_bytes(data)
    blocks = list(read_source(SourceSpec(path=name, **source), ["q"], base))
    rows = [pair for block in blocks for pair in zip(block.lines, block.columns["q"], strict=True)]
    return rows, [reject for block in blocks for reject in block.rejects]


def refusal(base: Path, name: str, data: bytes, **source: Any) -> str:
    with pytest.raises(SourceError) as refused:
        rows_of(base, name, data, **source)
    return str(refused.value)


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, "q\n1\n")
    return file.getvalue()


def parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"q": ["a"]}), file)
    return file.getvalue()


def arrow() -> bytes:
    file = io.BytesIO()
    pyarrow.feather.write_feather(pa.table({"q": ["a"]}), file)
    return file.getvalue()


ZSTD = bytes(pa.compress(b"q\n1\n", "zstd", asbytes=True))
KINDS = [
    (zipped("a.csv"), "a zip archive; unpack it"),
    (zipped("[Content_Types].xml", "xl/workbook.xml"), "an Excel workbook; export its sheet as CSV"),
    (zipped("docProps/app.xml"), "an Excel workbook; export its sheet as CSV"),  # as openpyxl begins
    (bytes.fromhex("d0cf11e0a1b11ae1") + bytes(600), "(xls); export its sheet as CSV"),
    (bz2.compress(b"q\n1\n"), "packed with bzip2; unpack it"),
    (lzma.compress(b"q\n1\n"), "packed with xz; unpack it"),
    (arrow(), "an Arrow file; write its rows to a Parquet, JSONL or CSV file"),
    (b"SQLite format 3\x00" + bytes(84), "an SQLite database"),
    (b"%PDF-1.7\n%\xe2\xe3", "a PDF file"),
    (b"\n<!DOCTYPE html>\n<html>sign in</html>", "an HTML page; what was downloaded is a page"),
    (b"<?xml version='1.0'?><a/>", "an XML file"),
    (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
        "a pointer of Git LFS in place of the file; run git",
    ),
]


@pytest.mark.parametrize(("data", "said"), KINDS)
def test_a_file_of_another_kind_is_named_with_what_to_do(tmp_path: Path, data: bytes, said: str) -> None:
    for name in ("a.csv", "a.jsonl", "a.json", "a.parquet", "a.csv.gz", "a.jsonl.zst"):
        message = refusal(tmp_path, name, data)
        assert message.startswith(f"{name}: ") and said in message


def test_a_packed_file_without_its_ending_is_told_its_name(tmp_path: Path) -> None:
    for data, packer, ending in ((gzip.compress(b"q\n1\n"), "gzip", "gz"), (ZSTD, "zstd", "zst")):
        for name in ("a.csv", "a.jsonl", "a.json", "a.tsv"):
            said = f"{name}: expected text, found a file packed with {packer}; call it {name}.{ending}"
            assert refusal(tmp_path, name, data) == said
        assert rows_of(tmp_path, f"a.csv.{ending}", data) == ([(2, "1")], [])
        assert refusal(tmp_path, "a.parquet", data).endswith(f"found a file packed with {packer}; unpack it")
    assert "packed twice: unpack it once" in refusal(tmp_path, "a.csv.gz", gzip.compress(gzip.compress(b"q\n1\n")))
    assert refusal(tmp_path, "a.csv.gz", ZSTD) == (
        "a.csv.gz: cannot be unpacked: expected gzip, found a file packed with zstd; call it a.csv.zst"
    )


def test_text_that_is_called_packed_or_parquet_is_told_so(tmp_path: Path) -> None:
    assert refusal(tmp_path, "a.csv.gz", "q\né\n".encode()).endswith("found text that is not packed; call it a.csv")
    assert refusal(tmp_path, "a.parquet", b"q\n1\n").endswith(
        "found text; write source.format: csv, tsv, jsonl or json, as it is"
    )
    assert "let its name end in .parquet, or write source.format: parquet" in refusal(tmp_path, "a.csv", parquet())
    assert rows_of(tmp_path, "a.csv", parquet(), format="parquet")[0] == [(1, "a")]


@pytest.mark.parametrize("header", ["PK", "PAR1", "ORC", "Obj", "BZh9", "ARROW1", "version"])
def test_a_text_that_begins_as_a_signature_does_is_text(tmp_path: Path, header: str) -> None:
    assert rows_of(tmp_path, "a.csv", f"{header},q\n1,2\n".encode()) == ([(2, "2")], [])


# Lines


def test_lines_that_end_with_a_carriage_return_alone_are_read(tmp_path: Path) -> None:
    assert rows_of(tmp_path, "a.csv", b'id,q\r1,a\r2,"b\rc"\r')[0] == [(2, "a"), (3, "b\nc")]
    assert rows_of(tmp_path, "a.jsonl", b'{"q": 1}\r\r{"q": 2}')[0] == [(1, 1), (3, 2)]
    (tmp_path / "b.csv").write_bytes(b"q\r" * 1000)
    assert estimated_lines(SourceSpec(path="b.csv"), tmp_path) == 1000
    # One in a field of a file that has newlines is a part of its text.
    assert rows_of(tmp_path, "a.csv", b'id,q\r\n1,"a\rb"\r\n')[0] == [(2, "a\rb")]
    assert rows_of(tmp_path, "a.csv", b"id,q\r")[0] == []


# JSON that is no JSONL

OBJECTS = [{"q": 1, "r": [1, {}]}, {"q": 2}]


@pytest.mark.parametrize(
    "text",
    [json.dumps(OBJECTS), json.dumps(OBJECTS, indent=2), '[\n{"q": 1},\n{"q": 2}\n]', '\n[{"q": 1},\n{"q": 2}\n]'],
)
def test_an_array_that_is_called_jsonl_is_refused_with_its_format(tmp_path: Path, text: str) -> None:
    message = refusal(tmp_path, "a.jsonl", text.encode())
    line = 2 if text.startswith("\n") else 1
    assert message.startswith(f"a.jsonl, line {line}: expected a JSON object per line, found the beginning of an array")
    assert message.endswith("write source.format: json")
    assert rows_of(tmp_path, "a.jsonl", text.encode(), format="json")[0] == [(1, 1), (2, 2)]


@pytest.mark.parametrize("more", [0, 2 << 20])
def test_objects_over_several_lines_are_refused_with_what_to_do(tmp_path: Path, more: int) -> None:
    texts = ["\n".join(json.dumps(one | {"long": "x" * more}, indent=2) for one in OBJECTS)]
    texts += ['{"q": "' + "é" * 50 + '",\n "r": 2}\n{"q": 2}\n'] if not more else []
    for text in texts:
        message = refusal(tmp_path, "a.jsonl", text.encode())
        assert message.startswith("a.jsonl, line 1: expected a JSON object per line, found one over several lines; ")
        assert "jq -c . FILE" in message and "source.format: json" in message


def test_a_json_file_that_is_one_object_is_told_to_write_its_list(tmp_path: Path) -> None:
    for more in (1, 30_000):
        text = json.dumps({"data": OBJECTS * more}, indent=2)
        assert "(jq .KEY FILE)" in refusal(tmp_path, "a.json", text.encode())
    assert "write source.format: jsonl" in refusal(tmp_path, "a.json", b'{"q": 1}\n{"q": 2}\n')


@pytest.mark.parametrize("first", [b'{"q": "cut', b"[INFO] begins", b'{"q": 1,}', b'["q"]', b"{", b'{"q":\n'])
def test_a_bad_first_line_is_one_bad_row(tmp_path: Path, first: bytes) -> None:
    rows, rejects = rows_of(tmp_path, "a.jsonl", first + b'\n{"q": 1}\n')
    assert [value for _, value in rows] == [1] and [reject.line for reject in rejects] == [1]


# Encodings


def test_text_that_is_no_utf_8_is_refused_with_the_key_that_helps(tmp_path: Path) -> None:
    header = refusal(tmp_path, "a.csv", "ü,q\n1,2\n".encode("latin-1"))
    assert "line 1: expected a header line, found one that is not valid UTF-8 at byte 1. " in header
    _, rejects = rows_of(tmp_path, "a.csv", "q\nfür\n".encode("latin-1"))
    for message in (header, str(SourceError.of_rows(rejects, 1)), str(SourceError.of_no_row("a.csv", rejects, 1))):
        assert "write source.encoding: windows-1252 (which reads Latin-1, too), or convert it (iconv" in message
    assert rows_of(tmp_path, "a.csv", "q\nfür\n".encode("latin-1"), encoding="windows-1252")[0] == [(2, "für")]
    assert "encoding" not in str(SourceError.of_rows([Reject("a.csv", 1, "expected 2 fields, found 1")], 1))


# Names


def test_columns_without_a_name_are_no_trouble(tmp_path: Path) -> None:
    assert rows_of(tmp_path, "a.csv", b",q,,\n0,a,,\n1,b,x,\n")[0] == [(2, "a"), (3, "b")]
    said = "a.csv, line 1: expected each column name once, found 'x' 2 times; give one of them another name in the file"
    assert refusal(tmp_path, "a.csv", b"x,q,x\n1,2,3\n") == said


def test_columns_that_differ_in_case_only_are_two_in_prompts_and_one_in_tables(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,Text, q \na,b,c\n")
    (block,) = read_source(SourceSpec(path="a.csv"), ["text", "Text"], tmp_path)
    assert block.columns == {"text": ["a"], "Text": ["b"]}
    attributes = {"name": "n", "source": {"path": "a.csv"}, "prompt": {"user": "{{ text }}"}, "model": "m"}
    with pytest.raises(SpecError, match=r"found 'Text' beside 'text'\. Readers .* rename one, under source\.rename"):
        load_spec(attributes | {"keep_columns": ["text", "Text"]}, "defs.yaml")
    with pytest.raises(SourceError, match=r"write \{\{ row\[' q '\] \}\} for the column ' q '"):
        list(read_source(SourceSpec(path="a.csv"), ["q"], tmp_path))
