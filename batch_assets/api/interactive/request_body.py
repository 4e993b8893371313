"""Bodies of interactive requests: read, checked as far as we need it, prepared for an engine. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from batch_assets.api.batches.lines import ENGINE_FIELDS
from batch_assets.api.requests.api_error import ApiError
from gpu_runner.routing.prefix_index import BLOCK_BYTES, MOST_BLOCKS

LONGEST_MODEL = 256
BYTES_PER_TOKEN = 4  # of English prose; an estimate that the engine's own count corrects
TOKENS_UNSAID = 256  # counted for an answer whose length nobody limits, until the engine says
MOST_TOKENS = 10**7
SALT = "cache_salt"


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What a request asks of an engine. `answer_limit`: tokens of all its answers at most; None: nobody limits them.

    `generates`: it has answers, as embeddings have not. `beginning`: of its prompt, where others may begin alike.
    """

    prompt_tokens: int
    answer_limit: int | None = None
    generates: bool = True
    beginning: bytes = b""


@dataclass(frozen=True, slots=True)
class InteractiveRequest:
    """A request for an engine. `expected_tokens`: of prompt and answers. `own_usage`: the usage in the stream was asked
    for by us, and is not for the caller. `salted`: the caller gave a salt for the engine's prefix cache.
    """

    model: str
    body: bytes
    stream: bool
    own_usage: bool
    expected_tokens: int
    size: RequestSize
    salted: bool = False


def read_request(
    body: bytes, resolve: Callable[[str], str] = lambda name: name, *, is_response: bool = False
) -> InteractiveRequest:
    """The request in a body. `resolve`: the model behind a name. `is_response`: it is one of `/v1/responses`.

    Raises ApiError 400.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise ApiError(
            400,
            "We could not parse the JSON body of your request. (HINT: This likely means you aren't using your HTTP "
            "library correctly. The OpenAI API expects a JSON payload.)",
        ) from None
    if not isinstance(fields, dict):
        raise ApiError(400, "Invalid body: expected a JSON object.")
    model = fields.get("model")
    if model is None:
        raise ApiError(400, "you must provide a model parameter", param="model")
    if not isinstance(model, str) or not 0 < len(model) <= LONGEST_MODEL:
        raise ApiError(400, "Invalid type for 'model': expected a string.", param="model", code="invalid_type")
    stream = _flag(fields, "stream")
    prepared = {name: value for name, value in fields.items() if name not in ENGINE_FIELDS}
    served = resolve(model)
    if served != model:
        prepared["model"] = served
    if is_response:
        _check_response(fields)
        prepared["store"] = False  # what an engine keeps, any tenant could read
    own_usage = stream and not is_response and not _asks_for_usage(fields)
    if own_usage:
        options = fields.get("stream_options") or {}
        prepared["stream_options"] = {**options, "include_usage": True}
    changed = own_usage or is_response or served != model or len(prepared) != len(fields)
    try:
        sent = orjson.dumps(prepared) if changed else body
    except orjson.JSONEncodeError:  # it reads deeper than it writes
        raise ApiError(400, "Invalid body: its JSON is nested too deeply.") from None
    size = size_of(fields, len(body), is_response=is_response)
    expected = _expected(size, max(1, _count(fields, "n")))
    return InteractiveRequest(served, sent, stream, own_usage, expected, size, SALT in fields)


def size_of(fields: Mapping[str, Any], size: int, *, is_response: bool = False) -> RequestSize:
    """The size of a request with these fields, in so many bytes."""
    prompt = size // BYTES_PER_TOKEN + 1
    # vLLM ignores an `input` beside messages or a prompt: a chat with one has an answer all the same.
    if not is_response and "input" in fields and not fields.keys() & {"messages", "prompt"}:
        return RequestSize(prompt, 0, generates=False)
    names = ("max_output_tokens",) if is_response else ("max_completion_tokens", "max_tokens")
    answer = next((count for name in names if (count := _count(fields, name))), 0)
    limit = min(MOST_TOKENS, max(1, _count(fields, "n")) * answer) if answer else None
    return RequestSize(prompt, limit, beginning=_beginning(fields))


def _beginning(fields: Mapping[str, Any]) -> bytes:
    """The beginning of what an engine's template makes of a request: tools, instructions, messages."""
    parts = [fields.get(name) for name in ("tools", "instructions", "messages", "prompt", "input")]
    try:
        return orjson.dumps([part for part in parts if part is not None])[: MOST_BLOCKS * BLOCK_BYTES]
    except orjson.JSONEncodeError:
        return b""


def _check_response(fields: Mapping[str, Any]) -> None:
    """What would need a response to be kept is refused. Raises ApiError 400."""
    for name in ("background", "previous_response_id", "conversation"):
        if fields.get(name):
            said = f"Unsupported parameter: '{name}'. Responses are not kept."
            raise ApiError(400, said, param=name, code="unsupported_parameter")


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"Invalid type for '{name}': expected a boolean.", param=name, code="invalid_type")
    return bool(value)


def _asks_for_usage(fields: Mapping[str, Any]) -> bool:
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise ApiError(
            400, "Invalid type for 'stream_options': expected an object.", param="stream_options", code="invalid_type"
        )
    return bool(options and options.get("include_usage"))


def _expected(size: RequestSize, answers: int) -> int:
    """Tokens that the request will use, about. Bounded, whatever it says."""
    limit = size.answer_limit if size.answer_limit is not None else answers * TOKENS_UNSAID
    return min(MOST_TOKENS, size.prompt_tokens + limit)


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return max(0, min(value, MOST_TOKENS))
