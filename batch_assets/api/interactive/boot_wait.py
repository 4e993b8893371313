"""Interactive requests for a model without an engine: they wait while one is started, as long as their callers do.

Nobody waits where no engine is on its way: for money, for an offer, for what others hold. Such a caller is told so
after SETTLE_SECONDS. Places are bounded, and a tenant has no more of them than are free for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping

from batch_assets.api.execution.engines.engine_supply import Awaited
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.telemetry.metrics import Sample
from batch_assets.settings import SettingError

BOOT_WAIT = "BATCH_ASSETS_BOOT_WAIT_SECONDS"
DEFAULT_SECONDS, MOST_SECONDS = 540.0, 3600.0
CLIENT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")  # of OpenAI's clients for Python and Node
CLIENT_SECONDS = 600.0  # as long as those wait that say nothing else
ANSWER_SHARE = 0.1  # of a caller's patience, which is left for the answer itself
PLACES = 500
LOOK_SECONDS = 0.1
SETTLE_SECONDS = 5.0
RETRY_SECONDS, HOPELESS_RETRY_SECONDS = 5, 30
ON_THE_WAY = (None, Awaited.ENGINE, Awaited.BOOT)

Look = Callable[[], Awaitable[bool]]


def boot_wait_seconds() -> float:
    """How long a request may wait for an engine; 0: not at all. Raises SettingError."""
    text = os.environ.get(BOOT_WAIT, "").strip()
    try:
        seconds = float(text) if text else DEFAULT_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MOST_SECONDS:
        raise SettingError(f"{BOOT_WAIT}: expected seconds, 0 to {MOST_SECONDS:g}, found {text!r:.40}")
    return seconds


def patience(headers: Mapping[str, str]) -> float:
    """Seconds that a caller may be kept waiting before an engine has its request."""
    for name in CLIENT_HEADERS:
        with contextlib.suppress(KeyError, ValueError):
            seconds = float(headers[name])
            if 0 < seconds < math.inf:
                return seconds * (1 - ANSWER_SHARE)
    return CLIENT_SECONDS * (1 - ANSWER_SHARE)


class BootWait:
    """The waiting requests of one process, on one event loop. `most`: seconds that a request may wait.

    `awaited`: what the model's feed waits for, None: nothing is known; `never_served`: why nothing can ever serve the
    model. Both are for models and paths; the latter may block.
    """

    def __init__(self, most: float, places: int = PLACES) -> None:
        self._most, self._places = most, places
        self.awaited: Callable[[str, str], Awaited | None] = lambda model, path: None
        self.never_served: Callable[[str, str], str | None] = lambda model, path: None
        self._tenants: Counter[str] = Counter()
        self._never: dict[tuple[str, str], asyncio.Task[str | None]] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return self._tenants.total()

    def samples(self) -> Iterator[Sample]:
        """For the page of metrics."""
        text = "Interactive requests that wait for the first engine of their model."
        yield "batch_assets_requests_waiting_for_engine", text, {}, self.waiting

    async def wait(self, model: str, path: str, tenant: str, seconds: float, look: Look) -> None:
        """Return when `look` says that an engine is there. `seconds`: the caller's patience. Raises ApiError."""
        seconds = min(seconds, self._most)
        if seconds <= 0 or self._tenants[tenant] >= self._places - self.waiting:
            raise self._none(model, path)
        with self._place(tenant):
            if (why := await self._why_never(model, path)) is not None:
                said = f"The model `{model}` can never be served here. {why}"
                raise ApiError(404, said, code="model_unavailable", param="model", headers={"x-should-retry": "false"})
            await self._until_there(model, path, seconds, look)

    async def _until_there(self, model: str, path: str, seconds: float, look: Look) -> None:
        clock = asyncio.get_running_loop().time
        until, hopeful_at = clock() + seconds, clock()
        while not await look():
            now = clock()
            if self.awaited(model, path) in ON_THE_WAY:
                hopeful_at = now
            if now >= until or now - hopeful_at >= SETTLE_SECONDS:
                raise self._none(model, path)
            await asyncio.sleep(LOOK_SECONDS)

    @contextlib.contextmanager
    def _place(self, tenant: str) -> Iterator[None]:
        self._tenants[tenant] += 1
        try:
            yield
        finally:
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]

    async def _why_never(self, model: str, path: str) -> str | None:
        """Asked once for all that wait."""
        asking = self._never.get((model, path))
        if asking is None or asking.done():
            asking = asyncio.create_task(asyncio.to_thread(self.never_served, model, path))
            self._never[model, path] = asking
        return await asyncio.shield(asking)

    def _none(self, model: str, path: str) -> ApiError:
        awaited = self.awaited(model, path)
        hopeful = awaited in ON_THE_WAY
        said = "No engine of this model runs now." + ("" if awaited is None else f" It waits for {awaited.value}.")
        retry = RETRY_SECONDS if hopeful else HOPELESS_RETRY_SECONDS
        return ApiError(503, said, code="no_engine", headers={"Retry-After": str(retry)})
