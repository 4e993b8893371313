"""A dataset made from a dataset: topics → questions (a row per element) → answers → judge (a row per group)."""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import orjson
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.snapshots import commit

from batch_assets.capacity_planning.preview_rows import first_rows
from batch_assets.capacity_planning.workload_estimate import work_of_source
from batch_assets.component import dataset_definitions, spec_version
from batch_assets.filtering.passed_table import filtered
from batch_assets.orchestration.source_place import at_its_place
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.snapshot import grouping, row_index
from batch_assets.snapshot.builder import build_snapshot, changed_rows
from batch_assets.snapshot.grouping import rows_of
from batch_assets.snapshot.source.derived import MAX_ELEMENTS
from batch_assets.snapshot.source.errors import SourceError, Unseen
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.spec.row_rules import RowRule
from gpu_runner.rows import Row
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

TOPICS = {
    "name": "topics",
    "source": {"path": "topics.jsonl"},
    "id": "topic",
    "prompt": {"user": "Three questions about {{ topic }}: {{ about }}"},
    "keep_columns": ["topic"],
}
QUESTIONS = {
    "name": "questions",
    "source": {"dataset": "topics", "rename": {"output": "question"}, "explode": "question"},
    "prompt": {"user": "{{ question }}"},
    "keep_columns": ["topic", "question"],
}
ANSWERS = {
    "name": "answers",
    "source": {"dataset": "questions"},
    "prompt": {"user": "Say it shorter: {{ output }}"},
    "keep_columns": ["topic"],
}
JUDGE = {
    "name": "judge",
    "source": {"dataset": "answers", "rename": {"output": "answers"}, "group_by": ["topic"]},
    "prompt": {"user": "{{ topic }}: {% for one in answers %}[{{ one }}]{% endfor %}"},
    "keep_columns": ["topic", "answers"],
}
CHAIN = (TOPICS, QUESTIONS, ANSWERS, JUDGE)


def spec(attributes: Mapping[str, Any], **more: Any) -> GeneratedDatasetSpec:
    return load_spec({"model": "m", "batch_rows": 4, **attributes, **more}, "defs.yaml")


def asked(row: Row) -> str:
    return str(orjson.loads(row.prompt)[-1]["content"])


class Chain:
    """The datasets in a store; `lists`: what the first one answers for a topic."""

    def __init__(self, folder: Path, objects: Objects, instance: dg.DagsterInstance) -> None:
        self.folder, self.objects, self.instance, self.builds = folder, objects, instance, 0
        self.lists: dict[str, list[Any]] = {}

    def topics(self, about: Mapping[str, str]) -> None:
        lines = [json.dumps({"topic": topic, "about": text}) for topic, text in about.items()]
        (self.folder / "topics.jsonl").write_text("\n".join(lines))

    def placed(self, attributes: Mapping[str, Any]) -> GeneratedDatasetSpec:
        return at_its_place(spec(attributes), self.instance, self.objects)

    def build(self, attributes: Mapping[str, Any]) -> SnapshotManifest:
        self.builds += 1
        store = DatasetStore(self.objects, attributes["name"])
        work = self.folder / f"work-{self.builds}"
        return build_snapshot(self.placed(attributes), store, now=float(self.builds), workdir=work, base=self.folder)

    def step(self, attributes: Mapping[str, Any], dead: Sequence[str] = ()) -> tuple[SnapshotManifest, int]:
        """Build, answer and publish one dataset; returns how many rows are to be asked for it."""
        store = DatasetStore(self.objects, attributes["name"])
        before = store.current_snapshot()
        manifest = self.build(attributes)
        todo = 0 if manifest.snapshot == before else manifest.rows - manifest.unchanged

        def answer(row: Row, _: int) -> str:
            text = asked(row)
            if attributes["name"] == "topics":
                return json.dumps(self.lists[text.partition(": ")[2]])
            return f"<{text}>"

        commit(store, manifest, answer=answer, dead=dead)
        publish(store, manifest, card=Card(), now=1.0, workdir=self.folder)
        return manifest, todo

    def refresh(self, *chain: Mapping[str, Any]) -> list[int]:
        return [self.step(one)[1] for one in chain or CHAIN]

    def rows(self, name: str) -> dict[str, str]:
        store = DatasetStore(self.objects, name)
        snapshot = store.current_snapshot()
        assert snapshot is not None
        manifest = store.manifest(snapshot)
        found = store.rows(manifest, store.entries(snapshot))
        return {row.row_id: asked(row) for _, rows in found for row in rows}


