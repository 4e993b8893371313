"""The engine of the model that plays the user, where that is another one than the engine that answers.

It is served by the same feed, with rows of its own: those whose next text is the user's. It has its own window, its own
bound, its own watchdog. While it is away its rows wait, and no row is charged for it; it is asked again, later and
later, and after AWAY_TRIES in a row that brought no text the run ends and says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from batch_assets.worker.job_worker import JobWorker, client_of
from gpu_runner.client.engine_client import EngineClient, EngineInfo, EngineLost, EngineRefused
from gpu_runner.rows import SIMULATED, Generation
from resources.fleet.leased_engine import LeasedEngine

AWAY_TRIES = 15
FIRST_REST, LONGEST_REST = 0.2, 15.0


class UserEngineAway(Exception):
    """The engine of the model that plays the user does not answer."""


class UserEngine:
    """`answering`: the engine that answers. `generation`: the requests for what the user says."""

    def __init__(
        self,
        leased: LeasedEngine,
        generation: Generation,
        worker: JobWorker[Any],
        answering: EngineInfo,
        run_id: str,
        answer_bytes: int | None,
    ) -> None:
        self._leased, self._generation, self._worker = leased, generation, worker
        self._answering, self._run_id, self._answer_bytes = answering, run_id, answer_bytes

    async def beside(self, answers: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
        """Serve until `answers`, which serves the engine that answers, has ended, and raise what that raises. In good
        order what the user says in requests under way is waited for. Raises UserEngineAway, EngineRefused, once the
        answers under way are there: `stop` ends `answers` so.
        """
        ended = asyncio.Event()
        answering, writing = asyncio.create_task(answers), asyncio.create_task(self._serve(ended))
        try:
            await asyncio.wait((answering, writing), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and (failed := writing.exception()) is not None:
                stop.set()
                await asyncio.gather(answering, return_exceptions=True)
                raise failed
            await answering
            ended.set()
            await writing
        finally:
            for task in (answering, writing):
                task.cancel()
            await asyncio.gather(answering, writing, return_exceptions=True)

    async def _serve(self, ended: asyncio.Event) -> None:
        """Until every row has its outcome, or `ended` and the requests under way are answered."""
        fruitless, before = 0, 0
        while not ended.is_set():
            try:
                return await self._serve_once(ended)
            except EngineLost as error:
                spent = self._leased.spending.spent()
                written = spent.prompt_tokens + spent.completion_tokens
                fruitless, before = (fruitless + 1 if written == before else 1), written
                if fruitless >= AWAY_TRIES:
                    raise UserEngineAway(
                        f"prompt.user_model: expected an answer of engine {self._name}, found none in {fruitless} "
                        f"tries in a row; the last one: {error}. What was said so far is kept; start it again when "
                        "that engine is back"
                    ) from error
            except EngineRefused as error:
                raise EngineRefused(f"prompt.user_model, engine {self._name}: {error}") from error
            rest = asyncio.create_task(ended.wait())
            await asyncio.wait([rest], timeout=min(LONGEST_REST, FIRST_REST * 2 ** (fruitless - 1)))
            rest.cancel()

    @property
    def _name(self) -> str:
        return self._leased.name.partition("/")[0]

    async def _serve_once(self, ended: asyncio.Event) -> None:
        leased = self._leased
        async with client_of(leased, EngineClient, self._generation, answer_bytes=self._answer_bytes) as engine:
            try:
                info = await engine.info()
            except EngineLost as error:
                self._worker.not_ready(error, plays_user=True)
                raise
            if info.simulated != self._answering.simulated:
                played = "this one is simulated" if info.simulated else "the one that answers is simulated"
                raise EngineRefused(f"expected two models, or a simulator on both sides, found that {played}")
            model = f"{info.model} ({SIMULATED})" if info.simulated else info.model
            await self._worker.serve(
                engine, leased, model=model, version=info.version, run_id=self._run_id, stop=ended, plays_user=True
            )
