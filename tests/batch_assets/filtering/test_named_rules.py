"""The named rules of a filter: what each flags, on the texts that it is for and on those that it must leave."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from support.snapshots import SourceRow, commit, write_snapshot

from batch_assets.asset_metadata.materialization import passed_metadata
from batch_assets.filtering.passed_table import FilterReport, PassedStore, filtered, is_current
from batch_assets.filtering.repeated_rows import PERMUTATIONS, band_length
from batch_assets.filtering.row_marks import mark_of
from batch_assets.gates.text_features import words_of
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import published_table
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import load_spec
from batch_assets.spec.row_rules import RowRule
from gpu_runner.rows import Task
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore
from resources.store.row_condition import BadCondition

WORDS = [f"w{number}" for number in range(5000)]


def published(
    objects: Objects, workdir: Path, texts: Sequence[Any], scores: Sequence[int] = (), task: Task = "chat"
) -> DatasetStore:
    """A table whose outputs are these texts, or vectors."""
    store = DatasetStore(objects, "sums")
    kept = [{"score": score} for score in scores or [0] * len(texts)]
    rows = [SourceRow(f"{i:06d}", f"question {i}", keep) for i, keep in enumerate(kept)]
    manifest = write_snapshot(store, rows, task=task)
    commit(store, manifest, answer=lambda row, number: texts[int(row.row_id)])
    publish(store, manifest, card=Card(), now=1.0, workdir=workdir)
    return store


def apply(store: DatasetStore, folder: Path, **written: Mapping[str, Any]) -> tuple[list[list[str]], FilterReport]:
    """The flags of every row in the order of the table."""
    rules = {name: RowRule.model_validate(rule) for name, rule in written.items()}
    table, report = filtered(store, rules, base=folder, now=2.0, workdir=folder)
    read = [pl.read_parquet(store.objects.uri(f"{table.path}/{stem}-*.parquet")) for stem in ("part", "fallen")]
    frame = pl.concat(read).sort("row_id")
    return frame["flags"].to_list(), report


def flagged(objects: Objects, folder: Path, texts: Sequence[str], **rule: Any) -> list[str]:
    """Which texts one rule flags."""
    flags, _ = apply(published(objects, folder, texts), folder, it=rule)
    return [text for text, found in zip(texts, flags, strict=True) if found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "hit", "left"),
    [
        ({"length": {"column": "output", "min": 3, "max": 5}}, ["ab", "abcdef"], ["abc", "abcde"]),
        ({"length": {"column": "output", "unit": "words", "max": 2}}, ["a b c", "你好吗"], ["a, b!", "你好"]),
        ({"ratio": {"column": "output", "over": "prompt", "max": 2}}, ["x" * 30], ["x" * 20]),
        (
            {"refusals": {"column": "output", "also": ["No comment"]}},
            ["I’m sorry, but I can’t help.", "Tut mir leid, ich kann das nicht.", "no Comment, as before"],
            ["I am happy to help.", "He said: I'm sorry, but I can't help."],
        ),
        (
            {"language": {"column": "output", "allowed": ["en"]}},
            ["Der Ausschuss trifft sich am Donnerstag wieder.", "委员会将于星期四再次开会。委员会将于星期四再次开会。"],
            ["The committee will meet again on Thursday.", "Ja."],
        ),
        (
            {"personal_data": {"column": "output"}},
            ["mail ann.b@example.org now", "call +49 30 1234567", "4111 1111 1111 1111", "DE89370400440532013000"],
            ["a@b", "10.0.0.1", "4111 1111 1111 1112", "DE89370400440532013001", "in 2024 1234567 rows"],
        ),
        ({"personal_data": {"column": "output", "kinds": ["ip_address"]}}, ["at 10.0.0.1"], ["1.2.3", "300.1.1.1"]),
        ({"duplicates": {"column": "output"}}, ["same  TEXT"], ["Same text", "another", "ﬁne"]),
    ],
)
def test_a_named_rule_flags_what_it_is_for(
    local_objects: Objects, tmp_path: Path, rule: dict[str, Any], hit: list[str], left: list[str]
) -> None:
    assert flagged(local_objects, tmp_path, [*left, *hit], **rule) == hit


def test_of_equal_texts_the_first_that_has_not_fallen_out_stays(local_objects: Objects, tmp_path: Path) -> None:
    store = published(local_objects, tmp_path, ["a", "a", "a", "b"], [1, 5, 5, 5])
    rules: dict[str, Any] = {
        "good": {"where": "score > 2", "remove": True},
        "again": {"duplicates": {"column": "output"}},
    }
    assert apply(store, tmp_path, **rules)[0] == [["good"], [], ["again"], []]
    assert apply(store, tmp_path, **dict(reversed(rules.items())))[0] == [["good"], ["again"], ["again"], []]


@pytest.mark.slow
def test_planted_near_duplicates_are_found_and_others_are_left(local_objects: Objects, tmp_path: Path) -> None:
    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=60)) for _ in range(400)]
    for number in range(100):  # one word of sixty changed: 55 of 61 runs of three words in common
        words = texts[number].split()
        words[draw.randrange(60)] = "changed"
        texts.append(" ".join(words))
    flags, report = apply(
        published(local_objects, tmp_path, texts), tmp_path, near={"near_duplicates": {"column": "output"}}
    )
    assert not any(flags[:400])
    assert sum(map(bool, flags[400:])) >= 98
    assert report.removed["near"] == 0
    assert not list(tmp_path.glob("*.bin")) and not list(tmp_path.glob("*.duckdb"))


def test_of_embeddings_that_are_near_each_other_the_first_that_has_not_fallen_out_stays(
    local_objects: Objects, tmp_path: Path
) -> None:
    vectors = [[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.0, 0.0], [1.0, 0.2]]
    store = published(local_objects, tmp_path, vectors, [1, 5, 5, 5, 5], task="embedding")
    rules: dict[str, Any] = {
        "good": {"where": "score > 2", "remove": True},
        "near": {"semantic_duplicates": {"column": "output", "threshold": 0.98}},
    }
    flags, report = apply(store, tmp_path, **rules)
    assert flags == [["good"], [], [], [], ["near"]]
    assert report.not_compared == {"near": 1}
    assert (report.passed, report.removed["near"]) == (4, 0)
    rules["near"]["remove"] = True
    assert apply(store, tmp_path, **rules)[1].passed == 3
    passed = published_table(PassedStore(store))
    assert passed is not None
    assert passed_metadata(store, passed, report)["not_compared_near"] == 1


def test_vectors_that_a_source_brought_are_compared_too(local_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(local_objects, "sums")
    rows = [SourceRow(f"{i:06d}", "q", {"v": vector}) for i, vector in enumerate([[1.0, 0.0], [2.0, 0.0], None])]
    manifest = write_snapshot(store, rows, keep_schema={"v": pa.list_(pa.float32())})
    commit(store, manifest)
    publish(store, manifest, card=Card(), now=1.0, workdir=tmp_path)
    assert apply(store, tmp_path, near={"semantic_duplicates": {"column": "v"}})[0] == [[], ["near"], []]
    with pytest.raises(BadCondition, match=r"filter\.near: expected a column of lists of numbers, found output"):
        apply(store, tmp_path, near={"semantic_duplicates": {"column": "output"}})


def test_bands_compare_nearly_all_texts_that_are_similar_enough() -> None:
    for threshold in (0.3, 0.5, 0.8, 0.95, 1.0):
        band = band_length(threshold)
        assert 1 - (1 - threshold**band) ** (PERMUTATIONS // band) >= 0.97


def test_rows_with_a_passage_of_an_evaluation_are_flagged_and_a_changed_file_makes_them_anew(
    local_objects: Objects, tmp_path: Path
) -> None:
    question = "A farmer has seventeen sheep and all but nine of them run away during the first night"
    file = tmp_path / "evaluation.jsonl"
    file.write_text(
        "".join(json.dumps({"q": text}) + "\n" for text in (question, "Name the capital city of Peru", "Why?"))
    )
    texts = [
        f"Solve this. {question.upper()}! How many are left?",
        "Please name the capital city of Peru.",
        "A farmer has seventeen goats and all but nine of them run away during the first night",
        "Why?",
    ]
    rule = {"overlap": {"column": "output", "files": "evaluation.jsonl", "text": "q"}}
    store = published(local_objects, tmp_path, texts)
    assert apply(store, tmp_path, it=rule)[0] == [["it"], ["it"], [], []]
    rules = {"it": RowRule.model_validate(rule)}
    assert is_current(store, rules, tmp_path)
    file.write_text(json.dumps({"q": "Name the capital city of Peru"}))
    assert not is_current(store, rules, tmp_path)
    assert apply(store, tmp_path, it=rule)[0] == [[], ["it"], [], []]
    file.unlink()
    with pytest.raises(BadCondition, match=r"filter\.it: .*evaluation\.jsonl"):
        apply(store, tmp_path, it=rule)


def test_passages_and_similar_texts_are_found_in_every_form_of_unicode(local_objects: Objects, tmp_path: Path) -> None:
    question = "Où était le café où François a passé l’été de mille neuf cent"
    assert unicodedata.normalize("NFD", question) != question
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"q": unicodedata.normalize("NFD", question)}))
    rule = {"overlap": {"column": "output", "files": "evaluation.jsonl", "text": "q"}}
    texts = [question, unicodedata.normalize("NFD", question), "Quelque chose de tout autre que cela"]
    store = published(local_objects, tmp_path, texts)
    assert apply(store, tmp_path, it=rule)[0] == [["it"], ["it"], []]
    assert apply(store, tmp_path, it={"near_duplicates": {"column": "output"}})[0] == [[], ["it"], []]


def test_texts_within_messages_of_an_evaluation_count_as_they_are(local_objects: Objects, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Name the capital\ncity of Peru"}, {"role": "assistant", "content": None}]
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"q": said}))
    rule = {"overlap": {"column": "output", "files": "evaluation.jsonl", "text": "q"}}
    assert flagged(local_objects, tmp_path, ["Name the capital city of Peru!", "user content"], **rule) == [
        "Name the capital city of Peru!"
    ]


def test_a_vowel_sign_does_not_end_a_word(local_objects: Objects, tmp_path: Path) -> None:
    rule = {"length": {"column": "output", "unit": "words", "min": 3, "max": 3}}
    texts = ["हिन्दी में लिखो", "كِتَابٌ جَدِيدٌ هُنا", "நான் தமிழ் பேசுகிறேன்", "e\u0301te\u0301 a b"]
    assert flagged(local_objects, tmp_path, [*texts, "two words"], **rule) == ["two words"]
    assert len(words_of("\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e04\u0e23\u0e31\u0e1a")) > 1  # a script without spaces


def test_a_refusal_that_the_engine_tells_apart_is_flagged() -> None:
    rule = RowRule.model_validate({"refusals": {"column": "output"}})
    mark = mark_of(rule, ["row_id", "output", "refusal"], Path())
    assert not callable(mark) and list(mark.columns) == ["output", "refusal"]
    rows = pl.DataFrame({"output": ["", "Yes.", ""], "refusal": ["I will not.", None, ""]})
    assert mark.flagged(rows).to_list() == [True, False, False]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"length": {"column": "output"}}, "length: expected min, max, or both"),
        ({"length": {"column": "output", "min": 3, "max": 2}}, "length.max: expected at least min (3)"),
        ({"length": {"column": "outptu", "min": 3}}, "length.column: expected a column of the table, found 'outptu'"),
        ({"length": {"column": "output", "unit": "tokens", "min": 1}}, "characters"),
        ({"duplicates": {"column": "output"}, "where": "usd > 0"}, "expected exactly one of"),
        ({"near_duplicates": {"column": "output", "threshold": 0.1}}, "threshold"),
        ({"semantic_duplicates": {"column": "output", "threshold": 1.5}}, "threshold"),
        ({"semantic_duplicates": {"column": "vector"}}, "semantic_duplicates.column: expected a column of the table"),
    ],
)
def test_a_named_rule_that_cannot_be_used_is_refused(rule: dict[str, Any], said: str) -> None:
    own = {"name": "sums", "source": {"path": "x.csv"}, "prompt": {"user": "{{ q }}"}, "model": "m"}
    with pytest.raises(SpecError) as error:
        load_spec(own | {"filter": {"it": rule}}, "defs.yaml")
    assert said in str(error.value)


def test_a_column_that_holds_no_texts_is_named(local_objects: Objects, tmp_path: Path) -> None:
    store = published(local_objects, tmp_path, ["a"])
    with pytest.raises(BadCondition, match=r"filter\.it: expected a column of texts, found tool_calls"):
        apply(store, tmp_path, it={"duplicates": {"column": "tool_calls"}})