@pytest.fixture
def chain(tmp_path: Path, local_objects: Objects) -> Iterator[Chain]:
    with dg.DagsterInstance.ephemeral() as instance:
        made = Chain(tmp_path, local_objects, instance)
        made.topics({"sun": "a", "moon": "b", "mars": "c"})
        made.lists = {"a": ["s1", "s2"], "b": ["m1"], "c": ["r1", "r2", "r3"], "a2": ["s2", "s0", "s1"], "b2": ["m9"]}
        yield made


@pytest.mark.slow
def test_a_refresh_asks_exactly_the_rows_below_what_changed(chain: Chain) -> None:
    assert chain.refresh() == [3, 6, 6, 3]
    assert chain.rows("judge")["sun"] == "sun: [<Say it shorter: <s1>>][<Say it shorter: <s2>>]"
    assert chain.refresh() == [0, 0, 0, 0]
    # Two topics change: of one list two elements stay, of the other none.
    chain.topics({"sun": "a2", "moon": "b2", "mars": "c"})
    assert chain.refresh() == [2, 2, 2, 2]
    # A topic goes: so does all below it, and nothing is asked.
    chain.topics({"moon": "b2", "mars": "c"})
    assert chain.refresh() == [0, 0, 0, 0]
    assert set(chain.rows("judge")) == {"moon", "mars"} and len(chain.rows("questions")) == 4
    # Another prompt in the middle: all from there down.
    assert chain.refresh(TOPICS, QUESTIONS, ANSWERS | {"prompt": {"user": "Longer: {{ output }}"}}, JUDGE) == [
        0,
        0,
        4,
        2,
    ]


@pytest.mark.slow
def test_ids_say_which_row_each_one_was_made_from(chain: Chain) -> None:
    chain.refresh()
    questions, answers = chain.rows("questions"), chain.rows("answers")
    assert {row_id.partition("/")[0] for row_id in questions} == {"sun", "moon", "mars"}
    assert set(answers) == set(questions)
    assert set(chain.rows("judge")) == {"sun", "moon", "mars"}


def test_a_snapshot_names_the_version_that_it_read_also_when_nothing_changed(chain: Chain) -> None:
    chain.refresh(TOPICS)
    store = DatasetStore(chain.objects, "topics")
    first = chain.build(QUESTIONS)
    assert first.upstream_version == store.current_published() is not None
    assert first.source == f"dataset topics, version {first.upstream_version}"
    chain.topics({"mars": "c", "sun": "a", "moon": "b", "venus": "v"})
    chain.lists["v"] = []
    chain.refresh(TOPICS)
    again = chain.build(QUESTIONS)  # another version, whose new row has no question
    assert again.snapshot == first.snapshot
    assert again.upstream_version == store.current_published() != first.upstream_version
    assert DatasetStore(chain.objects, "questions").manifest(again.snapshot) == again


def test_bad_rows_of_another_version_of_the_same_table_make_no_other_snapshot(chain: Chain) -> None:
    chain.lists["b"] = [""]  # an empty text is no question
    skipping = QUESTIONS | {"on_bad_row": "skip", "source": {"dataset": "topics", "explode": "output"}}
    skipping |= {"prompt": {"user": "{{ output }}"}, "id": "output", "keep_columns": []}
    chain.refresh(TOPICS)
    first = chain.build(skipping)
    assert first.rejected == 1
    chain.topics({"sun": "a", "moon": "b", "mars": "c", "venus": "v"})
    chain.lists["v"] = []
    chain.refresh(TOPICS)
    again = chain.build(skipping)
    assert again.snapshot == first.snapshot and again.upstream_version != first.upstream_version


