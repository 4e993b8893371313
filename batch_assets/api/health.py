"""`/healthz`, `/readyz` and `/metrics`: whether the process lives, whether it is to be sent requests, its figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from batch_assets.api.requests.callers import Caller, Scope, caller_with
from batch_assets.api.telemetry.metrics import CONTENT_TYPE, ServiceMetrics

CHECK_SECONDS = 2.0
KEPT_SECONDS = 1.0

Check = Callable[[], None]  # raises when what it looks at is not there

router = APIRouter(include_in_schema=False)


@dataclass(slots=True)
class Readiness:
    """What must be there for the service to answer.

    Looks at most once a second, however often it is asked, and not again while a look still waits: a database that
    hangs holds one thread. Each check has a thread of its own: calls that hold all others delay no answer.

    `engines_away`: addresses of configured engines that do not answer; batches are taken without them, so the service
    is ready. None: no address is configured.
    `draining`: the process is to end, and answers only what is under way and what still comes. `clock`: monotonic.
    """

    clock: Callable[[], float]
    checks: Mapping[str, Check]
    draining: bool = False
    wait_seconds: float = CHECK_SECONDS
    engines_away: Callable[[], Sequence[str]] | None = None
    _looked_at: float | None = None
    _missing: tuple[str, ...] = ()
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _looks: dict[str, asyncio.Future[bool]] = field(default_factory=dict)
    _threads: dict[str, ThreadPoolExecutor] = field(default_factory=dict)

    async def missing(self) -> tuple[str, ...]:
        """Names of what is not there."""
        async with self._lock:
            if self._looked_at is None or self.clock() - self._looked_at >= KEPT_SECONDS:
                found = await asyncio.gather(*(self._fails(name, check) for name, check in self.checks.items()))
                self._missing = tuple(name for name, fails in zip(self.checks, found, strict=True) if fails)
                self._looked_at = self.clock()
        return (*self._missing, "draining") if self.draining else self._missing

    async def _fails(self, name: str, check: Check) -> bool:
        look = self._looks.get(name)
        if look is None:
            thread = self._threads.get(name) or ThreadPoolExecutor(1, thread_name_prefix=f"ready-{name}")
            self._threads[name] = thread
            look = self._looks[name] = asyncio.get_running_loop().run_in_executor(thread, _raises, check)
            look.add_done_callback(lambda _: self._looks.pop(name))
        done, _ = await asyncio.wait({look}, timeout=self.wait_seconds)
        return not done or look.result()


def _raises(check: Check) -> bool:
    try:
        check()
    except Exception:
        return True  # whatever is wrong with it: it cannot be used now
    return False


@router.get("/healthz")
async def health() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
async def ready(request: Request) -> Response:
    """Whether requests are to be sent here."""
    readiness: Readiness = request.app.state.readiness
    missing = await readiness.missing()
    said: dict[str, object] = {"status": "not ready" if missing else "ready", "missing": missing}
    if readiness.engines_away is not None:
        said["engines_away"] = readiness.engines_away()
    return JSONResponse(said, 503 if missing else 200)


@router.get("/metrics")
async def metrics(request: Request, caller: Annotated[Caller, Depends(caller_with(Scope.METRICS_READ))]) -> Response:
    """The page for Prometheus; where keys are asked for, for keys with the scope `metrics.read`."""
    figures: ServiceMetrics = request.app.state.metrics
    return Response(await asyncio.to_thread(figures.page), media_type=CONTENT_TYPE)
