"""Engines that batches hold, shared with interactive requests: announced while they are held, rows give way on them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial

from batch_assets.api.execution.engines.engine_supply import Awaited, EngineSupply, ServingEngine, Waits, for_ever
from batch_assets.api.interactive.engine_directory import EngineDirectory, EngineTarget
from batch_assets.api.interactive.first_tokens import FirstTokens
from batch_assets.settings import SettingError
from gpu_runner.inference.windows.first_token_window import FirstTokenPolicy, FirstTokenSample, InteractiveShare
from gpu_runner.reachability import always_open
from gpu_runner.rows import Task

LEAVE_SECONDS = 30.0  # how long a tunnel stays open for requests under way when its engine is given back
LOOK_SECONDS = 0.1
FIRST_TOKEN = "BATCH_ASSETS_FIRST_TOKEN_SECONDS"


class SharedSupply:
    """Another supply, whose engines serve interactive requests too while somebody holds them."""

    def __init__(
        self, supply: EngineSupply, directory: EngineDirectory, first_tokens: FirstTokens, policy: FirstTokenPolicy
    ) -> None:
        self._supply, self._directory, self._first_tokens, self._policy = supply, directory, first_tokens, policy

    @contextlib.asynccontextmanager
    async def engine(self, model: str, task: Task, waits: Waits = for_ever) -> AsyncIterator[ServingEngine]:
        """An engine of the other supply. Raises EngineAway.

        One that is reached by a tunnel is given back when the requests under way there have ended: the tunnel is closed
        with the lease, and would break them.
        """
        async with self._supply.engine(model, task, waits) as engine:
            url = engine.endpoint.rstrip("/").removesuffix("/v1")
            hardware = f"{engine.provider}/{engine.instance_type}" if engine.leased else ""
            target = EngineTarget(
                url, model, engine.api_key, engine.tls, hardware, engine.max_num_seqs, engine.region, engine.name
            )
            self._directory.announce(target)
            try:
                feeding = partial(self._directory.feeding, url)
                yield replace(engine, share=InteractiveShare(self._reader(engine, url), self._policy, feeding))
            finally:
                self._directory.withdraw(target)
            if engine.reachability is not always_open:
                await self._left(target)

    async def _left(self, target: EngineTarget) -> None:
        """Returns when no request is under way on an engine that gets no new ones; after LEAVE_SECONDS all the same."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                while self._directory.in_flight(target):  # noqa: ASYNC110  (their number has no event)
                    await asyncio.sleep(LOOK_SECONDS)

    def _reader(self, engine: ServingEngine, url: str) -> Callable[[], FirstTokenSample]:
        """What is seen of interactive requests on the engine; of those of other replicas only that they come."""
        look = self._first_tokens.reader(url)

        def read() -> FirstTokenSample:
            found = look()
            return replace(found, unseen=found.unseen or engine.shared.is_set())

        return read

    def running(self, model: str) -> Sequence[ServingEngine]:
        """The running engines of the other supply."""
        return self._supply.running(model)

    def awaited(self, model: str, task: Task) -> Awaited | None:
        """As the other supply says it."""
        return self._supply.awaited(model, task)


def first_token_policy() -> FirstTokenPolicy:
    """When batches give way. Who names the seconds within which first tokens are to come wants that always: rows then
    never fill an engine's queue. Raises SettingError.
    """
    text = os.environ.get(FIRST_TOKEN, "").strip()
    if not text:
        return FirstTokenPolicy()
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.001 <= seconds <= 3600:
        raise SettingError(f"{FIRST_TOKEN}: expected seconds, 0.001 to 3600, found {text!r:.40}")
    return FirstTokenPolicy(target=seconds, standing=True)
