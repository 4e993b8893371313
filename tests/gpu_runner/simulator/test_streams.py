"""Streams of several choices and of tool calls, and `/v1/responses`: as the stock client reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from support.simulated_engine import simulated_engine

from gpu_runner.simulator.pieces import Piece, PieceKind, Pieces
from gpu_runner.simulator.replies import Answer

ASK = [{"role": "user", "content": "What is the weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "minLength": 4}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}
CHAT_TOOLS: Any = [{"type": "function", "function": TOOL}]
RESPONSE_TOOLS: Any = [{"type": "function", **TOOL}]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with (
        simulated_engine("--speed", "20", "--output-tokens", "uniform:8:20", model="m") as engine,
        OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


def test_pieces_join_to_the_whole_answer_and_each_part_begins_once() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
    for answer, parts in (
        (Answer("some words here", "stop", 3, reasoning="hm hm"), [PieceKind.REASONING, PieceKind.TEXT]),
        (Answer("", "tool_calls", 3, tool_call=call, reasoning="hm"), [PieceKind.REASONING, PieceKind.TOOL_CALL]),
        (Answer("", "stop", 1), [PieceKind.TEXT]),
    ):
        pieces = Pieces(answer)
        found: list[Piece] = [*pieces.until(1), *pieces.until(2), *pieces.rest()]
        assert [piece.part for piece in found if piece.begins] == parts
        text = "".join(piece.text for piece in found)
        assert text == (answer.reasoning or "") + (answer.text or (call["function"]["arguments"] if parts[1:] else ""))  # type: ignore[index]
        assert pieces.rest() == []


def test_a_stream_of_three_choices_says_what_the_whole_answer_says(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=ASK, n=3, temperature=1)  # type: ignore[arg-type]
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    used = []
    for chunk in client.chat.completions.create(
        model="m",
        messages=ASK,  # type: ignore[arg-type]
        n=3,
        temperature=1,
        stream=True,
        stream_options={"include_usage": True},
    ):
        used += [chunk.usage] if chunk.usage is not None else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert [texts[one.index] for one in whole.choices] == [one.message.content for one in whole.choices]
    assert reasons == {one.index: one.finish_reason for one in whole.choices} and len(reasons) == 3
    assert [one.completion_tokens for one in used] == [whole.usage.completion_tokens if whole.usage else None]


def test_several_prompts_are_streamed_side_by_side(client: OpenAI) -> None:
    whole = client.completions.create(model="m", prompt=["one", "two"], max_tokens=8)
    texts: dict[int, str] = defaultdict(str)
    for chunk in client.completions.create(model="m", prompt=["one", "two"], max_tokens=8, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[one.index] for one in whole.choices] == [one.text for one in whole.choices]


def test_a_streamed_tool_call_is_the_one_of_the_whole_answer(client: OpenAI) -> None:
    asked: Any = {"model": "m", "messages": ASK, "tools": CHAT_TOOLS, "tool_choice": "required"}
    whole = client.chat.completions.create(**asked).choices[0]
    calls = whole.message.tool_calls
    assert calls and calls[0].type == "function"
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        found = stream.get_final_completion().choices[0]
    assert found.finish_reason == "tool_calls" and found.message.tool_calls
    said = found.message.tool_calls[0]
    assert (said.id, said.function.name, said.function.arguments) == (
        calls[0].id,
        calls[0].function.name,
        calls[0].function.arguments,
    )


def streamed_response(client: OpenAI, **asked: Any) -> tuple[Any, list[Any]]:
    """The response that the stock client puts together, and the events it was made of."""
    with client.responses.stream(model="m", **asked) as stream:
        events = list(stream)
        return stream.get_final_response(), events


@pytest.mark.slow
def test_a_response_is_the_same_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {"input": "Say hello", "instructions": "Be brief.", "metadata": {"a": "b"}}
    whole = client.responses.create(model="m", **asked)
    assert whole.status == "completed" and whole.output_text and whole.id.startswith("resp_")
    assert whole.usage and whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert (whole.instructions, whole.metadata) == ("Be brief.", {"a": "b"})
    final, events = streamed_response(client, **asked)
    assert final.output_text == whole.output_text and final.usage == whole.usage
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")][:2] == [0, 1]
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


def test_a_response_that_is_cut_says_so(client: OpenAI) -> None:
    *_, last = client.responses.create(model="m", input="Say hello", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete" and last.response.status == "incomplete"
    assert last.response.incomplete_details and last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.usage and last.response.usage.output_tokens == 2


def test_functions_and_their_results_go_through_responses(client: OpenAI) -> None:
    asked: Any = {"input": "Weather?", "tools": RESPONSE_TOOLS, "tool_choice": "required"}
    whole = client.responses.create(model="m", **asked)
    (call,) = whole.output
    assert call.type == "function_call" and call.name == "weather"
    final, events = streamed_response(client, **asked)
    (again,) = final.output
    assert (again.name, again.arguments, again.call_id) == (call.name, call.arguments, call.call_id)
    assert "response.function_call_arguments.done" in [event.type for event in events]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items: Any = [{"role": "user", "content": "Weather?"}, call.model_dump(), result]
    assert client.responses.create(model="m", input=items).output_text


def test_reasoning_and_json_schemas_go_through_responses(client: OpenAI) -> None:
    thought = client.responses.create(model="m", input="Think", reasoning={"effort": "low"})
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    final, _ = streamed_response(client, input="Think", reasoning={"effort": "low"})
    assert [item.type for item in final.output] == ["reasoning", "message"]
    wanted: Any = {"format": {"type": "json_schema", "name": "city", "schema": PARAMETERS, "strict": False}}
    assert '"city"' in client.responses.create(model="m", input="City?", text=wanted).output_text


@pytest.mark.parametrize(
    "body", [{}, {"input": 3}, {"input": [{"type": "item_reference"}]}, {"input": "x", "tools": 1}]
)
def test_a_wrong_response_request_is_refused(client: OpenAI, body: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client.post("/responses", body={"model": "m", **body}, cast_to=object)
