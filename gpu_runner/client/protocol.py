"""What goes over the wire to an OpenAI-compatible server, and what its answers mean. Pure functions.

An answer becomes a `Completion` or one of the errors below; the feed decides by the error's class what
happens to the row. Messages of servers may echo prompts: they are cut here and belong into outcomes only,
never into logs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from gpu_runner.answers import NO_PARTS, AnswerParts
from gpu_runner.client.answers import answer_numbers, unreadable
from gpu_runner.client.answers.answer_parts import at_index_0, chat_parts, completion_parts
from gpu_runner.client.answers.pooled_outputs import PING, output_of, ranked_output
from gpu_runner.client.answers.quota_codes import quota_code
from gpu_runner.client.json_schemas.openai_strict import strict_takes
from gpu_runner.rows import POOLED, Generation, Output, Task

MESSAGE_LENGTH = 500
ERROR_ANSWER = "error_answer"  # code of an error that came with status 200

# Request fields that the client writes itself; in `sampling` they would contradict it.
RESERVED_FIELDS = frozenset({"model", "messages", "prompt", "input", "stream", "stream_options", "n"})

PATHS: Mapping[Task, str] = {
    "chat": "chat/completions",
    "completion": "completions",
    "embedding": "embeddings",
    "score": "score",
    "classify": "classify",
    "rerank": "rerank",
    "pooling": "pooling",
}
NOT_BELOW_V1: frozenset[Task] = frozenset({"classify", "pooling"})  # vLLM has these at the top only

# vLLM's fields of a chat whose last message is the beginning of the answer, which the model continues.
CONTINUES_ANSWER: Mapping[str, bool] = {"add_generation_prompt": False, "continue_final_message": True}

# vLLM ends a request with these when it did not finish the row itself (shutdown, engine error).
TRUNCATED = "truncated"  # the code of a row whose answer was cut at the token limit, where that is not enough
CONTEXT_EXCEEDED = "context_length_exceeded"  # the code of a row whose request does not fit the context
FILTERED = "content_filter"  # OpenAI's finish_reason of an answer that was left out in part by a content filter
BROKEN_FINISH_REASONS = frozenset({"abort", "error"})

# Wordings of vLLM 0.32, OpenAI and llama.cpp of "prompt (plus max_tokens) does not fit the context".
_TOO_LONG = re.compile(
    r"context_length_exceeded|maximum context length|longer than the maximum model length|max_model_len|"
    r"context (window|length)|prompt is too long|maximum input length|input is too long|"
    r"exceeds the available context size|exceed_context_size_error",
    re.IGNORECASE,
)


_QUOTED = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`""")
_FIGURES = re.compile(r"[\d.,]*\d")
# So many messages of a row are enough to know which roles it has.
PROBE_MESSAGES = 8

# llama.cpp's status for it is 500 where a text to embed is longer than what it computes in one step.
_REJECTED = "rejected_"
_TOO_LONG_TO_EMBED = re.compile(r"input \(\d+ tokens\) is too large to process", re.IGNORECASE)


class EngineError(Exception):
    """Base of everything an engine can do instead of answering. `status`: that of HTTP, where one came."""

    status: int | None = None


class RowRejected(EngineError):
    """The server refuses this row for good (too long, invalid): a dead letter at once."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(code)
        self.code, self.message = code, message[:MESSAGE_LENGTH]


class Transient(EngineError):
    """This request failed; the next one may not (408, 429, 5xx, reset, time-out, garbage).

    `retry_after` is the server's wish in seconds. `taken` is False when the engine surely did not work on
    the row (429, connection refused): such a row has no part in the engine's death.
    """

    def __init__(
        self,
        code: str,
        message: str = "",
        *,
        retry_after: float | None = None,
        taken: bool = True,
        status: int | None = None,
    ) -> None:
        super().__init__(code)
        self.code, self.message = code, message[:MESSAGE_LENGTH]
        self.retry_after, self.taken, self.status = retry_after, taken, status

    @property
    def overload(self) -> bool:
        """True when the server says that it has too much to do, which is rarely the row's fault."""
        return self.code in ("http_429", "http_503")

    @property
    def broken(self) -> bool:
        """True when the connection was lost or refused: the engine may be gone."""
        return self.unreached or self.code == "connection_lost"

    @property
    def unreached(self) -> bool:
        """True when the request never got to the server."""
        return not self.taken and not self.overload


