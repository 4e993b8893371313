"""Sources: every row is read with its file and line, or refused with them; memory does not follow hostile input."""

from __future__ import annotations

import base64
import datetime
import decimal
import gzip
import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_assets.snapshot.source import files
from batch_assets.snapshot.source import parquet as source_parquet
from batch_assets.snapshot.source import text as source_text
from batch_assets.snapshot.source.block import BLOCK_ROWS
from batch_assets.snapshot.source.errors import Reject, SourceError
from batch_assets.snapshot.source.parquet import plain
from batch_assets.snapshot.source.reader import read_source
from batch_assets.spec.source import SourceSpec
from resources.objects.opening import Objects


def rows_of(base: Path, columns: list[str], **source: Any) -> tuple[list[tuple[Any, ...]], list[Reject]]:
    """((file, line, values…), rejects) of a source."""
    rows: list[tuple[Any, ...]] = []
    rejects: list[Reject] = []
    for block in read_source(SourceSpec(**source), columns, base):
        values = zip(*(block.columns[name] for name in columns), strict=True) if columns else [()] * len(block.lines)
        rows += [(block.file, line, *row) for line, row in zip(block.lines, values, strict=True)]
        rejects += block.rejects
    return rows, rejects


def jsonl(folder: Path, data: bytes, **source: Any) -> tuple[list[tuple[Any, ...]], list[Reject]]:
    (folder / "a.jsonl").write_bytes(data)
    return rows_of(folder, ["q"], path="a.jsonl", **source)


def csv(folder: Path, data: bytes, columns: list[str] | None = None) -> tuple[list[tuple[Any, ...]], list[Reject]]:
    (folder / "a.csv").write_bytes(data)
    return rows_of(folder, columns or ["q"], path="a.csv")


