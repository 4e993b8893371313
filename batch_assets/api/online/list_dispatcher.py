"""Texts of several online requests as lists to an engine, together with those of `/v1/embeddings`.

Each text has its own outcome: a text that the engine refuses fails its own request and no other. A request whose try
failed goes alone from then on, so what breaks an engine costs the others of its list one try.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import orjson

from batch_assets.api.access.request_access import RequestAccess, continued_trace
from batch_assets.api.interactive.embedding_lists import (
    EmbeddingAnswer,
    EmbeddingInput,
    EmbeddingLists,
    EngineRefusal,
    read_inputs,
)
from batch_assets.api.interactive.event_stream import Usage
from batch_assets.api.interactive.request_body import InteractiveRequest, size_of
from batch_assets.api.online.dispatcher import DispatchAnswer, Dispatcher, DispatchRequest, failure_of
from batch_assets.api.online.queues.tasks import TaskKind
from batch_assets.api.requests.api_error import ApiError

MOST_TEXTS = 16  # of a request that is taken apart; more are a list that is worth its own request


class ListDispatcher:
    """Embeddings through `lists`, all else through `alone`. `used` is told the tokens of an answer, by its model."""

    def __init__(self, alone: Dispatcher, lists: EmbeddingLists, used: Callable[[str, Usage], None]) -> None:
        self._alone, self._lists, self._used = alone, lists, used

    def identity(self, model: str) -> str:
        """As it is without lists."""
        return self._alone.identity(model)

    async def ask(self, request: DispatchRequest) -> DispatchAnswer:
        """An engine's answer. Raises DispatchFailed."""
        answers = await self._listed(request)
        if answers is None:
            return await self._alone.ask(request)
        answer = joined(answers)
        if answer.usage is not None:
            self._used(request.model, answer.usage)
        return answer

    async def _listed(self, request: DispatchRequest) -> list[EmbeddingAnswer] | None:
        """None: the request is to go alone."""
        if request.kind is not TaskKind.EMBEDDING or request.failures:
            return None
        size = size_of(orjson.loads(request.body), len(request.body))
        wanted = InteractiveRequest(request.model, request.body, False, False, request.expected_tokens, size)
        inputs = read_inputs(wanted, RequestAccess(trace=continued_trace(request.traceparent)), MOST_TEXTS)
        return None if inputs is None else await self._asked(inputs)

    async def _asked(self, inputs: Sequence[EmbeddingInput]) -> list[EmbeddingAnswer] | None:
        """The answers to all texts; the first failure ends the others. Raises DispatchFailed."""
        asked = [asyncio.create_task(self._lists.ask(one)) for one in inputs]
        try:  # no TaskGroup: it cancels its parent, whom `raise_if_cancelled` would then believe to be ended
            answers = await asyncio.gather(*asked)
        except ApiError as error:
            raise failure_of(error, asked=isinstance(error, EngineRefusal)) from None
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        found = [answer for answer in answers if answer is not None]
        return found if len(found) == len(inputs) else None


def joined(answers: Sequence[EmbeddingAnswer]) -> DispatchAnswer:
    """One answer to the request whose texts these answer, in order. Without usage where the engine does not count."""
    found = [orjson.loads(answer.body) for answer in answers]
    data = [{**one["data"][0], "index": place} for place, one in enumerate(found)]
    counted = [answer.usage for answer in answers if answer.usage is not None]
    beside = {name: value for name, value in found[0].items() if name not in ("data", "usage")}
    if len(counted) < len(answers):
        return DispatchAnswer(orjson.dumps({**beside, "data": data}), None)
    usage = Usage(sum(one.prompt_tokens for one in counted), 0)
    tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    return DispatchAnswer(orjson.dumps({**beside, "data": data, "usage": tokens}), usage)
