"""Reading along in a stream: bytes go through as they are, whatever pieces they come in."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_assets.api.interactive.event_stream import MOST_HELD, EventStream, Usage, read_usage


def event(**fields: object) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
TOKEN = event(choices=[{"index": 0, "delta": {"content": 'a "usage" b'}, "finish_reason": None}])
END = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
USAGE = event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12})
DONE = b"data: [DONE]\n\n"
COMMENT = b": ping\r\n\r\n"


@given(st.lists(st.sampled_from([ROLE, TOKEN, END, USAGE, DONE, COMMENT]), max_size=12), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_every_byte_goes_through_in_order_however_it_is_cut(events: list[bytes], size: int) -> None:
    whole = b"".join(events)
    stream = EventStream(hold_usage=False)
    parts = [stream.feed(whole[at : at + size]) for at in range(0, len(whole), size)]
    assert b"".join(parts) + stream.finish() == whole


def test_the_usage_that_we_asked_for_is_held_back_and_read() -> None:
    stream = EventStream(hold_usage=True)
    whole = ROLE + TOKEN + END + USAGE + DONE
    assert b"".join(stream.feed(whole[at : at + 7]) for at in range(0, len(whole), 7)) == ROLE + TOKEN + END + DONE
    assert stream.usage == Usage(5, 7) and stream.done


def test_a_usage_beside_output_is_not_held_back() -> None:
    """Engines may put it into the last chunk: then that chunk is the caller's."""
    last = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}], usage={"prompt_tokens": 1})
    stream = EventStream(hold_usage=True)
    assert stream.feed(last) == last and stream.usage == Usage(1, 0)


@pytest.mark.parametrize(
    ("chunk", "generating"),
    [
        (ROLE, False),
        (COMMENT, False),
        (b"data: not json\n\n", False),
        (b"data: [1]\n\n", False),
        (event(choices=None), False),
        (event(choices=[7]), False),
        (TOKEN, True),
        (END, True),
        (event(choices=[{"text": "a"}]), True),
        (event(choices=[{"delta": {"reasoning_content": "hm"}}]), True),
        (event(choices=[{"delta": {"tool_calls": [{"index": 0}]}}]), True),
    ],
)
def test_the_first_token_is_the_first_output_not_the_first_event(chunk: bytes, generating: bool) -> None:
    stream = EventStream(hold_usage=False)
    stream.feed(chunk)
    assert stream.generating is generating


def test_an_event_without_an_end_is_held_within_a_bound() -> None:
    stream = EventStream(hold_usage=True)
    passed = b"".join(stream.feed(b"x" * 65536) for _ in range(40))
    assert len(passed) + len(stream.finish()) == 40 * 65536
    assert len(passed) >= 40 * 65536 - MOST_HELD


@pytest.mark.parametrize("usage", [None, 7, {}, {"prompt_tokens": -1}, {"prompt_tokens": True}, {"prompt_tokens": 1e9}])
def test_a_usage_that_can_be_none_counts_nothing(usage: object) -> None:
    assert read_usage({"usage": usage}) is None


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n"])
def test_the_end_of_an_event_is_found_wherever_it_is_cut(end: bytes) -> None:
    first, second = b"data: 1" + end, b"data: 2" + end
    for cut in range(1, len(first + second)):
        stream = EventStream(hold_usage=False)
        passed = stream.feed((first + second)[:cut])
        assert passed == (first if cut >= len(first) else b"")
        assert passed + stream.feed((first + second)[cut:]) == first + second and stream.finish() == b""
