"""Source to snapshot: nothing dropped, nothing asked twice, nothing written when nothing changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_assets.snapshot import files as snapshot_files
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.prompts.row_keys import RowKeys
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.templates.prompt_template import Refused, Template
from gpu_runner.rows import Row, row_key
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("BATCH_ASSETS_TEST_DATA", ROOT.parent / "shared" / "data"))
GSM8K = DATA / "gsm8k" / "train.jsonl"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K is not there: set BATCH_ASSETS_TEST_DATA")


class Bench:
    """A source file, a store, and what was built from one into the other."""

    def __init__(self, folder: Path, objects: Objects) -> None:
        self.folder, self.builds = folder, 0
        self.store = DatasetStore(objects, "questions")

    def spec(self, **attributes: Any) -> GeneratedDatasetSpec:
        least = {
            "name": "questions",
            "source": {"path": "a.jsonl"},
            "prompt": {"user": "{{ q }}"},
            "model": "tiny",
        }
        return load_spec(least | attributes, "defs.yaml")

    def write(self, rows: Sequence[dict[str, Any] | str], name: str = "a.jsonl") -> None:
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def build(self, rows: Sequence[dict[str, Any] | str] | None = None, **attributes: Any) -> SnapshotManifest:
        if rows is not None:
            self.write(rows)
        self.builds += 1
        workdir = self.folder / f"work-{self.builds}"
        spec = self.spec(**attributes)
        return build_snapshot(spec, self.store, now=float(self.builds), workdir=workdir, base=self.folder)

    def rows(self, manifest: SnapshotManifest) -> list[Row]:
        return [row for _, rows in self.store.rows(manifest, self.store.entries(manifest.snapshot)) for row in rows]

    def table(self, manifest: SnapshotManifest) -> pa.Table:
        paths = [self.store.snapshot_path(manifest.snapshot, shard.path) for shard in manifest.shards]
        return pa.concat_tables([self.read(path) for path in paths])

    def read(self, path: str) -> pa.Table:
        return pq.read_table(pa.BufferReader(self.store.objects.get(path)))

    def files(self) -> dict[str, bytes]:
        return {info.path: self.store.objects.get(info.path) for info in self.store.objects.list("questions/")}


@pytest.fixture
def bench(tmp_path: Path, local_objects: Objects) -> Bench:
    return Bench(tmp_path, local_objects)


def questions(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"q": f"question {i}", **more} for i in range(count)]


# What a snapshot holds


def test_a_snapshot_holds_each_row_once_in_batches_of_the_wanted_size(tmp_path: Path, any_objects: Objects) -> None:
    bench = Bench(tmp_path, any_objects)
    manifest = bench.build(questions(601))
    assert (manifest.rows, manifest.batches, manifest.source_rows, manifest.added) == (601, 3, 601, 601)
    assert bench.store.current_snapshot() == manifest.snapshot
    assert bench.store.manifest(manifest.snapshot) == manifest
    entries = bench.store.entries(manifest.snapshot)
    assert [(entry.key, entry.rows, entry.row_group) for entry in entries] == [
        ("00000", 250, 0),
        ("00001", 250, 1),
        ("00002", 101, 2),
    ]
    assert [orjson.loads(row.prompt)[0]["content"] for row in bench.rows(manifest)] == [q["q"] for q in questions(601)]


@pytest.mark.parametrize(
    ("attributes", "prompt"),
    [
        ({"prompt": {"system": "Be {{ how }}.", "user": "{{ q }}?"}}, [("system", "Be brief."), ("user", "why?")]),
        (
            {
                "prompt": {
                    "messages": [
                        {"role": "user", "content": "hi"},
                        {"role": "assistant", "content": "{{ how }}"},
                        {"role": "user", "content": "{{ q }}"},
                    ]
                }
            },
            [("user", "hi"), ("assistant", "brief"), ("user", "why")],
        ),
        ({"task": "completion", "prompt": {"text": "Q: {{ q }}\nA:"}}, "Q: why\nA:"),
        ({"task": "embedding", "prompt": {"user": "{{ q }}"}, "sampling": {"dimensions": 8}}, "why"),
    ],
)
def test_prompts_are_the_requests_messages_or_text_and_keys_are_those_of_gpu_runner(
    bench: Bench, attributes: dict[str, Any], prompt: Any
) -> None:
    manifest = bench.build([{"q": "why", "how": "brief"}], **attributes)
    (row,) = bench.rows(manifest)
    found = orjson.loads(row.prompt)
    assert found == (prompt if isinstance(prompt, str) else [{"role": r, "content": c} for r, c in prompt])
    assert row.row_key == row_key(manifest.settings(), found)
    assert row.row_id == f"{row.row_key}#0"


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(str.strip)


@settings(max_examples=30, deadline=None)
@given(
    words=st.lists(text, min_size=1, max_size=5),
    sampling=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "seed": st.integers(0, 2**31),
            "stop": st.lists(text, min_size=1, max_size=3),
        },
    ),
    schema=st.none() | st.just({"type": "object", "properties": {"ü": {"type": "string"}, "a": {"minimum": 1.5}}}),
)
def test_row_keys_are_those_of_gpu_runner_whatever_the_request(
    words: list[str], sampling: dict[str, Any], schema: dict[str, Any] | None
) -> None:
    spec = load_spec(
        {
            "name": "x",
            "source": {"path": "a.csv"},
            "prompt": {"user": "x"},
            "model": "é/m",
            "sampling": sampling,
            "output": {"json_schema": schema},
        },
        "f",
    )
    chats = [[{"role": "user", "content": word}] for word in words]
    for asked in (words, chats):
        encoded = [orjson.dumps(prompt, option=orjson.OPT_SORT_KEYS) for prompt in asked]
        digests = RowKeys(spec.generation()).digests(encoded)
        assert [digest.hex() for digest in digests] == [row_key(spec.generation(), prompt) for prompt in asked]


def test_kept_columns_have_one_type_over_all_blocks(bench: Bench) -> None:
    rows: list[dict[str, Any]] = questions(5000)
    for i, row in enumerate(rows):
        row |= {"score": i, "tags": [], "meta": {"a": i}, "flag": None, "big": None}
    rows[4000] |= {"score": 0.5, "tags": ["x"], "meta": {"b": "y"}, "flag": True, "big": 2**60}
    rows[4500] |= {"big": 0.25}
    keep = ["score", "tags", "meta", "flag", "big"]
    table = bench.table(bench.build(rows, keep_columns=keep))
    assert [str(table.schema.field(name).type) for name in keep] == [
        "double",
        "list<element: string>",
        "struct<a: int64, b: string>",
        "bool",
        "double",
    ]
    assert table.column("score").to_pylist()[3999:4002] == [3999.0, 0.5, 4001.0]
    assert table.column("meta").to_pylist()[4000] == {"a": None, "b": "y"}


def test_types_of_a_parquet_source_are_kept(bench: Bench) -> None:
    source = pa.table(
        {
            "q": ["a", "b"],
            "n": pa.array([1, None], pa.int16()),
            "day": pa.array([1, 2], pa.date32()),
            "parts": [[{"x": 1.5}], None],
            "at": pa.array([1, None], pa.timestamp("ns", "UTC")),
        }
    )
    pq.write_table(source, bench.folder / "a.parquet")
    keep = ["n", "day", "parts", "at"]
    table = bench.table(bench.build(source={"path": "a.parquet"}, keep_columns=keep))
    assert table.select(keep).cast(source.select(keep).schema) == source.select(keep)
    assert [table.schema.field(name).type for name in ("n", "day", "at")] == [
        pa.int16(),
        pa.date32(),
        pa.timestamp("ns", "UTC"),
    ]


def test_csv_and_grid_make_snapshots_too(bench: Bench) -> None:
    (bench.folder / "a.csv").write_text("q,lang\nwhy,en\nwarum,de\n")
    manifest = bench.build(source={"path": "a.csv"}, keep_columns=["lang"])
    assert bench.table(manifest).column("lang").to_pylist() == ["en", "de"]
    grid = {"topic": ["cats", "dogs"], "n": [1, 2, 3]}
    manifest = bench.build(
        source={"grid": grid}, prompt={"user": "{{ n }} facts on {{ topic }}"}, keep_columns=["topic", "n"]
    )
    table = bench.table(manifest)
    assert (manifest.rows, manifest.source) == (6, "grid of topic × n")
    assert table.column("n").to_pylist() == [1, 2, 3, 1, 2, 3]


def test_shards_end_at_batch_borders(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_files, "SHARD_ROWS", 1000)
    manifest = bench.build(questions(2600))
    assert [(shard.path, shard.rows) for shard in manifest.shards] == [
        ("prompts-00000.parquet", 1000),
        ("prompts-00001.parquet", 1000),
        ("prompts-00002.parquet", 600),
    ]
    assert len(bench.rows(manifest)) == 2600


# where and limit


def test_where_and_limit_choose_rows_before_anything_is_counted(bench: Bench) -> None:
    rows = [{"q": f"q{i}", "n": i, "lang": "en" if i % 2 else "de"} for i in range(3000)]
    manifest = bench.build(rows, source={"path": "a.jsonl", "where": "lang = 'en' AND n > 10", "limit": 7})
    assert (manifest.source_rows, manifest.rows, manifest.rejected) == (7, 7, 0)
    assert [orjson.loads(row.prompt)[0]["content"] for row in bench.rows(manifest)] == [
        f"q{i}" for i in range(11, 24, 2)
    ]


def test_a_limit_does_not_read_on(bench: Bench) -> None:
    bench.write([{"q": "a"}, {"q": "b"}, "not json"])
    assert bench.build(source={"path": "a.jsonl", "limit": 2}).rows == 2
    with pytest.raises(SourceError, match="line 3"):
        bench.build(source={"path": "a.jsonl", "limit": 3})


def test_a_row_on_which_where_fails_is_refused_and_others_are_judged(bench: Bench) -> None:
    (bench.folder / "a.csv").write_text("q,n\na,1\nb,many\nc,3\nd,\n")
    source = {"path": "a.csv", "where": "CAST(n AS INT) > 2"}
    with pytest.raises(SourceError, match=r"a\.csv, line 3: source\.where cannot be evaluated"):
        bench.build(source=source)
    manifest = bench.build(source=source, on_bad_row="skip")
    assert (manifest.rows, manifest.rejected, manifest.source_rows) == (1, 1, 2)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("n > 2", "does not fit the columns"),
        ("n", "expected a condition .true or false., found values of type String"),
        ("nope = 1", "expected column 'nope', found 'q', 'n'"),
    ],
)
def test_a_where_that_never_fits_stops_the_snapshot(bench: Bench, where: str, message: str) -> None:
    (bench.folder / "a.csv").write_text("q,n\nCANARY,CANARY\n")
    with pytest.raises(SourceError, match=message) as caught:
        bench.build(source={"path": "a.csv", "where": where})
    assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize(
    "where", ["scroe IS NULL", "scroe > 3", "scroe LIKE 'a%'", "CAST(scroe AS INT) > 3", "scroe IS NULL AND score > 3"]
)
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_where_over_a_column_that_is_not_there_names_it_and_what_was_meant(
    bench: Bench, where: str, ending: str
) -> None:
    rows = [{"q": f"q{i}", "score": i} for i in range(8)]
    bench.write(rows)
    (bench.folder / "a.csv").write_text("q,score\n" + "".join(f"{row['q']},{row['score']}\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), bench.folder / "a.parquet")
    with pytest.raises(SourceError) as caught:
        bench.build(source={"path": f"a.{ending}", "where": where})
    for words in (f"a.{ending}: expected column 'scroe', found", "'q', 'score'", "Did you mean 'score'?"):
        assert words in str(caught.value)
    assert "CSV" not in str(caught.value)


def test_a_where_waits_for_a_key_that_comes_late(bench: Bench) -> None:
    rows: list[dict[str, Any] | str] = [{"q": f"{i} " + "x" * 80} for i in range(15_000)]
    manifest = bench.build([*rows, {"q": "a", "score": 5}], source={"path": "a.jsonl", "where": "score > 3"})
    assert (manifest.rows, manifest.rejected) == (1, 0)


def test_a_where_that_never_fits_says_so_also_where_no_column_is_text(bench: Bench) -> None:
    bench.write([{"q": 1}])
    with pytest.raises(SourceError, match=r"a\.jsonl: source\.where: .* does not fit the columns"):
        bench.build(source={"path": "a.jsonl", "where": "q <> 'x'"})


def test_a_where_that_does_not_fit_json_says_which_columns_are_text(bench: Bench) -> None:
    with pytest.raises(SourceError, match=r"a\.jsonl: source\.where: 'q > 3' does not fit .* CAST\(q AS DOUBLE\)"):
        bench.build([{"q": "a"}], source={"path": "a.jsonl", "where": "q > 3"})


# Bad rows


BAD_ROWS: list[tuple[dict[str, Any] | str, str]] = [
    ({"q": None}, "message user: column 'q' is null"),
    ({"q": ""}, "message user: column 'q' is empty"),
    ({"q": "  \n"}, "message user: column 'q' is empty"),
    ({"other": 1}, "message user: column 'q' is null"),
    ({"q": "x", "n": "text"}, "column 'n': expected a whole number as in the rows before, found text"),
    ({"q": "x", "n": [1]}, "column 'n': expected a whole number as in the rows before, found a list"),
    ({"q": "x", "n": 2**64 - 1}, "column 'n': a whole number beyond 64 bits"),
    ("{broken", "not valid JSON"),
    ("[1]", "expected a JSON object, found a list"),
    ({"q": "y" * (1 << 20)}, "the prompt has 10486"),
    ({"q": "z", "n": 3, "text": "y" * (1 << 20)}, "the kept columns have 10485"),
]


def test_bad_rows_stop_the_snapshot_and_are_all_named(bench: Bench) -> None:
    rows = [row for bad, _ in BAD_ROWS for row in ({"q": "good", "n": 1}, bad)]
    with pytest.raises(SourceError) as caught:
        bench.build(rows, keep_columns=["n", "text"])
    message = str(caught.value)
    assert message.startswith(f"{len(BAD_ROWS)} rows cannot be used:\n")
    for number, (_, reason) in enumerate(BAD_ROWS):
        assert f"a.jsonl, line {2 * number + 2}: {reason}" in message
    assert "on_bad_row: skip" in message and len(message) < 3000
    assert bench.files() == {}


def test_bad_rows_can_be_skipped_and_are_then_counted_and_listed(bench: Bench) -> None:
    rows = [row for bad, _ in BAD_ROWS for row in ({"q": "good", "n": 1}, bad)]
    manifest = bench.build(rows, keep_columns=["n", "text"], on_bad_row="skip")
    assert (manifest.rows, manifest.rejected) == (len(BAD_ROWS), len(BAD_ROWS))
    assert manifest.source_rows == manifest.rows + manifest.rejected + manifest.duplicates
    rejects = bench.read(bench.store.snapshot_path(manifest.snapshot, "rejects.parquet")).to_pylist()
    assert [reject["line"] for reject in rejects] == [2 * i + 2 for i in range(len(BAD_ROWS))]
    assert {reject["file"] for reject in rejects} == {"a.jsonl"}
    by_line = {reject["line"]: reject["reason"] for reject in rejects}
    assert all(by_line[2 * i + 2].startswith(reason) for i, (_, reason) in enumerate(BAD_ROWS))


def test_what_is_no_data_names_its_column_and_row(bench: Bench) -> None:
    pq.write_table(pa.table({"q": [b"one", b"two"]}), bench.folder / "blobs.parquet")
    with pytest.raises(SourceError) as caught:
        bench.build([], source={"path": "blobs.parquet"})
    assert "blobs.parquet, line 2: message user: column 'q': expected text" in str(caught.value)
    with pytest.raises(
        SourceError, match=r"a.jsonl, line 1: message user: template: column 'order'.items: expected a field"
    ):
        bench.build([{"order": {"a": 1}}], prompt={"user": "{{ order.items }}"})


def test_an_unknown_time_zone_is_said(bench: Bench) -> None:
    times = pa.array([1, 2], pa.timestamp("us", tz="Nowhere/City"))
    pq.write_table(pa.table({"q": ["a", "b"], "t": times}), bench.folder / "times.parquet")
    with pytest.raises(SourceError, match=r"times.parquet: expected time zones .* found 'Nowhere/City'"):
        bench.build(source={"path": "times.parquet"}, prompt={"user": "{{ q }} {{ t }}"})


def test_a_template_that_takes_too_much_of_every_row_stops_the_reading(bench: Bench) -> None:
    text = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ q }}"
    with pytest.raises(SourceError, match=r"message user: template takes more than 250,000 steps .* so did 20 rows"):
        bench.build(questions(500), prompt={"user": text}, on_bad_row="skip")


def test_twenty_bad_rows_are_listed_and_the_others_counted(bench: Bench) -> None:
    with pytest.raises(SourceError, match="3000 rows cannot be used") as caught:
        bench.build([*questions(10), *[{"q": None}] * 3000])
    assert len(caught.value.rejects) == 20
    assert "… and 2980 more" in str(caught.value)


def test_a_repeated_id_names_both_lines(bench: Bench) -> None:
    accent = "caf\u00e9"
    rows = [
        {"id": "a", "q": "1"},
        {"id": accent, "q": "2"},
        {"id": "a", "q": "3"},
        {"id": unicodedata.normalize("NFD", accent), "q": "4"},
    ]
    with pytest.raises(SourceError) as caught:
        bench.build(rows, id="id")
    assert "a.jsonl, line 3: id: the same as in a.jsonl, line 1" in str(caught.value)
    assert "a.jsonl, line 4: id: the same as in a.jsonl, line 2" in str(caught.value)
    manifest = bench.build(id="id", on_bad_row="skip")
    assert [row.row_id for row in bench.rows(manifest)] == ["a", accent]
    assert (manifest.rejected, manifest.source_rows) == (2, 4)


def test_bad_rows_and_repeated_ids_are_skipped_together(bench: Bench) -> None:
    rows = [{"id": 0, "q": "a"}, "{not json", {"id": 0, "q": "dup"}, {"id": 1, "q": "b"}]
    manifest = bench.build(rows, id="id", on_bad_row="skip")
    assert (manifest.rows, manifest.rejected, manifest.source_rows) == (2, 2, 4)
    rejects = bench.read(bench.store.snapshot_path(manifest.snapshot, "rejects.parquet")).to_pylist()
    assert [reject["line"] for reject in rejects] == [2, 3]
    assert rejects[1]["reason"] == "id: the same as in a.jsonl, line 1"
    assert bench.build(id="id", on_bad_row="skip") == manifest, "an unchanged source gives the same snapshot"


@pytest.mark.parametrize("bad", [None, "", " ", 1.5, True, [1], {"a": 1}, "x" * 1025])
def test_an_id_that_names_nothing_is_refused(bench: Bench, bad: Any) -> None:
    with pytest.raises(SourceError, match=r"a\.jsonl, line 2: id: expected"):
        bench.build([{"id": 1, "q": "a"}, {"id": bad, "q": "b"}], id="id")


def test_text_without_a_utf8_form_is_refused(bench: Bench) -> None:
    template = r"{{ q }}{{ '\ud800' if q == 'odd' else '' }}"
    with pytest.raises(SourceError, match=r"1 row cannot be used:\n  grid, line 2: the prompt holds lone surrogates"):
        bench.build(source={"grid": {"q": ["fine", "odd"]}}, prompt={"user": template})


def test_a_source_without_a_usable_row_is_refused(bench: Bench) -> None:
    for content in ("", "\n\n", "\ufeff"):
        (bench.folder / "a.jsonl").write_text(content)
        with pytest.raises(SourceError, match=r"a\.jsonl: expected at least one row, found none"):
            bench.build()
    with pytest.raises(SourceError, match=r"found none that can be used \(all 1 were rejected\)"):
        bench.build([{"q": None}], on_bad_row="skip")
    (bench.folder / "a.csv").write_text("q\n")
    with pytest.raises(SourceError, match="expected at least one row"):
        bench.build(source={"path": "a.csv"})


def test_a_column_that_is_not_there_is_named(bench: Bench) -> None:
    with pytest.raises(SourceError, match="expected columns 'context', 'question', found 'q', 'n'"):
        bench.build([{"q": "x", "n": 1}], prompt={"user": "{{ question }} {{ context }}"})
    with pytest.raises(SourceError, match=r"a\.jsonl: expected column 'answer', found it in no row"):
        bench.build([{"q": "x"}], keep_columns=["answer"])
    (bench.folder / "a.csv").write_text("q\nx\n")
    with pytest.raises(SourceError, match=r"a\.csv: expected column 'answer', found 'q'"):
        bench.build(source={"path": "a.csv"}, keep_columns=["answer"])
    assert not bench.files()


def _prompts(bench: Bench, manifest: SnapshotManifest) -> list[str]:
    return [orjson.loads(row.prompt)[0]["content"] for row in bench.rows(manifest)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my col", "a.b", "range", "my-col", "0", "loop", "it's", "größe (m²)"])
def test_a_column_of_any_name_can_be_written(bench: Bench, name: str) -> None:
    written = "{{ row[" + repr(name) + "] }}"
    rows = [{name: "x", "q": 1, "n": [1, 2]}]
    assert _prompts(bench, bench.build(rows, prompt={"user": f"{written}!"})) == ["x!"]
    longer = "{% set y = 2 %}{% if q %}" + written + "{{ row['n'][1] }}{{ q + y }}{% endif %}"
    assert _prompts(bench, bench.build(rows, prompt={"user": longer})) == ["x23"]


def test_a_row_of_the_template_itself_stays_what_it_is(bench: Bench) -> None:
    rows = [{"rows": [{"a": 1}, {"a": 2}], "row": {"b": 3}}]
    in_a_loop = "{% for row in rows %}{{ row['a'] }}{% endfor %}"
    assert _prompts(bench, bench.build(rows, prompt={"user": in_a_loop})) == ["12"]
    assert _prompts(bench, bench.build(rows, prompt={"user": "{{ row.b }}"})) == ["3"]


@pytest.mark.parametrize(
    ("prompt", "column", "said"),
    [
        (
            "{{ a.b }}",
            "a.b",
            "found it in no row, but 'a.b'. In a prompt, write {{ row['a.b'] }} for the column 'a.b'",
        ),
        ("{{ my-col }}", "my-col", "write {{ row['my-col'] }}"),
        ("{{ row['my cal'] }}", "my col", "Did you mean 'my col'?"),
    ],
)
def test_the_error_says_how_a_column_whose_name_is_no_word_is_written(
    bench: Bench, prompt: str, column: str, said: str
) -> None:
    with pytest.raises(SourceError) as caught:
        bench.build([{column: "x"}], prompt={"user": prompt})
    assert said in str(caught.value)


@pytest.mark.parametrize("prompt", ["{{ q }}", "{{ q }}{{ '!' if q }}", "{{ q | tojson }}", "{{ q | string }}"])
def test_a_value_that_is_nested_very_deeply_is_a_bad_row_with_file_and_line(bench: Bench, prompt: str) -> None:
    deep = '{"q": ' + "[" * 1000 + "]" * 1000 + "}"
    with pytest.raises(SourceError, match=r"a\.jsonl, line 2: message user: "):
        bench.build([{"q": "a"}, deep], prompt={"user": prompt})
    inner: Any = []
    for _ in range(200):
        inner = [inner]
    assert bench.build([{"q": inner}]).rows == 1


@pytest.mark.slow
def test_a_key_may_come_late_where_its_absence_is_allowed(bench: Bench) -> None:
    rows: list[dict[str, Any]] = [{"q": f"{i} " + "x" * 80} for i in range(15_000)]
    rows[-1] |= {"note": "late", "hint": "!"}
    manifest = bench.build(rows, prompt={"user": "{{ q }}{{ hint or '' }}"}, keep_columns=["note"])
    assert bench.table(manifest).column("note").to_pylist()[-2:] == [None, "late"]
    with pytest.raises(SourceError, match=r"a\.jsonl: expected column 'hint', found 'q'"):
        bench.build(prompt={"user": "{{ q }}{{ hint }}"})


# Refreshes


@pytest.mark.slow
def test_an_unchanged_source_writes_nothing(
    tmp_path: Path, any_objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, any_objects)
    rows = [{"q": f"q{i % 40}", "id": i, "n": i} for i in range(100)]
    options = {"keep_columns": ["n"], "dedupe": True, "id": "id", "on_bad_row": "skip"}
    first = bench.build([*rows, "broken"], **options)
    before = bench.files()

    def refuse(*_: object) -> None:
        raise AssertionError("written")

    for name in ("put", "upload", "create", "delete"):
        monkeypatch.setattr(any_objects, name, refuse)
    assert bench.build(**options) == first
    assert bench.files() == before
    # The rejected line stays where it is; the others may stand anywhere.
    assert bench.build([*reversed(rows), "broken"], **(options | {"dedupe": True})).unchanged == first.unchanged


@needs_gsm8k
@pytest.mark.parametrize("with_id", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_inserted_one_changed_and_one_deleted_of_7473_ask_for_two_rows(bench: Bench, with_id: bool) -> None:
    rows = [json.loads(line) | {"id": f"r{i}"} for i, line in enumerate(GSM8K.read_text().splitlines())]
    options = {"prompt": {"user": "{{ question }}"}, "keep_columns": ["answer"]} | ({"id": "id"} if with_id else {})
    first = bench.build(rows, **options)
    before = {row.row_id: row for row in bench.rows(first)}
    assert (first.rows, first.batches) == (7473, 30)
    rows[3000]["question"] += " Really?"
    del rows[5000]
    rows.insert(0, {"question": "What is 1 + 1?", "answer": "2", "id": "new"})
    second = bench.build(rows, **options)
    after = {row.row_id: row for row in bench.rows(second)}
    assert len(after) == second.rows == 7473
    assert len({row.row_key for row in after.values()} - {row.row_key for row in before.values()}) == 2
    assert all(before[row_id].batch == row.batch for row_id, row in after.items() if row_id in before)
    counts = (second.added, second.changed, second.removed, second.unchanged)
    assert counts == ((1, 1, 1, 7471) if with_id else (2, 0, 2, 7471))
    versions = {entry.key: entry.data_version for entry in bench.store.entries(first.snapshot)}
    changed = [entry.key for entry in bench.store.entries(second.snapshot) if entry.data_version != versions[entry.key]]
    assert len(changed) == 3
    assert bench.build(rows, **options) == second


@pytest.mark.slow
def test_many_refreshes_keep_every_row_in_its_batch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_files, "BUCKET_BYTES", 2000)
    rows = [{"q": f"q{i}", "n": i} for i in range(1200)]
    home: dict[str, str] = {}
    for step in range(4):
        manifest = bench.build(rows, batch_rows=50, keep_columns=["n"])
        found = {row.row_id: row.batch for row in bench.rows(manifest)}
        assert all(found[row_id] == batch for row_id, batch in home.items() if row_id in found)
        table = bench.table(manifest)
        asked = [orjson.loads(prompt)[0]["content"] for prompt in table.column("prompt").to_pylist()]
        assert asked == [f"q{n}" for n in table.column("n").to_pylist()]
        assert sorted(asked) == sorted(row["q"] for row in rows)
        home = found
        rows = [{"q": f"q{i}", "n": i} for i in range(2000 + 100 * step, 2060 + 100 * step)] + rows[::-1][5:]


def test_kept_columns_that_change_make_a_snapshot_whose_batches_are_the_same(bench: Bench) -> None:
    first = bench.build(questions(300, n=1), keep_columns=["n"])
    second = bench.build(questions(300, n=2), keep_columns=["n"])
    assert second.snapshot != first.snapshot and second.previous == first.snapshot
    assert bench.store.entries(second.snapshot) == bench.store.entries(first.snapshot)
    assert bench.table(second).column("n").to_pylist() == [2] * 300


@pytest.mark.slow
def test_another_model_asks_for_all_rows_again(bench: Bench) -> None:
    first = bench.build(questions(300))
    second = bench.build(questions(300), model="other")
    assert (second.added, second.removed, second.unchanged) == (300, 300, 0)
    assert [entry.key for entry in bench.store.entries(second.snapshot)] == ["00000", "00001"]
    back = bench.build(questions(300))
    assert back.snapshot == first.snapshot == bench.store.current_snapshot()
    assert back.previous == second.snapshot
    rows = [row | {"id": i} for i, row in enumerate(questions(300))]
    bench.build(rows, id="id")
    assert bench.build(rows, id="id", model="other").changed == 300


def test_a_row_id_column_added_later_places_all_rows_anew(bench: Bench) -> None:
    rows = [{"q": f"q{i}", "id": f"{i}"} for i in range(30)]
    bench.build(rows)
    manifest = bench.build(rows, id="id")
    assert (manifest.added, manifest.removed) == (30, 30)
    assert [row.row_id for row in bench.rows(manifest)] == [f"{i}" for i in range(30)]
    assert bench.build(rows).added == 30


def test_duplicates_are_asked_once_and_listed_with_the_row_that_is_asked(bench: Bench) -> None:
    rows = [{"q": f"q{i % 3}", "id": f"r{i}", "n": i} for i in range(9)]
    manifest = bench.build(rows, id="id", keep_columns=["n"], sampling={"temperature": 0})
    assert (manifest.rows, manifest.duplicates, manifest.source_rows) == (3, 6, 9)
    (shard,) = manifest.duplicate_shards
    duplicates = bench.read(bench.store.snapshot_path(manifest.snapshot, shard.path))
    assert duplicates.to_pylist() == [{"row_id": f"r{i}", "of_row_id": f"r{i % 3}", "n": i} for i in range(3, 9)]
    manifest = bench.build(rows, dedupe=True)
    (shard,) = manifest.duplicate_shards
    duplicates = bench.read(bench.store.snapshot_path(manifest.snapshot, shard.path))
    of_ids = {row["of_row_id"] for row in duplicates.to_pylist()}
    assert of_ids == {row.row_id for row in bench.rows(manifest)}
    assert len({row["row_id"] for row in duplicates.to_pylist()} | of_ids) == 9


@pytest.mark.slow
def test_a_crash_while_writing_leaves_the_snapshot_before_and_the_next_try_completes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench.build(questions(600))
    objects = bench.store.objects
    rows = [*questions(600), {"q": "new"}, "broken", {"q": "question 1"}]
    for failing in range(1, 6):
        calls = 0

        def crash(original: Any, *arguments: Any, failing: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise KeyboardInterrupt
            original(*arguments)

        with monkeypatch.context() as patch:
            for name in ("upload", "put"):
                original = getattr(objects, name)
                patch.setattr(objects, name, lambda *a, original=original: crash(original, *a))
            with pytest.raises(KeyboardInterrupt):
                bench.build(rows, dedupe=True, on_bad_row="skip")
        assert bench.store.current_snapshot() == first.snapshot
        assert bench.store.manifest(first.snapshot) == first
    second = bench.build(dedupe=True, on_bad_row="skip")
    assert bench.store.current_snapshot() == second.snapshot
    assert (second.rows, second.rejected, second.duplicates) == (601, 1, 1)
    assert len(bench.rows(second)) == 601


def test_more_batches_than_keys_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_files, "MAX_BATCHES", 5)
    with pytest.raises(SourceError, match=r"expected at most 5 batches .*; raise batch_rows"):
        bench.build(questions(6), batch_rows=1)


def test_prompts_do_not_reach_the_manifest(bench: Bench) -> None:
    manifest = bench.build([{"q": "CANARY", "n": "CANARY"}], keep_columns=["n"])
    assert "CANARY" not in manifest.model_dump_json()


# Templates


def render(template: str, **columns: list[Any]) -> list[Any]:
    return Template(template).render_column(columns, len(next(iter(columns.values()))))


def test_a_column_written_plainly_must_have_a_value_where_it_is_printed() -> None:
    assert render("{{ a }}", a=[None, "", " ", 0, False, "x"]) == [
        Refused("column 'a' is null"),
        Refused("column 'a' is empty"),
        Refused("column 'a' is empty"),
        "0",
        "False",
        "x",
    ]
    assert render("{% if a %}{{ a }}{% endif %}.", a=[None, "x"]) == [".", "x."]
    assert render("{{ a or '' }}.", a=[None, "x"]) == [".", "x."]


def test_null_is_never_printed() -> None:
    assert isinstance(render("{{ a.b }}", a=[{"b": None}])[0], Refused)


@pytest.mark.parametrize("template", ["{{ a.nope }}", "{{ a['nope'] }}", "{{ a.nope.deeper }}"])
def test_a_missing_part_of_a_value_is_refused(template: str) -> None:
    (refused,) = render(template, a=[{"b": 1}])
    assert isinstance(refused, Refused) and "nope" in refused.reason


@pytest.mark.parametrize(
    "template",
    [
        "{{ a.__class__.__mro__ }}",
        "{{ ''.__class__ }}{{ a.upper() }}",
        "{{ a * 10000000 }}",
        "{{ 2 ** 10000 }}{{ a.x }}",
        "{{ range(10000000) | list }}{{ a.x }}",
        "{{ a | attr('__class__') }}",
        "{{ a.format.__globals__ }}",
        "{% for i in a.append(1) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_swell(template: str) -> None:
    (refused,) = render(template, a=["text"])
    assert isinstance(refused, Refused)


def test_a_failing_row_does_not_quote_itself() -> None:
    (refused,) = render("{{ a | int(base=99) }}{{ (a | list).CANARY2() }}", a=["CANARY"])
    assert isinstance(refused, Refused) and "CANARY'" not in refused.reason


def test_tojson_keeps_text_as_it_is() -> None:
    assert render("{{ a | tojson }}", a=[{"x": "<é> & 'y'"}]) == ['{"x": "<é> & \'y\'"}']


value = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.lists(st.integers(), max_size=3)
)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.sampled_from(["{{ a }}", "{{b}}", "{{ c -}}", " text\n", "{# note #}", "%"])),
    rows=st.lists(st.tuples(value, value, value), min_size=1, max_size=4),
)
def test_the_fast_path_for_plain_templates_gives_what_jinja_gives(
    parts: list[str], rows: list[tuple[Any, Any, Any]]
) -> None:
    source = "".join(parts)
    columns = dict(zip("abc", map(list, zip(*rows, strict=True)), strict=True))
    plain = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(source)
    template = Template(source)
    for found, row in zip(template.render_column(columns, len(rows)), rows, strict=True):
        named = dict(zip("abc", row, strict=True))
        empty = [
            name
            for name in template.columns
            if named[name] is None or (isinstance(named[name], str) and not named[name].strip())
        ]
        assert isinstance(found, Refused) if empty else found == plain.render(named)


# Size


def _peak_mb(folder: Path, rows: int, ending: str) -> int:
    """Peak resident memory of a process that makes a first snapshot and a shuffled refresh, in MB."""
    script = """