@pytest.mark.parametrize("part", ["", "/passed"])
def test_a_version_that_is_deleted_while_it_is_listed_is_an_error_and_no_smaller_table(chain: Chain, part: str) -> None:
    chain.refresh(TOPICS)
    rules = {"whole": RowRule(where="finish_reason = 'stop'", remove=True)}
    filtered(DatasetStore(chain.objects, "topics"), rules, base=chain.folder, now=1.0, workdir=chain.folder)
    source = {**QUESTIONS["source"], "passed": bool(part)}  # type: ignore[dict-item]
    placed = chain.placed(QUESTIONS | {"source": source})
    version = DatasetStore(chain.objects, f"topics{part}").current_published()
    chain.objects.delete([f"topics{part}/published/{version}/manifest.json"])  # the first that goes
    store = DatasetStore(chain.objects, "questions")
    said = f"version {version} of topics{part} was deleted while it was read.*run again"
    with pytest.raises(SourceError, match=said):
        build_snapshot(placed, store, now=1.0, workdir=chain.folder / "w", base=chain.folder)
    assert store.current_snapshot() is None


def test_columns_may_be_renamed_to_those_that_the_table_itself_has(chain: Chain) -> None:
    chain.refresh(TOPICS)
    source = {**QUESTIONS["source"], "rename": {"topic": "error", "output": "question"}}  # type: ignore[dict-item]
    assert chain.build(QUESTIONS | {"source": source, "keep_columns": []}).rows == 6


def test_a_field_of_an_element_that_is_called_row_id_names_no_row(chain: Chain) -> None:
    chain.lists = {text: [{"row_id": "same", "q": text}] for text in "abc"}
    chain.refresh(TOPICS)
    chain.build(QUESTIONS | {"prompt": {"user": "{{ q }}"}, "keep_columns": []})
    assert {row_id.partition("/")[0] for row_id in chain.rows("questions")} == {"sun", "moon", "mars"}


def test_rows_without_an_answer_are_read_only_where_that_is_asked_for(chain: Chain) -> None:
    chain.step(TOPICS, dead=["moon"])
    assert {row_id.partition("/")[0] for row_id in _ids(chain.step(QUESTIONS)[0], chain)} == {"sun", "mars"}
    errors = {
        "name": "errors",
        "source": {"dataset": "topics", "include_errors": True, "where": "error IS NOT NULL"},
        "prompt": {"user": "{{ topic }}: {{ error }}"},
    }
    chain.step(errors)
    assert chain.rows("errors") == {"moon": "moon: prompt_too_long"}


def _ids(manifest: SnapshotManifest, chain: Chain) -> list[str]:
    return list(chain.rows(manifest.dataset))


@pytest.mark.slow
def test_samples_of_samples_have_ids_of_their_own(chain: Chain) -> None:
    chain.refresh(TOPICS, QUESTIONS | {"samples": 2})
    assert chain.refresh(ANSWERS | {"samples": 2}) == [24]
    ids = set(chain.rows("answers"))
    assert len(ids) == 24 and {row_id[-4:] for row_id in ids if row_id.endswith("/~1")} == {"1/~1"}
    assert chain.refresh(ANSWERS | {"samples": 2}) == [0]


@pytest.mark.slow
def test_where_and_limit_count_rows_as_they_are_after_the_list_was_taken_apart(chain: Chain) -> None:
    chain.refresh(TOPICS)
    source = {**QUESTIONS["source"], "where": "question <> 's2'", "limit": 3}  # type: ignore[dict-item]
    chain.step(QUESTIONS | {"source": source})
    assert sorted(chain.rows("questions").values()) == ["m1", "r1", "s1"]
    grouped = {**JUDGE["source"], "where": "answers <> '<m1>'", "min_group": 2}  # type: ignore[dict-item]
    chain.refresh(QUESTIONS)
    chain.step(JUDGE | {"source": {**grouped, "dataset": "questions"}})
    assert set(chain.rows("judge")) == {"sun", "mars"}


