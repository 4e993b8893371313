"""What goes over the wire to an OpenAI-compatible server, and what its answers mean. Pure functions.

An answer becomes a `Completion` or one of the errors below; the feed decides by the error's class what
happens to the row. Messages of servers may echo prompts: they are cut here and belong into outcomes only,
never into logs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from gpu_runner import answer_numbers
from gpu_runner.answer_parts import NO_PARTS, AnswerParts, at_index_0, chat_parts, completion_parts
from gpu_runner.rows import Generation, Output, Task

MESSAGE_LENGTH = 500

# Request fields that the client writes itself; in `sampling` they would contradict it.
RESERVED_FIELDS = frozenset({"model", "messages", "prompt", "input", "stream", "stream_options", "n"})

PATHS: Mapping[Task, str] = {"chat": "chat/completions", "completion": "completions", "embedding": "embeddings"}

# vLLM ends a request with these when it did not finish the row itself (shutdown, engine error).
BROKEN_FINISH_REASONS = frozenset({"abort", "error"})

# vLLM 0.32 and OpenAI wordings of "prompt (plus max_tokens) does not fit the context".
_TOO_LONG = re.compile(
    r"context_length_exceeded|maximum context length|longer than the maximum model length|max_model_len|"
    r"context (window|length)|prompt is too long|maximum input length|input is too long",
    re.IGNORECASE,
)


class EngineError(Exception):
    """Base of everything an engine can do instead of answering."""


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

    def __init__(self, code: str, message: str = "", *, retry_after: float | None = None, taken: bool = True) -> None:
        super().__init__(code)
        self.code, self.message = code, message[:MESSAGE_LENGTH]
        self.retry_after, self.taken = retry_after, taken

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
    """One request was answered as if nothing could be had here: 401, 403, 404, 405, a redirect.

    Whether that is so, or meant for this row alone (a gateway that moderates), only another request shows. The text
    is for the case that it is so; `code` and `message` are those of the row's dead letter otherwise.
    """

    def __init__(self, code: str, refusal: str, message: str = "") -> None:
        super().__init__(refusal)
        self.code, self.message = code, message[:MESSAGE_LENGTH]


class EngineLost(EngineError):
    """The engine is gone or makes no progress. `reason` is a stable word: unreachable, not_ready, restarted,
    stalled or no_progress.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `output` is text, or a vector for embeddings; an empty text is an answer too.

    `parts`: what it holds besides.
    """

    output: Output
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    parts: AnswerParts = NO_PARTS


@dataclass(frozen=True, slots=True)
class Repair:
    """A second request for an answer that did not fit the schema: what was answered and what is wrong with it."""

    answer: str
    problem: str
    attempt: int


class Requests:
    """Builds request bodies of one generation; everything but the prompt is encoded once."""

    def __init__(self, generation: Generation) -> None:
        reserved = RESERVED_FIELDS | ({"response_format"} if generation.json_schema is not None else set())
        clash = sorted(reserved & generation.sampling.keys())
        if clash:
            raise ValueError(f"sampling may not set {', '.join(clash)}: the client writes these request fields itself")
        self._generation = generation
        self._field = {"chat": b"messages", "completion": b"prompt", "embedding": b"input"}[generation.task]
        self._head = self._encode(dict(generation.sampling))

    def _encode(self, sampling: Mapping[str, Any]) -> bytes:
        fields: dict[str, Any] = {"model": self._generation.model, **sampling}
        if self._generation.json_schema is not None:
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": dict(self._generation.json_schema), "strict": True},
            }
        return orjson.dumps(fields)[:-1] + b',"' + self._field + b'":'

    def body(self, prompt: bytes, repair: Repair | None = None) -> bytes:
        """The body for one row. `prompt` is JSON: messages for chat, a string otherwise."""
        if repair is None:
            return self._head + prompt + b"}"
        sampling = dict(self._generation.sampling)
        if self._generation.task == "chat":
            messages = [*orjson.loads(prompt), *_repair_messages(repair)]
            return self._head + orjson.dumps(messages) + b"}"
        sampling["seed"] = int(sampling.get("seed") or 0) + repair.attempt
        return self._encode(sampling) + prompt + b"}"

    def canary(self) -> bytes:
        """The smallest request that makes the engine generate: one token, no schema."""
        fields: dict[str, Any] = {"model": self._generation.model}
        if self._generation.task == "chat":
            fields |= {"messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
        elif self._generation.task == "completion":
            fields |= {"prompt": "ping", "max_tokens": 1}
        else:
            fields |= {"input": "ping"}
        return orjson.dumps(fields)


def _repair_messages(repair: Repair) -> list[dict[str, str]]:
    wish = f"This answer does not fit the JSON schema: {repair.problem}. Answer again with the corrected JSON only."
    return [{"role": "assistant", "content": repair.answer}, {"role": "user", "content": wish}]


def read_answer(task: Task, status: int, headers: Mapping[str, str], body: bytes) -> Completion:
    """The completion in an HTTP answer; raises RowRejected, Transient or RequestDenied for anything else."""
    if status != 200:
        raise error_of(status, headers, body)
    try:
        answer = orjson.loads(body)
        if task == "embedding":
            return _embedding(answer)
        return _text(task, answer)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:  # as a hostile body may cause
        raise Transient("garbage_body", f"{len(body)} bytes that are no {task} answer") from error


def _text(task: Task, answer: Any) -> Completion:
    choice = at_index_0(answer["choices"])
    reason = choice.get("finish_reason")
    if reason is None or reason in BROKEN_FINISH_REASONS:
        raise Transient("unfinished", f"finish_reason {reason}")
    content = choice["message"].get("content") if task == "chat" else choice["text"]
    if content is None:  # a refusal, a tool call, or reasoning only: an empty text beside those parts
        content = ""
    if not isinstance(content, str):
        raise TypeError("content is no text")
    parts = chat_parts(choice) if task == "chat" else completion_parts(choice)
    return Completion(content, answer_numbers.finish_word(reason), *_usage(answer), parts)


def _embedding(answer: Any) -> Completion:
    vector = answer_numbers.vector_of(at_index_0(answer["data"])["embedding"])
    return Completion(vector, "stop", _usage(answer)[0], 0)


def _usage(answer: Any) -> tuple[int, int]:
    """(prompt tokens, completion tokens) as the server counts them; 0 where it does not."""
    usage = answer.get("usage") or {}
    return (
        answer_numbers.token_count(usage.get("prompt_tokens")),
        answer_numbers.token_count(usage.get("completion_tokens")),
    )


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> EngineError:
    """What an HTTP status other than 200 means for the row or the engine."""
    message, code = _error_text(body)
    if status in (401, 403, 404, 405) or 300 <= status < 400:
        return RequestDenied(f"rejected_{status}", _refusal(status), message)
    if status in (408, 425, 429) or status >= 500 or status < 200:
        return Transient(f"http_{status}", message, retry_after=retry_after(headers), taken=status != 429)
    if status < 300:
        return Transient("garbage_body", f"status {status} without an answer")
    if _TOO_LONG.search(f"{code} {message}"):
        return RowRejected("context_length_exceeded", message)
    return RowRejected(f"rejected_{status}", message)


def _refusal(status: int) -> str:
    if status in (401, 403):
        return f"expected the API key to be accepted, found status {status}: check the engine's key"
    if status in (404, 405):
        return f"expected an OpenAI-compatible endpoint with the wanted model, found status {status}: check both"
    return f"expected an answer, found a redirect (status {status}), which is never followed: use the final address"


def _error_text(body: bytes) -> tuple[str, str]:
    """(message, code) of an error body: OpenAI's `{"error": {…}}`, FastAPI's `{"detail": …}`, or plain text."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:MESSAGE_LENGTH].decode("utf-8", "replace"), ""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    try:
        if isinstance(error, dict):
            message = error.get("message") or error.get("detail") or ""
            return str(message)[:MESSAGE_LENGTH], f"{error.get('code')} {error.get('type')}"
        return str(error)[:MESSAGE_LENGTH], ""
    except RecursionError:  # lists in lists, nearly as deep as orjson reads them
        return "", ""


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


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """vLLM's own view of its load. `kv_usage` is 0..1; the two after it are counters since its start.

    `started_at`: when the server's process began, in Unix seconds of its machine; None where the page does not tell
    (several API servers of one vLLM show a page of their sums).
    """

    running: int
    waiting: int
    kv_usage: float
    generated_tokens: int
    preemptions: int
    started_at: float | None = None


