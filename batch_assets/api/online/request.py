"""The body of `POST /v1/inference`, and the engine's request that it stands for. Pure.

`input` is a text or a list of messages: a chat; or a list of texts: their vectors. `params` are parameters of OpenAI's
chat completions or embeddings. The answer to `output`: the text, or the vectors in the order of the texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

from batch_assets.api.batches.lines import ENGINE_FIELDS
from batch_assets.api.interactive.event_stream import Usage, read_usage
from batch_assets.api.interactive.request_body import LONGEST_MODEL, read_request
from batch_assets.api.online.queues.tasks import TaskKind
from batch_assets.api.requests.api_error import ApiError

DEFAULT_LIFETIME, LONGEST_LIFETIME = 300.0, 3600.0
MOST_TEXTS = 2048
CLIENT_LENGTH = 128
MOST_LETTERS = 1000
OWN_FIELDS = frozenset({"model", "messages", "input", "prompt", "stream", "stream_options"}) | ENGINE_FIELDS


class InferenceRequest(BaseModel):
    """What is asked."""

    model_config = ConfigDict(extra="forbid")
    input: Annotated[
        StrictStr
        | Annotated[list[StrictStr], Field(min_length=1)]
        | Annotated[list[dict[str, Any]], Field(min_length=1)],
        Field(description="A text or a list of chat messages: a chat. A list of texts: their embeddings."),
    ]
    client_id: Annotated[
        StrictStr,
        Field(
            min_length=1,
            max_length=CLIENT_LENGTH,
            description="Client that the Idempotency-Key belongs to; a name of your choice.",
        ),
    ]
    model: Annotated[
        StrictStr | None,
        Field(min_length=1, max_length=LONGEST_MODEL, description="May be left out where one model is served."),
    ] = None
    params: Annotated[
        dict[StrictStr, Any] | None,
        Field(description="Parameters of OpenAI's chat completions or embeddings, as temperature or max_tokens."),
    ] = None
    ttl_seconds: Annotated[
        StrictInt | StrictFloat,
        Field(gt=0, le=LONGEST_LIFETIME, description="After this time the request is dropped and FAILED: expired."),
    ] = DEFAULT_LIFETIME
    cache: Annotated[
        Literal["auto", "allow", "never"],
        Field(
            description="Whether an answer to the same request of the last 5 minutes will do. auto: where temperature "
            "is 0 or seed is set, and for embeddings."
        ),
    ] = "auto"


class Redrive(BaseModel):
    """Which dead letters are to be tried again."""

    model_config = ConfigDict(extra="forbid")
    task_ids: Annotated[list[StrictStr], Field(min_length=1, max_length=MOST_LETTERS)]


class Accepted(BaseModel):
    """The request is kept, and will be answered."""

    task_id: Annotated[str, Field(description="For GET /v1/result/{task_id}.")]


class ResultError(BaseModel):
    """Why a request failed."""

    code: Annotated[str, Field(description="A stable word of the documentation.")]
    message: str


class TokenUsage(BaseModel):
    """Tokens, as the engine counts them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Result(BaseModel):
    """What became of a request. Times are Unix seconds."""

    task_id: str
    status: Literal["PENDING", "SUCCESS", "FAILED"]
    created_at: float
    finished_at: float | None = None
    output: Annotated[
        str | list[Any] | None, Field(description="The text of a chat's answer; of embeddings the list of vectors.")
    ] = None
    choices: Annotated[
        list[dict[str, Any]] | None,
        Field(
            description="Of a chat, where `output` does not say it all: several answers, tool calls, log-probabilities."
        ),
    ] = None
    usage: TokenUsage | None = None
    error: ResultError | None = None
    tries: Annotated[int | None, Field(description="Tries that failed.")] = None
    cached: Annotated[bool | None, Field(description="Answered by the answer to the same request.")] = None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What an engine is asked. `body`: canonical JSON, its keys sorted. `reusable`: by others who ask the same."""

    kind: TaskKind
    model: str
    body: bytes
    expected_tokens: int
    reusable: bool


def engine_request(asked: InferenceRequest, model: str) -> EngineRequest:
    """The engine's request. Raises ApiError 400."""
    params = asked.params or {}
    for name in sorted(params.keys() & OWN_FIELDS):
        raise ApiError(
            400, f"Unsupported parameter: 'params.{name}'.", param=f"params.{name}", code="unsupported_parameter"
        )
    texts = isinstance(asked.input, list) and isinstance(asked.input[0], str)
    kind = TaskKind.EMBEDDING if texts else TaskKind.CHAT
    if texts and len(asked.input) > MOST_TEXTS:
        raise ApiError(
            400, f"Invalid 'input': expected at most {MOST_TEXTS} texts.", param="input", code="invalid_value"
        )
    if kind is TaskKind.EMBEDDING:
        fields: dict[str, Any] = {"input": asked.input}
    elif isinstance(asked.input, str):
        fields = {"messages": [{"role": "user", "content": asked.input}]}
    else:
        fields = {"messages": asked.input}
    try:
        body = orjson.dumps({**params, **fields, "model": model}, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        said = "Invalid body: expected Unicode text, integers of at most 64 bits and at most 254 levels of JSON."
        raise ApiError(400, said) from None
    reusable = asked.cache == "allow" or (asked.cache == "auto" and _deterministic(kind, params))
    return EngineRequest(kind, model, body, read_request(body).expected_tokens, reusable)


def _deterministic(kind: TaskKind, params: dict[str, Any]) -> bool:
    """Whether the same request has the same answer, as far as a caller can say."""
    if kind is TaskKind.EMBEDDING:
        return True
    temperature, seed = params.get("temperature"), params.get("seed")
    zero = isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0
    return zero or (isinstance(seed, int) and not isinstance(seed, bool))


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """What a result shows of an engine's answer. `output` and `choices`: JSON."""

    output: bytes
    choices: bytes | None
    usage: Usage | None


def read_answer(kind: TaskKind, body: bytes) -> ReadAnswer | None:
    """The result in an engine's answer; None for what is no answer to this kind of request."""
    try:
        found = orjson.loads(body)
        if kind is TaskKind.EMBEDDING:
            vectors = [entry["embedding"] for entry in sorted(found["data"], key=lambda entry: int(entry["index"]))]
            return ReadAnswer(orjson.dumps(vectors), None, read_usage(found))
        choices = found["choices"]
        text = choices[0]["message"].get("content")
        if not isinstance(text, str | None):
            return None
        plain = len(choices) == 1 and _only_text(choices[0])
        return ReadAnswer(orjson.dumps(text), None if plain else orjson.dumps(choices), read_usage(found))
    except (ValueError, LookupError, TypeError, AttributeError, orjson.JSONEncodeError):
        return None


def _only_text(choice: dict[str, Any]) -> bool:
    message = choice["message"]
    more = any(value for name, value in message.items() if name not in ("role", "content"))
    return not more and not choice.get("logprobs") and choice.get("finish_reason") == "stop"
