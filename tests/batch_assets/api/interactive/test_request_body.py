"""Bodies of interactive requests: what goes to an engine, what is refused, what is expected to be used."""

from __future__ import annotations

import orjson
import pytest

from batch_assets.api.batches.lines import ENGINE_FIELDS
from batch_assets.api.interactive.request_body import MOST_TOKENS, read_request
from batch_assets.api.requests.api_error import ApiError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_a_body_that_needs_no_change_goes_on_as_it_came() -> None:
    body = b'{ "model":"m",\n "messages": [], "x": 1.50 }'
    assert read_request(body).body == body
    asked = orjson.dumps({**CHAT, "stream": True, "stream_options": {"include_usage": True}})
    assert read_request(asked).body == asked and not read_request(asked).own_usage


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False, "x": 1}])
def test_usage_is_asked_for_where_the_caller_does_not(options: object) -> None:
    fields = {**CHAT, "stream": True, "stream_options": options}
    found = read_request(orjson.dumps(fields))
    assert found.own_usage and orjson.loads(found.body)["stream_options"]["include_usage"] is True


@pytest.mark.parametrize("name", sorted(ENGINE_FIELDS))
def test_no_caller_says_who_comes_first_in_an_engine(name: str) -> None:
    found = read_request(orjson.dumps({**CHAT, name: -1000}))
    assert orjson.loads(found.body) == CHAT


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"\xff",
        b"[" * 100_000,
        b'{"a":' * 5000,
        b"{}",
        b'{"model": null}',
        b'{"model": 7}',
        b'{"model": ""}',
        b'{"model": "' + b"m" * 300 + b'"}',
        b'{"model": "m", "stream": "yes"}',
        b'{"model": "m", "stream": 1}',
        b'{"model": "m", "stream": true, "stream_options": []}',
    ],
    ids=lambda body: body[:30].decode("latin-1"),
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_request(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_tokens": 100}, 100),
        ({"max_completion_tokens": 50, "max_tokens": 100}, 50),
        ({"max_tokens": 100, "n": 3}, 300),
        ({}, 256),
        ({"max_tokens": -5, "n": -5}, 256),
        ({"max_tokens": True}, 256),
        ({"input": "text"}, 0),
        ({"input": "", "messages": [], "max_tokens": 100}, 100),
        ({"input": "", "prompt": "a"}, 256),
    ],
)
def test_tokens_are_expected_by_what_is_asked_for(fields: dict[str, object], tokens: int) -> None:
    body = orjson.dumps({"model": "m", **fields})
    assert read_request(body).expected_tokens == tokens + len(body) // 4 + 1


def test_no_number_is_too_large_to_count() -> None:
    assert read_request(orjson.dumps({"model": "m", "max_tokens": 2**63, "n": 2**63})).expected_tokens == MOST_TOKENS


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    deep = b"[" * 300 + b"]" * 300
    body = orjson.dumps({**CHAT, "priority": 1, "x": "HERE"}).replace(b'"HERE"', deep)
    with pytest.raises(ApiError) as refused:
        read_request(body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("fields", "limit", "generates"),
    [
        ({"messages": []}, None, True),
        ({"messages": [], "max_tokens": 7}, 7, True),
        ({"messages": [], "max_tokens": 7, "n": 3}, 21, True),
        ({"input": "text"}, 0, False),
        ({"input": "text", "messages": [], "max_tokens": 7}, 7, True),
        ({"messages": [], "max_tokens": 10**12}, 10**7, True),
    ],
)
def test_what_an_answer_may_have_at_most_is_read(fields: dict[str, object], limit: int | None, generates: bool) -> None:
    size = read_request(orjson.dumps({"model": "m", **fields})).size
    assert (size.answer_limit, size.generates) == (limit, generates)


def test_the_beginning_of_a_prompt_is_what_its_template_sees_first_and_bounded() -> None:
    tools, messages = [{"type": "function"}], [{"role": "user", "content": "x" * 200_000}]
    one = read_request(orjson.dumps({"model": "m", "temperature": 1, "messages": messages, "tools": tools})).size
    other = read_request(orjson.dumps({"tools": tools, "messages": messages, "model": "m", "max_tokens": 3})).size
    assert one.beginning == other.beginning and len(one.beginning) == 64 * 1024
    assert one.beginning.startswith(b'[[{"type":"function"}],[{"role":"user"')
