"""An engine client for requests that somebody else wrote: bodies go out and answers come back as they are.

A row's prompt is the whole body of its request, and its output the whole body of the answer, as JSON on one line. What
an answer means for the engine (lost, overloaded, alive) is judged as for any other row. Requests for the vector of one
text may go out as one request for several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from gpu_runner.bounded_http.bounded_read import (
    ERROR_BYTES,
    PAGE_BYTES,
    Admit,
    BodyTooLarge,
    UnaskedEncoding,
    check_values,
    read_beginning,
    read_body,
)
from gpu_runner.client.answers import answer_numbers, unreadable
from gpu_runner.client.answers.answer_limit import list_limit
from gpu_runner.client.engine_client import EngineClient
from gpu_runner.client.input_lists import EmbeddingBody, answers_of_inputs, body_of_texts
from gpu_runner.client.protocol import (
    BROKEN_FINISH_REASONS,
    Completion,
    EngineError,
    EngineRefused,
    Repair,
    RequestDenied,
    RowRejected,
    Transient,
    error_of,
    not_an_answer,
    rejected,
)
from gpu_runner.rows import TOKEN_LIMITS, Task

# Of an answer that is an error, what is kept. vLLM's may repeat the prompt.
KEPT_ERROR_BYTES = 16_384


class VerbatimClient(EngineClient):
    """`EngineClient` for whole requests. `generate` never repairs: what came is the answer."""

    async def generate(
        self,
        prompt: bytes,
        *,
        repair: Repair | None = None,
        admit: Admit | None = None,
        fields: bytes = b"",
        max_tokens: int | None = None,
        free: bool = False,
        user: bool = False,
    ) -> Completion:
        """Asks for one row. Raises RowRejected, Transient, and EngineRefused where the key or the model is refused."""
        return await self._ask(prompt, admit, self._completion)

    def list_kind(self, prompt: bytes) -> object:
        """Requests of one text that agree in all else may go in one list; None: this one goes alone."""
        body = EmbeddingBody.read(prompt)
        return None if body is None else body.fields

    async def generate_list(self, prompts: Sequence[bytes], *, admit: Admit | None = None) -> list[Completion]:
        """Asks for the vectors of several rows of one `list_kind` by one request. Raises like `generate`: for all.

        Each row's answer is one of its own, with its share of the tokens.
        """
        bodies = [body for prompt in prompts if (body := EmbeddingBody.read(prompt)) is not None]
        if len(bodies) != len(prompts) or len({body.fields for body in bodies}) != 1:
            raise ValueError("expected requests of one text that agree in all else")
        texts = [body.text for body in bodies]
        limit, weights = list_limit(self._limit, len(texts)), [len(text) for text in texts]

        async def read(answer: aiohttp.ClientResponse, admit: Admit | None) -> list[Completion]:
            return read_each(await self._body(answer, limit, admit), weights)

        return await self._ask(body_of_texts(bodies[0].fields, texts), admit, read)

    async def canary(self, prompt: bytes | None = None) -> None:
        """One token, to a row's request if there is one. Raises like `generate`."""
        if prompt is None:
            await super().canary(None)
            return
        body = orjson.loads(prompt)
        if self.generation.task != "embedding":
            asked = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
            body = {name: value for name, value in body.items() if name not in TOKEN_LIMITS} | {asked: 1}
        await self._ask(orjson.dumps(body), None, self._completion)

    async def probe(self, prompt: bytes, *, content: bool, fields: bytes = b"") -> None:
        """One token, to a row's own body or to none: each row has its own settings. Raises like `generate`."""
        await self.canary(prompt if content else None)

    async def _completion(self, answer: aiohttp.ClientResponse, admit: Admit | None) -> Completion:
        return read_whole(await self._body(answer, self._limit, admit), self.generation.task)

    @staticmethod
    async def _body(answer: aiohttp.ClientResponse, limit: int, admit: Admit | None) -> bytes:
        """The body of an answer of status 200, of `limit` bytes at most."""
        try:
            if answer.status != 200:
                raise refusal(answer, await read_beginning(answer, ERROR_BYTES))
            body = await read_body(answer, limit, admit)
            if len(body) > PAGE_BYTES:
                check_values(body, limit)
        except (BodyTooLarge, ValueError) as error:
            raise RowRejected("answer_too_large", f"expected at most {limit:,} bytes, found {error}") from error
        except UnaskedEncoding as error:
            raise RowRejected("content_encoding", "expected an answer without an encoding") from error
        return body


