"""Requests of several inputs and their answers: one for each input, with its share of the usage. Pure functions.

`POST /v1/embeddings` takes a list as `input` and answers with one entry of `data` for each, named by its `index`
(OpenAI's API; vLLM and llama.cpp do so). vLLM's `/classify` and `/pooling` are like it, and
`/score` takes two lists. The usage is told for the request as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gpu_runner.client.answers import answer_numbers
from gpu_runner.client.answers.pooled_outputs import output_of
from gpu_runner.client.protocol import Completion, Transient, error_of, model_of, not_an_answer
from gpu_runner.rows import Task


@dataclass(frozen=True, slots=True)
class EmbeddingBody:
    """The body of a request for the vector of one text. `fields`: all others, as JSON without its last brace.

    `text`: as JSON. Bodies with the same `fields` may be asked for together.
    """

    fields: bytes
    text: bytes

    @classmethod
    def read(cls, body: bytes) -> EmbeddingBody | None:
        """None for a body whose input is not one text, or that is not JSON."""
        try:
            found = orjson.loads(body)
            text = found.pop("input")
            if not isinstance(text, str):
                return None
            return cls(fields_beside(found), orjson.dumps(text))
        except (ValueError, LookupError, TypeError, AttributeError):
            return None


def fields_beside(others: Mapping[str, Any]) -> bytes:
    """The fields of a request but its input, as JSON without its last brace; the same for the same fields."""
    return orjson.dumps(others, option=orjson.OPT_SORT_KEYS)[:-1]


def body_of_texts(fields: bytes, texts: Sequence[bytes]) -> bytes:
    """One request for all texts, each as JSON; one text goes as it is. `fields`: see `fields_beside`."""
    comma = b"," if len(fields) > 1 else b""
    given = texts[0] if len(texts) == 1 else b"[" + b",".join(texts) + b"]"
    return fields + comma + b'"input":' + given + b"}"


def divide(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to the weights (0 or more), which add up to `total` exactly: largest remainders.

    Weights of 0 in all places count as equal.
    """
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    shares = [total * weight // whole for weight in weights]
    left = total - sum(shares)
    if left:
        by_rest = sorted(range(len(weights)), key=lambda place: -(total * weights[place] % whole))
        for place in by_rest[:left]:
            shares[place] += 1
    return shares


def read_outputs(
    task: Task, status: int, headers: Mapping[str, str], body: bytes, weights: Sequence[int]
) -> list[Completion]:
    """The outputs of a request (vectors of `embedding`), in the order of its inputs. `weights`: bytes of each input.

    An input's `prompt_tokens` are its share of the request's, by its bytes: they add up to what the server counted.
    Raises RowRejected, Transient or RequestDenied for an answer that is none, or not one of all inputs.
    """
    if status != 200:
        raise error_of(status, headers, body)
    try:
        answer = orjson.loads(body)
        entries = entries_in_order(answer["data"], len(weights))
        outputs = [output_of(task, entry) for entry in entries]
        usage = answer.get("usage") or {}
        tokens = divide(answer_numbers.token_count(usage.get("prompt_tokens")), weights)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:  # as a hostile body may cause
        wrong = not_an_answer(task, headers, body)
        if isinstance(wrong, Transient) and wrong.code == "garbage_body":
            wrong.message += f" (asked for {len(weights):,} inputs)"
        raise wrong from error
    model = model_of(answer)
    return [Completion(one, "stop", share, 0, model=model) for one, share in zip(outputs, tokens, strict=True)]


def answers_of_inputs(answer: Mapping[str, Any], weights: Sequence[int]) -> list[dict[str, Any]]:
    """A body for each input, as if it had been asked for alone, from the body for all of them. `weights`: bytes.

    Raises ValueError, LookupError, TypeError or AttributeError for what is no answer to all inputs.
    """
    data = [{**entry, "index": 0} for entry in entries_in_order(answer["data"], len(weights))]
    beside = {name: value for name, value in answer.items() if name not in ("data", "usage")}
    total = answer_numbers.token_count((answer.get("usage") or {}).get("prompt_tokens"))
    return [
        {**beside, "data": [entry], "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        for entry, tokens in zip(data, divide(total, weights), strict=True)
    ]


def entries_in_order(data: Any, count: int) -> list[Mapping[str, Any]]:
    """The entries of `data` by their index. Raises ValueError, LookupError or TypeError unless each of 0 … count - 1 is
    there once.
    """
    if type(data) is not list or len(data) != count:
        raise ValueError("expected one entry for each input")
    found: dict[int, Mapping[str, Any]] = {}
    for entry in data:
        place = entry["index"]
        if type(place) is not int or not 0 <= place < count or place in found:
            raise ValueError("expected each index once")
        found[place] = entry
    return [found[place] for place in range(count)]