class EngineRefused(EngineError):
    """Wrong key, model or address: no row can succeed here. The text says expected, found, what to do.

    `RequestDenied` is the one that still has to be proved.
    """


class RequestDenied(EngineRefused):
    """One request was refused by its status: 400, 401, 402, 403, 404 and all other 4xx, or a redirect.

    Whether every request is refused (key, credit, model, settings of the request), or this row alone (moderation, an
    invalid text), only another request shows. The text is for the case that all are; `code` and `message` are those of
    the row's dead letter otherwise. `of_account`: the server says that the account cannot pay (quota_codes.py): where
    other requests are answered, this row is tried again.
    """

    def __init__(self, code: str, refusal: str, message: str = "", *, of_account: bool = False) -> None:
        super().__init__(refusal)
        self.code, self.message, self.of_account = code, message[:MESSAGE_LENGTH], of_account

    def like(self, other: EngineRefused) -> bool:
        """Whether both were refused for one reason, as far as status and message tell.

        What denies access does so in many words, and before a request is read: there the status is enough.
        """
        if not isinstance(other, RequestDenied) or (self.code in _OF_ACCESS and other.code in _OF_ACCESS):
            return True
        if self.of_account and other.of_account:
            return True
        return self.code == other.code and message_kind(self.message) == message_kind(other.message)


