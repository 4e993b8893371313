"""Keys that stand twice in the object of a row: a bad row, in JSONL and in JSON arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from batch_assets.snapshot.source import repeated_keys
from batch_assets.snapshot.source.errors import Reject
from batch_assets.snapshot.source.reader import read_source
from batch_assets.spec.source import SourceSpec

REASON = "expected each key once in its object, found 'q' twice or more"


def read(base: Path, items: Sequence[bytes], *columns: str, array: bool = False) -> tuple[list[Any], list[Reject]]:
    """(values of q, rejects) of a file of these objects."""
    name = "a.json" if array else "a.jsonl"
    (base / name).write_bytes(b"[" + b",\n".join(items) + b"]" if array else b"\n".join(items))
    blocks = list(read_source(SourceSpec(path=name), ["q", *columns], base))
    rejects = [reject for block in blocks for reject in block.rejects]
    return [value for block in blocks for value in block.columns["q"]], rejects


ROWS = [b'{"q": 1, "t": "x"}', b'{"q": 2, "q": 3}', b'{"q": 4, "t": "x"}']
NESTED = [b'{"q": 1, "o": {"a": 1}}', b'{"q" : 2, "o": {"a": 1}, "q" : 2}', b'{"q": 4, "o": [{"q": 1}, {"q": 2}]}']
TEXTS = [b'{"q": 1, "t": "\\"q\\": \\"q\\":"}', b'{"q": 2, "q": 3, "t": "\\"q\\":"}', b'{"t": "q", "q": 4}']


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize("items", [ROWS, NESTED, TEXTS])
def test_a_row_with_a_key_twice_is_a_bad_row(tmp_path: Path, items: list[bytes], array: bool) -> None:
    values, rejects = read(tmp_path, items, array=array)
    assert values == [1, 4]
    assert [(reject.line, reject.reason) for reject in rejects] == [(2, REASON)]


def test_a_row_that_lacks_the_key_does_not_hide_another_that_has_it_twice(tmp_path: Path) -> None:
    values, rejects = read(tmp_path, [b'{"t": {"a": 1}}', b'{"q": 1, "q": 2}', b'{"q": null, "t": {}}', b"no"])
    assert values == [None, None]
    assert [reject.line for reject in rejects] == [2, 4]


def test_keys_that_are_not_read_may_repeat(tmp_path: Path) -> None:
    assert read(tmp_path, [b'{"q": 1, "t": 2, "t": 3}', b'{"q": {"t": 1, "t": 2}}'])[1] == []


def test_rows_in_later_blocks_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_keys, "_PIECE", 64)  # needles that two pieces share are counted once
    monkeypatch.setattr("batch_assets.snapshot.source.text.READ_BYTES", 1000)
    items = [orjson.dumps({"q": number, "a long name": "x", "o": {"t": number}}) for number in range(500)]
    assert read(tmp_path, items, "a long name")[1] == []
    twice = b'{"a long name": 1, "q": 0, "a long name": 2}'
    _, rejects = read(tmp_path, [*items, twice, *items], "a long name")
    assert [(reject.line, "'a long name' twice" in reject.reason) for reject in rejects] == [(501, True)]


def test_looking_ends_in_a_file_whose_values_have_the_same_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    keys = repeated_keys._keys

    def count(line: bytes) -> list[str]:
        parsed.append(line)
        return keys(line)

    monkeypatch.setattr(repeated_keys, "_keys", count)
    monkeypatch.setattr("batch_assets.snapshot.source.text.READ_BYTES", 1000)
    values, rejects = read(tmp_path, [b'{"q": 1, "o": {"q": 2}}'] * 5000)
    assert len(values) == 5000 and not rejects and len(parsed) == repeated_keys.FRUITLESS


@pytest.mark.parametrize("name", ["é", 'a"b', "a\\b", "", "x"])
def test_names_of_every_kind_are_counted(name: str) -> None:
    line = b"{" + orjson.dumps(name) + b": 1, " + orjson.dumps(name) + b": 2}"
    row = orjson.loads(line)
    assert repeated_keys.RepeatedKeys([name]).look([line, None, b""], [row]) == {0: name}
    assert repeated_keys.RepeatedKeys([name]).look([orjson.dumps(row)], [row]) == {}
    assert repeated_keys.RepeatedKeys([]).look([line], [row]) == {}
