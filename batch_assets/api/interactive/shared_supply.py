"""Engines that batches hold, shared with interactive requests: announced while they are held, rows give way on them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from batch_assets.api.execution.engines.engine_supply import EngineSupply, ServingEngine
from batch_assets.api.interactive.engine_directory import EngineDirectory, EngineTarget
from batch_assets.api.interactive.first_tokens import FirstTokens
from batch_assets.settings import SettingError
from gpu_runner.inference.windows.first_token_window import FirstTokenPolicy, InteractiveShare
from gpu_runner.rows import Task

FIRST_TOKEN = "BATCH_ASSETS_FIRST_TOKEN_SECONDS"


class SharedSupply:
    """Another supply, whose engines serve interactive requests too while somebody holds them."""

    def __init__(
        self, supply: EngineSupply, directory: EngineDirectory, first_tokens: FirstTokens, policy: FirstTokenPolicy
    ) -> None:
        self._supply, self._directory, self._first_tokens, self._policy = supply, directory, first_tokens, policy

    @contextlib.asynccontextmanager
    async def engine(self, model: str, task: Task) -> AsyncIterator[ServingEngine]:
        """An engine of the other supply. Raises EngineAway."""
        async with self._supply.engine(model, task) as engine:
            url = engine.endpoint.rstrip("/").removesuffix("/v1")
            hardware = f"{engine.provider}/{engine.instance_type}" if engine.leased else ""
            target = EngineTarget(url, model, engine.api_key, engine.tls, hardware, engine.max_num_seqs, engine.region)
            self._directory.announce(target)
            try:
                yield replace(engine, share=InteractiveShare(self._first_tokens.reader(url), self._policy))
            finally:
                self._directory.withdraw(target)

    def running(self, model: str) -> Sequence[ServingEngine]:
        """Of the other supply."""
        return self._supply.running(model)


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