def refusal(answer: aiohttp.ClientResponse, body: bytes) -> EngineError:
    """What a status other than 200 means. The message is the answer's body, as JSON; `code` has its status.

    A request that is refused is its writer's affair: only a refused key or model says something of the engine.
    """
    return _as_of_row(answer.status, error_of(answer.status, answer.headers, body), body)


def _not_an_answer(body: bytes, task: Task) -> EngineError:
    """As of the status that an error in the body names, else of a bad gateway; or garbage."""
    error = not_an_answer(task, {}, body)
    if isinstance(error, Transient) and error.code == "garbage_body":
        return error
    status = unreadable.status_in(unreadable.error_in(orjson.loads(body))) or 502
    return _as_of_row(status, error_of(status, {}, body), body)


def _as_of_row(status: int, error: EngineError, body: bytes) -> EngineError:
    if isinstance(error, RequestDenied) and (error.of_account or _of_all_requests(status, body)):
        return EngineRefused(str(error))
    if isinstance(error, RowRejected | RequestDenied):
        error = RowRejected(rejected(status))
    if isinstance(error, RowRejected | Transient):
        error.message = error_json(body)
    return error


def _of_all_requests(status: int, body: bytes) -> bool:
    """Whether an error is of key, credit or address; or a 404 that says that there is no such model, which was served
    when it was asked.
    """
    no_model = status == 404 and b"model" in body[:KEPT_ERROR_BYTES].lower()
    return status in (401, 402) or 300 <= status < 400 or no_model


def error_json(body: bytes) -> str:
    """The body of an error as JSON on one line, within bounds."""
    try:
        packed = orjson.dumps(orjson.loads(body))
    except (orjson.JSONDecodeError, TypeError, RecursionError):
        packed = b""
    if not packed or len(packed) > KEPT_ERROR_BYTES:
        text = body[: KEPT_ERROR_BYTES // 8].decode("utf-8", "replace")
        packed = orjson.dumps({"error": {"message": text, "type": None, "param": None, "code": None}})
    return packed.decode()


def read_whole(body: bytes, task: Task = "chat") -> Completion:
    """An answer of status 200. Raises Transient for one that is no answer, or that the engine broke off.

    An error in its place counts as of the status that it names: Transient, RowRejected or EngineRefused.
    """
    try:
        answer = orjson.loads(body)
        if not answer.get("choices") and not answer.get("data"):
            raise ValueError("expected an answer")
        choices = answer.get("choices", [])
        reason = _finish_reason(choices)
        usage = answer.get("usage") or {}
        tokens = [answer_numbers.token_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")]
        cached = answer_numbers.cached_count(usage, tokens[0])
        text = orjson.dumps(answer).decode()
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _not_an_answer(body, task) from error
    return Completion(text, reason, tokens[0], tokens[1], cached_tokens=cached)


def read_each(body: bytes, weights: Sequence[int]) -> list[Completion]:
    """The answers to several texts of one request. `weights`: bytes of each. Raises Transient."""
    try:
        found = answers_of_inputs(orjson.loads(body), weights)
        return [
            Completion(orjson.dumps(answer).decode(), "stop", answer["usage"]["prompt_tokens"], 0) for answer in found
        ]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _not_an_answer(body, "embedding") from error


def _finish_reason(choices: Any) -> str:
    """The finish reason of the first choice; "stop" where there are none (embeddings). Raises Transient where one is
    unfinished.
    """
    reasons = [choice.get("finish_reason") for choice in choices]
    for reason in reasons:
        if reason is None or reason in BROKEN_FINISH_REASONS:
            raise Transient("unfinished", f"finish_reason {reason}", status=200)
    return answer_numbers.finish_word(reasons[0]) if reasons else "stop"