@pytest.mark.slow
def test_preview_and_plan_see_the_rows_that_a_snapshot_has(chain: Chain) -> None:
    chain.refresh(TOPICS, QUESTIONS, ANSWERS)
    for attributes, count in ((QUESTIONS, 6), (JUDGE, 3)):
        placed = chain.placed(attributes)
        assert len([row for row in first_rows(placed, chain.folder, 10) if row.prompt]) == count
        assert work_of_source(placed, chain.folder).rows == count
    store = DatasetStore(chain.objects, "judge")
    chain.refresh(JUDGE)
    changed = spec(JUDGE, prompt={"user": "Other: {{ answers[0] }}"})
    changed = at_its_place(changed, chain.instance, chain.objects)
    work = chain.folder / "w"
    work.mkdir()
    counts = changed_rows(changed, store, workdir=work, base=chain.folder)
    assert counts is not None and counts.to_ask == 3


def test_what_was_never_published_or_is_damaged_is_one_sentence(chain: Chain) -> None:
    with pytest.raises(
        SourceError, match=r"expected a published table of topics, found none; `batch-assets run topics`"
    ):
        chain.build(QUESTIONS)
    chain.refresh(TOPICS)
    store = DatasetStore(chain.objects, "topics")
    part = next(info.path for info in chain.objects.list("topics/published/") if "part-" in info.path)
    chain.objects.put(part, b"short")
    assert store.current_published()
    with pytest.raises(SourceError, match=r"found part-00000.parquet gone or of another size.*verify topics"):
        chain.build(QUESTIONS)


def test_lineage_goes_from_table_to_source(tmp_path: Path) -> None:
    graph = dataset_definitions(spec(QUESTIONS), tmp_path)
    (source,) = [one for one in graph.assets or () if isinstance(one, dg.AssetSpec)]
    assert [dep.asset_key for dep in source.deps] == [dg.AssetKey(["topics", "dataset"])]


# Lists


def rows_from(folder: Path, rows: Sequence[Mapping[str, Any]], **attributes: Any) -> tuple[dict[Any, Any], list[str]]:
    """Rows by id (else by number) as {column: value}, and the reasons of those that cannot be used."""
    (folder / "q.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = {"path": "q.jsonl", "explode": "items", **attributes.pop("source", {})}
    columns = attributes.pop("columns", ["q"])
    made = spec({"name": "d", "prompt": {"user": "{{ q }}"}, "source": source, **attributes})
    found: dict[Any, Any] = {}
    reasons: list[str] = []
    wanted = list(dict.fromkeys([*columns, *([made.id_column] if made.id_column else [])]))
    for block in rows_of(made, wanted, folder, Unseen()):
        reasons += [reject.reason for reject in block.rejects]
        for place in range(len(block.lines)):
            key = block.ids[place] if block.ids is not None else len(found)
            assert key not in found
            found[key] = {name: block.columns[name][place] for name in wanted}
    return found, reasons


@pytest.mark.parametrize(
    ("cell", "source", "values"),
    [
        ('["a", "b"]', {}, ["a", "b"]),
        (["a", 2, None], {}, ["a", 2, None]),
        ([{"q": "a", "x": 1}, {"x": 2}], {"name": "q"}, ["a", None]),
        ('{"questions": ["a"]}', {"explode": "items.questions"}, ["a"]),
        ({"deep": '{"questions": ["a", "b"]}'}, {"explode": "items.deep.questions"}, ["a", "b"]),
        ([], {}, []),
        ([["a"], []], {}, [["a"], []]),
    ],
)
def test_a_list_is_a_row_per_element(tmp_path: Path, cell: Any, source: dict[str, str], values: list[Any]) -> None:
    source = dict(source)
    leaf = source.pop("name", source.get("explode", "items").rpartition(".")[2])
    found, reasons = rows_from(tmp_path, [{"items": cell, "q": None}], columns=[leaf], source=source)
    assert [row[leaf] for row in found.values()] == values and not reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (None, "expected a list, found null"),
        ("no json", "expected a JSON list, found text that is no JSON"),
        ("3", "expected a list, found a number"),
        ('{"questions": [1]}', "expected a list, found an object; name its list with a dot: explode: COLUMN.questions"),
        ("[" * 10_000, "expected a JSON list, found text that is no JSON"),
        ("[" * 10_000 + "]" * 10_000, "expected a JSON list, found text that is no JSON"),
        (list(range(MAX_ELEMENTS + 1)), "expected at most 100,000 elements, found 100,001"),
        ('"' + "x" * (16 << 20) + '"', "expected at most 16 MiB of JSON"),
    ],
)
def test_a_cell_that_is_no_list_is_a_reject_that_says_what_it_is(tmp_path: Path, cell: Any, reason: str) -> None:
    good = {"items": ["fine"], "q": "x"}
    # A text of 16 MiB does not fit a line of JSONL: it comes in Parquet.
    if isinstance(cell, str) and len(cell) > 1 << 20:
        pq.write_table(pa.table({"items": [cell, '["fine"]'], "q": ["a", "b"]}), tmp_path / "q.parquet")
        made = spec({"name": "d", "prompt": {"user": "{{ q }}"}, "source": {"path": "q.parquet", "explode": "items"}})
        blocks = list(rows_of(made, ["q"], tmp_path, Unseen()))
        found, reasons = (
            [q for block in blocks for q in block.columns["q"]],
            [reject.reason for block in blocks for reject in block.rejects],
        )
        assert found == ["b"]
    else:
        rows, reasons = rows_from(tmp_path, [{"items": cell, "q": "y"}, good])
        assert [row["q"] for row in rows.values()] == ["x"]
    assert len(reasons) == 1 and reasons[0].startswith("source.explode: ") and reason in reasons[0]