# JSONL


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"q": "x"', "not valid JSON"),
        (b'{"q": "x"} trailing', "not valid JSON"),
        (b'{"q": "x"}{"q": "y"}', "not valid JSON"),
        (b"{'q': 1}", "not valid JSON"),
        (b'{"q": NaN}', "not valid JSON"),
        (b'{"q": 01}', "not valid JSON"),
        (b'{"q": "\x01"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"q": "\xff\xfe"}', "not valid UTF-8 at byte 8"),
        (b'{"q": "\xed\xa0\x80"}', "not valid UTF-8 at byte 8"),
        (b'{"q": "\\ud800"}', "not valid JSON"),
        (b'["q"]', "expected a JSON object, found a list"),
        (b'"q"', "expected a JSON object, found text"),
        (b"5", "expected a JSON object, found a number"),
        (b"null", "expected a JSON object, found null"),
        (b"true", "expected a JSON object, found true/false"),
    ],
)
def test_a_bad_json_line_is_refused_with_its_number_and_its_neighbours_are_read(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    rows, rejects = jsonl(tmp_path, b'{"q": "first"}\n' + line + b'\n{"q": "last"}\n')
    assert rows == [("a.jsonl", 1, "first"), ("a.jsonl", 3, "last")]
    assert [(reject.file, reject.line) for reject in rejects] == [("a.jsonl", 2)]
    assert rejects[0].reason.startswith(reason)
    assert len(rejects[0].reason) < 200


def test_no_reason_quotes_the_row(tmp_path: Path) -> None:
    _, rejects = jsonl(tmp_path, b'{"q": "ok"}\n{"q": "CANARY", oops CANARY\n["CANARY"]\n"CANARY\xff"\n')
    assert len(rejects) == 3 and "CANARY" not in repr(rejects)


def test_bom_crlf_blank_lines_and_a_missing_last_newline_are_ordinary(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"q": "a"}\r\n\r\n   \n{"q": "b"}\r\n{"q": "c"}'
    assert jsonl(tmp_path, data) == ([("a.jsonl", 1, "a"), ("a.jsonl", 4, "b"), ("a.jsonl", 5, "c")], [])


def test_odd_but_valid_text_is_kept_exactly(tmp_path: Path) -> None:
    odd = [
        "nul \x00 in it",
        "emoji 🙂👩‍👩‍👧",
        "rtl ‮ override",
        "line \u2028 separator",
        "\x7f\x85",
        "e\u0301",
        "\U0010ffff",
    ]
    data = "".join(json.dumps({"q": text}, ensure_ascii=index % 2 == 0) + "\n" for index, text in enumerate(odd))
    rows, rejects = jsonl(tmp_path, data.encode())
    assert [row[2] for row in rows] == odd and not rejects


def test_values_keep_their_json_types(tmp_path: Path) -> None:
    values: list[Any] = [1, 1.0, "1", True, None, [1, "a", None], {"b": {"c": [1]}}, 2**63, -(2**63)]
    rows, _ = jsonl(tmp_path, "".join(json.dumps({"q": value}) + "\n" for value in values).encode())
    assert [row[2] for row in rows] == values
    assert [type(row[2]) for row in rows] == [type(value) for value in values]


def test_a_key_that_a_row_lacks_counts_as_null(tmp_path: Path) -> None:
    assert jsonl(tmp_path, b'{"q": 1}\n{"other": 2}\n')[0] == [("a.jsonl", 1, 1), ("a.jsonl", 2, None)]


@pytest.mark.parametrize("packed", [False, True])
def test_an_over_long_line_is_refused_without_being_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(source_text, "MAX_LINE", 3000)
    monkeypatch.setattr(source_text, "READ_BYTES", 1000)
    held: list[int] = []
    blocks = source_text.line_blocks

    def watched(stream: Any) -> Any:
        for lines in blocks(stream):
            held.append(sum(len(line or b"") for line in lines))
            yield lines

    monkeypatch.setattr(source_text, "line_blocks", watched)
    long = json.dumps({"q": "x" * 50_000}).encode()
    edge = b'{"q": "' + b"y" * (3000 - 9) + b'"}'
    lines = [b'{"q": "a"}', long, b'{"q": "b"}', edge, edge[:-2] + b'y"}', b'{"q": "c"}', long]
    data = b"\n".join(lines)
    if packed:
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
        rows, rejects = rows_of(tmp_path, ["q"], path="a.jsonl.gz")
    else:
        rows, rejects = jsonl(tmp_path, data)
    assert [row[1] for row in rows] == [1, 3, 4, 6]
    assert [reject.line for reject in rejects] == [2, 5, 7]
    assert max(held) <= 5000


def test_blocks_do_not_depend_on_where_lines_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = "".join(json.dumps({"q": "é🙂" * (i % 23)}) + "\r\n" for i in range(200)).encode()
    whole = jsonl(tmp_path, data)
    for size in (1, 2, 3, 7, 64, 1000):
        monkeypatch.setattr(source_text, "READ_BYTES", size)
        assert jsonl(tmp_path, data) == whole


@pytest.mark.parametrize("digits", [str(2**63), str(2**64), "12345678901234567890123", "-" + "9" * 300])
def test_a_whole_number_keeps_all_its_digits(tmp_path: Path, digits: str) -> None:
    rows, _ = jsonl(tmp_path, f'{{"q": {digits}}}\n{{"q": [{{"n": {digits}}}]}}\n'.encode())
    assert [row[2] for row in rows] == [int(digits), [{"n": int(digits)}]]


def test_a_number_that_cannot_be_read_is_a_bad_row(tmp_path: Path) -> None:
    rows, rejects = jsonl(tmp_path, b'{"q": ' + b"9" * 5000 + b'}\n{"q": 1}\n')
    assert [row[2] for row in rows] == [1]
    assert [reject.reason.partition(" at")[0] for reject in rejects] == [
        "not valid JSON: number is infinity when parsed as double"
    ]


# CSV


def test_csv_follows_rfc_4180(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbfid,q\r\n1,plain\r\n2,"quoted, with ""marks"""\r\n3,"two\r\nlines"\r\n\r\n4,last'
    rows, rejects = csv(tmp_path, data, ["id", "q"])
    assert not rejects
    assert rows == [
        ("a.csv", 2, "1", "plain"),
        ("a.csv", 3, "2", 'quoted, with "marks"'),
        ("a.csv", 4, "3", "two\r\nlines"),
        ("a.csv", 7, "4", "last"),
    ]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"1", "expected 2 fields, found 1"),
        (b"1,2,3", "expected 2 fields, found 3"),
        (b'1,"a"b', "not valid CSV"),
        (b"1,\xff", "not valid UTF-8 at byte 3"),
    ],
)
def test_a_bad_csv_record_is_refused_with_its_line(tmp_path: Path, record: bytes, reason: str) -> None:
    rows, rejects = csv(tmp_path, b"id,q\n0,first\n" + record + b"\n2,last\n")
    assert [row[1:] for row in rows] == [(2, "first"), (4, "last")]
    assert [(reject.line, reject.reason.startswith(reason)) for reject in rejects] == [(3, True)]


