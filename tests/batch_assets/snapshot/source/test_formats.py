"""JSON arrays, TSV, other delimiters and other encodings: read in pieces, and refused with what to write instead."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from batch_assets.api.batches.snapshot import numbered_lines
from batch_assets.capacity_planning.preview_rows import first_rows
from batch_assets.snapshot.source import files, json_array
from batch_assets.snapshot.source.errors import Reject, SourceError
from batch_assets.snapshot.source.json_array import JsonArray
from batch_assets.snapshot.source.reader import read_source
from batch_assets.snapshot.source.size import estimated_lines
from batch_assets.snapshot.source.text import line_blocks
from batch_assets.spec.models import load_spec
from batch_assets.spec.source import SourceSpec

CSV = 'id,q\n1,é🙂\n2,"a, b"\n'


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


class Slow(io.RawIOBase):
    """A stream that answers each read with a few bytes, as a socket may."""

    def __init__(self, data: bytes, most: int) -> None:
        self._data, self._most = io.BytesIO(data), most

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._data.read(self._most)

    def readinto(self, buffer: Any) -> int:
        found = self._data.read(self._most)
        buffer[: len(found)] = found
        return len(found)


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_a_byte_order_mark_that_comes_in_several_reads_is_none_of_the_text(most: int) -> None:
    mark = b"\xef\xbb\xbf"
    assert [line for lines in line_blocks(cast(BinaryIO, Slow(mark + b"a\nb", most))) for line in lines] == [b"a", b"b"]
    assert list(line_blocks(cast(BinaryIO, Slow(mark, most)))) == []
    array = JsonArray("a.json", cast(BinaryIO, Slow(mark + b' [{"q": 1}]', most)))
    assert [item for items in array.blocks() for item in items] == [b'{"q": 1}']
    api = io.BufferedReader(Slow(mark + b"{}\n", most), 8)
    assert list(numbered_lines(cast(BinaryIO, api), 100)) == [(1, b"{}\n")]


# JSON arrays

ODD = [
    "[",
    "]}",
    "a, b",
    'quote " here',
    "back\\slash\\",
    "\\",
    "é🙂",
    {"deep": [{"q": ["]", "{"]}]},
    [],
    None,
    2**70,
    "",
]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_read_item_by_item(tmp_path: Path, indent: int | None) -> None:
    data = json.dumps([{"q": value} for value in ODD], ensure_ascii=False, indent=indent).encode()
    assert rows_of(tmp_path, "a.json", b"\xef\xbb\xbf \n" + data + b"\n") == (list(enumerate(ODD, 1)), [])


def test_items_do_not_depend_on_where_the_pieces_of_the_file_end(monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps([{"q": value} for value in ODD]).encode()
    for size in (*range(1, 20), 1000):
        monkeypatch.setattr(json_array, "READ_BYTES", size)
        items = [item for block in JsonArray("a.json", io.BytesIO(data)).blocks() for item in block]
        assert [json.loads(item or b"") for item in items] == [{"q": value} for value in ODD], size


def test_items_that_are_no_objects_are_refused_by_their_place(tmp_path: Path) -> None:
    rows, rejects = rows_of(tmp_path, "a.json", b'[{"q": 1}, "x", [1], {"q": 2,}, {"q": NaN}, , {"q": 3}]')
    assert rows == [(1, 1), (7, 3)]
    assert [(reject.line, reject.reason.partition(":")[0]) for reject in rejects] == [
        (2, "expected a JSON object, found text"),
        (3, "expected a JSON object, found a list"),
        (4, "not valid JSON"),
        (5, "not valid JSON"),
        (6, "expected a JSON object, found nothing"),
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"q": 1}\n{"q": 2}\n', "expected a JSON array of objects, [{…}, {…}], found an object"),
        (b"  \n ", "found nothing; for one object per line write source.format: jsonl"),
        (b"q\n1\n", "found other text"),
        (b'[{"q": 1}, {"q": 2}', "expected the array to be closed with ], found the end of the file within item 2"),
        (b'[{"q": 1}, {"q": "2}]', "found the end of the file within item 2"),
        (b'[{"q": 1}, {"q": 2}}, {"q": 3}]', "expected brackets that match, found one } too many in item 2"),
        (b'[{"q": 1}]\n[{"q": 2}]', "expected the end of the file after its array, found more text"),
    ],
)
def test_a_file_that_is_no_single_array_is_refused_whole(tmp_path: Path, data: bytes, said: str) -> None:
    message = refusal(tmp_path, "a.json", data)
    assert message.startswith("a.json: ") and said in message


@pytest.mark.parametrize(
    "items",
    [
        b'{"q": "x}, {"q": "y"}, {"q": z"}',
        b'{"q": "5" tall", "b": 1}, {"q": "ok", "b": 2}, {"q": "6" tall", "b": 3}',
    ],
)
def test_an_item_whose_quotes_swallow_others_stops_the_source(tmp_path: Path, items: bytes) -> None:
    message = refusal(tmp_path, "a.json", b'[{"q": 1}, ' + items + b', {"q": 4}]')
    assert message.startswith("a.json, line 2: expected the quotes within this item to be escaped")


def test_a_bad_item_that_holds_a_list_of_objects_is_one_bad_row(tmp_path: Path) -> None:
    rows, rejects = rows_of(tmp_path, "a.json", b'[{"q": [{"a": "x"}, {"a": NaN}, {"b": "{}"}]}, {"q": 2}]')
    assert rows == [(2, 2)] and [reject.line for reject in rejects] == [1]


def test_an_array_without_items_has_no_rows_and_deep_items_are_bad_rows(tmp_path: Path) -> None:
    assert rows_of(tmp_path, "a.json", b" [ ] ") == ([], [])
    rows, rejects = rows_of(tmp_path, "a.json", b'[{"q": ' + b"[" * 5000 + b"]" * 5000 + b'}, {"q": 1}]')
    assert rows == [(2, 1)]
    assert [reject.line for reject in rejects] == [1]


def test_an_array_is_read_in_the_memory_of_a_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_array, "READ_BYTES", 1 << 14)
    monkeypatch.setattr(json_array, "MAX_ITEM", 1 << 15)

    class Endless(io.RawIOBase):
        """4 MiB of small items, then one item of 4 MiB."""

        pieces = iter(
            [b"[", *[b'{"q": "' + b"x" * 1000 + b'"},'] * 4000, b'{"q": "', *[b"y" * (1 << 14)] * 256, b'"}]']
        )

        def read(self, size: int = -1) -> bytes:
            return next(self.pieces, b"")

    tracemalloc.start()
    try:
        found = [len(item or b"") for block in JsonArray("a.json", Endless()).blocks() for item in block]  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) == 4001 and found[-1] == 0
    assert peak < 1 << 20


# Delimiters


def test_tsv_and_other_delimiters_are_read(tmp_path: Path) -> None:
    expected = ([(2, "é🙂"), (3, "a, b")], [])
    tabs = 'id\tq\n1\té🙂\n2\t"a, b"\n'.encode()
    assert rows_of(tmp_path, "a.tsv", tabs) == expected
    assert rows_of(tmp_path, "a.csv", tabs, delimiter="\t") == expected
    assert rows_of(tmp_path, "a.txt", tabs, format="tsv") == expected
    assert rows_of(tmp_path, "b.csv", 'id;q\n1;é🙂\n2;"a, b"\n'.encode(), delimiter=";") == expected


@pytest.mark.parametrize(
    ("name", "header", "delimiter", "found"),
    [
        ("a.csv", "id;q, or so", None, '";"'),
        ("a.csv", "id\tq", None, '"\\t"'),
        ("a.csv", "id,q", ";", '","'),
        ("a.tsv", "id|q", None, '"|"'),
    ],
)
def test_a_header_with_another_delimiter_names_it(
    tmp_path: Path, name: str, header: str, delimiter: str | None, found: str
) -> None:
    header = header.replace(", or so", ";x")
    message = refusal(tmp_path, name, f"{header}\n1\n".encode(), delimiter=delimiter)
    assert message.startswith(f"{name}, line 1: expected columns with ") and "found one column 'id" in message
    assert message.endswith(f"that holds {found}; write delimiter: {found} beside its path")


def test_a_file_of_one_column_needs_no_delimiter(tmp_path: Path) -> None:
    assert rows_of(tmp_path, "a.csv", b"q\na;b\n") == ([(2, "a;b")], [])
    assert "expected column 'q', found 'question'" in refusal(tmp_path, "a.csv", b"question\nx\n")


def test_options_of_other_files_are_refused(tmp_path: Path) -> None:
    assert "expected source.delimiter beside CSV or TSV files, found jsonl" in refusal(
        tmp_path, "a.jsonl", b"{}", delimiter=";"
    )
    assert "expected source.encoding beside files of text" in refusal(tmp_path, "a.parquet", b"PAR1", encoding="utf-16")


def test_a_list_of_a_grid_may_be_tsv_or_have_a_delimiter(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("code\tq\nen\tEnglish\n")
    (tmp_path / "b.csv").write_bytes("code;q\nen;Deutsch\n".encode("utf-16"))
    named: dict[str, Any] = {"csv": "b.csv", "column": "q", "delimiter": ";", "encoding": "utf-16"}
    source = SourceSpec(grid={"q": {"csv": "a.tsv", "column": "q"}, "p": named})  # type: ignore[dict-item]
    (block,) = read_source(source, ["q", "p"], tmp_path)
    assert block.columns == {"q": ["English"], "p": ["Deutsch"]}


# Encodings


@pytest.mark.parametrize("named", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_read_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    for size in (1 << 20, 3, 5):
        monkeypatch.setattr("batch_assets.snapshot.source.text.READ_BYTES", size)
        assert rows_of(tmp_path, "a.csv", CSV.encode(named), encoding=named)[0] == [(2, "é🙂"), (3, "a, b")]
    data = json.dumps([{"q": "é🙂"}], ensure_ascii=False).encode(named)
    assert rows_of(tmp_path, "a.json", data, encoding=named)[0] == [(1, "é🙂")]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    for named in ("utf-16-le", "utf-16-be"):
        data = ("\ufeffq\n" + "x\n").encode(named)
        assert rows_of(tmp_path, "a.csv", data, encoding="utf-16")[0] == [(2, "x")]
        assert rows_of(tmp_path, "a.csv", data, encoding=named)[0] == [(2, "x")]


@pytest.mark.parametrize(
    ("data", "named", "said"),
    [
        (CSV.encode("utf-16"), None, "expected text in UTF-8, found UTF-16 (its first bytes are ff fe)"),
        (CSV.encode("utf-16-be"), None, "write source.encoding: utf-16-be"),
        (CSV.encode("utf-16-le"), "utf-8", "write source.encoding: utf-16-le"),
        (CSV.encode(), "utf-16", "expected UTF-16 with a byte order mark at its beginning"),
        (CSV.encode("utf-16-le")[:-1], "utf-16-le", "found bytes that are none at byte 39"),
        (b"q\n\x81\n", "windows-1252", "expected text in windows-1252, as source.encoding says, found bytes"),
    ],
)
def test_a_wrong_encoding_is_refused_with_what_to_write(
    tmp_path: Path, data: bytes, named: str | None, said: str
) -> None:
    for name in ("a.csv", "a.jsonl"):
        message = refusal(tmp_path, name, data, encoding=named)
        assert message.startswith(f"{name}: ") and said in message


def test_windows_1252_is_read_by_its_name(tmp_path: Path) -> None:
    assert rows_of(tmp_path, "a.csv", "q\n€ é\n".encode("windows-1252"), encoding="windows-1252")[0] == [(2, "€ é")]


def test_a_byte_that_is_wrong_is_named_by_its_place_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batch_assets.snapshot.source.text.READ_BYTES", 7)
    data = ("q\n" + "x\n" * 50).encode("utf-16-le") + b"\x00\xdc" + "\n".encode("utf-16-le")
    assert f"at byte {len(data) - 3}" in refusal(tmp_path, "a.csv", data, encoding="utf-16-le")


# Where they are read for something else


def test_the_lines_of_a_large_file_are_estimated_in_each_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batch_assets.snapshot.source.size.SAMPLE_BYTES", 1 << 12)
    records = [{"q": f"{i:04} ਊ"} for i in range(2000)]
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1, ensure_ascii=False))
    (tmp_path / "a.csv").write_bytes(("q\n" + "".join(f"{one['q']}\n" for one in records)).encode("utf-16"))
    assert estimated_lines(SourceSpec(path="a.json"), tmp_path) == pytest.approx(2000, rel=0.05)
    assert estimated_lines(SourceSpec(path="a.csv", encoding="utf-16"), tmp_path) == pytest.approx(2001, rel=0.05)


def test_preview_shows_rows_of_an_array_and_the_refusal_of_a_delimiter(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"q": "one"}, 2, {"q": "three"}]')
    (tmp_path / "a.csv").write_text("id;q\n1;x\n")
    attributes: dict[str, Any] = {
        "name": "a",
        "source": {"path": "a.json"},
        "prompt": {"user": "{{ q }}"},
        "model": "m",
    }
    shown = first_rows(load_spec(attributes, tmp_path / "defs.yaml"), tmp_path, 5)
    assert [(row.line, row.refused) for row in shown] == [
        (1, ""),
        (2, "expected a JSON object, found a number"),
        (3, ""),
    ]
    spec = load_spec(attributes | {"source": {"path": "a.csv"}}, tmp_path / "defs.yaml")
    with pytest.raises(SourceError, match='write delimiter: ";"'):
        first_rows(spec, tmp_path, 5)


def test_the_first_bytes_may_come_one_at_a_time() -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(1)

    stream = files.in_utf8(Slow("é\n".encode("utf-16")), "utf-16", "a.csv")
    assert b"".join(iter(lambda: stream.read(10), b"")).decode() == "\ufeffé\n"
