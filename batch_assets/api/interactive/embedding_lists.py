"""Embeddings of many callers as lists to an engine, where the setting BATCH_ASSETS_MICRO_BATCHES is `on`.

Only requests of one text (online: of a few) are collected, and only with others that agree in every other field. Each
caller gets an answer of its own, with its own error. Tokens are counted by the engine for the list; a caller's are its
share of them, by the bytes of its text.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from prometheus_client import Gauge, Histogram

from batch_assets.api.access.request_access import RequestAccess
from batch_assets.api.interactive.event_stream import Usage
from batch_assets.api.interactive.proxy import Proxy
from batch_assets.api.interactive.request_body import InteractiveRequest, RequestSize
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.telemetry.metrics import ServiceMetrics
from batch_assets.settings import SettingError
from gpu_runner.client.input_lists import answers_of_inputs, body_of_texts, fields_beside
from gpu_runner.micro_batches.list_batcher import BatcherClosed, BatcherFull, BatchPolicy, ListBatcher, ListRefused

MICRO_BATCHES = "BATCH_ASSETS_MICRO_BATCHES"
PATH = "/v1/embeddings"
MOST_BATCHERS = 100
MOST_CALLERS = 4096  # in all lists together: what bounds the memory of texts that wait
LONGEST_FIELDS = 1000  # bytes of all fields but the text: what has more is rare, and goes alone
LONGEST_TEXT = 64 << 10  # bytes; a longer one fills a list by itself, and goes alone
# What an engine says of the inputs, not of the list as such.
_REFUSED = frozenset({400, 413, 422})
_SIZES = (1, 2, 4, 8, 16, 32, 48, 64)
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingInput:
    """One text of one request. `fields`: all others of the request, as JSON without its last brace; `text` as JSON."""

    model: str
    fields: bytes
    text: bytes
    access: RequestAccess
    expected_tokens: int


@dataclass(frozen=True, slots=True)
class EmbeddingAnswer:
    """The body for one caller, and its share of the tokens; None where the engine does not count."""

    body: bytes
    usage: Usage | None


class EngineRefusal(ApiError):
    """An engine has answered, and it was no success: these are its words, or stand for them."""


class BatchFigures:
    """What is measured of lists. Implements BatchObserver."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        name = "batch_assets_"
        self._sizes = Histogram(
            f"{name}batch_size_distribution", "Inputs of a list.", registry=metrics.registry, buckets=_SIZES
        )
        self._waits = Histogram(
            f"{name}micro_batch_wait_seconds",
            "From the first input of a list to its sending.",
            registry=metrics.registry,
            buckets=_SECONDS,
        )
        self._engine = Histogram(
            f"{name}micro_batch_engine_seconds",
            "Of an engine, for a list.",
            registry=metrics.registry,
            buckets=_SECONDS,
        )
        self._depth = Gauge(f"{name}micro_batch_waiting", "Inputs that wait to be sent.", registry=metrics.registry)

    def of_one(self) -> _ShardFigures:
        """An observer for one batcher."""
        return _ShardFigures(self)

    def sent(self, size: int, waited: float) -> None:
        """A list goes to an engine."""
        self._sizes.observe(size)
        self._waits.observe(waited)

    def answered(self, seconds: float) -> None:
        """Count a list that was answered."""
        self._engine.observe(seconds)

    def depth(self, more: int) -> None:
        """So many more wait, or fewer."""
        self._depth.inc(more)


class _ShardFigures:
    """The figures of one batcher: its depth is one part of the sum."""

    def __init__(self, figures: BatchFigures) -> None:
        self._figures, self._waiting = figures, 0

    def sent(self, size: int, waited: float) -> None:
        self._figures.sent(size, waited)

    def answered(self, seconds: float) -> None:
        self._figures.answered(seconds)

    def depth(self, waiting: int) -> None:
        self._figures.depth(waiting - self._waiting)
        self._waiting = waiting