def test_a_quote_that_never_closes_stops_the_source_and_names_its_line(tmp_path: Path) -> None:
    data = b'id,q\n0,first\n1,"open\n' + b"2,x\n" * 5000
    with pytest.raises(SourceError, match=r"a\.csv, line 3: .*the rest of the file \(5001 lines, to line 5003\)"):
        csv(tmp_path, data)


def test_each_line_that_a_bad_record_swallows_is_a_reject(tmp_path: Path) -> None:
    rows, rejects = csv(tmp_path, b'id,q\n0,first\n1,"open\n2,x\n3,"closed"\n4,last\n')
    assert [row[1:] for row in rows] == [(2, "first"), (6, "last")]
    assert [reject.line for reject in rejects] == [3, 4, 5]
    assert rejects[1].reason.startswith("within the record of line 3, which cannot be used (not valid CSV")


def test_a_record_with_wrong_fields_rejects_all_its_lines(tmp_path: Path) -> None:
    rows, rejects = csv(tmp_path, b'id,q\n1,"open\n2,x\n3,",end\n4,last\n')
    assert [row[1:] for row in rows] == [(5, "last")]
    assert [reject.line for reject in rejects] == [2, 3, 4]


def test_a_quote_that_closes_hundreds_of_lines_later_stops_the_source(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"line 2: .* in its place \(301 lines, to line 302\)"):
        csv(tmp_path, b'id,q\n1,"open' + b"\n2,x" * 300 + b'",3\n4,last\n')


def test_text_of_many_lines_in_good_quotes_is_one_row(tmp_path: Path) -> None:
    text = "\n".join(map(str, range(2000)))
    rows, rejects = csv(tmp_path, f'id,q\n1,"{text}"\n2,x\n'.encode())
    assert [row[1:] for row in rows] == [(2, text), (2002, "x")]
    assert not rejects


def test_an_over_long_csv_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_text, "MAX_LINE", 2000)
    monkeypatch.setattr(source_text, "READ_BYTES", 500)
    rows, rejects = csv(tmp_path, b"id,q\n1,a\n2," + b"x" * 5000 + b"\n4,d\n")
    assert [row[2] for row in rows] == ["a", "d"]
    assert [reject.line for reject in rejects] == [3]


def test_an_over_long_csv_field_stops_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_text, "MAX_LINE", 2000)
    with pytest.raises(SourceError, match=r"line 2: expected the quote .* to be closed"):
        csv(tmp_path, b'id,q\n3,"' + b"y\n" * 1500 + b'"\n4,d\n')


def test_a_csv_may_have_a_hundred_thousand_columns(tmp_path: Path) -> None:
    """Comparing each with each would take minutes; benchmarks/timing.py measures it."""
    names = ",".join(f"c{i}" for i in range(100_000))
    assert csv(tmp_path, f"{names},q\n{',' * 100_000}x\n".encode())[0][0][2] == "x"


