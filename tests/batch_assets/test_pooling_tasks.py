"""Tasks of vLLM whose answers are no text: scores, classes, ranked lists, vectors. Answers have vLLM's shape."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.dataset_project import MODEL, dataset_project
from support.plain_engine import plain_engine
from support.simulated_engine import simulated_engine

from batch_assets.capacity_planning.workload_estimate import prompt_tokens
from batch_assets.publishing.published_table import published_table
from batch_assets.spec.models import GeneratedDatasetSpec, SpecError, load_spec
from gpu_runner.client.answers.pooled_outputs import SCHEMAS
from gpu_runner.client.engine_client import EngineClient, EngineRefused, RequestDenied, Transient
from gpu_runner.client.input_lists import read_outputs
from gpu_runner.client.llama_cpp import refusals
from gpu_runner.client.protocol import Requests, read_answer
from gpu_runner.rows import Generation, Task

USAGE = {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0, "prompt_tokens_details": None}
HEAD = {"id": "x", "object": "list", "created": 1, "model": MODEL, "usage": USAGE}
LINES = [
    {"id": "a", "q": "rain", "d": "It rains.", "docs": ["snow", "It rains.", "sun"]},
    {"id": "b", "q": "sun", "d": "It snows.", "docs": '["It snows.", "sun"]'},
    {"id": "c", "q": "no", "d": "x", "docs": "rain"},
]


def scores(asked: dict[str, Any]) -> dict[str, Any]:
    one, other = asked["text_1"], asked["text_2"]
    pairs = list(zip(one, other, strict=True)) if isinstance(one, list) else [(one, other)]
    data = [{"index": i, "object": "score", "score": len(d) / 10} for i, (_, d) in enumerate(pairs)]
    return {**HEAD, "data": data[::-1]}


def classes(asked: dict[str, Any]) -> dict[str, Any]:
    texts = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
    data = [{"index": i, "label": "wet", "probs": [0.75, 0.25], "num_classes": 2} for i in range(len(texts))]
    return {**HEAD, "data": data}


def ranked(asked: dict[str, Any]) -> dict[str, Any]:
    found = [
        {"index": i, "document": {"text": text, "multi_modal": None}, "relevance_score": float(asked["query"] in text)}
        for i, text in enumerate(asked["documents"])
    ]
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    return {"id": "x", "model": MODEL, "usage": usage, "results": found[: asked.get("top_n")]}


def pooled(asked: dict[str, Any]) -> dict[str, Any]:
    texts = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
    data = [{"index": i, "object": "pooling", "data": [[0.5, 1.0]] * len(text)} for i, text in enumerate(texts)]
    return {**HEAD, "data": data}


PAIR = {"query": "{{ q }}", "document": "{{ d }}"}
RANKING = {"query": "{{ q }}", "documents_from": "docs"}
RESULTS = pa.list_(pa.struct([("index", pa.int64()), ("relevance_score", pa.float64())]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "path", "reply", "prompt", "types", "first"),
    [
        ("score", "/v1/score", scores, PAIR, {"score": pa.float64()}, {"score": 0.9}),
        (
            "classify",
            "/classify",
            classes,
            {"text": "{{ d }}"},
            {"label": pa.string(), "probs": pa.list_(pa.float64())},
            {"label": "wet", "probs": [0.75, 0.25]},
        ),
        (
            "rerank",
            "/v1/rerank",
            ranked,
            RANKING,
            {"results": RESULTS},
            {"results": [{"index": i, "relevance_score": float(i == 1)} for i in (1, 0, 2)]},
        ),
        (
            "pooling",
            "/pooling",
            pooled,
            {"text": "{{ q }}"},
            {"data": pa.list_(pa.list_(pa.float64()))},
            {"data": [[0.5, 1.0]] * 4},
        ),
    ],
)
def test_a_dataset_of_each_task_has_its_typed_columns(
    tmp_path: Path, task: str, path: str, reply: Any, prompt: Any, types: dict[str, pa.DataType], first: Any
):
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    given = {"task": task, "prompt": prompt, "sampling": {}, "on_bad_row": "skip"}
    with plain_engine(MODEL) as engine, dataset_project(tmp_path, **given) as site:
        engine.replies[path] = reply
        assert site.materialize("prompts").success
        assert site.run_rows("00000", "00000", engine.url).success
        assert site.materialize("dataset").success
        table = published_table(site.store)
        assert table is not None and table.output_mismatches == 0
        (file,) = table.files
        data = pq.read_table(pa.BufferReader(site.store.objects.get(f"{table.path}/{file.name}")))
    rows = {line["row_id"]: line for line in data.to_pylist()}
    assert rows.keys() == ({"a", "b"} if task == "rerank" else {"a", "b", "c"})
    for name, kind in types.items():
        assert data.schema.field(name).type == kind
    assert {name: rows["a"][name] for name in types} == first == orjson.loads(rows["a"]["output"])
    assert rows["a"]["completion_tokens"] == 0 < rows["a"]["prompt_tokens"]
    if task != "rerank":
        assert sum(line["prompt_tokens"] for line in rows.values()) == 7 * len(engine.requests)
    if task == "score":
        assert orjson.loads(rows["a"]["prompt"]) == {"text_1": "rain", "text_2": "It rains."}
        assert len(engine.requests) < 3  # several pairs in one request


LEAST: dict[str, Any] = {"name": "d", "source": {"path": "a.jsonl"}, "model": "m", "prompt": PAIR, "task": "score"}


def problem(**attributes: Any) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(LEAST | attributes, "defs.yaml")
    (found,) = caught.value.problems
    return str(found)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (
            {"prompt": {"user": "{{ q }}"}},
            "prompt: expected prompt.query and prompt.document for task score, found user",
        ),
        ({"task": "rerank"}, "prompt: expected prompt.query and prompt.documents_from for task rerank"),
        ({"task": "classify"}, "prompt: expected prompt.text (or prompt.user) alone for task classify"),
        ({"task": "chat"}, "for task chat, found query and document"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature: expected only extra for task score"),
        ({"sampling": {"dimensions": 3}}, "sampling.dimensions: expected only extra for task score"),
        ({"sampling": {"extra": {"text_1": "x"}}}, "sampling.extra.text_1: expected no text_1 for task score"),
        ({"sampling": {"extra": {"logprobs": 1}}}, "no logprobs for task score"),
        ({"output": {"json_schema": {"type": "object"}}}, "output.json_schema: expected no JSON schema for task score"),
        ({"output": {"on_truncated": "dead"}}, "output.on_truncated: expected no such key for task score"),
        ({"samples": 2}, "samples: expected 1 for task score"),
        ({"keep_columns": ["Score"]}, "keep_columns.0: expected no such column beside task score"),
    ],
)
def test_what_a_task_has_not_is_refused_when_the_file_is_read(attributes: dict[str, Any], said: str):
    assert said in problem(**attributes)


def test_plans_count_the_query_of_a_ranked_list_with_each_document():
    def tokens(prompt: Any) -> float:
        return prompt_tokens(prompt, lambda text: len(text) / 4)

    documents = ["x" * 40, "y" * 80]
    assert tokens({"documents": documents, "query": "z" * 20}) == pytest.approx(
        tokens("x" * 120) + 2 * tokens("z" * 20)
    )
    assert tokens({"text_1": "x" * 40, "text_2": "y" * 80}) == pytest.approx(tokens("x" * 120))
    made: GeneratedDatasetSpec = load_spec(LEAST, "defs.yaml")
    assert made.generation().sampling == {} and made.repeatable


BAD: list[tuple[Task, dict[str, Any]]] = [
    ("score", {"data": [{"index": 0, "score": "0.5"}]}),
    ("score", {"data": [{"index": 0, "score": True}]}),
    ("score", {"data": []}),
    ("classify", {"data": [{"index": 0, "label": 3, "probs": [1.0]}]}),
    ("classify", {"data": [{"index": 0, "label": "a", "probs": []}]}),
    ("classify", {"data": [{"index": 0, "label": "a" * 10_000, "probs": [1.0]}]}),
    ("pooling", {"data": [{"index": 0, "data": "AAAA"}]}),
    ("pooling", {"data": [{"index": 0, "data": [[1.0], 2.0]}]}),
    ("rerank", {"results": []}),
    ("rerank", {"results": [{"index": 0, "relevance_score": 1.0}] * 2}),
    ("rerank", {"results": [{"index": -1, "relevance_score": 1.0}]}),
    ("rerank", {"results": [{"index": 0, "relevance_score": 1e400}]}),
]


@pytest.mark.parametrize(("task", "answer"), BAD)
def test_an_answer_of_another_form_is_garbage_and_no_outcome(task: Task, answer: dict[str, Any]):
    body = json.dumps(answer).encode()
    with pytest.raises(Transient) as caught:
        read_answer(task, 200, {}, body)
    assert caught.value.code == "garbage_body"
    if task != "rerank":
        with pytest.raises(Transient):
            read_outputs(task, 200, {}, body, [1])
    with pytest.raises(RequestDenied):
        read_answer(task, 404, {}, body)


def test_a_request_without_content_has_the_form_of_its_task():
    for task in SCHEMAS:
        requests = Requests(Generation(task, "m", {"top_n": 1}))
        ping = orjson.loads(requests.probe(b'"secret"', content=False))
        assert ping["model"] == "m" and ping["top_n"] == 1 and b"secret" not in orjson.dumps(ping)
        assert orjson.loads(requests.canary()).keys() == ping.keys() - {"top_n"}
    with pytest.raises(ValueError, match="query"):
        Requests(Generation("rerank", "m", {"query": "mine"}))


def test_llama_cpp_and_the_simulator_refuse_before_the_first_row():
    assert refusals("score", {}) and refusals("rerank", {}) and not refusals("embedding", {})

    async def ask(url: str, task: Task) -> None:
        async with EngineClient(url, Generation(task, MODEL)) as engine:
            await engine.info()

    with simulated_engine("--model", MODEL) as engine:
        asyncio.run(ask(engine.url, "embedding"))
        with pytest.raises(EngineRefused, match="task score: expected vLLM with a model that pools"):
            asyncio.run(ask(engine.url, "score"))
