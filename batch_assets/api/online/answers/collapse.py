"""A dispatcher that asks once for the same request: those in flight together get one answer, later ones the kept one.

Requests of one process wait for the one that was sent. Of other processes they wait for the kept answer as long as the
other process says that it asks. Where the cache is away or slow, each process asks for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from batch_assets.api.online.answers.answer_cache import (
    MOST_ANSWER,
    AnswerCache,
    CacheAway,
    answer_key,
    sealed,
    unsealed,
)
from batch_assets.api.online.dispatcher import (
    DispatchAnswer,
    Dispatcher,
    DispatchFailed,
    DispatchRequest,
    Failure,
)
from batch_assets.api.online.online_metrics import OnlineFigures
from batch_assets.api.online.request import read_answer

ASKED_SECONDS = 10.0  # how long another process is believed to ask
LOOK_AGAIN = (0.01, 0.02, 0.05, 0.1)


class CollapsedRequests:
    """`groups`: tenants that share answers. Others share with nobody: no answer's time tells of another tenant."""

    def __init__(
        self, dispatcher: Dispatcher, cache: AnswerCache, groups: Mapping[str, str], figures: OnlineFigures
    ) -> None:
        self._dispatcher, self._cache, self._groups, self._figures = dispatcher, cache, groups, figures
        self._asked: dict[str, asyncio.Future[DispatchAnswer]] = {}

    async def ask(self, tenant: str, request: DispatchRequest, *, reusable: bool) -> tuple[DispatchAnswer, bool]:
        """The answer, and whether it was another request's. Raises DispatchFailed."""
        if not reusable:
            return await self._fresh(request), False
        identity = self._dispatcher.identity(request.model)
        group = self._groups.get(tenant)
        name = f"tenant {tenant}" if group is None else f"group {group}"
        key = answer_key(name, identity, request.kind.path, request.body)
        while (leader := self._asked.get(key)) is not None:
            with contextlib.suppress(_Left):
                answer = await asyncio.shield(leader)
                self._figures.cache("collapsed")
                return answer, True
        return await self._lead(key, request)

    async def _lead(self, key: str, request: DispatchRequest) -> tuple[DispatchAnswer, bool]:
        """Ask for all who want this now."""
        leader: asyncio.Future[DispatchAnswer] = asyncio.get_running_loop().create_future()
        leader.add_done_callback(_retrieved)
        self._asked[key] = leader
        try:
            found = await self._kept(key)
            answer = found if found is not None else await self._ask(key, request)
        except DispatchFailed as error:
            leader.set_exception(error)
            raise
        except BaseException:  # whoever waits begins anew
            leader.set_exception(_Left())
            raise
        else:
            leader.set_result(answer)
            return answer, found is not None
        finally:
            del self._asked[key]

    async def _kept(self, key: str) -> DispatchAnswer | None:
        """A kept answer: also one that another process is about to bring."""
        try:
            answer = await self._look(key)
            if answer is None:
                answer = await self._other(key)
        except CacheAway:
            self._figures.cache("bypassed")
            return None
        self._figures.cache("miss" if answer is None else "hit")
        return None if answer is None else DispatchAnswer(answer, None)

    async def _other(self, key: str) -> bytes | None:
        """The answer that another process is about to keep. None: this one is to ask."""
        for number in range(int(ASKED_SECONDS / LOOK_AGAIN[-1])):
            if await self._cache.begin(key, ASKED_SECONDS):
                if (answer := await self._look(key)) is not None:  # kept since the look before this
                    await _quietly(lambda: self._cache.end(key))
                return answer
            await asyncio.sleep(LOOK_AGAIN[min(number, len(LOOK_AGAIN) - 1)])
            if (answer := await self._look(key)) is not None:
                return answer
        return None

    async def _look(self, key: str) -> bytes | None:
        value = await self._cache.get(key)
        if value is None:
            return None
        answer = unsealed(key, value)
        if answer is None:
            self._figures.cache("corrupt")
            await self._cache.drop(key)
        return answer

    async def _fresh(self, request: DispatchRequest) -> DispatchAnswer:
        """An engine's answer that is one: nothing else is handed on or kept."""
        answer = await self._dispatcher.ask(request)
        read = read_answer(request.kind, answer.body)
        if read is None:
            raise DispatchFailed(Failure.BROKEN, "engine_garbage", "The engine's answer could not be read.")
        return replace(answer, read=read)

    async def _ask(self, key: str, request: DispatchRequest) -> DispatchAnswer:
        try:
            answer = await self._fresh(request)
            if len(answer.body) <= MOST_ANSWER:
                await _quietly(lambda: self._cache.put(key, sealed(key, answer.body)))
            return answer
        finally:
            await _quietly(lambda: self._cache.end(key))


class _Left(Exception):
    """Raised where the request that asked for others was cancelled."""


async def _quietly(call: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(CacheAway):
        await call()


def _retrieved(future: asyncio.Future[DispatchAnswer]) -> None:
    """A failure that nobody waited for is no defect."""
    if not future.cancelled():
        future.exception()