# vLLM's metric names; gpu_cache_usage_perc is the name before 0.9.
_METRIC = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc"
    rb"|generation_tokens_total|num_preemptions_total)(?:\{[^\n]*\})? (\S+)",
    re.MULTILINE,
)
# Of Prometheus' own client library, on Linux.
_STARTED = re.compile(rb"^process_start_time_seconds (\S+)", re.MULTILINE)


class MalformedMetrics(ValueError):
    """A page of vLLM's metrics in which a figure is none."""


def parse_metrics(text: bytes) -> EngineLoad | None:
    """The load in a Prometheus page, summed over data-parallel engines; None when it is not vLLM's.

    Raises MalformedMetrics for figures that cannot be: NaN, negative, beyond 2^53, no number. The page then says
    nothing: a counter that was left out would look like an engine that began anew.
    """
    sums: dict[bytes, float] = {}
    for name, value in _METRIC.findall(text):
        try:
            figure = answer_numbers.metric(value)
        except ValueError:
            raise MalformedMetrics(f"vllm:{name.decode()}: expected a number of 0 or more") from None
        if name.endswith(b"usage_perc"):
            sums[b"kv"] = max(sums.get(b"kv", 0.0), figure)
        else:
            sums[name] = sums.get(name, 0.0) + figure
    if b"num_requests_running" not in sums:
        return None
    started = _STARTED.search(text)
    return EngineLoad(
        running=int(sums[b"num_requests_running"]),
        waiting=int(sums.get(b"num_requests_waiting", 0)),
        kv_usage=sums.get(b"kv", 0.0),
        generated_tokens=int(sums.get(b"generation_tokens_total", 0)),
        preemptions=int(sums.get(b"num_preemptions_total", 0)),
        started_at=answer_numbers.unix_seconds(started[1]) if started else None,
    )
