"""Answers to several inputs: order, shares of the usage, and what is no answer."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.client.input_lists import EmbeddingBody, answers_of_inputs, body_of_texts, divide, read_outputs
from gpu_runner.client.protocol import RequestDenied, Requests, Transient
from gpu_runner.rows import Generation


def entry(index: Any, vector: Any) -> dict[str, Any]:
    return {"index": index, "object": "embedding", "embedding": vector}


def read(data: Any, weights: list[int], tokens: Any = 10, status: int = 200) -> Any:
    body = orjson.dumps({"object": "list", "data": data, "usage": {"prompt_tokens": tokens}})
    return read_outputs("embedding", status, {}, body, weights)


def test_vectors_are_ordered_by_their_index() -> None:
    found = read([entry(1, [2.0]), entry(0, [1, 0.5])], [3, 1], tokens=4)
    assert [one.output for one in found] == [(1.0, 0.5), (2.0,)]
    assert [(one.prompt_tokens, one.completion_tokens, one.finish_reason) for one in found] == [
        (3, 0, "stop"),
        (1, 0, "stop"),
    ]


@pytest.mark.parametrize(
    "data",
    [
        [],
        [entry(0, [1.0])],
        [entry(0, [1.0]), entry(0, [1.0])],
        [entry(0, [1.0]), entry(2, [1.0])],
        [entry(0, [1.0]), entry(True, [1.0])],
        [entry(0, [1.0]), entry(1, [])],
        [entry(0, [1.0]), entry(1, ["x"])],
        [entry(0, [1.0]), {"embedding": [1.0]}],
        [entry(0, [1.0]), None],
        {"0": entry(0, [1.0])},
        None,
    ],
)
def test_an_answer_that_is_not_one_vector_for_each_input_is_garbage(data: Any) -> None:
    with pytest.raises(Transient, match="garbage_body"):
        read(data, [1, 1])


def test_a_refusal_is_that_of_the_list() -> None:
    with pytest.raises(RequestDenied, match="400"):
        read([], [1, 1], status=400)


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**6), min_size=1, max_size=64))
def test_shares_add_up_and_are_within_one_of_their_proportion(total: int, weights: list[int]) -> None:
    shares = divide(total, weights)
    assert sum(shares) == total
    whole = sum(weights)
    if whole:
        assert all(abs(share - total * weight / whole) < 1 for share, weight in zip(shares, weights, strict=True))
    else:
        assert max(shares) - min(shares) <= 1


def test_the_body_holds_all_inputs_and_the_sampling_once() -> None:
    requests = Requests(Generation("embedding", "m", {"dimensions": 8}))
    texts = ["one", 'tw"o', ""]
    body = requests.body_of_list([orjson.dumps(text) for text in texts])
    assert orjson.loads(body) == {"model": "m", "dimensions": 8, "input": texts}


def test_bodies_that_agree_but_for_their_text_are_one_request() -> None:
    one = EmbeddingBody.read(b'{"model": "m", "input": "a \\" b", "dimensions": 8}')
    other = EmbeddingBody.read(b'{"dimensions": 8, "input": "c", "model": "m"}')
    assert one is not None and other is not None and one.fields == other.fields
    together = body_of_texts(one.fields, [one.text, other.text])
    assert orjson.loads(together) == {"model": "m", "dimensions": 8, "input": ['a " b', "c"]}
    bare = EmbeddingBody.read(b'{"input": "c"}')
    assert bare is not None and orjson.loads(body_of_texts(bare.fields, [bare.text])) == {"input": "c"}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"input": ["a"]}', b'{"input": [1, 2]}', b'{"input": null}', b"\xff"]
)
def test_other_bodies_go_alone(body: bytes) -> None:
    assert EmbeddingBody.read(body) is None


def test_each_text_gets_an_answer_of_its_own() -> None:
    data = [{"index": 1, "embedding": "AAAA"}, {"index": 0, "embedding": "BBBB", "object": "embedding"}]
    answer = {"object": "list", "model": "m", "data": data, "usage": {"prompt_tokens": 5, "total_tokens": 5}}
    first, second = answers_of_inputs(answer, [4, 1])
    entry_of_first = {"index": 0, "embedding": "BBBB", "object": "embedding"}
    used = {"prompt_tokens": 4, "total_tokens": 4}
    assert first == {"object": "list", "model": "m", "data": [entry_of_first], "usage": used}
    assert second["data"] == [{"index": 0, "embedding": "AAAA"}] and second["usage"]["prompt_tokens"] == 1
    assert [one["usage"]["prompt_tokens"] for one in answers_of_inputs({"data": data}, [1, 1])] == [0, 0]
    with pytest.raises(ValueError, match="one entry for each"):
        answers_of_inputs(answer, [1, 1, 1])