def test_an_empty_csv_field_is_null_and_other_text_stays_as_it_is(tmp_path: Path) -> None:
    assert [row[2] for row in csv(tmp_path, b"id,q\n1,\n2,007\n3, x \n")[0]] == [None, "007", " x "]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"id,id\n1,2\n", "expected each column name once, found 'id' 2 times"),
        (b"i\xffd,q\n1,2\n", "not valid UTF-8"),
        (b"id,x\n1,2\n", "expected column 'q', found 'id', 'x'"),
        (b'"id,q\n1,2\n', "expected a header line"),
    ],
)
def test_a_csv_without_a_usable_header_is_refused_whole(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        csv(tmp_path, data)


# Parquet


def parquet(folder: Path, name: str = "a.parquet", **columns: Any) -> Path:
    pq.write_table(pa.table(columns), folder / name, row_group_size=100)
    return folder / name


def test_parquet_rows_are_numbered_from_1_across_blocks_and_row_groups(tmp_path: Path) -> None:
    parquet(tmp_path, q=[f"q{i}" for i in range(700)], other=list(range(700)))
    rows, _ = rows_of(tmp_path, ["q"], path="a.parquet")
    assert rows == [("a.parquet", i + 1, f"q{i}") for i in range(700)]


def test_parquet_values_keep_their_types(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 5, 6, 7, 8, 9)
    parquet(
        tmp_path,
        text=pa.array(["a", None], pa.large_string()),
        shared=pa.array(["x", "x"]).dictionary_encode(),
        price=pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
        when=pa.array([moment, None], pa.timestamp("ns")),
        parts=pa.array([[1, 2], None], pa.list_(pa.int32())),
        record=pa.array([{"a": 1, "b": [True]}, None]),
        raw=pa.array([b"\xff\x00", None]),
    )
    columns = ["text", "shared", "price", "when", "parts", "record", "raw"]
    (block,) = read_source(SourceSpec(path="a.parquet"), columns, tmp_path)
    assert block.arrow is not None
    assert {name: str(plain(array).type) for name, array in block.arrow.items()} == {
        "text": "string",
        "shared": "string",
        "price": "decimal128(9, 2)",
        "when": "timestamp[ns]",
        "parts": "list<element: int32>",
        "record": "struct<a: int64, b: list<element: bool>>",
        "raw": "binary",
    }
    assert block.columns["record"] == [{"a": 1, "b": [True]}, None]
    assert block.columns["shared"] == ["x", "x"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"PAR1",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data[:-400] + b"\x00" * 300 + data[-100:],
        lambda data: b"not parquet at all" * 10,
        lambda data: data[:4] + b"\xff" * 300 + data[304:],
    ],
)
def test_a_truncated_or_damaged_parquet_file_is_refused_and_named(tmp_path: Path, damage: Any) -> None:
    file = parquet(tmp_path, q=[os.urandom(20).hex() for _ in range(300)])
    file.write_bytes(damage(file.read_bytes()))
    said = r"^a\.parquet: (expected a whole Parquet file|expected at least one row|broken at row)"
    with pytest.raises(SourceError, match=said):
        rows_of(tmp_path, ["q"], path="a.parquet")


def test_parquet_text_that_is_not_utf8_is_refused_by_row(tmp_path: Path) -> None:
    good = pa.array([b"ok", b"bad \xff", b"fine"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, good.buffers())
    for array in (text, pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), text)):
        pq.write_table(pa.table({"q": array}), tmp_path / "a.parquet")
        rows, rejects = rows_of(tmp_path, ["q"], path="a.parquet")
        assert [row[1:] for row in rows] == [(1, "ok"), (3, "fine")]
        assert rejects == [Reject("a.parquet", 2, "column 'q' is not valid UTF-8")]


