"""What an engine answers that pools a text instead of writing on: scores, classes, ranked lists, vectors of tokens.

Shapes of requests and answers are those of vLLM 0.32 (vllm/entrypoints/pooling/*/protocol.py; docs.vllm.ai, "Pooling
models"): `/score`, `/classify`, `/rerank` and `/pooling`, each with `usage` for the request as a whole. Pure functions.

An output is JSON text of the form that SCHEMAS has for its task, so that its fields become typed columns of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import orjson

from gpu_runner.client.answers import answer_numbers
from gpu_runner.rows import Output, Task

MOST_DOCUMENTS = 1_000  # of one row to rank
MOST_VECTORS = 131_072  # of one text: a token each
LONGEST_LABEL = 512

_NUMBER, _VECTOR = {"type": "number"}, {"type": "array", "items": {"type": "number"}}
_RANKED = {
    "type": "object",
    "properties": {"index": {"type": "integer"}, "relevance_score": _NUMBER},
    "additionalProperties": False,
}
SCHEMAS: Mapping[Task, Mapping[str, Any]] = {
    "score": {"type": "object", "properties": {"score": {**_NUMBER, "description": "how well the two texts fit"}}},
    "classify": {
        "type": "object",
        "properties": {
            "label": {"type": ["string", "null"], "description": "the likeliest class, as the model names it"},
            "probs": {**_VECTOR, "description": "of each class, in the order of the model"},
        },
    },
    "rerank": {
        "type": "object",
        "properties": {"results": {"type": "array", "items": _RANKED, "description": "documents, the best first"}},
    },
    "pooling": {
        "type": "object",
        "properties": {
            "data": {"type": "array", "items": _VECTOR, "description": "a vector, or one of each token"},
        },
    },
}
# Texts of a request that holds none of a row's.
PING: Mapping[Task, Any] = {
    "score": {"text_1": "ping", "text_2": "ping"},
    "rerank": {"documents": ["ping"], "query": "ping"},
}


def output_of(task: Task, entry: Mapping[str, Any]) -> Output:
    """The output in an entry of `data`. Raises ValueError, LookupError or TypeError for what is none."""
    if task == "embedding":
        return answer_numbers.vector_of(entry["embedding"])
    return orjson.dumps(_READERS[task](entry)).decode()


def ranked_output(answer: Mapping[str, Any]) -> str:
    """The output in an answer to `/rerank`: places of documents in the request with their scores, the best first."""
    results = answer["results"]
    if type(results) is not list or not 0 < len(results) <= MOST_DOCUMENTS:
        raise ValueError("expected a ranked list")
    found = [{"index": _place(one["index"]), "relevance_score": _number(one["relevance_score"])} for one in results]
    if len({one["index"] for one in found}) < len(found):
        raise ValueError("expected each document once")
    found.sort(key=lambda one: (-one["relevance_score"], one["index"]))
    return orjson.dumps({"results": found}).decode()


def _score(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"score": _number(entry["score"])}


def _classified(entry: Mapping[str, Any]) -> dict[str, Any]:
    label = entry["label"]
    if label is not None and not (isinstance(label, str) and len(label) <= LONGEST_LABEL):
        raise ValueError("expected a label")
    return {"label": label, "probs": answer_numbers.vector_of(entry["probs"])}


def _pooled(entry: Mapping[str, Any]) -> dict[str, Any]:
    data = entry["data"]
    if type(data) is not list or not 0 < len(data) <= MOST_VECTORS:
        raise ValueError("expected a vector, or a list of them")
    vectors = data if type(data[0]) is list else [data]
    return {"data": [answer_numbers.vector_of(one) for one in vectors]}


_READERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "score": _score,
    "classify": _classified,
    "pooling": _pooled,
}


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not isfinite(value):
        raise ValueError("expected a number")
    return float(value)


def _place(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST_DOCUMENTS:
        raise ValueError("expected the place of a document")
    return value