@pytest.mark.parametrize("cell", ["[[%s], 1]" % ("9" * 30), "[%s, 1]" % ("[" * 300 + "]" * 300)])
def test_an_element_that_json_can_hold_has_an_id_of_its_own(tmp_path: Path, cell: str) -> None:
    found, reasons = rows_from(tmp_path, [{"items": cell, "q": "y", "id": "p"}], id="id", columns=["items"])
    assert [row["items"] for row in found.values()] == json.loads(cell) and not reasons
    assert len({row_id.partition("/")[2] for row_id in found}) == 2


@pytest.mark.parametrize("parent", [True, 1.5, ["a"], " ", None])
def test_what_can_be_no_id_is_none_beside_explode_either(tmp_path: Path, parent: Any) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps({"items": ["a"], "id": parent}) + '\n{"items": ["b"], "id": "p"}')
    source = {"path": "q.jsonl", "explode": "items"}
    made = {"name": "d", "prompt": {"user": "{{ items }}"}, "source": source, "id": "id", "on_bad_row": "skip"}
    manifest = chain_snapshot(spec(made), tmp_path)
    assert (manifest.rows, manifest.rejected) == (1, 1)


def test_a_field_of_an_element_goes_before_a_column_of_its_row_and_a_column_that_is_nowhere_is_an_error(
    tmp_path: Path,
) -> None:
    rows = [{"items": [{"q": "inner"}, {"other": 1}], "q": "outer"}]
    found, _ = rows_from(tmp_path, rows)
    assert [row["q"] for row in found.values()] == ["inner", "outer"]
    made = spec({"name": "d", "prompt": {"user": "{{ quest }}"}, "source": {"path": "q.jsonl", "explode": "items"}})
    with pytest.raises(SourceError, match=r"expected column 'quest', found it in no row, but 'items', 'q', 'other'"):
        first = chain_snapshot(made, tmp_path)
        assert first
    lost = spec({"name": "d", "prompt": {"user": "{{ q }}"}, "source": {"path": "q.jsonl", "explode": "lists"}})
    with pytest.raises(SourceError, match="lists"):
        chain_snapshot(lost, tmp_path)