def test_files_of_a_glob_must_agree_in_the_columns_that_are_used(tmp_path: Path) -> None:
    parquet(tmp_path, "a.parquet", q=["x"], n=[1])
    parquet(tmp_path, "b.parquet", q=["y"], n=["text"])
    assert len(rows_of(tmp_path, ["q"], path="*.parquet")[0]) == 2
    with pytest.raises(SourceError, match=r"b\.parquet: expected int64 in column 'n' as in a\.parquet, found string"):
        rows_of(tmp_path, ["q", "n"], path="*.parquet")
    parquet(tmp_path, "b.parquet", other=["y"])
    with pytest.raises(SourceError, match=r"b\.parquet: expected column 'q', found 'other'"):
        rows_of(tmp_path, ["q"], path="*.parquet")


@pytest.mark.slow
def test_ten_thousand_columns_are_no_burden_and_the_error_names_a_few(tmp_path: Path) -> None:
    parquet(tmp_path, **{f"c{i}": [i] for i in range(10_000)}, q=["x"])
    assert rows_of(tmp_path, ["q"], path="a.parquet")[0] == [("a.parquet", 1, "x")]
    with pytest.raises(SourceError, match=r"expected column 'nope', found 'c0', .* and 9951 more") as caught:
        rows_of(tmp_path, ["nope"], path="a.parquet")
    assert len(str(caught.value)) < 1000