import pathlib, random, sys, json
import pyarrow as pa, pyarrow.parquet as pq
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.prompts.row_keys import RowKeys
from batch_assets.spec.models import load_spec
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore
folder, rows, ending = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = DatasetStore(open_objects(str(folder / "store")), "d")
spec = load_spec({"name": "d", "model": "m", "source": {"path": "a." + ending}, "keep_columns": ["n"],
                  "prompt": {"system": "Be brief.", "user": "PlannerInput: {{ q }}"}}, "f")
order = list(range(rows))
def text(i):
    return f"{i} " + random.Random(i).randbytes(150).hex()
for step in range(2):
    if ending == "jsonl":
        with (folder / "a.jsonl").open("w") as out:
            for i in order:
                out.write(json.dumps({"q": text(i), "n": i}) + "\\n")
    else:
        schema = pa.schema([("q", pa.string()), ("n", pa.int64())])
        with pq.ParquetWriter(folder / "a.parquet", schema) as out:
            for first in range(0, rows, 10_000):
                part = order[first : first + 10_000]
                out.write_table(pa.table([list(map(text, part)), part], schema=schema))
    random.Random(1).shuffle(order)
    order = order[10:] + list(range(rows, rows + 10))
    manifest = build_snapshot(spec, store, now=1.0, workdir=folder / f"work-{step}", base=folder)
    assert manifest.rows == rows, manifest
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024)
"""
    folder.mkdir()
    command = [sys.executable, "-c", script, str(folder), str(rows), ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.soak("rows")
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_memory_does_not_follow_the_number_of_rows(tmp_path: Path, ending: str) -> None:
    small, large = _peak_mb(tmp_path / "small", 20_000, ending), _peak_mb(tmp_path / "large", 200_000, ending)
    assert large < 500
    assert large < small + 150, (small, large)


@pytest.mark.slow
def test_a_parquet_bomb_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    """A file of a few KB whose rows are a megabyte each, the first ones just small enough for a prompt."""
    shared = pa.array(["x" * 1_000_000, "x" * 1_100_000])
    huge = pa.DictionaryArray.from_arrays(pa.array([0] * 300 + [1] * 3000, pa.int32()), shared)
    pq.write_table(pa.table({"q": huge, "n": huge}), tmp_path / "a.parquet")
    script = """
import pathlib, sys
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.prompts.row_keys import RowKeys
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.models import load_spec
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore
folder = pathlib.Path(sys.argv[1])
store = DatasetStore(open_objects(str(folder / "store")), "d")
spec = load_spec({"name": "d", "model": "m", "source": {"path": "a.parquet"},
                  "keep_columns": ["n"], "prompt": {"user": "Q: {{ q }}"}}, "f")
try:
    build_snapshot(spec, store, now=1.0, workdir=folder / "work", base=folder)
except SourceError as error:
    assert "3000 rows cannot be used" in str(error)
    print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0 and int(done.stdout) < 512, (done.stdout, done.stderr)