def chain_snapshot(made: GeneratedDatasetSpec, folder: Path) -> SnapshotManifest:
    from resources.objects.opening import open_objects

    store = DatasetStore(open_objects(str(folder / "store")), made.name)
    return build_snapshot(made, store, now=1.0, workdir=folder / "w", base=folder)


def test_values_of_parquet_that_json_does_not_know_are_texts_in_rows_made_of_lists(tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 2)
    pq.write_table(pa.table({"items": [["a", "b"]], "day": [day], "n": [3]}), tmp_path / "q.parquet")
    source = {"path": "q.parquet", "explode": "items"}
    made = spec(
        {
            "name": "d",
            "prompt": {"user": "{{ items }} {{ day }} {{ n }}"},
            "source": source,
            "keep_columns": ["day", "n"],
        }
    )
    manifest = chain_snapshot(made, tmp_path)
    assert manifest.rows == 2


edits = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["add", "drop", "move"]), st.sampled_from("abcdef")), max_size=40
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(lists=st.lists(st.lists(st.sampled_from("abcdef"), max_size=6), min_size=1, max_size=5), edits=edits)
def test_an_element_keeps_its_id_whatever_else_changes_in_its_list(lists: list[list[str]], edits: Any) -> None:
    from tempfile import TemporaryDirectory

    def ids(now: list[list[str]]) -> dict[tuple[int, str], list[str]]:
        with TemporaryDirectory() as folder:
            rows = [{"items": items, "id": f"p{i}", "q": "x"} for i, items in enumerate(now)]
            found, _ = rows_from(Path(folder), rows, id="id", columns=["items"])
        by_content: dict[tuple[int, str], list[str]] = {}
        for row_id, row in found.items():
            assert row_id.startswith(row["id"] + "/")
            by_content.setdefault((int(row["id"][1:]), row["items"]), []).append(row_id)
        return by_content

    before = ids(lists)
    chance = random.Random(len(edits))
    for place, what, letter in edits:
        items = lists[place % len(lists)]
        if what == "add":
            items.insert(chance.randint(0, len(items)), letter)
        elif items and what == "drop":
            items.pop(chance.randrange(len(items)))
        else:
            chance.shuffle(items)
    after = ids(lists)
    for key in before.keys() & after.keys():
        few = min(len(before[key]), len(after[key]))
        assert sorted(before[key])[:few] == sorted(after[key])[:few]


# Groups


def grouped(folder: Path, rows: Sequence[Mapping[str, Any]], **source: Any) -> tuple[dict[Any, Any], list[str]]:
    return rows_from(folder, rows, source={"explode": None, "group_by": ["g"], **source}, columns=["g", "q"])


def test_a_group_is_one_row_with_lists_in_the_order_of_the_source(tmp_path: Path) -> None:
    rows = [{"g": g, "q": q} for g, q in (("b", 1), ("a", 2), ("b", 3), ("c", None), ("a", 4))]
    found, reasons = grouped(tmp_path, rows)
    assert found == {"b": {"g": "b", "q": [1, 3]}, "a": {"g": "a", "q": [2, 4]}, "c": {"g": "c", "q": [None]}}
    assert list(found) == ["b", "a", "c"] and not reasons
    both, _ = rows_from(
        tmp_path, [{"g": 1, "h": "x", "q": 1}], source={"explode": None, "group_by": ["g", "h"]}, columns=["q", "h"]
    )
    assert both == {'[1,"x"]': {"q": [1], "h": "x"}}


def test_a_row_whose_key_of_a_group_is_nan_is_left_out_as_one_without_a_key(tmp_path: Path) -> None:
    pl.DataFrame({"g": [1.5, float("nan"), None, 1.5], "q": ["a", "b", "c", "d"]}).write_parquet(tmp_path / "g.parquet")
    found, reasons = grouped(tmp_path, [], path="g.parquet")
    assert found == {"1.5": {"g": 1.5, "q": ["a", "d"]}}
    assert reasons == [f"source.group_by: expected a value of 'g', found {what}" for what in ("nan", "null")]