def test_repeated_values_of_a_dictionary_are_shared_not_copied(tmp_path: Path) -> None:
    value = "x" * 500_000
    dictionary = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), pa.array([value]))
    pq.write_table(pa.table({"q": dictionary}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    blocks = read_source(SourceSpec(path="a.parquet"), ["q"], tmp_path)
    first = next(iter(blocks)).columns["q"]
    assert len({id(text) for text in first}) == 1


# Finding and opening


def test_a_glob_is_read_in_name_order_and_names_are_relative(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("b", "a", "c"):
        (tmp_path / "in" / f"{name}.jsonl").write_text(json.dumps({"q": name}) + "\n")
    rows, _ = rows_of(tmp_path, ["q"], path="in/*.jsonl")
    assert rows == [("in/a.jsonl", 1, "a"), ("in/b.jsonl", 1, "b"), ("in/c.jsonl", 1, "c")]
    assert len(rows_of(tmp_path, ["q"], path=str(tmp_path / "**" / "*.jsonl"))[0]) == 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing.jsonl", "no such file"),
        ("*.csv.gz", "no such file"),
        ("folder", "found a folder"),
        ("s3://bucket", "expected s3://bucket/key"),
        ("data.txt", "expected a file ending in"),
        ("data.parquet.gz", "Parquet compresses itself"),
        ("mixed.*", "expected files of one format, found csv and jsonl"),
        ("x" * 5000, "cannot be looked up (File name too long)"),
        ("x" * 300 + "/*.jsonl", "cannot be looked up (File name too long)"),
        ("a\0b.jsonl", "no such file"),
        ("~nosuchuser/a.jsonl", "expected a home folder that exists"),
        ("loop.jsonl", "no such file"),
        ("/proc/self/environ", "one of the operating system's own"),
        ("/proc/self/envir*", "one of the operating system's own"),
        ("link.jsonl", "one of the operating system's own"),
    ],
)
def test_a_path_that_leads_to_no_source_is_refused(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("data.txt", "data.parquet.gz", "mixed.csv", "mixed.jsonl"):
        (tmp_path / name).write_text("q\n")
    (tmp_path / "link.jsonl").symlink_to("/proc/self/environ")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    with pytest.raises(SourceError, match=re.escape(message)):
        rows_of(tmp_path, ["q"], path=path, format="csv" if path.startswith("/proc") else None)


def test_a_file_that_links_lead_to_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "a.jsonl").write_text('{"q": 1}\n')
    (tmp_path / "in" / "loop").symlink_to("..")
    (tmp_path / "in" / "deep" / "again").symlink_to("..")
    (tmp_path / "in" / "other.jsonl").symlink_to("deep/a.jsonl")
    for pattern in ("in/**/*.jsonl", "**/*.jsonl", "in/*/*.jsonl", "in/*/a*.jsonl"):
        assert [row[2] for row in rows_of(tmp_path, ["q"], path=pattern)[0]] == [1], pattern


def test_a_header_that_is_a_row_is_not_shown_whole(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as refused:
        csv(tmp_path, b"id," + b"secret " * 100 + b"\n")
    assert len(str(refused.value)) < 200


def test_format_can_be_named_when_the_ending_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text('{"q": 1}\n')
    assert rows_of(tmp_path, ["q"], path="data.txt", format="jsonl")[0] == [("data.txt", 1, 1)]


def test_a_missing_column_is_named_with_the_columns_there_are(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"a\.jsonl: expected column 'q', found 'question', 'answer'"):
        jsonl(tmp_path, b'{"question": 1, "answer": 2}\n' * 3)


def test_a_source_that_changes_or_vanishes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for spoil, message in ((lambda: file.write_text('{"q": 2}\n'), "changed while"), (file.unlink, "is gone")):
        file.write_text('{"q": 1}\n' * 10)
        blocks = read_source(SourceSpec(path="a.jsonl"), ["q"], tmp_path)
        next(blocks)
        spoil()
        with pytest.raises(SourceError, match=message):
            list(blocks)


def _zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("zst", _zstd)])
def test_packed_text_is_read_and_its_damage_is_noticed(tmp_path: Path, ending: str, pack: Any) -> None:
    data = "".join(json.dumps({"q": os.urandom(30).hex()}) + "\n" for _ in range(5000)).encode()
    file = tmp_path / f"a.jsonl.{ending}"
    file.write_bytes(pack(data[: len(data) // 2]) + pack(data[len(data) // 2 :]))
    rows, rejects = rows_of(tmp_path, ["q"], path=file.name)
    assert len(rows) == 5000 and not rejects
    whole = pack(data)
    for damaged in (whole[: len(whole) // 2], b"no archive", whole[:-4] + b"\xff" * 4 + whole[-4:]):
        file.write_bytes(damaged)
        with pytest.raises(SourceError, match=f"a.jsonl.{ending}: cannot be unpacked"):
            rows_of(tmp_path, ["q"], path=file.name)


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("zst", _zstd)])
def test_a_decompression_bomb_is_stopped_while_streaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, pack: Any
) -> None:
    monkeypatch.setattr(files, "RATIO_FROM", 1 << 21)
    (tmp_path / f"a.jsonl.{ending}").write_bytes(pack(b"\n" * (1 << 24)))
    with pytest.raises(SourceError, match="unpacks to more than 300 times its size"):
        rows_of(tmp_path, ["q"], path=f"a.jsonl.{ending}")


@pytest.mark.slow
def test_s3_sources_are_found_by_key_and_glob(s3_objects: Objects, tmp_path: Path) -> None:
    for name in ("in/a.jsonl", "in/b.jsonl", "in/deep/c.jsonl", "in/a.txt"):
        s3_objects.put(name, json.dumps({"q": name}).encode())
    root = s3_objects.root
    prefix = root.removeprefix("s3://bucket/")
    assert [row[2] for row in rows_of(tmp_path, ["q"], path=f"{root}/in/b.jsonl")[0]] == ["in/b.jsonl"]
    rows, _ = rows_of(tmp_path, ["q"], path=f"{root}/in/*.jsonl")
    assert [row[0] for row in rows] == [f"s3://bucket/{prefix}/in/a.jsonl", f"s3://bucket/{prefix}/in/b.jsonl"]
    assert len(rows_of(tmp_path, ["q"], path=f"{root}/in/**/[!ab].jsonl")[0]) == 1
    pq.write_table(pa.table({"q": list(range(1000))}), tmp_path / "p.parquet")
    s3_objects.upload("p.parquet", tmp_path / "p.parquet")
    assert [row[2] for row in rows_of(tmp_path, ["q"], path=f"{root}/p.parquet")[0]] == list(range(1000))
    with pytest.raises(SourceError, match="no such file"):
        rows_of(tmp_path, ["q"], path=f"{root}/in/nothing-*.jsonl")
    with pytest.raises(SourceError, match=r"refuses to be read \(NoSuchBucket"):
        rows_of(tmp_path, ["q"], path="s3://no-such-bucket/a.jsonl")


# Grid


def test_a_grid_is_the_cross_join_with_the_last_list_fastest(tmp_path: Path) -> None:
    (tmp_path / "langs.csv").write_text("code,name\nen,English\nde,German\n")
    grid = {"lang": {"csv": "langs.csv", "column": "code"}, "n": [1, 2, 3]}
    rows, _ = rows_of(tmp_path, ["lang", "n"], grid=grid)
    pairs = [("en", 1), ("en", 2), ("en", 3), ("de", 1), ("de", 2), ("de", 3)]
    assert rows == [("grid", i + 1, *pair) for i, pair in enumerate(pairs)]


def test_a_large_grid_is_never_made_whole(tmp_path: Path) -> None:
    grid = {name: list(range(100)) for name in "abcd"}
    blocks = read_source(SourceSpec(grid=grid), ["d"], tmp_path)
    assert len(next(blocks).lines) == BLOCK_ROWS
    with pytest.raises(SourceError, match="expected at most 200000000 combinations, found 10000000000"):
        next(read_source(SourceSpec(grid=grid | {"e": list(range(100))}), ["d"], tmp_path))
    with pytest.raises(SourceError, match="grid: expected column 'z', found 'a', 'b', 'c', 'd'"):
        next(read_source(SourceSpec(grid=grid), ["z"], tmp_path))


def test_a_bad_csv_of_a_grid_stops_it(tmp_path: Path) -> None:
    (tmp_path / "langs.csv").write_text("code\nen,extra\n")
    with pytest.raises(SourceError, match=r"langs\.csv, line 2: expected 1 fields, found 2"):
        rows_of(tmp_path, ["lang"], grid={"lang": {"csv": "langs.csv", "column": "code"}})
    (tmp_path / "langs.csv").write_text("code\n")
    with pytest.raises(SourceError, match="at least one value of 'lang'"):
        rows_of(tmp_path, ["lang"], grid={"lang": {"csv": "langs.csv", "column": "code"}})


# Hostile Parquet


def run_in_small_memory(code: str, *arguments: str, megabytes: int = 4000) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, whose address space is bounded."""
    limit = megabytes << 20
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )


READ = """
import resource, sys
from pathlib import Path
from batch_assets.snapshot.source.reader import read_source
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.source import SourceSpec

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:-1]:
    for column in sys.argv[-1].split(","):
        rows = 0
        try:
            for block in read_source(SourceSpec(path=path), [column], Path(".")):
                rows += len(block.lines)
        except SourceError as error:
            print(error)
        else:
            print(rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_an_encrypted_parquet_file_is_refused(tmp_path: Path) -> None:
    encryption = pytest.importorskip("pyarrow.parquet.encryption", reason="pyarrow was built without encryption")

    class Keys(encryption.KmsClient):
        def wrap_key(self, key: bytes, master: str) -> bytes:
            return base64.b64encode(key)

        def unwrap_key(self, key: bytes, master: str) -> bytes:
            return base64.b64decode(key)

    table = pa.table({"secret": ["x"] * 10, "open": ["y"] * 10})
    files = []
    for plain_footer in (True, False):
        factory = encryption.CryptoFactory(lambda _: Keys())
        wanted = encryption.EncryptionConfiguration(
            footer_key="footer", column_keys={"column": ["secret"]}, plaintext_footer=plain_footer
        )
        properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), wanted)
        files.append(tmp_path / f"{plain_footer}.parquet")
        with pq.ParquetWriter(files[-1], table.schema, encryption_properties=properties) as writer:
            writer.write_table(table)
    done = run_in_small_memory(READ, *map(str, files), "secret,open")
    assert done.returncode == 0, done.stderr
    assert [line.count("encrypt") > 0 for line in done.stdout.splitlines()] == [True] * 4