class EngineLost(EngineError):
    """The engine is gone or makes no progress. `reason` is a stable word: unreachable, not_ready, restarted,
    stalled or no_progress; `detail` the rest. `never_answered`: every request failed from the first one on, so that no
    row of it is to blame.
    """

    def __init__(
        self, reason: str, message: str = "", *, status: int | None = None, never_answered: bool = False
    ) -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason, self.detail, self.status, self.never_answered = reason, message, status, never_answered


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `output` is text, or a vector for embeddings; an empty text is an answer too.

    `parts`: what it holds besides. `filtered`: a content filter ended it, so the output is a part or nothing.
    `model`: who answered, by the answer's own field; None where it does not say. `cached_tokens`: of `prompt_tokens`
    those that the engine had in its cache.
    """

    output: Output
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    parts: AnswerParts = NO_PARTS
    filtered: bool = False
    model: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Repair:
    """A second request for an answer that did not fit the schema: what was answered and what is wrong with it."""

    answer: str
    problem: str
    attempt: int


class Requests:
    """Builds request bodies of one generation; everything but the prompt is encoded once, for rows without fields of
    their own. `dialect`: the same generation as the server calls its fields; raises ValueError for what it cannot do.
    """

    def __init__(self, generation: Generation, dialect: Callable[[Generation], Generation] | None = None) -> None:
        self._given, self._dialect = generation, dialect
        generation = generation if dialect is None else dialect(generation)
        reserved = (
            RESERVED_FIELDS
            | PING.get(generation.task, {}).keys()
            | ({"response_format"} if generation.json_schema is not None else set())
        )
        clash = sorted(reserved & generation.sampling.keys())
        if clash:
            raise ValueError(f"sampling may not set {', '.join(clash)}: the client writes these request fields itself")
        self._generation = generation
        self._field = {"chat": b"messages", "completion": b"prompt"}.get(generation.task, b"input")
        self._head = self._encode(dict(generation.sampling))
        self._free: Requests | None = None
        if generation.json_schema is not None or self._given.structured_outputs is not None:
            self._free = Requests(replace(self._given, json_schema=None, structured_outputs=None), dialect)

    def _encode(self, sampling: Mapping[str, Any]) -> bytes:
        fields: dict[str, Any] = {"model": self._generation.asked_model, **sampling}
        if self._generation.json_schema is not None:
            schema = dict(self._generation.json_schema)
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": schema, "strict": strict_takes(schema)},
            }
        if self._generation.structured_outputs is not None:
            fields["structured_outputs"] = dict(self._generation.structured_outputs)
        head = orjson.dumps(fields)[:-1]
        return head if self._generation.task in PING else head + b',"' + self._field + b'":'

    def with_fields(self, fields: bytes) -> Generation:
        """The generation of a row with request fields of its own (a JSON object), as the server calls them.

        Raises RowRejected for what it cannot do.
        """
        generation = self._given.with_fields(fields)
        try:
            return generation if self._dialect is None else self._dialect(generation)
        except ValueError as error:
            raise RowRejected("unsupported_field", str(error)) from None

    def body(
        self,
        prompt: bytes,
        repair: Repair | None = None,
        fields: bytes = b"",
        max_tokens: int | None = None,
        *,
        free: bool = False,
    ) -> bytes:
        """The body for one row. `prompt` is JSON: messages for chat, a string otherwise. `fields`, `max_tokens`: the
        row's own, the latter before all others. `free`: without the form that outputs have.

        Raises RowRejected where the server cannot do what they ask for.
        """
        if free and self._free is not None:
            return self._free.body(prompt, repair, fields, max_tokens)
        generation = self.with_fields(fields) if fields else self._generation
        sampling = dict(generation.sampling)
        if max_tokens is not None:
            sampling |= dict.fromkeys(generation.limit_fields, max_tokens)
        head = self._encode(sampling) if fields or max_tokens is not None else self._head
        if repair is None:
            return _joined(head, prompt) if generation.task in PING else head + prompt + b"}"
        if self._generation.task == "chat":
            messages = self._with_repair(orjson.loads(prompt), repair)
            if not CONTINUES_ANSWER.keys().isdisjoint(sampling):
                head = self._encode({name: given for name, given in sampling.items() if name not in CONTINUES_ANSWER})
            return head + orjson.dumps(messages) + b"}"
        sampling["seed"] = int(sampling.get("seed") or 0) + repair.attempt
        return self._encode(sampling) + prompt + b"}"

    def _with_repair(self, messages: list[dict[str, Any]], repair: Repair) -> list[dict[str, Any]]:
        """The conversation, its answer (behind the beginning of it that the prompt has, if any), and what is wrong."""
        answer = repair.answer
        if messages and messages[-1].get("role") == "assistant" and isinstance(messages[-1].get("content"), str):
            answer = messages.pop()["content"] + answer
        form, what = "have the wanted form", "right text"
        if self._generation.json_schema is not None:
            form, what = "fit the JSON schema", "corrected JSON"
        wish = f"This answer does not {form}: {repair.problem}. Answer again with the {what} only."
        return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": wish}]

    def body_of_list(self, prompts: Sequence[bytes]) -> bytes:
        """The body for several texts, or pairs of texts; see `EngineClient.takes_lists`."""
        if self._generation.task == "score":
            pairs = [orjson.loads(prompt) for prompt in prompts]
            return _joined(self._head, orjson.dumps({name: [one[name] for one in pairs] for name in PING["score"]}))
        return self._head + b"[" + b",".join(prompts) + b"]}"

    def probe(self, prompt: bytes, *, content: bool, fields: bytes = b"") -> bytes:
        """A row's request again; without its content: same settings and roles, each text "ping"."""
        if content or self._generation.task != "chat":
            ping = orjson.dumps(PING.get(self._generation.task, "ping"))
            return self.body(prompt if content else ping, fields=fields)
        messages = orjson.loads(prompt)
        if len(messages) > PROBE_MESSAGES:
            messages = [*messages[: PROBE_MESSAGES - 1], messages[-1]]
        roles = [_probe_role(message) for message in messages]
        return self.body(orjson.dumps([{"role": role, "content": "ping"} for role in roles]), fields=fields)

    def canary(self, prompt: bytes | None = None) -> bytes:
        """The smallest request that makes the engine generate: one token, no schema. `prompt` as in `body`."""
        head = {"model": self._generation.asked_model}
        if self._generation.task in POOLED:
            asked = orjson.dumps(PING.get(self._generation.task, "ping")) if prompt is None else prompt
            if self._generation.task in PING:
                return _joined(orjson.dumps(head)[:-1], asked)
            return orjson.dumps({**head, "input": orjson.Fragment(asked)})
        content: Any = [{"role": "user", "content": "ping"}] if self._generation.task == "chat" else "ping"
        given = content if prompt is None else orjson.Fragment(prompt)
        limit = next(iter(self._generation.limit_fields), "max_tokens")  # OpenAI's reasoning models refuse max_tokens
        return orjson.dumps({**head, self._field.decode(): given, limit: 1})


