"""Carries jobs on: rows of their parts through a feed, finished rows into journals, whole parts into objects.

A job is whatever asks for rows: a run's range of a dataset, or an OpenAI batch. All jobs of one worker share a feed and
its engines. Who opens the worker leases engines and says what comes of it: to Dagster's catalog, or to the service's
records.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from gpu_runner.client.engine_client import EngineClient, EngineLost, TimeOuts
from gpu_runner.client.vector_length import VectorLength
from gpu_runner.inference.failures.failing_requests import FailingRequests
from gpu_runner.inference.feed import Engine, Feed, FeedPolicy, FeedProgress, RequestContext
from gpu_runner.inference.windows.first_token_window import InteractiveShare
from gpu_runner.rows import Batch, Generation, Origin, Outcome, Urgency
from resources.fleet.leased_engine import KnownEngine
from resources.objects.store_health import is_store_trouble
from resources.store.dataset_store import BatchFooter

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
LEAST_PAUSE = 0.1  # between two times that journals are written


class Job(Protocol):
    """What asks for rows. Methods that are not said to block are called on the loop."""

    @property
    def name(self) -> str:
        """As its parts say whose they are; no other job of the worker has it."""

    @property
    def over(self) -> bool:
        """Nothing of it is kept any more."""

    @property
    def unwritten(self) -> bool:
        """`write_journal` or `tidy` may have something to do."""

    def note(self, part: str, outcome: Outcome) -> None:
        """A row has its outcome. Quick."""

    def is_whole(self, part: str, outcomes: list[Outcome]) -> bool:
        """Whether these are all rows of the part, and none was left out when it was read."""

    def commit(self, part: str, outcomes: list[Outcome]) -> BatchFooter:
        """Write the object of the part, create-only. Blocks; called again while the store is away."""

    def write_journal(self) -> None:
        """Write finished rows of open parts to the journal. Blocks."""

    def tidy(self) -> None:
        """Delete what committed parts need no more, and give up the right to them. Blocks."""


J = TypeVar("J", bound=Job)
Client = TypeVar("Client", bound=EngineClient)


def client_of(
    engine: KnownEngine,
    kind: Callable[..., Client],
    generation: Generation,
    *,
    answer_bytes: int | None = None,
    priority: int | None = None,
) -> Client:
    """A client of this engine, to be entered. Raises TlsFilesError."""
    return kind(
        engine.endpoint,
        generation,
        api_key=engine.api_key,
        time_outs=TimeOuts(request=engine.limits.request_seconds),
        answer_bytes=answer_bytes,
        reachability=engine.reachability,
        priority=priority,
        tls=engine.tls,
    )


class JobWorker(Generic[J]):
    """For one event loop. `parts` is read in a thread, and says of each part which job it is of.

    `noted(job, part, outcome)` hears of every outcome after its job, `committed(job, footer)` of every part that is in
    the store, `left_out(job, part)` of one that is to be read again, for the rows that were left out. Blocking calls of
    jobs are made in `pool`. `user_elsewhere`: see `Feed`.
    """

    def __init__(
        self,
        parts: Iterator[Batch],
        pool: ThreadPoolExecutor,
        *,
        policy: FeedPolicy | None = None,
        rng: random.Random | None = None,
        vectors: VectorLength | None = None,
        next_urgency: Callable[[], Urgency | None] = lambda: None,
        user_elsewhere: bool = False,
        committed: Callable[[J, BatchFooter], None],
        noted: Callable[[J, str, Outcome], None] = lambda job, part, outcome: None,
        left_out: Callable[[J, str], None] = lambda job, part: None,
    ) -> None:
        self.jobs: dict[str, J] = {}
        self._pool, self._committed, self._noted, self._left_out = pool, committed, noted, left_out
        self._feed = Feed(
            parts,
            on_row=self._on_row,
            on_batch=self._on_part,
            policy=policy or FeedPolicy(),
            rng=rng or random.Random(),
            vectors=vectors,
            next_urgency=next_urgency,
            user_elsewhere=user_elsewhere,
        )

    def add(self, job: J) -> None:
        """Its parts may come from now on."""
        self.jobs[job.name] = job

    def more(self) -> None:
        """There are further parts to read."""
        self._feed.batch_came()

    def end(self, job: J) -> None:
        """A job is over, or done: its rows that were read reach no engine any more."""
        self._feed.end_job(job.name)

    def remove(self, job: J) -> None:
        """A job has ended, and what it keeps is written, or another's to write."""
        self.jobs.pop(job.name, None)

    def progress(self) -> FeedProgress:
        """Where all jobs stand together."""
        return self._feed.progress()

    def failing(self, before: float) -> FailingRequests | None:
        """What every request meets, see `Feed.failing`. For any thread."""
        return self._feed.failing(before)

    def not_ready(self, error: EngineLost, *, plays_user: bool = False) -> None:
        """An engine did not say who it is."""
        self._feed.not_ready(error, plays_user=plays_user)

    async def prepare(self) -> bool:
        """Commit parts that need no engine, see `Feed.prepare`."""
        return await self._feed.prepare()

    async def serve(
        self,
        client: Engine,
        engine: KnownEngine,
        *,
        model: str,
        version: str,
        run_id: str,
        stop: asyncio.Event | None = None,
        share: InteractiveShare | None = None,
        context: RequestContext | None = None,
        plays_user: bool = False,
    ) -> None:
        """Generate on one engine, see `Feed.serve`; rows say that `model` on `version` of it has answered `run_id`.

        Journals are written by `flush_often` meanwhile.
        """
        await self._feed.serve(
            client,
            Origin(model, version, engine.provider, engine.instance_type, engine.spot, run_id),
            engine.max_num_seqs,
            stop=stop,
            spending=engine.spending,
            share=share,
            limits=engine.limits,
            context=context,
            plays_user=plays_user,
        )

    async def flush_often(self, seconds: float, flush: Callable[[], Awaitable[object]] | None = None) -> None:
        """Until cancelled: `flush` about every so many seconds, and after each as long a pause as it took."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await (flush or self.flush)()
            took = loop.time() - began
            await asyncio.sleep(max(LEAST_PAUSE, min(took, seconds), seconds - took))

    async def flush(self) -> bool:
        """Write the journals of all jobs, side by side. False: not all could be written, and are tried next time."""
        return all(await asyncio.gather(*(self._flush(job) for job in self.jobs.values() if job.unwritten)))

    async def _flush(self, job: J) -> bool:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._pool, job.write_journal)
            await loop.run_in_executor(self._pool, job.tidy)
        except Exception as error:  # RuntimeError: the pool is closed
            log.warning("%s: journal not written: %s", job.name, type(error).__name__)
            return False
        return True

    # what the feed calls

    def _on_row(self, name: str, part: str, outcome: Outcome) -> None:
        job = self.jobs.get(name)
        if job is not None and not job.over:
            job.note(part, outcome)
            self._noted(job, part, outcome)

    async def _on_part(self, name: str, part: str, outcomes: list[Outcome]) -> None:
        """Called again when it is cancelled."""
        job = self.jobs.get(name)
        if job is not None and not job.over and not job.is_whole(part, outcomes):
            self._left_out(job, part)
            return
        while (job := self.jobs.get(name)) is not None and not job.over:
            try:
                footer = await asyncio.get_running_loop().run_in_executor(self._pool, job.commit, part, outcomes)
            except Exception as error:
                if not is_store_trouble(error):
                    raise
                log.warning("%s: part %s not written: %s", job.name, part, type(error).__name__)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._committed(job, footer)
            return