def large_cells(file: Path, rows: int, *, write_batch_size: int) -> None:
    """Cells of 1 MB in one row group."""
    cells = [os.urandom(500_000).hex() for _ in range(4)]
    table = pa.table({"q": [f"{i} {cells[i % 4]}" for i in range(rows)]})
    pq.write_table(
        table, file, use_dictionary=False, row_group_size=rows, write_batch_size=write_batch_size, compression="none"
    )


@pytest.mark.slow
def test_large_cells_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    large_cells(tmp_path / "a.parquet", 200, write_batch_size=1)
    done = run_in_small_memory(READ, str(tmp_path / "a.parquet"), "q")
    rows, megabytes = done.stdout.split()
    assert int(rows) == 200
    assert int(megabytes) < 120


def test_a_page_that_must_be_in_memory_whole_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_parquet, "MAX_PAGE", 16 << 20)
    large_cells(tmp_path / "a.parquet", 20, write_batch_size=1024)
    with pytest.raises(SourceError, match=r"expected pages of at most 16 MiB in column 'q', found one of 19 MiB"):
        rows_of(tmp_path, ["q"], path="a.parquet")
    large_cells(tmp_path / "a.parquet", 20, write_batch_size=8)
    assert len(rows_of(tmp_path, ["q"], path="a.parquet")[0]) == 20


