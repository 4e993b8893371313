"""Watches one engine: its load, its health, and whether it still makes progress.

/health proves no progress, and neither does an open connection. What proves an engine
alive is an answer: of a row, or of a canary, a request for one token that is sent when no row answers. The
canary also tells rows that fail or hang from an engine that does. An answer is a claim until a later look at /metrics
shows the engine that there was before: it may be that of the next one. While the way to the engine is broken, its
health says nothing about it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from gpu_runner.bounded_http.bounded_read import Admit
from gpu_runner.client.engine_load import EngineLoad
from gpu_runner.client.protocol import (
    Completion,
    EngineError,
    EngineLost,
    EngineRefused,
    Repair,
    RowRejected,
    Transient,
)
from gpu_runner.inference.engine_liveness import EngineLiveness
from gpu_runner.inference.failed_requests import FailedRequests
from gpu_runner.inference.failures.denials import Evidence, told
from gpu_runner.inference.failures.retry import backoff
from gpu_runner.inference.policy import FeedPolicy
from gpu_runner.reachability import Reachability
from gpu_runner.rows import Generation

# How often an engine is asked for its health while it fails: a dead one is to be noticed within seconds.
UNEASY_SECONDS = 0.3
# Canaries in the time of a stall (2 min, 10 min without metrics) while rows hang and nothing fails, sent in the
# second half of it. Each is a request that is paid.
QUIET_CANARIES = 4
# So long is a request waited for that is only to show whether it is refused.
PROBE_SECONDS = 20.0


class _Admitted(Exception):
    """A request was not refused; its answer was not waited for."""


class Engine(Protocol):
    """What a feed needs of an engine; `EngineClient` is one."""

    @property
    def generation(self) -> Generation: ...
    async def generate(
        self,
        prompt: bytes,
        *,
        repair: Repair | None = None,
        admit: Admit | None = None,
        fields: bytes = b"",
        max_tokens: int | None = None,
        free: bool = False,
        user: bool = False,
    ) -> Completion: ...
    async def canary(self, prompt: bytes | None = None) -> None: ...
    async def probe(self, prompt: bytes, *, content: bool, fields: bytes = b"") -> None: ...
    async def load(self) -> EngineLoad | None: ...
    async def healthy(self) -> bool: ...
    def reachability(self) -> Reachability: ...


@runtime_checkable
class ListEngine(Engine, Protocol):
    """An engine that may be asked for several rows by one request; `EngineClient` is one.

    `generate_list` answers in the order of the prompts, by one request, and fails as a whole. Prompts whose
    `list_kind` is equal may go together; one of None goes alone.
    """

    @property
    def takes_lists(self) -> bool: ...
    def list_kind(self, prompt: bytes) -> object: ...
    async def generate_list(self, prompts: Sequence[bytes], *, admit: Admit | None = None) -> list[Completion]: ...


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of the engine. `ticked`: `load` is the newest, for the window. `lost`: why it is to be left."""

    ticked: bool = False
    load: EngineLoad | None = None
    lost: EngineLost | None = None


@dataclass(frozen=True, slots=True)
class WatchOrders:
    """What the engine worker is to do: leave the engine, send a canary, end the requests that were sent until then."""

    lost: EngineLost | None = None
    canary: bool = False
    abort_before: float | None = None


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """What came of a canary. `error`: why the engine is to be left. `judge`: failed requests can be judged."""

    error: EngineError | None = None
    judge: bool = False


