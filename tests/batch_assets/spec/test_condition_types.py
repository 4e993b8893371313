"""Conditions on rows that are made are held against the types of the real table: none that works there is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.snapshots import SourceRow, commit, write_snapshot

from batch_assets.capacity_planning.preview_rows import first_rows
from batch_assets.capacity_planning.workload_estimate import work_of_source
from batch_assets.filtering.passed_table import filtered
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.snapshot.builder import build_snapshot, changed_rows
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.condition_types import judged_types, table_types
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.spec.row_rules import RowRule
from gpu_runner.rows import Task
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore
from resources.store.row_condition import BadCondition, SqlCondition, TypeMisfit, check_types, with_floats

SCHEMA = {
    "type": "object",
    "properties": {
        "score": {"type": "integer"},
        "share": {"type": "number"},
        "good": {"type": "boolean"},
        "why": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "free": {},
        "part": {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False},
    },
    "additionalProperties": False,
}
ANSWER = '{"score": 4, "share": 0.5, "good": true, "why": "4", "tags": ["a"], "free": [1], "part": {"n": 2}}'
KEPT = {"topic": pa.string(), "level": pa.int64()}


def declared(**more: Any) -> GeneratedDatasetSpec:
    own = {"name": "sums", "source": {"path": "x.csv"}, "prompt": {"user": "{{ q }}"}, "model": "m"}
    return load_spec(own | {"keep_columns": ["topic", "level"]} | more, "defs.yaml")


def problem(**more: Any) -> str:
    with pytest.raises(SpecError) as caught:
        declared(**more)
    (found,) = caught.value.problems
    return str(found)


def real_table(folder: Path, task: Task = "chat", schema: Mapping[str, Any] | None = None) -> pa.Table:
    store = DatasetStore(open_objects(str(folder / f"store-{task}")), "sums")
    rows = [SourceRow(f"id-{number}", "q", {"topic": str(number), "level": number}) for number in range(4)]
    manifest = write_snapshot(store, rows, task=task, json_schema=schema)
    answer = None if task == "embedding" else lambda row, number: ANSWER if schema else str(number)
    commit(store, manifest, dead=["id-3"], **({} if answer is None else {"answer": answer}))
    table = publish(store, manifest, card=Card(), now=1.0, workdir=folder, output_columns=schema is not None)
    return pa.concat_tables(pq.read_table(path) for path in Path(table.glob(store.objects)).parent.glob("*.parquet"))


def known_types(task: Task, schema: Mapping[str, Any] | None, there: list[str]) -> dict[str, pa.DataType]:
    return table_types(task, conversations=False, json_schema=schema, kept=KEPT, there=there)


@pytest.mark.parametrize("task", ["chat", "completion", "embedding"])
@pytest.mark.parametrize("schema", [None, SCHEMA])
def test_types_are_those_of_the_published_table(task: Task, schema: Mapping[str, Any] | None, tmp_path: Path) -> None:
    if task == "embedding" and schema is not None:
        return
    table = real_table(tmp_path, task, schema)
    found = known_types(task, schema, table.column_names)
    assert found == {item.name: item.type for item in table.schema}


CONDITIONS = """output > 3|output = '3'|output IN (1, 2)|output IN ('1')|output BETWEEN 1 AND 3|output + 1 > 3|output
CAST(output AS DOUBLE) > 3|TRY_CAST(output AS DOUBLE) > 3|output::int > 3|length(output) > 3|length(output)
upper(output) = 'A'|output LIKE 'a%'|output ~ 'a'|prompt_tokens LIKE '1%'|prompt_tokens > '3'|prompt_tokens > 3.5
prompt_tokens|prompt_tokens = 'a'|tries > 99999999999|spot|spot = 1|spot = true|spot > 3|NOT spot|spot = 'true'
started_at > '2026-01-01'|started_at > DATE '2023-01-01'|started_at > TIMESTAMP '2023-01-01 00:00:00'|started_at > 3
EXTRACT(year FROM started_at) > 2020|seconds > '3'|seconds < 1|tool_calls IS NULL|tool_calls > 1|prompt > 3
array_length(prompt) = 1|share > score|share > 'a'|good|good AND score > 3|good OR why > 3|why = '4'|why > 3|why = score
score = '4'|score IN ('a')|score % 2 = 0|why % 2 = 0|tags > 1|array_contains(tags, 'a')|array_contains(tags, 1)
array_length(tags) > 0|tags[1] = 'a'|tags[1] > 3|free > 3|free = '[1]'|part.n > 1|part > 3|part.n = 'a'|score IS NULL
output AND spot|output OR spot|NOT output|output = spot|output = prompt_tokens|COALESCE(output, 3) > 3
CASE WHEN output > 3 THEN true ELSE false END|CASE WHEN spot THEN output ELSE 'a' END > 3|COALESCE(why, '3') = '3'
false AND output > 3|true OR output > 3|spot OR output > 3|abs(output) > 3|abs(score) > 3|round(seconds, 1) < 1
sqrt(output) > 1|substr(output, 1, 2) = 'a'|substr(prompt_tokens, 1, 2) = 'a'|strpos(output, 'a') > 0
regexp_like(prompt_tokens, 'a')|left(output, 2) = 'a'|output = NULL|NULLIF(output, 3) = 'a'|output > 3.0|output <> 3
output = true|-output > 1|concat(output, prompt_tokens) = 'a'|CAST(prompt_tokens AS VARCHAR) = '5'|output IS TRUE
output IS DISTINCT FROM 3|prompt_tokens IS DISTINCT FROM '5'|topic > 3|topic > '3'|level > 3|level > '3'|level = topic
started_at IN ('2026-01-01')|started_at > INTERVAL '1 day'|strftime(started_at, '%Y') = '2023'|date(output) > '2020'
level > 1 AND output > 3|level > 1 AND output > '3'|topic LIKE 'a' OR prompt_tokens > 'a'|length(level) > 1"""


def test_what_works_on_the_real_table_is_never_refused(tmp_path: Path) -> None:
    table = real_table(tmp_path, "chat", SCHEMA)
    frame = pl.DataFrame(pl.from_arrow(table))
    types, chance = known_types("chat", SCHEMA, table.column_names), random.Random(7)
    refused = []
    for text in CONDITIONS.replace("\n", "|").split("|"):
        for known in (types, {name: types[name] for name in types if chance.random() < 0.5}):
            try:
                check_types(text, known)
            except TypeMisfit:
                refused.append(text)
                with pytest.raises(BadCondition):
                    SqlCondition(text, table.column_names).mask(frame)
                    SqlCondition(with_floats(text), table.column_names).mask(frame)
                    pytest.fail(f"{text} works on the table")
    texts = {"output > 3", "output IN (1, 2)", "output", "level > 1 AND output > 3", "why > 3", "part.n = 'a'"}
    texts |= {"started_at > '2026-01-01'", "prompt_tokens > '3'", "share > 'a'", "length(level) > 1", "tags[1] > 3"}
    assert texts <= set(refused)


COLUMNS = ["output", "prompt_tokens", "tries", "spot", "started_at", "seconds", "score", "good", "why", "level"]
VALUES = ["3", "2.5", "'3'", "'a'", "true", "NULL", "DATE '2026-01-01'", "-1"]
_LEAVES = st.sampled_from([*COLUMNS, *COLUMNS, *VALUES])
_PARTS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "=", "<>", ">", "<=", "AND", "OR"]), inner).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        st.tuples(st.sampled_from(["NOT {}", "{} IS NULL", "length({})", "upper({})", "abs({})"]), inner).map(
            lambda parts: f"({parts[0].format(parts[1])})"
        ),
        st.tuples(st.sampled_from(["DOUBLE", "VARCHAR", "INT"]), inner).map(
            lambda parts: f"TRY_CAST({parts[1]} AS {parts[0]})"
        ),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    return real_table(tmp_path_factory.mktemp("table"), "chat", SCHEMA)


@settings(max_examples=300)
@given(text=_PARTS, known=st.sets(st.sampled_from(COLUMNS)))
def test_no_condition_at_all_that_works_is_refused(made: pa.Table, text: str, known: set[str]) -> None:
    types = known_types("chat", SCHEMA, made.column_names)
    try:
        condition = SqlCondition(text, made.column_names)
    except BadCondition:
        return
    for some in (types, {name: types[name] for name in known}):
        try:
            check_types(text, some)
        except TypeMisfit:
            with pytest.raises(BadCondition):
                condition.mask(pl.DataFrame(pl.from_arrow(made)))
                SqlCondition(with_floats(text), made.column_names).mask(pl.DataFrame(pl.from_arrow(made)))


def test_a_comparison_that_no_output_fits_is_an_error_of_the_file() -> None:
    where, accepted = "output > 3", {"where": "TRY_CAST(output AS DOUBLE) > 3"}
    said = problem(filter={"low": {"where": where, "remove": True}})
    assert said.startswith(
        "filter.low.where: expected a condition that fits the types of its columns, found 'output > 3'"
    )
    assert "TRY_CAST(output AS DOUBLE)" in said and "output.columns: true" in said
    assert problem(exports=[{"name": "x", "format": "jsonl", "where": where}]).startswith("exports.0.where: ")
    assert problem(gates={"rules": {"r": {"where": where, "max_rate": 0.5}}}).startswith("gates.rules.r.where: ")
    assert declared(filter={"low": accepted}, exports=[{"name": "x", "format": "jsonl", **accepted}])


def test_columns_of_a_schema_have_its_types() -> None:
    output = {"json_schema": SCHEMA, "columns": True}
    assert "why is text" in problem(output=output, filter={"low": {"where": "score > 3 AND why > 3"}})
    rules = {"r": {"where": "why > 3", "max_rate": 0.5}}
    assert "why is text" in problem(output={"json_schema": SCHEMA}, gates={"rules": rules})
    assert declared(output=output, filter={"low": {"where": "score > 3 AND share < 1 AND good"}})
    assert declared(filter={"far": {"where": "level > 3 AND topic > 'a' AND usd < 1"}}), "their types are not known yet"


def test_scores_of_a_judge_are_numbers() -> None:
    own = {"name": "scores", "model": "m", "keep_columns": ["topic"]}
    judge = {"dataset": "answers", "rubric": "Correct.", "votes": 3}
    with pytest.raises(SpecError, match=r"judge\.accept: .*found \"score = 'good'\".*score is a number"):
        load_spec(own | {"judge": judge | {"accept": "score = 'good'"}}, "defs.yaml")
    assert load_spec(own | {"judge": judge | {"accept": "score >= 4 AND agreement > 0.5 AND votes > 1"}}, "defs.yaml")
    spec = load_spec(own | {"judge": judge}, "defs.yaml")
    assert spec.judge is not None
    types = judged_types(spec.judge, {}, {"judged_output": pa.string(), "topic": pa.string()})
    assert (types["output"], types["topic"], types["score"]) == (pa.string(), pa.string(), pa.float64())


RULES: list[tuple[str, dict[str, Any], str]] = [
    (
        "chat",
        {"semantic_duplicates": {"column": "output"}},
        "semantic_duplicates.column: expected a column of lists of",
    ),
    (
        "embedding",
        {"duplicates": {"column": "output"}},
        "duplicates.column: expected a column of texts, found 'output'",
    ),
    ("embedding", {"ratio": {"column": "topic", "over": "output", "min": 1}}, "ratio.over: expected a column of texts"),
    ("chat", {"length": {"column": "tool_calls", "max": 9}}, "length.column: expected a column of texts"),
    ("chat", {"duplicates": {"column": "output"}}, ""),
    ("chat", {"length": {"column": "prompt", "max": 9}}, ""),
    ("chat", {"length": {"column": "prompt_tokens", "max": 9}}, ""),
    ("embedding", {"semantic_duplicates": {"column": "output"}}, ""),
]


@pytest.mark.parametrize(("task", "rule", "said"), RULES)
def test_a_rule_is_refused_where_the_real_table_would_refuse_it(
    task: Task, rule: dict[str, Any], said: str, tmp_path: Path
) -> None:
    real_table(tmp_path, task)
    store = DatasetStore(open_objects(str(tmp_path / f"store-{task}")), "sums")
    rules = {"one": RowRule.model_validate(rule)}
    prompt = {"user" if task == "chat" else "text": "{{ q }}"}
    if not said:
        assert declared(task=task, prompt=prompt, filter={"one": rule})
        filtered(store, rules, base=tmp_path, now=2.0, workdir=tmp_path)
        return
    assert problem(task=task, prompt=prompt, filter={"one": rule}).startswith(f"filter.one.{said}")
    with pytest.raises(BadCondition):
        filtered(store, rules, base=tmp_path, now=2.0, workdir=tmp_path)


def test_types_of_kept_columns_are_those_of_the_source(tmp_path: Path) -> None:
    spec = declared(source={"path": "q.jsonl"}, filter={"hard": {"where": "level > 2", "remove": True}})
    (tmp_path / "q.jsonl").write_text('{"q": "tea", "topic": "a", "level": "3"}\n')
    store, work = DatasetStore(open_objects(str(tmp_path / "store")), "sums"), tmp_path / "work"
    looks = [
        lambda: work_of_source(spec, tmp_path),
        lambda: first_rows(spec, tmp_path, 1),
        lambda: build_snapshot(spec, store, now=1.0, workdir=work, base=tmp_path),
    ]
    for look in looks:
        with pytest.raises(SourceError, match=r"^filter\.hard\.where: .*'level > 2'.*level is text"):
            look()
    assert store.current_snapshot() is None
    (tmp_path / "q.jsonl").write_text('{"q": "tea", "topic": "a", "level": 3}\n')
    build_snapshot(spec, store, now=1.0, workdir=tmp_path / "again", base=tmp_path)
    changed = declared(source={"path": "q.jsonl"}, filter={"hard": {"where": "level LIKE '3%'"}})
    for look in (
        lambda: build_snapshot(changed, store, now=1e12, workdir=tmp_path / "third", base=tmp_path),
        lambda: changed_rows(changed, store, workdir=tmp_path / "fourth", base=tmp_path),
    ):
        (tmp_path / "fourth").mkdir(exist_ok=True)
        with pytest.raises(SourceError, match=r"^filter\.hard\.where: .*level is a whole number"):
            look()


def test_fields_of_the_json_that_are_called_as_columns_of_an_outcome_have_their_own_types_in_gates() -> None:
    schema = {"type": "object", "properties": {"refusal": {"type": "boolean"}, "model": {"type": "integer"}}}
    for where in ("refusal", "model > 3"):
        declared(output={"json_schema": schema}, gates={"rules": {"r": {"where": where, "max_rate": 0.5}}})


def test_a_number_with_a_fraction_is_not_compared_with_a_text_as_a_text() -> None:
    for where in ("output > 3.5", "output BETWEEN 1.0 AND 5.0", "output IN (.5, 1.)"):
        assert "output is text; as a number it is TRY_CAST" in problem(filter={"low": {"where": where}})
    for where in ("level > 3.5", "output = '3.5'", "TRY_CAST(output AS DOUBLE) > 3.5", "output LIKE '%1.5%'"):
        declared(filter={"low": {"where": where}})
        check_types(where, {"output": pa.string(), "level": pa.int64()})
    numbers = {"whole": pa.list_(pa.int64()), "scores": pa.list_(pa.float64())}
    check_types("ARRAY_CONTAINS(whole, 1.0)", numbers)  # works on rows
    with pytest.raises(TypeMisfit):
        check_types("ARRAY_CONTAINS(scores, 1.5)", numbers)  # does not


def test_conversations_of_a_file_that_polars_wrote_are_texts() -> None:
    from batch_assets.spec.condition_types import check_texts

    message = pa.struct({"role": pa.string(), "content": pa.string()})
    for kind in (pa.list_(message), pa.large_list(message)):
        check_texts("filter.long.column", "messages", {"messages": kind})


def test_what_is_said_of_a_text_that_is_compared_with_a_number_can_be_done() -> None:
    gate = {"rules": {"r": {"where": "output > 3", "max_rate": 0.5}}}
    assert problem(gates=gate).endswith("Or declare numbers in output.json_schema.")
    assert problem(filter={"low": {"where": "output > 3"}}).endswith("(output.columns: true).")
    assert "json_schema" not in problem(
        task="embedding", filter={"low": {"where": "output > 3"}}, prompt={"text": "{{ q }}"}
    )