@pytest.mark.slow
@pytest.mark.soak("rows")
def test_a_column_of_gigabytes_is_read_or_refused_in_bounded_memory(tmp_path: Path) -> None:
    """1,500 cells of 1 MB: in small pages, as one value of all rows, and in a page of a gigabyte after small ones."""
    cells = [f"{i} {'x' * 1_000_000}" for i in range(1500)]
    options: dict[str, Any] = {"compression": "zstd", "row_group_size": 5000}
    small, shared, late = (tmp_path / f"{name}.parquet" for name in ("small", "shared", "late"))
    pq.write_table(pa.table({"q": cells}), small, use_dictionary=False, write_batch_size=16, **options)
    pq.write_table(pa.table({"q": ["x" * 1_000_000] * 1500}), shared, **options)
    pq.write_table(pa.table({"q": ["s" * 2000] * 1024 + cells}), late, use_dictionary=False, **options)
    done = run_in_small_memory(READ, *map(str, (small, shared, late)), "q")
    assert done.returncode == 0, done.stderr
    read, same, refused = done.stdout.splitlines()
    for line in (read, same):
        rows, megabytes = map(int, line.split())
        assert rows == 1500 and megabytes < 400
    assert "in column 'q', found one of 976 MiB in row group 0" in refused


def test_parquet_columns_of_one_name_are_refused_where_they_are_read(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["q", "q", "other"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert rows_of(tmp_path, ["other"], path="a.parquet")[0] == [("a.parquet", 1, "c")]
    with pytest.raises(SourceError, match="expected one column 'q', found several"):
        rows_of(tmp_path, ["q"], path="a.parquet")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "log", "kind"),
    [
        ("t/a.parquet", "t/_delta_log/00000000000000000000.json", "a Delta"),
        ("t/year=2021/a.parquet", "t/_delta_log/00000000000000000000.json", "a Delta"),
        ("t/data/a.parquet", "t/metadata/v1.metadata.json", "an Iceberg"),
    ],
)
def test_files_of_a_table_whose_log_says_which_rows_are_left_are_refused(
    tmp_path: Path, any_objects: Objects, data: str, log: str, kind: str
):
    bytes_of = io.BytesIO()
    pq.write_table(pa.table({"q": ["a"]}), bytes_of)
    any_objects.put(data, bytes_of.getvalue())
    pattern = any_objects.uri(data.replace("a.parquet", "*.parquet")).removeprefix("file://")
    assert [row[2] for row in rows_of(tmp_path, ["q"], path=pattern)[0]] == ["a"]
    any_objects.put(log, b"{}")
    with pytest.raises(SourceError, match=f"found those of {kind} table, which hold deleted rows, too"):
        rows_of(tmp_path, ["q"], path=pattern)