class Watchdog:
    """One engine's watchdog. It says what is to be done: its engine worker does it."""

    def __init__(
        self,
        engine: Engine,
        liveness: EngineLiveness,
        failures: FailedRequests,
        policy: FeedPolicy,
        rng: random.Random,
    ) -> None:
        self._engine, self._liveness, self._failures = engine, liveness, failures
        self._policy, self._rng = policy, rng
        self._loop = asyncio.get_running_loop()
        self.canaries = 0
        self._tokens: int | None = None
        self._seen: EngineLoad | None = None
        self._page_missing_since: float | None = None
        self._blind = False
        self._bad_health: list[float] = []
        self._canary_waits = False
        self._canary_ok_at = float("-inf")
        self._canary_failures = 0
        self._next_canary = self._next_quiet_canary = 0.0
        self._next_tick = 0.0

    async def rest(self) -> None:
        """Until the next look: a poll, or less while something is wrong."""
        poll = self._policy.poll_seconds
        shortest = min(UNEASY_SECONDS, poll)
        await asyncio.sleep(shortest)
        uneasy = self._liveness.uneasy
        if not self._bad_health and not uneasy.is_set():
            # Not wait_for: before Python 3.12 it may swallow a cancel that comes with the time-out.
            with suppress(TimeoutError):
                async with asyncio.timeout(poll - shortest):
                    await uneasy.wait()
        uneasy.clear()

    async def look(self) -> Look:
        """Asks for load and health. `decide` follows, when failed requests are judged."""
        quiet = self._loop.time() - self._liveness.progress_at > 5 * self._policy.poll_seconds
        if self._failures.oldest is not None or quiet or self._bad_health:
            (_, look), lost = await asyncio.gather(self._read_load(), self._check_health())
            return replace(look, lost=look.lost or lost)
        read, look = await self._read_load()
        return look if read else replace(look, lost=look.lost or await self._check_health())

    def decide(self, in_flight: int, rows_in_flight: int) -> WatchOrders:
        """What is to be done now. `rows_in_flight`: of those in flight, what the server is to answer."""
        now, liveness = self._loop.time(), self._liveness
        failed_at = self._failures.oldest
        if failed_at is None:
            if not self._failures.denials:
                liveness.trouble_since = None
            if not rows_in_flight:
                liveness.progress_at = now
        doubtful = failed_at is not None and now - failed_at >= 2 * self._policy.retry.proof_lag
        quiet = now - liveness.progress_at >= self._limit / 2 and now >= self._next_quiet_canary
        silent = not liveness.canary_useless and (doubtful or quiet)
        wanted = silent or self._failures.evidence_wanted(now, in_flight) is not None
        canary = wanted and not self._canary_waits and now >= max(self._next_canary, liveness.resting_until)
        self._canary_waits = self._canary_waits or canary
        return replace(self._progress_orders(now), canary=canary)

    async def _read_load(self) -> tuple[bool, Look]:
        """The first is False when the engine could not be asked."""
        asked, claims, ticked = self._loop.time(), replace(self._liveness.claims), False
        lost: EngineLost | None = None
        try:
            load = await self._engine.load()
        except EngineError:
            self._page_missing(asked)
            return False, Look()
        self._blind = load is None
        if self._loop.time() >= self._next_tick:
            self._next_tick = self._loop.time() + 0.9 * self._policy.poll_seconds
            ticked = True
        if load is None:
            self._page_missing(asked)
        else:
            self._page_missing_since = None
            if self._seen is not None and self._restarted(self._seen, load):
                lost = EngineLost("restarted", "its counters began anew; its rows in flight are lost")
            else:
                self._liveness.proof.add(claims)
            if self._tokens is not None and load.progress > self._tokens:
                self._liveness.progress_at = self._loop.time()
            self._seen, self._tokens = load, load.progress
        return True, Look(ticked, load, lost)

    @staticmethod
    def _restarted(before: EngineLoad, now: EngineLoad) -> bool:
        """Whether the second page is of another process than the first.

        Start times say nothing where counters stand still, as vLLM's do for embeddings: several servers may share the
        address.
        """
        began = before.started_at is not None and now.started_at is not None and before.started_at != now.started_at
        return now.progress < before.progress or (began and before.progress > 0)

    def _page_missing(self, asked: float) -> None:
        """Without the page engines cannot be told apart: where it stays away, any answer counts as of the same one."""
        if self._page_missing_since is None:
            self._page_missing_since = asked
        never = self._blind and self._seen is None
        if never or self._loop.time() - self._page_missing_since >= self._policy.retry.proof_health:
            self._liveness.proof.add(self._liveness.claims)

    async def _check_health(self) -> EngineLost | None:
        asked, lost = self._loop.time(), None
        if await self._engine.healthy():
            self._liveness.claims.health = asked
            broken_at = self._failures.oldest_break
            if self._bad_health and broken_at is not None and broken_at <= self._bad_health[-1]:
                lost = EngineLost("restarted", "it was gone for a moment; its rows in flight are lost")
            self._bad_health.clear()
            return lost
        if self._liveness.progress_at > asked:
            return None
        reachability = self._engine.reachability()
        if reachability is Reachability.LOST:
            return EngineLost("unreachable", "its host does not answer")
        if reachability is Reachability.RESTORING:
            self._bad_health.clear()  # of the engine nothing is known
            self._liveness.suspect()
            return None
        now = self._loop.time()
        self._bad_health.append(now)
        since = now - self._bad_health[0]
        if len(self._bad_health) >= self._policy.health_tries and since >= self._policy.dead_seconds:
            return EngineLost("unreachable", f"no health for {since:.1f} s")
        return None

    # --- canary ---

    async def canary(self, in_flight: int) -> CanaryAnswer:
        """Sends the canary that was decided on."""
        self.canaries += 1
        try:
            return await self._canary(self._failures.evidence_wanted(self._loop.time(), in_flight))
        finally:
            self._canary_waits = False

    async def _canary(self, evidence: Evidence | None) -> CanaryAnswer:
        sent, liveness = self._loop.time(), self._liveness
        try:
            if evidence is None:
                async with asyncio.timeout(self._policy.stall_seconds):
                    await self._engine.canary()
            else:
                await self._probe(evidence == "answered_row")
        except RowRejected:
            liveness.canary_useless = liveness.canary_useless or evidence is None
            self._next_canary = sent + self._policy.poll_seconds
            return self._admitted(sent, evidence)  # it was read, so it got past what denies
        except _Admitted:
            self._next_canary = self._loop.time() + self._policy.poll_seconds
            return self._admitted(sent, evidence)
        except EngineRefused as error:
            self._next_canary = sent + self._policy.poll_seconds
            return self._canary_denied(sent, error, evidence)
        except Transient as error:
            return self._canary_failed(sent, error)
        except TimeoutError:
            late = Transient("timeout", f"no answer within {self._policy.stall_seconds:.0f} s")
            return self._canary_failed(sent, late)
        except EngineLost as error:
            return CanaryAnswer(error)
        now = self._loop.time()
        self._canary_ok_at, self._canary_failures = now, 0
        # At most one per poll, and two in the time of a stall where it only says that hanging rows hang alone.
        self._next_canary = now + self._policy.poll_seconds
        self._next_quiet_canary = now + self._limit / QUIET_CANARIES
        self._tokens = None  # the canary's own token is no progress of rows
        liveness.succeeded(sent, now)
        return self._admitted(sent, evidence)

    def _admitted(self, sent: float, evidence: Evidence | None) -> CanaryAnswer:
        """A canary that no refused row asked for has other settings than rows: it shows nothing of their refusal."""
        if evidence == "answered_row":
            self._failures.denials.answered_row_answered(sent)
        elif evidence == "canary":
            self._failures.denials.canary_answered(sent)
        return CanaryAnswer(judge=True)

    async def _probe(self, answered_row: bool) -> None:
        """Evidence for refused rows. Raises _Admitted where the answer takes long: a refusal comes at once."""
        denials = self._failures.denials
        row = denials.answered_row if answered_row else denials.oldest_row
        prompt, fields = (b'"ping"', b"") if row is None else (row.prompt, row.own_fields)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._engine.probe(prompt, content=answered_row, fields=fields)
        except TimeoutError:
            raise _Admitted from None

    def _canary_denied(self, sent: float, error: EngineRefused, evidence: Evidence | None) -> CanaryAnswer:
        """A row that was answered before and is denied now: the engine denies. Else only the canary may be meant."""
        denials = self._failures.denials
        if evidence == "answered_row":
            row = denials.answered_row
            return CanaryAnswer(told(error, None if row is None else row.prompt))
        self._liveness.canary_useless = self._liveness.canary_useless or evidence is None
        denied_at = denials.oldest
        if denied_at is None or denied_at > sent:
            return CanaryAnswer()
        denials.canary_denied(error)
        self._liveness.suspect()
        return CanaryAnswer(judge=True)

    def _canary_failed(self, sent: float, error: Transient) -> CanaryAnswer:
        self._liveness.outage_at = now = self._loop.time()
        self._failures.canary_failed(error, now)
        if self._liveness.trouble_since is None:
            self._liveness.trouble_since = sent
        self._canary_failures += 1
        wait = backoff(self._policy.retry, self._canary_failures, error.retry_after, self._rng.random)
        self._next_canary = now + max(wait / 2, error.retry_after or 0.0)
        return CanaryAnswer()

    # --- progress ---

    @property
    def _limit(self) -> float:
        return self._policy.stall_seconds * (self._policy.blind_factor if self._blind else 1.0)

    def _progress_orders(self, now: float) -> WatchOrders:
        liveness = self._liveness
        trouble = 0.0 if liveness.trouble_since is None else now - liveness.trouble_since
        quiet = now - liveness.progress_at
        if trouble >= self._policy.stall_seconds or (trouble and quiet >= self._limit):
            reason = self._failures.reason
            last = f", the last one with {reason}" if reason else ""
            said, never = f"every request failed for {trouble:.0f} s{last}", liveness.claims.arrived == float("-inf")
            return WatchOrders(EngineLost("no_progress", said, never_answered=never))
        if quiet < self._limit:
            return WatchOrders()
        if self._canary_ok_at <= liveness.progress_at:
            return WatchOrders(EngineLost("stalled", f"rows in flight, no token for {quiet:.0f} s"))
        liveness.progress_at = now
        # The engine generates, but none of these rows. Without metrics they may be long ones: the request
        # time-out decides.
        return WatchOrders() if self._blind else WatchOrders(abort_before=now - self._limit / 2)
