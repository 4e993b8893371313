"""Sample rows for the UI: which rows, how short, and nothing of an untrusted text read as Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.snapshots import SourceRow, commit, questions, write_snapshot

from batch_assets.asset_metadata.materialization import shown_rows, table_metadata
from batch_assets.asset_metadata.sample_rows import (
    cut,
    escaped,
    first_rows_markdown,
    read_rows,
    sample_markdown,
    sample_places,
    text_of,
)
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import PublishedTable
from gpu_runner.rows import Row
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import DatasetStore

RATES = ("dead_rate", "cut_rate")

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "![a](http://evil.example/beacon.png)",
    "[click](javascript:alert(1))",
    "https://evil.example/x www.evil.example me@evil.example",
    "| a | b |\n|---|---|\n| c | d |",
    "# heading\n- item\n```\ncode\n```",
    "**bold** _em_ ~~gone~~ &lt;b&gt; \\",
    "\u202egnp.exe\u202c \u0000 \u200b",
]


@pytest.fixture
def store(local_objects: Objects) -> DatasetStore:
    return DatasetStore(local_objects, "sums")


def published(store: DatasetStore, workdir: Path, rows: list[SourceRow], **options: Any) -> PublishedTable:
    manifest = write_snapshot(store, rows, task=options.pop("task", "chat"))
    commit(store, manifest, answer=options.pop("answer", None), dead=options.pop("dead", ()))
    return publish(store, manifest, card=Card(), now=1.0, workdir=workdir, part_rows=20, **options)


def lines_of(markdown: str) -> list[str]:
    return [line for line in markdown.splitlines() if line.startswith("| ")][2:]


def test_the_first_the_last_and_spread_rows_are_shown() -> None:
    assert sample_places(5, 10) == [0, 1, 2, 3, 4]
    assert sample_places(0, 10) == []
    assert sample_places(5000, 10) == [0, 555, 1111, 1666, 2222, 2777, 3333, 3888, 4444, 4999]


@pytest.mark.slow
def test_rows_are_read_across_files(any_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(any_objects, "sums")
    table = published(store, tmp_path, questions(95))
    assert table.parts > 3
    places = [0, 19, 20, 41, 94]
    found = list(read_rows(store, table, places, ["row_id", "output"]))
    assert [row["row_id"] for row in found] == [f"id-{place:06d}" for place in places]


def test_the_table_shows_the_prompt_beside_the_output(store: DatasetStore, tmp_path: Path) -> None:
    shown = sample_markdown(store, published(store, tmp_path, questions(95), dead=["id-000094"]))
    assert shown.startswith("10 of 95 rows")
    lines = lines_of(shown)
    assert len(lines) == 10
    assert lines[0] == r"| id\-000000 | topic 0 | 0 | **user** What is 0 plus 0? | answer 0 to id\-000000 |"
    assert lines[-1].endswith(r"*no completion\: prompt\_too\_long* |")


def test_a_table_without_prompts_and_one_of_vectors_have_their_rows_too(store: DatasetStore, tmp_path: Path) -> None:
    shown = sample_markdown(store, published(store, tmp_path, questions(3), include_prompt=False))
    assert lines_of(shown)[1] == r"| id\-000001 | topic 1 | 1 | answer 1 to id\-000001 |"
    vectors = published(store, tmp_path, questions(3), task="embedding")
    assert lines_of(sample_markdown(store, vectors))[2].endswith(r"| What is 2 plus 2? | \[2, 1, 0\.5\] |")
    assert text_of([0.123456] * 1024) == "[0.123, 0.123, 0.123, … 1,024 numbers]"


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_of_a_text_is_markdown(store: DatasetStore, tmp_path: Path, text: str) -> None:
    rows = [SourceRow("a|b", text, {"no|te": text})]
    shown = sample_markdown(store, published(store, tmp_path, rows, answer=lambda row, number: text))
    line = lines_of(shown)[0]
    assert len(shown.splitlines()) == 5
    plain = re.sub(r"\\.", "", line.replace("**user**", ""))
    assert plain.count("|") == 5  # the cells' own borders
    assert not set("<>[]*_`!~&") & set(plain)
    assert all(c.isprintable() or c == "\u2060" for c in line)
    assert not re.search(r"(?i)https?:/|www\.\w|\w@\w", re.sub(r"\\(.)", r"\1", line))


def test_its_size_is_bounded(store: DatasetStore, tmp_path: Path) -> None:
    rows = [SourceRow(f"r{i}" + "x" * 900, "*" * 500_000, {f"k{n}": "|" * 5000 for n in range(30)}) for i in range(12)]

    def answer(row: Row, number: int) -> str:
        return "[" * 100_000

    shown = sample_markdown(store, published(store, tmp_path, rows, answer=answer))
    assert len(shown) < 20_000


def test_a_long_text_is_cut_on_one_line() -> None:
    assert cut("short", 10) == "short"
    assert cut("one\ntwo\r\nthree", 20) == "one ⏎ two ⏎ three"
    assert cut("abcdefghij" * 50, 10) == "abcdefghi…"
    assert cut(" " * 500 + "x", 10) == "…"
    assert escaped("a_b") == r"a\_b"


def test_a_damaged_file_is_named(store: DatasetStore, tmp_path: Path) -> None:
    table = published(store, tmp_path, questions(3))
    store.objects.put(f"{table.path}/part-00000.parquet", b"nothing")
    with pytest.raises(CorruptObject, match=r"part-00000\.parquet: cannot be read"):
        sample_markdown(store, table)


def test_the_metadata_has_the_sample_only_when_it_may_be_shown(store: DatasetStore, tmp_path: Path) -> None:
    table = published(store, tmp_path, questions(40), answer=lambda row, number: f"zanzibar {number}")
    shown = shown_rows(store, table, samples=True)
    assert list(shown) == ["first_rows", "sample_rows", "histograms", *RATES]  # as the page shows them
    first = str(shown["first_rows"].value)
    # The page is too narrow for a second column: an output stands below its prompt.
    assert lines_of(first)[2:4] == [r"| What is 1 plus 1? |", "| → zanzibar 1 |"]
    assert len(lines_of(first)) == 2 * 3
    assert isinstance(shown["sample_rows"], dg.MarkdownMetadataValue)
    assert "zanzibar" in str(shown["sample_rows"].value)
    hidden = shown_rows(store, table, samples=False)
    assert set(hidden) == {"histograms", *RATES}
    assert "zanzibar" not in str(hidden)


def test_the_first_rows_stand_above_the_columns(store: DatasetStore, tmp_path: Path) -> None:
    """Dagster's UI shows `dagster/column_schema` in a section of its own, above all other metadata."""
    table = published(store, tmp_path, questions(3), dead=["id-000000"])
    found = list(shown_rows(store, table, samples=True) | table_metadata(store, table, None))
    assert found[0] == "first_rows" and "columns" in found and "dagster/column_schema" not in found
    assert lines_of(first_rows_markdown(store, table))[1] == r"| → no completion\: prompt\_too\_long |"


def test_long_and_hostile_first_rows_stay_on_the_page(store: DatasetStore, tmp_path: Path) -> None:
    """The UI puts Markdown of 1,000 letters or more behind a button."""
    table = published(store, tmp_path, questions(3), answer=lambda row, number: f"{HOSTILE[number]} `*_|" * 400)
    found = first_rows_markdown(store, table)
    assert len(found) < 1000 and len(lines_of(found)) == 2 * 3
    assert not re.search(r"(?<!\\)[<\[`*_]", found)  # every mark is escaped


def test_a_card_without_rows_has_none(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(5))
    commit(store, manifest, answer=lambda row, number: "zanzibar")
    card = Card(show_rows=False)
    table = publish(store, manifest, card=card, now=1.0, workdir=tmp_path)
    text = store.objects.get(f"{table.path}/README.md").decode()
    assert "First rows" not in text and "zanzibar" not in text
