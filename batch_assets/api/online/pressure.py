"""How full the engines are that online requests go to, read from their own metrics while there is work.

Rows of our own batches come after online requests where an engine has priority scheduling, and fewer are sent while
first tokens are late. So their place in an engine's queue is no reason to refuse a request: what waits, less all rows
of ours there, is what would wait without them. Which of them run no engine tells, so it may be too few by as many as
run; what an engine does not take in time waits in our own queue, which admission counts. Nor does an engine tell whose
the blocks of its KV cache are: all of them count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from batch_assets.api.interactive.engine_directory import EngineDirectory, EngineTarget
from batch_assets.api.interactive.engine_reports import MOST_ENGINES, LoadReader
from batch_assets.api.online.admission import EnginePressure


class EnginePressures:
    """`concurrency`: requests that are sent at a time; a queue in an engine is full when as many wait, or as many as
    run, without rows of our own batches. One that does not tell its load counts as empty: what it cannot take shows in
    our own queue.
    """

    def __init__(self, directory: EngineDirectory, concurrency: int) -> None:
        self._directory, self._concurrency = directory, max(1, concurrency)
        self._reader = LoadReader()

    async def look(self) -> Mapping[str, EnginePressure]:
        """The pressure of each model: that of its least loaded engine. Takes at most a second."""
        targets = self._directory.targets()[:MOST_ENGINES]
        found = await asyncio.gather(*(self._ask(target) for target in targets))
        pressures: dict[str, EnginePressure] = {}
        for target, pressure in zip(targets, found, strict=True):
            known = pressures.get(target.model)
            if known is None or pressure.most < known.most:
                pressures[target.model] = pressure
        return pressures

    async def close(self) -> None:
        """Close its connections."""
        await self._reader.close()

    async def _ask(self, target: EngineTarget) -> EnginePressure:
        load = (await self._reader.read(target)).load
        if load is None:
            return EnginePressure()
        waiting = max(0, load.waiting - self._directory.batch_rows(target.url))
        return EnginePressure(load.kv_usage, waiting / max(load.running, self._concurrency))