def test_groups_that_are_too_large_and_rows_without_a_key_are_rejects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "MAX_GROUP_ROWS", 3)
    rows = [{"g": "big", "q": 1}] * 4 + [{"g": "fits", "q": 1}] * 3 + [{"g": None, "q": 1}]
    found, reasons = grouped(tmp_path, rows)
    assert found == {"fits": {"g": "fits", "q": [1, 1, 1]}}
    assert reasons == [
        "source.group_by: expected a value of 'g', found null",
        "source.group_by: expected at most 3 rows and 16 MiB in a group, found 4 rows of 0 MiB",
    ]
    many, _ = grouped(tmp_path, [{"g": g, "q": 1} for g in (True, 1.5, [1])])
    assert list(many) == ["true", "1.5", "[1]"]
    _, long = grouped(tmp_path, [{"g": "a", "q": "x" * (1 << 20)}])
    assert "expected at most 1,048,576 bytes in a row of a group" in long[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "length", "found"), [(10_001, 1, "10,001 rows of 0 MiB"), (18, 1_000_000, "18 rows of 17 MiB")]
)
def test_the_limits_of_a_group_are_held_in_rows_and_in_bytes(
    tmp_path: Path, rows: int, length: int, found: str
) -> None:
    pq.write_table(
        pa.table({"g": ["big"] * rows + ["fits"], "q": ["x" * length] * rows + ["y"]}), tmp_path / "q.parquet"
    )
    source = {"path": "q.parquet", "group_by": ["g"]}
    made = spec({"name": "d", "prompt": {"user": "{{ q }}"}, "source": source})
    blocks = list(rows_of(made, ["q"], tmp_path, Unseen()))
    assert [one for block in blocks for one in block.ids or []] == ["fits"]
    reasons = [reject.reason for block in blocks for reject in block.rejects]
    assert reasons == [f"source.group_by: expected at most 10,000 rows and 16 MiB in a group, found {found}"]


def test_groups_are_made_of_more_rows_than_are_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_index, "INDEX_ROWS", 100)
    monkeypatch.setattr(grouping, "_FETCHED", 7)
    rows = [{"g": f"g{i % 1500}", "q": i} for i in range(4500)]
    found, _ = grouped(tmp_path, rows)
    assert found == {f"g{i}": {"g": f"g{i}", "q": [i, i + 1500, i + 3000]} for i in range(1500)}


def test_no_group_that_is_large_enough_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"source.group_by: expected groups of 2 rows or more, found none"):
        grouped(tmp_path, [{"g": "a", "q": 1}], min_group=2)
    with pytest.raises(SourceError, match=r"source.where lets none of 1 rows through"):
        grouped(tmp_path, [{"g": "a", "q": 1}], where="q > 1")


# What is refused when the file is read


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"source": {"dataset": "d"}}, "expected another dataset, found the dataset itself"),
        ({"source": {"dataset": "x", "path": "y.csv"}}, "expected exactly one of path, asset, dataset and grid"),
        ({"source": {"dataset": "x", "format": "csv"}}, "expected no format beside a dataset"),
        ({"source": {"path": "x.csv", "include_errors": True}}, "include_errors beside a dataset only"),
        ({"source": {"path": "x.csv", "min_group": 2}}, "min_group beside group_by only"),
        ({"source": {"path": "x.csv", "rename": {"a": "c", "b": "c"}}}, "each new name once"),
        ({"source": {"path": "x.csv", "explode": "a..b"}}, "a column, or names with dots"),
        ({"source": {"path": "x.csv", "group_by": ["a", "a"]}}, "each column once"),
        ({"source": {"path": "x.csv", "group_by": ["a"]}, "id": "b"}, "no id beside group_by"),
        ({"source": {"dataset": "Not A Name"}}, "source.dataset"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec({"name": "d", "prompt": {"user": "{{ q }}"}, **attributes})


def test_a_dataset_without_these_keys_has_the_code_version_that_it_had() -> None:
    made = load_spec({"name": "d", "source": {"path": "x.csv"}, "prompt": {"user": "{{ q }}"}, "model": "m"}, "f")
    assert spec_version(made) == "3eea5ac00822da1c"