class EmbeddingLists:
    """One batcher for each combination of model and other fields. Async context manager; lives on one event loop."""

    def __init__(self, proxy: Proxy, figures: BatchFigures, policy: BatchPolicy | None = None) -> None:
        self._proxy, self._figures, self._policy = proxy, figures, policy or BatchPolicy()
        self._batchers: OrderedDict[bytes, ListBatcher[EmbeddingInput, EmbeddingAnswer]] = OrderedDict()
        self._callers = 0

    async def __aenter__(self) -> EmbeddingLists:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*[batcher.close() for batcher in self._batchers.values()])

    async def ask(self, wanted: EmbeddingInput) -> EmbeddingAnswer | None:
        """The answer to one text; None where too many kinds of requests are under way. Raises ApiError."""
        batcher = self._batcher(wanted.fields)
        if batcher is None:
            return None
        if self._callers >= MOST_CALLERS:
            raise _overloaded()
        self._callers += 1
        try:
            return await batcher.ask(wanted)
        except BatcherFull:
            raise _overloaded() from None
        except BatcherClosed:
            raise ApiError(503, "The service is shutting down.", headers={"Retry-After": "5"}) from None
        finally:
            self._callers -= 1

    def _batcher(self, fields: bytes) -> ListBatcher[EmbeddingInput, EmbeddingAnswer] | None:
        found = self._batchers.get(fields)
        if found is None:
            if len(self._batchers) >= MOST_BATCHERS:
                oldest = next(iter(self._batchers))
                if not self._batchers[oldest].idle:
                    return None
                del self._batchers[oldest]
            found = ListBatcher(self._send, _size_of, self._policy, self._figures.of_one())
            self._batchers[fields] = found
        self._batchers.move_to_end(fields)
        return found

    async def _send(self, inputs: Sequence[EmbeddingInput]) -> list[EmbeddingAnswer]:
        first = inputs[0]
        texts = [one.text for one in inputs]
        body = body_of_texts(first.fields, texts)
        expected = sum([one.expected_tokens for one in inputs])
        size = RequestSize(expected, 0, generates=False)
        request = InteractiveRequest(first.model, body, False, False, expected, size)
        async with self._proxy.open(PATH, request, first.access, time.monotonic()) as answer:
            if answer.http.status != 200:
                error = await self._proxy.refusal(answer, PATH)
                said = EngineRefusal(
                    error.status, error.message, param=error.param, code=error.code, headers=error.headers
                )
                if error.status in _REFUSED:
                    raise ListRefused(said)
                if len(inputs) == 1 or error.status >= 500:
                    raise said
                # The engine's words may quote a text, and the texts of a list may be of several tenants.
                raise EngineRefusal(error.status, "The engine refused the request.")
            try:
                found, usage = await self._proxy.whole(answer)
            except ApiError as error:
                if len(inputs) == 1:
                    raise
                raise ApiError(error.status, "The engine could not answer the request.", code=error.code) from error
        try:
            return _answers(orjson.loads(found), usage, [len(text) for text in texts])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ApiError(502, "The engine's answer could not be read.", code="engine_garbage") from error


def read_input(request: InteractiveRequest, access: RequestAccess) -> EmbeddingInput | None:
    """The one text of a request; None for a request that goes alone: a list, token ids, unusual fields, a long text."""
    fields: dict[str, Any] = orjson.loads(request.body)
    text = fields.pop("input", None)
    found = _inputs(request, fields, [text], access) if isinstance(text, str) else None
    return None if found is None else found[0]


def read_inputs(request: InteractiveRequest, access: RequestAccess, most: int) -> list[EmbeddingInput] | None:
    """Each text of a list of `most` texts at most; None for a request that goes alone."""
    fields: dict[str, Any] = orjson.loads(request.body)
    texts = fields.pop("input", None)
    if not isinstance(texts, list) or not 0 < len(texts) <= most or not all(isinstance(text, str) for text in texts):
        return None
    return _inputs(request, fields, texts, access)


def _inputs(
    request: InteractiveRequest, fields: Mapping[str, Any], texts: Sequence[str], access: RequestAccess
) -> list[EmbeddingInput] | None:
    """`fields`: all but the texts. The tokens that are expected are shared evenly."""
    if any(len(text) > LONGEST_TEXT for text in texts):
        return None
    with contextlib.suppress(orjson.JSONEncodeError):
        others = fields_beside(fields)
        encoded = [orjson.dumps(text) for text in texts]
        if len(others) <= LONGEST_FIELDS and all(len(text) <= LONGEST_TEXT for text in encoded):
            expected = -(-request.expected_tokens // len(texts))
            return [EmbeddingInput(request.model, others, text, access, expected) for text in encoded]
    return None


def _overloaded() -> ApiError:
    return ApiError(503, "The service is overloaded. Please try again.", headers={"Retry-After": "1"})


def _size_of(one: EmbeddingInput) -> int:
    return len(one.text)


def _answers(found: Mapping[str, Any], usage: Usage | None, sizes: Sequence[int]) -> list[EmbeddingAnswer]:
    """An answer for each input; the tokens of all are those of `usage`. Raises as `answers_of_inputs`."""
    found = {**found, "usage": {"prompt_tokens": usage.prompt_tokens if usage else 0}}
    return [
        EmbeddingAnswer(orjson.dumps(body), Usage(body["usage"]["prompt_tokens"], 0) if usage else None)
        for body in answers_of_inputs(found, sizes)
    ]


def embedding_lists(proxy: Proxy, metrics: ServiceMetrics) -> EmbeddingLists | None:
    """As the setting says. Raises SettingError."""
    text = os.environ.get(MICRO_BATCHES, "").strip() or "off"
    if text not in ("on", "off"):
        raise SettingError(f"{MICRO_BATCHES}: expected on or off, found {text!r:.40}")
    return EmbeddingLists(proxy, BatchFigures(metrics)) if text == "on" else None
