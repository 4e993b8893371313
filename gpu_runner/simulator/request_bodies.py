"""OpenAI request bodies, read and refused as vLLM 0.32 does.

Status codes, error types, `param` and the wording of the errors were taken from a running server
(tests/contract compares them). Unknown fields are ignored in silence, as vLLM ignores them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

from gpu_runner.simulator.generated_text import count_tokens, prompt_digest
from gpu_runner.simulator.parts import MOST_LOGPROBS, NOTHING, Asked
from gpu_runner.simulator.request_errors import ApiError, invalid
from gpu_runner.simulator.response_requests import chat_fields

Endpoint = Literal["chat", "completion", "embedding", "response"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request: its digest, its size and, for faults that look for it, its text."""

    digest: str
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request. `max_tokens` is what the context leaves when the client did not ask for less.

    `grammar` is one of {"json": schema}, {"json_object": True}, {"regex": …}, {"choice": […]}, or None. `shown`: fields
    of a body of `/v1/responses`, of which the response repeats some.
    """

    endpoint: Endpoint
    prompts: tuple[Prompt, ...]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    seed: int | None
    n: int
    stop: tuple[str, ...]
    grammar: Mapping[str, Any] | None
    stream: bool
    include_usage: bool
    base64: bool
    dimensions: int | None
    asked: Asked = NOTHING
    priority: int = 0
    shown: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    @property
    def digest(self) -> str:
        """The prompt's digest; that of all digests when there are several."""
        return _digest(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum([prompt.tokens for prompt in self.prompts])


def _digest(prompts: tuple[Prompt, ...]) -> str:
    if len(prompts) == 1:
        return prompts[0].digest
    return prompt_digest("".join(prompt.digest for prompt in prompts).encode())


def parse(endpoint: Endpoint, body: bytes, model: str, max_model_len: int, adapters: Collection[str] = ()) -> Request:
    """Read a body; raises ApiError with vLLM's status and message. `adapters`: names served beside the model."""
    fields = _fields(body)
    wanted = fields.get("model")
    found = _read(endpoint, fields, wanted, (model, *adapters), max_model_len)
    return replace(found, model=model if wanted is None else wanted)


def _read(
    endpoint: Endpoint, fields: dict[str, Any], wanted: object, served: Collection[str], max_model_len: int
) -> Request:
    if wanted is not None and wanted not in served:
        # vLLM 0.32 leaves the param out for embeddings.
        param = None if endpoint == "embedding" else "model"
        raise ApiError(404, f"The model `{wanted}` does not exist.", "NotFoundError", param)
    if endpoint == "response":
        return _response(fields, max_model_len)
    if endpoint == "chat":
        prompts: tuple[Prompt, ...] = (_chat_prompt(fields),)
    else:
        prompts = _text_prompts(fields, "input" if endpoint == "embedding" else "prompt")
    try:
        return _checked(endpoint, fields, prompts, max_model_len)
    except ApiError as error:
        error.prompt = _digest(prompts)
        raise


def _response(fields: dict[str, Any], max_model_len: int) -> Request:
    """Checked as the chat that it is."""
    chat = chat_fields(fields)
    prompts = (_chat_prompt(chat),)
    try:
        return replace(_checked("chat", chat, prompts, max_model_len), endpoint="response", shown=fields)
    except ApiError as error:
        error.prompt = _digest(prompts)
        raise


def _checked(endpoint: Endpoint, fields: dict[str, Any], prompts: tuple[Prompt, ...], max_model_len: int) -> Request:
    generates = endpoint != "embedding"
    for prompt in prompts:
        _check_context(prompt.tokens, max_model_len, generates)
    n = _integer(fields, "n", 1, low=1)
    assert n is not None
    if generates:
        _check_sampling(fields, n)
    stream = generates and bool(fields.get("stream"))
    options = fields.get("stream_options") or {}
    return Request(
        endpoint=endpoint,
        prompts=prompts,
        max_tokens=_max_tokens(fields, endpoint, max_model_len),
        min_tokens=_integer(fields, "min_tokens", 0, low=0) or 0,
        ignore_eos=bool(fields.get("ignore_eos")),
        seed=_integer(fields, "seed", None),
        n=n,
        stop=_stop(fields.get("stop")),
        grammar=_grammar(fields) if generates else None,
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        base64=fields.get("encoding_format") == "base64",
        dimensions=_integer(fields, "dimensions", None, low=1),
        asked=_asked(endpoint, fields),
        priority=_integer(fields, "priority", 0) or 0,
    )


def _fields(body: bytes) -> dict[str, Any]:
    if not body:
        raise invalid("missing", "body", "Field required")
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid("json_invalid", f"body.{error.pos}", "JSON decode error") from error
    if not isinstance(fields, dict):
        raise invalid("model_attributes_type", "body", "Input should be a valid dictionary")
    return fields


def _chat_prompt(fields: dict[str, Any]) -> Prompt:
    messages = fields.get("messages")
    if messages is None:
        raise invalid("missing", "body.messages", "Field required")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise invalid("list_type", "body.messages", "Input should be a valid list")
    if not messages:
        raise ApiError(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
    texts = [_content(message.get("content")) for message in messages]
    # A chat template adds about four tokens per message and three for the answer to come.
    tokens = 3 + sum([count_tokens(text) + 4 for text in texts])
    return Prompt(prompt_digest(orjson.dumps(messages)), tokens, "\n".join(texts))


def _content(content: Any) -> str:
    """The text of a message, given as a string or as a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if not parts or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise invalid("string_type", "body.messages.content", "Input should be a valid string or list of text parts")
    return "".join(part["text"] for part in parts)


def _text_prompts(fields: dict[str, Any], name: str) -> tuple[Prompt, ...]:
    """A string, a list of strings, token ids or a list of those."""
    given = fields.get(name)
    if given is None and name == "input":
        raise invalid("missing", "body.input", "Field required")
    if given == [] and name == "input":
        raise ApiError(400, "You must pass at least one prompt")
    if given is None or (given in ("", []) and name == "prompt"):
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise ApiError(400, message, param="prompt")
    several = isinstance(given, list) and not isinstance(given[0] if given else 0, int)
    return tuple([_text_prompt(item, name) for item in (given if several else [given])])


def _text_prompt(item: Any, name: str) -> Prompt:
    if isinstance(item, str):
        return Prompt(prompt_digest(item.encode("utf-8", "surrogatepass")), max(1, count_tokens(item)), item)
    if isinstance(item, list) and item and all(isinstance(token, int) for token in item):
        return Prompt(prompt_digest(orjson.dumps(item)), len(item), "")
    raise invalid("string_type", f"body.{name}", "Input should be a valid string")


def _check_context(tokens: int, max_model_len: int, generates: bool) -> None:
    if tokens > max_model_len:
        raise too_long(max_model_len)
    if generates and tokens == max_model_len:
        raise _too_few(0)


def too_long(max_model_len: int) -> ApiError:
    """The refusal of a prompt that does not fit the context."""
    least = max_model_len + 1
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
        f"{least} input tokens, which exceeds this limit even without any output tokens. Please reduce the length "
        f"of the input prompt. (parameter=input_tokens, value={least})"
    )
    return ApiError(400, message, param="input_tokens")


def _too_few(tokens: int) -> ApiError:
    message = f"max_tokens must be at least 1, got {tokens}. (parameter=max_tokens, value={tokens})"
    return ApiError(400, message, param="max_tokens")


def _max_tokens(fields: dict[str, Any], endpoint: Endpoint, max_model_len: int) -> int | None:
    name = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    # The API's own default for text completions is 16; a chat may fill its context.
    wanted = _integer(fields, name, 16 if endpoint == "completion" else None)
    if wanted is None:
        return None
    if wanted < 1:
        raise _too_few(wanted)
    if wanted > max_model_len:
        message = (
            f"max_tokens={wanted} cannot be greater than max_model_len={max_model_len}. Please request fewer output "
            f"tokens. (parameter=max_tokens, value={wanted})"
        )
        raise ApiError(400, message, param="max_tokens")
    return wanted


def _integer(fields: dict[str, Any], name: str, default: int | None, low: int | None = None) -> int | None:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid("int_parsing", f"body.{name}", "Input should be a valid integer")
    if low is not None and value < low:
        raise ApiError(400, f"{name} must be at least {low}, got {value}.", param=name)
    return value


def _check_sampling(fields: dict[str, Any], n: int) -> None:
    """Ranges of the sampling fields; the simulator uses the seed only."""
    ranges = (("temperature", 0, 2, "[0, 2]"), ("top_p", 0, 1, "(0, 1]"))
    for name, low, high, words in ranges:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid("float_parsing", f"body.{name}", "Input should be a valid number")
        if not low <= value <= high or (name == "top_p" and value == 0):
            limit = "non-negative" if name == "temperature" and value < 0 else f"in {words}"
            message = f"{name} must be {limit}, got {float(value)}. (parameter={name}, value={float(value)})"
            raise ApiError(400, message, param=name)
    if n > 1 and fields.get("temperature") == 0:
        raise ApiError(400, f"n must be 1 when using greedy sampling, got {n}.")


def _asked(endpoint: Endpoint, fields: dict[str, Any]) -> Asked:
    """Which parts of an answer besides its text are asked for. A simulated model thinks where it is told to."""
    if endpoint == "completion" and fields.get("logprobs") is not None:
        return Asked(logprobs=_integer(fields, "logprobs", None, low=0))
    if endpoint != "chat" or not fields.keys() & {"tools", "logprobs", "top_logprobs", "chat_template_kwargs"}:
        return NOTHING
    top = _integer(fields, "top_logprobs", 0)
    assert top is not None
    if top and not fields.get("logprobs"):
        raise ApiError(400, "when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    if not 0 <= top <= MOST_LOGPROBS:
        message = f"Requested sample logprobs of {top}, which is greater than max allowed: {MOST_LOGPROBS}"
        raise ApiError(400, message, param="top_logprobs")
    tools, choice = fields.get("tools") or (), fields.get("tool_choice")
    try:
        named = choice["function"]["name"] if isinstance(choice, dict) else None
        offered = tuple([tool for tool in tools if named in (None, tool["function"]["name"])])
    except (TypeError, LookupError) as error:
        raise invalid("missing", "body.tools", "Field required") from error
    template = fields.get("chat_template_kwargs") or {}
    return Asked(
        tools=() if choice == "none" else offered,
        must_call=choice == "required" or named is not None,
        logprobs=top if fields.get("logprobs") else None,
        thinks=bool(template.get("enable_thinking")) and fields.get("include_reasoning") is not False,
    )


def _stop(stop: Any) -> tuple[str, ...]:
    given = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(given, list) or len(given) > 4 or not all(isinstance(text, str) for text in given):
        raise invalid("too_long", "body.stop", "List should have at most 4 strings")
    return tuple(text for text in given if text)


def _grammar(fields: dict[str, Any]) -> Mapping[str, Any] | None:
    """What the output must fit, from `response_format` or `structured_outputs`."""
    wanted = fields.get("response_format") or {}
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_schema":
        named = wanted.get("json_schema")
        if not isinstance(named, dict):
            message = (
                "When response_format type is 'json_schema', the 'json_schema' field must be provided. "
                "(parameter=response_format)"
            )
            raise ApiError(400, message, param="response_format")
        return {"json": named.get("schema", {})}
    if kind == "json_object":
        return {"json_object": True}
    structured = fields.get("structured_outputs") or {}
    for name in ("json", "regex", "choice"):
        if structured.get(name) is not None:
            value = structured[name]
            return {name: orjson.loads(value) if name == "json" and isinstance(value, str) else value}
    return None
