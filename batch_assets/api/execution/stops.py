"""Rows of batches that are over (cancelled, expired) reach no engine any more, and those in flight are broken off.

The prompt of a row begins with the name of its `BatchRun` and a space, so that the engine knows whose it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence

from batch_assets.api.telemetry.tracing import Span, sent_in
from gpu_runner.client.engine_client import EngineLoad
from gpu_runner.client.protocol import Completion, Repair, RowRejected
from gpu_runner.client.verbatim_client import VerbatimClient
from gpu_runner.http.bounded_read import Admit
from gpu_runner.reachability import Reachability
from gpu_runner.rows import Generation

STOPPED = "batch_stopped"

SpanOf = Callable[[str], Span | None]


def marked(name: str, body: bytes) -> bytes:
    """The prompt of a row of the run of this name."""
    return name.encode() + b" " + body


class Stops:
    """The batches that are over, and the requests of all others. For one event loop."""

    def __init__(self) -> None:
        self._stopped: set[bytes] = set()
        self._requests: dict[bytes, set[asyncio.Timeout]] = defaultdict(set)

    def stop(self, name: str) -> None:
        """No request of this batch is sent any more, and none is waited for."""
        key = name.encode()
        self._stopped.add(key)
        now = asyncio.get_running_loop().time()
        for request in self._requests.get(key, ()):
            request.reschedule(now)

    def forget(self, name: str) -> None:
        """No row of this batch is left anywhere."""
        self._stopped.discard(name.encode())

    @property
    def names(self) -> int:
        """How many batches are remembered."""
        return len(self._stopped | self._requests.keys())

    def is_stopped(self, key: bytes) -> bool:
        """Whether this batch is over."""
        return key in self._stopped

    def begin(self, key: bytes, request: asyncio.Timeout) -> None:
        """A request is under way."""
        self._requests[key].add(request)

    def end(self, key: bytes, request: asyncio.Timeout) -> None:
        """The counterpart of `begin`."""
        requests = self._requests.get(key, set())
        requests.discard(request)
        if not requests:
            self._requests.pop(key, None)


class StoppableEngine:
    """An engine as the feed sees it, for rows of many batches. `span_of`: begins the span of a request of this run."""

    def __init__(self, client: VerbatimClient, stops: Stops, span_of: SpanOf = lambda name: None) -> None:
        self._client, self._stops, self._span_of = client, stops, span_of

    @property
    def generation(self) -> Generation:
        """What all rows share: the model and the kind of task."""
        return self._client.generation

    async def generate(
        self, prompt: bytes, *, repair: Repair | None = None, admit: Admit | None = None, seed: int | None = None
    ) -> Completion:
        """Ask for one row. Raises as `VerbatimClient.generate`, and RowRejected for a row of a batch that is over."""
        key, _, body = prompt.partition(b" ")
        async with self._stoppable([key]):
            return await self._client.generate(body, admit=admit)

    @property
    def takes_lists(self) -> bool:
        """As of the client."""
        return self._client.takes_lists

    def list_kind(self, prompt: bytes) -> object:
        """As of the client. Rows of several batches may go together."""
        return self._client.list_kind(prompt.partition(b" ")[2])

    async def generate_list(self, prompts: Sequence[bytes], *, admit: Admit | None = None) -> list[Completion]:
        """Ask for several rows. Raises as `VerbatimClient.generate_list`, and RowRejected where the batch of one is
        over: the others are asked for again. The first batch that is traced has the span of the request.
        """
        keys, bodies = [], []
        for prompt in prompts:
            key, _, body = prompt.partition(b" ")
            keys.append(key)
            bodies.append(body)
        async with self._stoppable(list(dict.fromkeys(keys))):
            return await self._client.generate_list(bodies, admit=admit)

    @contextlib.asynccontextmanager
    async def _stoppable(self, keys: Sequence[bytes]) -> AsyncIterator[None]:
        """A request for rows of these batches. Raises RowRejected when one of them is over, before it or meanwhile."""
        if any(self._stops.is_stopped(key) for key in keys):
            raise RowRejected(STOPPED)
        try:
            async with asyncio.timeout(None) as request:
                for key in keys:
                    self._stops.begin(key, request)
                try:
                    spans = (self._span_of(key.decode()) for key in keys)
                    span = next((span for span in spans if span is not None), None)
                    with contextlib.nullcontext() if span is None else sent_in(span):
                        yield
                finally:
                    for key in keys:
                        self._stops.end(key, request)
        except TimeoutError:
            raise RowRejected(STOPPED) from None

    async def canary(self, prompt: bytes | None = None) -> None:
        """One token, to a row's request if there is one."""
        await self._client.canary(None if prompt is None else prompt.partition(b" ")[2])

    async def probe(self, prompt: bytes, *, content: bool) -> None:
        """As of the client."""
        await self._client.probe(prompt.partition(b" ")[2], content=content)

    async def load(self) -> EngineLoad | None:
        """As of the client."""
        return await self._client.load()

    async def healthy(self) -> bool:
        """As of the client."""
        return await self._client.healthy()

    def reachability(self) -> Reachability:
        """As of the client."""
        return self._client.reachability()