def _joined(head: bytes, prompt: bytes) -> bytes:
    """A body of fields, as JSON without its last brace, and of a prompt that is a JSON object of further ones."""
    return head + b"," + prompt[1:]


def _probe_role(message: Mapping[str, Any]) -> Any:
    """A tool's message stands behind the call that it answers, which a probe does not have."""
    return "user" if message.get("role") == "tool" else message.get("role")


def read_answer(task: Task, status: int, headers: Mapping[str, str], body: bytes) -> Completion:
    """The completion in an HTTP answer; raises RowRejected, Transient or RequestDenied for anything else."""
    if status != 200:
        raise error_of(status, headers, body)
    try:
        answer = orjson.loads(body)
        if task in POOLED:
            return _pooled(task, answer)
        return _text(task, answer)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:  # as a hostile body may cause
        raise not_an_answer(task, headers, body) from error


def not_an_answer(task: Task, headers: Mapping[str, str], body: bytes) -> EngineError:
    """What a body of status 200 is instead of an answer: the error that it holds, or garbage, named as what it is.

    An error counts as of the status that it names, if any.
    """
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    if (error := unreadable.error_in(answer)) is None:
        return Transient("garbage_body", unreadable.what_is_wrong(body, task), status=200)
    if (status := unreadable.status_in(error)) is not None:
        return error_of(status, headers, body)
    message, *codes = _error_text(body)
    return error_of(429, headers, body) if quota_code(*codes) else Transient(ERROR_ANSWER, message, status=200)


def _text(task: Task, answer: Any) -> Completion:
    choice = at_index_0(answer["choices"])
    reason = choice.get("finish_reason")
    if reason is None or reason in BROKEN_FINISH_REASONS:
        raise Transient("unfinished", f"finish_reason {reason}", status=200)
    content = choice["message"].get("content") if task == "chat" else choice["text"]
    if content is None:  # a refusal, a tool call, or reasoning only: an empty text beside those parts
        content = ""
    if not isinstance(content, str):
        raise TypeError("content is no text")
    parts = chat_parts(choice) if task == "chat" else completion_parts(choice)
    word = answer_numbers.finish_word(reason)
    model = model_of(answer)
    prompt, completion = _usage(answer)
    cached = answer_numbers.cached_count(answer.get("usage"), prompt)
    filtered = word == FILTERED
    return Completion(content, word, prompt, completion, parts, filtered, model, cached)


def _pooled(task: Task, answer: Any) -> Completion:
    found = ranked_output(answer) if task == "rerank" else output_of(task, at_index_0(answer["data"]))
    return Completion(found, "stop", _usage(answer)[0], 0, model=model_of(answer))


def model_of(answer: Mapping[str, Any]) -> str | None:
    """The model that an answer names; None where it names none, or nothing that could be shown and stored."""
    return answer_numbers.short_name(answer.get("model")).strip() or None


