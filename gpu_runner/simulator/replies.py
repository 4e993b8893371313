"""Answers: what a request gets to read, and the bodies that carry it in vLLM's shape."""

from __future__ import annotations

import base64
from array import array
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import orjson

from gpu_runner.simulator import generated_text, parts
from gpu_runner.simulator.pattern import matching
from gpu_runner.simulator.request_bodies import Prompt, Request
from gpu_runner.simulator.request_errors import ApiError
from gpu_runner.simulator.schema import instance

OBJECTS = {"chat": "chat.completion", "completion": "text_completion"}


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished text. `tokens` counts the end token when `finish_reason` is stop, as vLLM does."""

    text: str
    finish_reason: str
    tokens: int
    stop_reason: str | None = None
    tool_call: dict[str, Any] | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseGenerator:
    """What an answer depends on: everything outside the request that its text depends on."""

    model: str
    max_model_len: int
    lengths: generated_text.Lengths
    seed: int
    dimensions: int


def answers(voice: ResponseGenerator, request: Request) -> list[Answer]:
    """The texts of a request: `n` for each prompt. Raises ApiError when its grammar cannot be met."""
    return [_answer(voice, request, prompt, index) for prompt in request.prompts for index in range(request.n)]


def _key(voice: ResponseGenerator, model: str, prompt: Prompt, seed: int | None, index: int = 0) -> bytes:
    model = model or voice.model
    model = model if not voice.seed else f"{model}#{voice.seed}"
    return generated_text.request_key(model, prompt.digest if not index else f"{prompt.digest}/{index}", seed)


def _answer(voice: ResponseGenerator, request: Request, prompt: Prompt, index: int) -> Answer:
    key = _key(voice, request.model, prompt, request.seed, index)
    room = voice.max_model_len - prompt.tokens
    limit = room if request.max_tokens is None else min(request.max_tokens, room)
    if request.grammar is not None:
        return _cut(_structured(request, key), limit, request.stop)
    if request.asked is not parts.NOTHING:
        call, thought = parts.tool_call(request.asked, key), parts.reasoning(request.asked, key)
        if call is not None:
            # Arguments that were cut would be no JSON; a real engine does cut them.
            tokens = min(limit, generated_text.count_tokens(call["function"]["arguments"]) + 1)
            return Answer("", "tool_calls", tokens, None, call, thought)
        if thought is not None:
            return replace(_spoken(request, key, limit, voice), reasoning=thought)
    return _spoken(request, key, limit, voice)


def _spoken(request: Request, key: bytes, limit: int, voice: ResponseGenerator) -> Answer:
    """Words, as many as come naturally or fit."""
    natural = max(generated_text.natural_length(key, voice.lengths), request.min_tokens + 1)
    if request.ignore_eos or natural > limit:
        return _cut_at_stop(Answer(generated_text.words(key, limit), "length", limit), request.stop)
    return _cut_at_stop(Answer(generated_text.words(key, natural - 1), "stop", natural), request.stop)


def _structured(request: Request, key: bytes) -> str:
    """The text that the request's grammar allows."""
    rng = Random(key)
    grammar = request.grammar or {}
    try:
        if "regex" in grammar:
            return matching(grammar["regex"], rng)
        if "choice" in grammar:
            return str(rng.choice(grammar["choice"]))
        schema = grammar.get("json", {"type": "object", "properties": {"text": {"type": "string"}}})
        return orjson.dumps(instance(schema, rng)).decode()
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ApiError(400, f"Grammar error: {error}") from error


def _cut(full: str, limit: int, stop: tuple[str, ...]) -> Answer:
    """Structured text in tokens of four characters, cut off where the limit is."""
    needed = generated_text.count_tokens(full) + 1
    if needed > limit:
        return _cut_at_stop(Answer(full[: 4 * limit], "length", limit), stop)
    return _cut_at_stop(Answer(full, "stop", needed), stop)


def _cut_at_stop(answer: Answer, stop: tuple[str, ...]) -> Answer:
    found = [(at, word) for word in stop if (at := answer.text.find(word)) >= 0]
    if not found:
        return answer
    at, word = min(found)
    share = (at + len(word)) / len(answer.text)
    return Answer(answer.text[:at], "stop", max(1, round(answer.tokens * share)), word)


def without_schema(answer: Answer, key_text: str) -> Answer:
    """The same length of prose where JSON was asked for: what an engine gives that ignores the schema."""
    prose = "Sure! " + generated_text.words(key_text.encode(), max(1, answer.tokens - 1))
    return Answer(prose, answer.finish_reason, answer.tokens)


def vectors(voice: ResponseGenerator, request: Request) -> list[list[float]]:
    """One unit vector per input. Raises ApiError when other dimensions are asked for."""
    if request.dimensions not in (None, voice.dimensions):
        message = (
            f"Model '{voice.model}' does not support Matryoshka embeddings; dimensions must be unset "
            f"(received dimensions={request.dimensions})."
        )
        raise ApiError(400, message)
    return [
        generated_text.unit_vector(_key(voice, request.model, prompt, None), voice.dimensions)
        for prompt in request.prompts
    ]


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Token counts as every answer carries them."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def completion_body(
    request: Request, found: list[Answer], model: str, name: str, created: int, *, finished: bool = True
) -> bytes:
    """The body of a chat or text completion. `finished=False` leaves the finish reasons out."""
    choices = []
    for index, answer in enumerate(found):
        choice: dict[str, Any] = {"index": index}
        if request.endpoint == "chat":
            choice["message"] = _message(answer)
            choice["logprobs"] = parts.chat_logprobs(request.asked, answer.text)
        else:
            choice["text"] = answer.text
            choice["logprobs"] = parts.completion_logprobs(request.asked, answer.text)
        choice["finish_reason"] = answer.finish_reason if finished else None
        choice["stop_reason"] = answer.stop_reason
        choices.append(choice)
    tokens = sum([answer.tokens for answer in found])
    return orjson.dumps(
        {
            "id": name,
            "object": OBJECTS[request.endpoint],
            "created": created,
            "model": model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": "simulated",
            "usage": usage(request.prompt_tokens, tokens),
        }
    )


def _message(answer: Answer) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text, "refusal": None, "reasoning": answer.reasoning}
    return message if answer.tool_call is None else {**message, "content": None, "tool_calls": [answer.tool_call]}


def embedding_body(request: Request, found: list[list[float]], model: str, name: str, created: int) -> bytes:
    """The body of an embedding answer, as numbers or base64 of little-endian float32."""
    data = []
    for index, vector in enumerate(found):
        packed = base64.b64encode(array("f", vector).tobytes()).decode() if request.base64 else vector
        data.append({"index": index, "object": "embedding", "embedding": packed})
    tokens = usage(request.prompt_tokens, 0)
    return orjson.dumps(
        {"id": name, "object": "list", "created": created, "model": model, "data": data, "usage": tokens}
    )
