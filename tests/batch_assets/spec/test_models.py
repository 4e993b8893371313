"""What users write in attributes: of a defs.yaml, and what they are told when it is wrong."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from batch_assets.component import dataset_definitions, spec_version
from batch_assets.spec.cron import cron_problem
from batch_assets.spec.deadline import parse_deadline
from batch_assets.spec.errors import model_at
from batch_assets.spec.models import OWN_COLUMNS, GeneratedDatasetSpec, SpecError, load_spec
from gpu_runner.rows import Generation

FILE = "defs/questions/defs.yaml"
LEAST: dict[str, Any] = {
    "name": "questions",
    "source": {"path": "questions.jsonl"},
    "prompt": {"user": "{{ question }}"},
    "model": "Qwen/Qwen3-8B",
}


def spec(**attributes: Any) -> GeneratedDatasetSpec:
    return load_spec({**copy.deepcopy(LEAST), **attributes}, FILE)


def problem(**attributes: Any) -> str:
    """The message for attributes that have exactly one problem."""
    with pytest.raises(SpecError) as caught:
        spec(**attributes)
    assert len(caught.value.problems) == 1, str(caught.value)
    assert FILE in str(caught.value)
    return str(caught.value.problems[0])


def test_the_least_that_makes_a_dataset_has_defaults_for_all_else() -> None:
    least = spec()
    assert (least.task, least.batch_rows, least.batches_per_run, least.on_bad_row) == ("chat", 250, 100, "fail")
    assert least.generation() == Generation("chat", "Qwen/Qwen3-8B", {"max_tokens": 1024}, None, 1)


def test_generation_holds_what_was_set_and_nothing_else() -> None:
    sampling = {
        "temperature": 0,
        "seed": 7,
        "chat_template_kwargs": {"enable_thinking": False},
        "extra": {"priority": 3},
    }
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    generation = spec(sampling=sampling, output={"json_schema": schema, "repair_tries": 2}).generation()
    expected = {"temperature": 0, "seed": 7, "chat_template_kwargs": {"enable_thinking": False}, "priority": 3}
    assert generation.sampling == {**expected, "max_tokens": 1024}
    assert (generation.json_schema, generation.repair_tries) == (schema, 2)


def test_an_embedding_sends_no_max_tokens() -> None:
    embedding = spec(task="embedding", prompt={"text": "{{ question }}"}, sampling={"dimensions": 64})
    assert embedding.generation().sampling == {"dimensions": 64}


@pytest.mark.parametrize(
    ("sampling", "sent"),
    [
        ({"extra": {"max_completion_tokens": 50}}, {"max_completion_tokens": 50}),
        ({"max_tokens": None, "extra": {"max_completion_tokens": 50}}, {"max_completion_tokens": 50}),
        ({"max_tokens": 50}, {"max_tokens": 50}),
        ({"max_tokens": None}, {}),
        ({"extra": {"n_predict": 50}}, {"n_predict": 50}),
        ({"extra": {"max_completion_tokens": None}}, {"max_completion_tokens": None}),
        (
            {"min_tokens": 2000, "extra": {"max_completion_tokens": 3000}},
            {"min_tokens": 2000, "max_completion_tokens": 3000},
        ),
        ({"max_tokens": None, "min_tokens": 2000}, {"min_tokens": 2000}),
    ],
)
def test_a_request_limits_its_answer_by_the_field_that_the_user_wrote(
    sampling: dict[str, Any], sent: dict[str, Any]
) -> None:
    assert spec(sampling=sampling).generation().sampling == sent
    assert spec_version(spec(sampling=sampling)) != spec_version(spec()), "another request is to show as stale"


TEXT = {"text": "{{ question }}"}


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (
            {"sampling": {"max_tokens": 5, "extra": {"max_completion_tokens": 5}}},
            "sampling.extra.max_completion_tokens: expected one of max_tokens and max_completion_tokens, found both. ",
        ),
        ({"sampling": {"extra": {"max_completion_tokens": 5, "n_predict": 5}}}, "max_completion_tokens and n_predict"),
        ({"sampling": {"extra": {"max_completion_tokens": True}}}, "expected a whole number from 1 to 1,048,576"),
        ({"sampling": {"extra": {"max_completion_tokens": 0}}}, "expected a whole number from 1 to 1,048,576"),
        ({"sampling": {"min_tokens": 9, "extra": {"max_completion_tokens": 8}}}, "expected at most max_tokens (8)"),
        ({"sampling": {"min_tokens": 9, "extra": {"min_new_tokens": 9}}}, "one of min_tokens and min_new_tokens"),
        ({"sampling": {"repetition_penalty": 1.1, "extra": {"repeat_penalty": 1.2}}}, "and repeat_penalty"),
        ({"sampling": {"seed": 1, "extra": {"random_seed": 2}}}, "one of seed and random_seed"),
        ({"sampling": {"stop": ["."], "extra": {"stop_sequences": ["!"]}}}, "one of stop and stop_sequences"),
        (
            {
                "task": "embedding",
                "prompt": TEXT,
                "sampling": {"dimensions": 8, "extra": {"output_dimension": 9}},
            },
            "one of dimensions and output_dimension",
        ),
        (
            {"task": "embedding", "prompt": TEXT, "sampling": {"extra": {"max_completion_tokens": 9}}},
            "no max_completion_tokens for task embedding",
        ),
        (
            {"task": "completion", "prompt": TEXT, "sampling": {"extra": {"max_completion_tokens": 9}}},
            "expected max_tokens for task completion",
        ),
        (
            {"output": {"json_schema": {"type": "object"}}, "sampling": {"extra": {"guided_regex": "a+"}}},
            "no guided_regex beside output.json_schema",
        ),
    ],
)
def test_what_extra_says_a_second_time_is_refused(attributes: dict[str, Any], said: str) -> None:
    assert said in problem(**attributes)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, False),
        ({"sampling": {"temperature": 0}}, True),
        ({"sampling": {"temperature": 0.7}}, False),
        ({"sampling": {"temperature": 0}, "dedupe": False}, False),
        ({"dedupe": True}, True),
    ],
)
def test_dedupe_is_on_by_default_exactly_when_the_temperature_is_0(attributes: dict[str, Any], expected: bool) -> None:
    assert spec(**attributes).dedupe_effective is expected


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (
            {"filter": {"a": {"language": {"column": "output", "allowed": ["english"]}}}},
            "filter.a.language.allowed.0: expected two small letters, a language by ISO 639-1 (en), found 'english'",
        ),
        (
            {"gates": {"language": {"allowed": ["english"]}}},
            "gates.language.allowed.0: expected two or three small letters, a language by ISO 639 (en), found",
        ),
        (
            {"filter": {"a": {"where": "tries < 2", "remove": True}}, "want": {"rows": 5, "per": "topic"}},
            "want.per: expected one of keep_columns, found 'topic'. There are none here.",
        ),
    ],
)
def test_an_error_is_said_in_words(attributes: dict[str, Any], said: str) -> None:
    message = problem(**attributes)
    assert said in message and "pattern" not in message and "Known here" not in message


@pytest.mark.parametrize(
    ("attributes", "key", "words"),
    [
        ({"taks": "chat"}, "taks", "Did you mean 'task'?"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature", "Did you mean 'temperature'?"),
        (
            {"source": {"path": "a.csv", "zzz": 1}},
            "source.zzz",
            "Known here: asset, dataset, delimiter, encoding, explode, format, grid, group_by",
        ),
        ({"checks": {"max_ded_rate": 1}}, "checks.max_ded_rate", "Did you mean 'max_dead_rate'?"),
        ({"output": {"schema": {}}}, "output.schema", "Did you mean 'json_schema'?"),
        (
            {"prompt": {"messages": [{"role": "user", "content": "x", "nam": "y"}]}},
            "prompt.messages.0.nam",
            "Known here: content, role",
        ),
        ({"source": {"grid": {"a": {"csv": "x", "column": "y", "colum": 1}}}}, "source.grid.a.csv.colum", "'column'"),
    ],
)
def test_an_unknown_key_is_refused_at_every_level(attributes: dict[str, Any], key: str, words: str) -> None:
    message = problem(**attributes)
    assert message.startswith(f"{key}: expected a known key")
    assert words in message


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"batch_rows": "many"}, "batch_rows: expected a whole number, found 'many' (text)"),
        ({"batch_rows": "250"}, "batch_rows: expected a whole number, found '250' (text)"),
        ({"batch_rows": True}, "batch_rows: expected a whole number, found True (true/false)"),
        ({"batch_rows": 0}, "batch_rows: expected at least 1, found 0"),
        ({"batch_rows": 10_001}, "batch_rows: expected at most 10000, found 10001"),
        ({"batches_per_run": 0}, "batches_per_run: expected at least 1, found 0"),
        ({"sampling": {"temperature": "warm"}}, "sampling.temperature: expected a number, found 'warm' (text)"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature: expected a finite number, found nan"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p: expected more than 0"),
        ({"sampling": None}, "sampling: expected a mapping of keys to values, found nothing"),
        ({"keep_columns": "answer"}, "keep_columns: expected a list, found 'answer' (text)"),
        ({"source": {"path": ["a", "b"]}}, "source.path: expected text, found ['a', 'b'] (a list)"),
        ({"source": {"grid": {"a": "x"}}}, "source.grid.a: expected a list, found 'x' (text)"),
        (
            {"task": "chatt"},
            "task: expected 'chat', 'completion', 'embedding', 'score', 'classify', 'rerank' or 'pooling', "
            "found 'chatt'. Did you mean 'chat'?",
        ),
        ({"on_bad_row": "skp"}, "on_bad_row: expected 'fail' or 'skip', found 'skp'. Did you mean 'skip'?"),
        ({"tags": {"team": 1}}, "tags.team: expected text, found 1 (a number)"),
        ({"model": ""}, "model: expected at least this many characters: 1, found ''"),
    ],
)
def test_a_wrong_type_or_size_names_key_expected_and_found(attributes: dict[str, Any], message: str) -> None:
    assert problem(**attributes).startswith(message)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "_a",
        "A",
        "a-b",
        "a.b",
        "../../x",
        "%2e%2e",
        "/etc",
        "a" * 64,
        "a\x00b",
        "a∕b",
        "x' OR 1=1 --",
        "é",
        "a\n",
        5,
    ],
)
def test_a_name_outside_the_grammar_is_refused(name: object) -> None:
    assert problem(name=name).startswith("name: expected")


@pytest.mark.parametrize("name", ["a", "0", "gsm8k", "my_data_2", "a" * 63])
def test_a_name_of_letters_digits_and_underscores_is_taken(name: str) -> None:
    assert spec(name=name).name == name


def test_exactly_one_of_path_and_grid_is_needed() -> None:
    assert "source: expected exactly one of path, asset, dataset and grid, found none" in problem(source={})
    assert "found path and grid" in problem(source={"path": "a.csv", "grid": {"a": [1]}})
    assert "source.format" in problem(source={"grid": {"a": [1]}, "format": "csv"})
    assert "source.grid.a: expected at least one value" in problem(source={"grid": {"a": []}})


@pytest.mark.parametrize(
    ("key", "source", "said"),
    [
        ("delimiter", {"path": "a.csv", "delimiter": ";;"}, "expected one character between two fields"),
        ("delimiter", {"path": "a.csv", "delimiter": '"'}, "expected one character between two fields"),
        ("delimiter", {"path": "a", "format": "json", "delimiter": ";"}, "expected a delimiter beside CSV or TSV"),
        ("delimiter", {"grid": {"a": [1]}, "delimiter": ";"}, "expected no delimiter beside a grid"),
        ("encoding", {"path": "a.csv", "encoding": "utf16"}, "'utf-16'"),
        ("encoding", {"path": "a", "format": "parquet", "encoding": "utf-16"}, "expected an encoding beside files"),
    ],
)
def test_options_of_a_file_are_refused_where_they_mean_nothing(key: str, source: dict[str, Any], said: str) -> None:
    assert f"source.{key}: " in problem(source=source)
    assert said in problem(source=source)


@pytest.mark.parametrize("path", ["az://bucket/a.csv", "https://host/a.csv", "file:///a.csv"])
def test_a_source_that_cannot_be_read_is_refused_with_the_spec(path: str) -> None:
    scheme = path.partition(":")[0]
    expected = "expected a local path, s3://bucket/key, gs://bucket/key or hf://datasets/OWNER/NAME/FILE"
    expected += f", found the scheme '{scheme}'"
    assert f"source.path: {expected}" in problem(source={"path": path})
    assert expected in problem(source={"grid": {"a": {"csv": path, "column": "c"}}})


@pytest.mark.parametrize(
    "path",
    [
        "hf://datasets/gsm8k",
        "hf://acme/sums/x.csv",
        "hf://buckets/acme/sums/x.csv",
        "hf://datasets/../sums/x.csv",
        "hf://datasets/acme/sums@/x.csv",
        "hf://user:word@datasets/acme/sums/x.csv",
        "hf://datasets/acme/sums/x.csv#word",
        "hf://datasets/acme/sums@v1@word/x.csv",
    ],
)
def test_an_address_of_the_hub_is_that_of_a_dataset(path: str) -> None:
    said = problem(source={"path": path})
    assert "source.path: expected hf://datasets/OWNER/NAME/FILE or" in said and "user:word" not in said
    assert "found another address of the hub" in said and path not in said


@pytest.mark.parametrize(
    "path", ["hf://datasets/acme/sums@v1.0/a-?.csv", "hf://datasets/acme/sums", "HF://datasets/a/b"]
)
def test_a_dataset_of_the_hub_is_a_source(path: str) -> None:
    assert spec(source={"path": path}).source.path == path


def test_grid_values_are_scalars_or_a_csv_column() -> None:
    grid = spec(source={"grid": {"a": [1, 2.5, "x", True, None], "b": {"csv": "b.csv", "column": "c"}}}).source.grid
    assert grid is not None and grid["a"] == [1, 2.5, "x", True, None]
    message = problem(source={"grid": {"a": [1, datetime.date(2024, 1, 1)]}})
    assert message.startswith("source.grid.a.1: expected text, a number, true/false or null")
    assert problem(source={"grid": {"a": ["\ud800"]}}).startswith("source.grid.a.0: expected what JSON can carry")


@pytest.mark.parametrize(
    ("task", "prompt", "good"),
    [
        ("chat", {"user": "x"}, True),
        ("chat", {"system": "s", "user": "x"}, True),
        ("chat", {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]}, True),
        ("chat", {"system": "s"}, False),
        ("chat", {"text": "x"}, False),
        ("chat", {"user": "x", "messages": [{"role": "user", "content": "x"}]}, False),
        ("chat", {}, False),
        ("completion", {"text": "x"}, True),
        ("completion", {"user": "x"}, True),
        ("completion", {"system": "s", "user": "x"}, False),
        ("completion", {"messages": [{"role": "user", "content": "x"}]}, False),
        ("embedding", {"text": "x"}, True),
        ("embedding", {"text": "x", "user": "y"}, False),
    ],
)
def test_the_prompt_must_fit_the_task(task: str, prompt: dict[str, Any], good: bool) -> None:
    if good:
        assert spec(task=task, prompt=prompt).prompt.templates()
    else:
        assert problem(task=task, prompt=prompt).startswith("prompt: expected prompt.")


def test_a_conversation_does_not_end_with_a_system_message() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    assert problem(prompt={"messages": messages}).startswith("prompt.messages.1.role: expected a last message of role")


@pytest.mark.parametrize(
    "template", ["{{ a", "{% for %}", "{{ a|nofilter }}", "{% include 'x' %}", "{{ a|random }}", "{% if a %}"]
)
def test_a_broken_template_is_refused_at_load_with_its_key(template: str) -> None:
    message = problem(prompt={"messages": [{"role": "user", "content": template}]})
    assert message.startswith("prompt.messages.0.content: expected a Jinja template")
    assert "line 1 of the template" in message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objct"},
        {"$ref": "http://169.254.169.254/latest/meta-data"},
        {"properties": {"a": {"$ref": "file:///etc/passwd"}}},
        {"description": "x" * 200_000},
        {"pattern": "("},
        {"$ref": "#/$defs/missing"},
        {"const": datetime.timedelta(1)},
    ],
)
def test_a_json_schema_that_cannot_be_used_is_refused(schema: dict[str, Any]) -> None:
    assert problem(output={"json_schema": schema}).startswith("output.json_schema: expected")


def test_embedding_takes_no_sampling_and_no_schema() -> None:
    text = {"text": "{{ question }}"}
    assert "sampling.temperature" in problem(task="embedding", prompt=text, sampling={"temperature": 1})
    assert "output.json_schema" in problem(task="embedding", prompt=text, output={"json_schema": {"type": "object"}})
    assert "sampling.dimensions" in problem(sampling={"dimensions": 3})


def test_request_fields_of_the_platform_cannot_be_set_through_extra() -> None:
    assert "what JSON can carry" in problem(sampling={"extra": {"priority": {1, 2}}})
    assert "'stream'" in problem(sampling={"extra": {"stream": True}})
    assert "under sampling itself" in problem(sampling={"extra": {"temperature": 1}})


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"n": 2}, "write samples: n"),
        ({"best_of": 2}, "write samples: n"),
        ({"use_beam_search": True}, "write samples: n"),
        ({"echo": True}, "not the prompt"),
        ({"prompt_logprobs": 1}, "not the prompt"),
        ({"return_token_ids": True}, "token ids"),
        ({"response_format": {"type": "json_object"}}, "output.json_schema"),
        ({"functions": [{}]}, "tools and tool_choice"),
        ({"modalities": ["audio"]}, "text only"),
        ({"web_search_options": {}}, "citations"),
        ({"request_id": "mine"}, "All rows"),
        ({"kv_transfer_params": {"a": 1}}, "inner state"),
        ({"top_logprobs": 5}, "logprobs: true"),
        ({"logprobs": 5}, "how many alternatives under top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
        ({"logprobs": True, "logprob_token_ids": list(range(129))}, "1 to 128 token ids"),
        ({"tools": []}, "1 to 128 tools"),
        ({"tools": [{"type": "function"}]}, "sampling.extra.tools.0"),
        ({"tools": [TOOL], "tool_choice": "f"}, "sampling.extra.tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "one of the tools"),
        ({"tool_choice": "auto"}, "tools beside tool_choice"),
    ],
)
def test_a_field_whose_answer_has_no_column_is_refused_when_the_spec_is_loaded(extra: dict, words: str) -> None:
    assert words in problem(sampling={"extra": extra})


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": True},
        {"logprobs": True, "top_logprobs": 20},
        {"reasoning_effort": "low", "include_reasoning": True},
        {"echo": False, "encoding_format": "float", "return_token_ids": None},
        {"mirostat": 2, "ignore_eos": True},  # of another engine, and one that shapes the answer only
    ],
)
def test_fields_whose_answer_has_columns_and_fields_not_known_here_are_sent_as_they_are(extra: dict) -> None:
    assert extra.items() <= dict(spec(sampling={"extra": extra}).generation().sampling).items()


def test_parts_that_a_task_does_not_have_are_refused() -> None:
    text = {"text": "{{ question }}"}
    assert "no tools for task completion" in problem(
        task="completion", prompt=text, sampling={"extra": {"tools": [TOOL]}}
    )
    assert "0 to 20" in problem(task="completion", prompt=text, sampling={"extra": {"logprobs": True}})
    assert "no logprobs for task embedding" in problem(
        task="embedding", prompt=text, sampling={"extra": {"logprobs": 1}}
    )
    schema = {"json_schema": {"type": "object"}}
    assert "no text to hold against" in problem(sampling={"extra": {"tools": [TOOL]}}, output=schema)
    assert "sampling.min_tokens" in problem(sampling={"min_tokens": 9, "max_tokens": 8})


@pytest.mark.parametrize(
    ("schedule", "good"),
    [
        ("0 6 * * *", True),
        ("*/15 0-5,20 * jan-mar mon-fri", True),
        ("@daily", True),
        ("0 0 29 2 *", True),
        ("0 0 31 2 mon", True),
        ("", False),
        ("0 6 * *", False),
        ("0 6 * * * *", False),
        ("60 * * * *", False),
        ("0 24 * * *", False),
        ("0 0 0 * *", False),
        ("*/0 * * * *", False),
        ("5-1 * * * *", False),
        ("0 0 30 2 *", False),
        ("0 0 31 4,6 *", False),
        ("every day", False),
    ],
)
def test_a_schedule_is_checked_at_load(schedule: str, good: bool) -> None:
    assert (cron_problem(schedule) is None) is good
    if not good:
        assert problem(schedule=schedule).startswith("schedule: expected a cron schedule of five fields")


@pytest.mark.parametrize("where", ["a >", "1 = 1", "sum(a) > 2", "a > avg(a)", "a in (select b from c)", "f(a) = 1"])
def test_a_where_that_is_no_condition_on_one_row_is_refused(where: str) -> None:
    assert problem(source={"path": "a.csv", "where": where}).startswith("source.where: expected")


def test_a_where_over_columns_is_taken() -> None:
    for where in ("score > 3", "lang = 'sum(en)' AND cast(n AS int) IN (1, 2)", "text LIKE 'a%' OR text IS NULL"):
        assert spec(source={"path": "a.csv", "where": where}).source.where == where


@pytest.mark.parametrize("column", sorted(OWN_COLUMNS))
def test_a_kept_column_cannot_take_the_name_of_one_of_the_tables_own(column: str) -> None:
    assert problem(keep_columns=["answer", column.upper()]).startswith("keep_columns.1: expected a column name that")


def test_only_answers_that_are_the_same_each_time_are_reused() -> None:
    assert spec().reuse is False
    assert spec(sampling={"temperature": 0}, reuse=True).reuse is True
    assert spec(sampling={"temperature": 0.7, "seed": 3}, reuse=["a", "b"]).reuse == ["a", "b"]
    assert spec(task="embedding", prompt={"text": "{{ question }}"}, reuse=True).repeatable
    for sampling in ({}, {"temperature": 0.7}, {"max_tokens": 5}):
        assert problem(sampling=sampling, reuse=True).startswith("reuse: expected sampling whose answers are the same")
        assert spec(sampling=sampling, reuse=[]).reuse == []


def test_what_names_no_other_datasets_is_refused() -> None:
    sampling = {"temperature": 0}
    assert problem(sampling=sampling, reuse=["questions"]).startswith(
        "reuse.0: expected other datasets, found the dataset"
    )
    assert problem(sampling=sampling, reuse=["../api"]).startswith("reuse.0: expected 1 to 63 characters")
    assert problem(sampling=sampling, reuse="maybe").startswith("reuse: expected true or false")
    assert problem(sampling=sampling, reuse=["a"] * 101).startswith("reuse: expected at most")


def test_labels_that_dagster_would_refuse_are_refused_here() -> None:
    for owner in ("bob", "a@b.c", "ä@ö.de", "bob@example.technology", "+a@b.de", "a b@c.de"):
        assert problem(owners=[owner]).startswith("owners.0: expected an e-mail address or team:name")
    assert problem(tags={"a b": "c"}).startswith("tags: expected a tag")
    assert problem(keep_columns=["a", "A"]).startswith("keep_columns.1: expected each column once")
    owners = ["team:ml", "bob@example.com", "b.o+b@ex-ample.museum"]
    made = spec(owners=owners, tags={"dept": "ml", "x/y": ""})
    assert made.owners == owners
    assert dataset_definitions(made, Path()).assets


def test_a_prompt_that_cannot_print_the_column_it_means_is_refused_and_says_how_to() -> None:
    assert problem(prompt={"user": "Answer {t}"}) == (
        "prompt.user: expected a column in double braces, {{ t }}, found no column, and {t}, which is sent as it is"
    )
    assert "{{ row['my col'] }}" in problem(prompt={"user": "{{ my col }}"})
    for honest in ("Tell a joke.", 'Answer as {"a": 1}: {{ t }} {x}', "{ } {1}", "{{ '{x}' }}{{ t }}"):
        assert spec(prompt={"user": honest})


@pytest.mark.slow
def test_a_conversation_has_at_most_500_messages() -> None:
    messages = [{"role": "user", "content": "{{ a }}"}] * 10_000
    said = problem(prompt={"messages": messages})
    assert said.startswith("prompt.messages: expected at most this many entries: 500, found")
    assert spec(prompt={"messages": messages[:500]})


def test_a_wrapper_of_openai_around_a_schema_is_understood_and_mistakes_in_it_are_named() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    wrapped = {"json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert spec(output=wrapped).generation() == spec(output={"json_schema": schema}).generation()
    wrong = {"json_schema": {"name": "n", "schema": {"type": "object", "propertes": {}}}}
    assert problem(output=wrong) == (
        "output.json_schema: expected known keywords of JSON schema, found 'propertes' at #. Did you mean 'properties'?"
    )


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        load_spec({"name": "A", "batch_rows": 0, "source": {"pth": "x"}, "prompt": {"user": "{{"}}, FILE)
    keys = {entry.key for entry in caught.value.problems}
    assert keys == {"name", "batch_rows", "source.pth", "prompt.user", "model"}
    assert str(caught.value).startswith(f"{FILE}: 5 problems in the attributes of this dataset\n")


@pytest.mark.parametrize("attributes", [None, [], "text", 5])
def test_attributes_that_are_no_mapping_are_refused(attributes: object) -> None:
    with pytest.raises(SpecError, match="attributes: expected a mapping of keys to values"):
        load_spec(attributes, FILE)


def test_a_long_or_hostile_value_is_shown_short_and_escaped() -> None:
    message = problem(name="\x1b[31m" + "x" * 100_000 + "\r\nforged: line")
    assert len(message) < 400 and "\x1b" not in message and "\n" not in message


def _models(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    if model not in seen:
        seen.add(model)
        yield model
        for name in model.model_fields:
            yield from _models(model_at(model, [name]), seen)


def test_every_field_says_what_it_is_for_and_no_model_takes_unknown_keys() -> None:
    models = list(_models(GeneratedDatasetSpec, set()))
    assert len(models) >= 8
    for model in models:
        assert model.model_config["extra"] == "forbid"
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
    schema = GeneratedDatasetSpec.model_json_schema()
    assert schema["properties"]["batch_rows"]["maximum"] == 10_000


# deadline and money


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("6h", 21600), ("90m", 5400), ("90 min", 5400), ("1d 12h", 129600), ("0.5h", 1800), ("45s", 45)],
)
def test_a_deadline_may_be_a_time_after_the_request(text: str, seconds: float) -> None:
    assert spec(deadline=text).deadline == text
    assert parse_deadline(text).at(1000.0) == 1000.0 + seconds


def test_a_deadline_may_be_a_moment_or_the_next_one_of_a_schedule() -> None:
    moment = datetime.datetime(2027, 1, 31, 6, tzinfo=datetime.UTC).timestamp()
    assert parse_deadline("2027-01-31T06:00:00Z").at(0.0) == moment
    assert parse_deadline("2027-01-31T08:00:00+02:00").at(0.0) == moment
    assert parse_deadline("0 6 * * *").at(moment - 3600) == moment
    # A refresh that the same schedule starts is for its next moment, not for now.
    assert parse_deadline("0 6 * * *").at(moment) == moment + 86400
    assert parse_deadline("@daily").at(moment) == moment + 18 * 3600


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("6 hours", "found '6 hours'"),
        ("0s", "between 1 second and 366 days"),
        ("400d", "between 1 second and 366 days"),
        ("2027-01-31T06:00:00", "Say in which time zone it is"),
        ("2027-02-31T06:00:00Z", "Day is out of range for month"),
        ("61 * * * *", "The field minute is '61'"),
        ("", "found ''"),
    ],
)
def test_what_is_no_deadline_is_refused_with_what_one_is(text: str, hint: str) -> None:
    said = problem(deadline=text)
    assert said.startswith("deadline: expected a time after the request (6h, 90m, 1d 12h), a cron schedule, or a")
    assert hint in said


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"budget_usd": 0}, "budget_usd: expected more than 0"),
        ({"budget_usd": "12 $"}, "budget_usd: expected a number"),
        ({"max_instances": 0}, "max_instances: expected at least 1"),
        ({"objective": "cheap"}, "objective: expected 'cheapest', 'fastest' or 'efficient'"),
        ({"deadline": 6}, "deadline: expected text"),
    ],
)
def test_wrong_wishes_are_refused_in_our_words(attributes: dict[str, Any], said: str) -> None:
    assert said in problem(**attributes)


def test_a_rule_of_ones_own_may_be_called_as_a_gate_that_is_off_and_is_on() -> None:
    """The list of gates that are on left it out."""
    gates = spec(gates={"rules": {"near_repeated": {"where": "tries > 1", "max_rate": 0.5}}}).gates
    assert gates.on == ("dead", "empty", "cut", "refused", "repeated", "near_repeated")
    assert "near_repeated" not in gates.off and "length" in gates.off