def _usage(answer: Any) -> tuple[int, int]:
    """(prompt tokens, completion tokens) as the server counts them; 0 where it does not."""
    usage = answer.get("usage") or {}
    return (
        answer_numbers.token_count(usage.get("prompt_tokens")),
        answer_numbers.token_count(usage.get("completion_tokens")),
    )


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> EngineError:
    """What an HTTP status other than 200 means for the row or the engine."""
    error = _error_of(status, headers, body)
    error.status = status
    return error


def _error_of(status: int, headers: Mapping[str, str], body: bytes) -> EngineError:
    message, code, kind = _error_text(body)
    if status >= 400 and (spent := quota_code(code, kind)):
        return RequestDenied(rejected(status), _out_of_quota(status, spent), message, of_account=True)
    if status == 500 and _TOO_LONG_TO_EMBED.search(message):
        return RowRejected(CONTEXT_EXCEEDED, message)
    if status in (408, 425, 429) or status >= 500 or status < 200:
        return Transient(f"http_{status}", message, retry_after=retry_after(headers), taken=status != 429)
    if 200 <= status < 300:
        return Transient("garbage_body", f"status {status} without an answer")
    if status not in _ACCESS and _TOO_LONG.search(f"{code} {kind} {message}"):
        return RowRejected(CONTEXT_EXCEEDED, message)
    return RequestDenied(rejected(status), _refusal(status), message)


def rejected(status: int) -> str:
    """The error code of a row whose request was refused with this status (rejected_400)."""
    return f"{_REJECTED}{status}"


_ACCESS = frozenset({401, 403, 404, 405, *range(300, 400)})
_OF_ACCESS = frozenset(map(rejected, _ACCESS))


def message_kind(message: str) -> str:
    """What messages of one kind have in common: figures and what is quoted differ from row to row."""
    return _FIGURES.sub("0", _QUOTED.sub("''", message.lower()))


def _refusal(status: int) -> str:
    if status in (401, 403):
        return f"expected the API key to be accepted, found status {status}: check the engine's key"
    if status in (404, 405):
        return f"expected an OpenAI-compatible endpoint with the wanted model, found status {status}: check both"
    if status == 402:
        return "expected an account with credit, found status 402: look at its billing page"
    if status >= 400:
        return (
            f"expected requests of this dataset to be taken, found them refused with status {status}, a short one with "
            "the same settings too: check sampling and output against what the server allows"
        )
    return f"expected an answer, found a redirect (status {status}), which is never followed: use the final address"


def _out_of_quota(status: int, code: str) -> str:
    return (
        f"expected an account that can pay for requests, found status {status} ({code}): look at its credit, its quota "
        "and its spend limits on the billing pages of whoever runs the endpoint"
    )


def _error_text(body: bytes) -> tuple[str, str, str]:
    """(message, code, type) of an error body: OpenAI's `{"error": {…}}`, FastAPI's `{"detail": …}`, or plain text."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:MESSAGE_LENGTH].decode("utf-8", "replace"), "", ""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    try:
        if isinstance(error, dict):
            message = error.get("message") or error.get("detail") or ""
            return str(message)[:MESSAGE_LENGTH], str(error.get("code")), str(error.get("type"))
        return str(error)[:MESSAGE_LENGTH], "", ""
    except RecursionError:  # lists in lists, nearly as deep as orjson reads them
        return "", "", ""


def error_code(body: bytes) -> str:
    """The code of an error body; "" where it has none."""
    return _error_text(body)[1]


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for (RFC 9110 section 10.2.3: seconds or a date), or None.

    An hour at most, whatever it says.
    """
    value = headers.get("Retry-After")
    if value is None:
        return None
    with suppress(ValueError):
        return answer_numbers.wait_seconds(float(value))
    try:
        asked = parsedate_to_datetime(value) - parsedate_to_datetime(headers.get("Date", ""))
    except (ValueError, TypeError, OverflowError):  # no date, or one with a time zone and one without
        return None
    return answer_numbers.wait_seconds(asked.total_seconds())
