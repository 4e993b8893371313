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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, runtime_checkable

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
from gpu_runner.http.bounded_read import Admit
from gpu_runner.inference.failures.denials import Denials, Evidence, told
from gpu_runner.inference.failures.retry import LivenessEvidence, backoff
from gpu_runner.inference.policy import FeedPolicy
from gpu_runner.inference.windows.concurrency_window import Window
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
        self, prompt: bytes, *, repair: Repair | None = None, admit: Admit | None = None, seed: int | None = None
    ) -> Completion: ...
    async def canary(self, prompt: bytes | None = None) -> None: ...
    async def probe(self, prompt: bytes, *, content: bool) -> None: ...
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


class WatchedFailures(Protocol):
    """What the watchdog sees of failed and denied requests (failed_requests.py), and does to them."""

    @property
    def oldest(self) -> float | None: ...
    @property
    def oldest_break(self) -> float | None: ...
    @property
    def denials(self) -> Denials: ...
    @property
    def reason(self) -> str: ...
    def evidence_wanted(self, now: float) -> Evidence | None: ...
    def canary_failed(self, error: Transient, now: float) -> None: ...
    def judge(self) -> None: ...


class Watched(Protocol):
    """What the watchdog sees of an engine worker, and does to it."""

    @property
    def rows_in_flight(self) -> int: ...
    @property
    def failures(self) -> WatchedFailures: ...
    def abort_rows(self, sent_before: float) -> None: ...
    def count_request(self, prompt_bytes: int, rows: int) -> None: ...
    def end(self, error: BaseException | None = None) -> None: ...


class Watchdog:
    """One engine's watchdog. `resting_until` is when the server wants to be asked again."""

    def __init__(self, engine: Engine, worker: Watched, window: Window, policy: FeedPolicy, rng: random.Random) -> None:
        self._engine, self._worker, self._window, self._policy, self._rng = engine, worker, window, policy, rng
        self._loop = asyncio.get_running_loop()
        self.proof = LivenessEvidence()
        self.claims = LivenessEvidence()
        self.outage_at = float("-inf")
        self.canary_useless = False
        self.canaries = 0
        self.resting_until = 0.0
        self._progress_at = self._loop.time()
        self._tokens: int | None = None
        self._seen: EngineLoad | None = None
        self._page_missing_since: float | None = None
        self._blind = False
        self._bad_health: list[float] = []
        self._trouble_since: float | None = None
        self._canary_task: asyncio.Task[None] | None = None
        self._canary_ok_at = float("-inf")
        self._canary_failures = 0
        self._next_canary = self._next_quiet_canary = 0.0
        self._next_tick = 0.0
        self._uneasy = asyncio.Event()

    def answered(self, now: float) -> None:
        """The server answered a row, one way or the other."""
        self._progress_at = now

    def succeeded(self, sent: float, now: float) -> None:
        """The engine generated something."""
        self._trouble_since = None
        self.claims.success(sent, now)

    def rest_until(self, until: float) -> bool:
        """The server wants no request before `until`; False where it is to rest as long anyway."""
        if until <= self.resting_until:
            return False
        self.resting_until = until
        return True

    def suspect(self) -> None:
        """A connection was refused or broken: looks soon instead of at the next poll."""
        self._uneasy.set()

    async def run(self, wake: Callable[[], None], spawn: Callable[..., asyncio.Task[None]]) -> None:
        """Looks every `poll_seconds` until cancelled; `wake` is called after each look."""
        try:
            while True:
                await self._look(spawn)
                wake()
                await self._rest()
        except Exception as error:
            self._worker.end(error)

    async def _rest(self) -> None:
        """Until the next look: a poll, or less while something is wrong."""
        poll = self._policy.poll_seconds
        shortest = min(UNEASY_SECONDS, poll)
        await asyncio.sleep(shortest)
        if not self._bad_health and not self._uneasy.is_set():
            # Not wait_for: before Python 3.12 it may swallow a cancel that comes with the time-out.
            with suppress(TimeoutError):
                async with asyncio.timeout(poll - shortest):
                    await self._uneasy.wait()
        self._uneasy.clear()

    async def _look(self, spawn: Callable[..., asyncio.Task[None]]) -> None:
        quiet = self._loop.time() - self._progress_at > 5 * self._policy.poll_seconds
        if self._worker.failures.oldest is not None or quiet or self._bad_health:
            await asyncio.gather(self._read_load(), self._check_health())
        elif not await self._read_load():
            await self._check_health()
        self._worker.failures.judge()
        now = self._loop.time()
        failed_at = self._worker.failures.oldest
        if failed_at is None:
            if not self._worker.failures.denials:
                self._trouble_since = None
            if not self._worker.rows_in_flight:
                self._progress_at = now
        doubtful = failed_at is not None and now - failed_at >= 2 * self._policy.retry.proof_lag
        quiet = now - self._progress_at >= self._limit / 2 and now >= self._next_quiet_canary
        silent = not self.canary_useless and (doubtful or quiet)
        if silent or self._worker.failures.evidence_wanted(now) is not None:
            self._send_canary(now, spawn)
        self._check_progress(now)

    async def _read_load(self) -> bool:
        """Feeds the window; False when the engine could not be asked."""
        asked, claims = self._loop.time(), replace(self.claims)
        try:
            load = await self._engine.load()
        except EngineError:
            self._page_missing(asked)
            return False
        self._blind = load is None
        if self._loop.time() >= self._next_tick:
            self._next_tick = self._loop.time() + 0.9 * self._policy.poll_seconds
            self._window.on_tick(load, self._worker.rows_in_flight)
        if load is None:
            self._page_missing(asked)
        else:
            self._page_missing_since = None
            if self._seen is not None and self._restarted(self._seen, load):
                self._worker.end(EngineLost("restarted", "its counters began anew; its rows in flight are lost"))
            else:
                self.proof.add(claims)
            if self._tokens is not None and load.progress > self._tokens:
                self._progress_at = self._loop.time()
            self._seen, self._tokens = load, load.progress
        return True

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
            self.proof.add(self.claims)

    async def _check_health(self) -> None:
        asked = self._loop.time()
        if await self._engine.healthy():
            self.claims.health = asked
            broken_at = self._worker.failures.oldest_break
            if self._bad_health and broken_at is not None and broken_at <= self._bad_health[-1]:
                self._worker.end(EngineLost("restarted", "it was gone for a moment; its rows in flight are lost"))
            self._bad_health.clear()
            return
        if self._progress_at > asked:
            return
        reachability = self._engine.reachability()
        if reachability is Reachability.LOST:
            self._worker.end(EngineLost("unreachable", "its host does not answer"))
            return
        if reachability is Reachability.RESTORING:
            self._bad_health.clear()  # of the engine nothing is known
            self.suspect()
            return
        now = self._loop.time()
        self._bad_health.append(now)
        since = now - self._bad_health[0]
        if len(self._bad_health) >= self._policy.health_tries and since >= self._policy.dead_seconds:
            self._worker.end(EngineLost("unreachable", f"no health for {since:.1f} s"))

    # --- canary ---

    def _send_canary(self, now: float, spawn: Callable[..., asyncio.Task[None]]) -> None:
        busy = self._canary_task is not None and not self._canary_task.done()
        if not busy and now >= max(self._next_canary, self.resting_until):
            self._canary_task = spawn(self._canary())

    async def _canary(self) -> None:
        self.canaries += 1
        self._worker.count_request(0, 0)
        sent = self._loop.time()
        evidence = self._worker.failures.evidence_wanted(sent)
        try:
            if evidence is None:
                async with asyncio.timeout(self._policy.stall_seconds):
                    await self._engine.canary()
            else:
                await self._probe(evidence == "answered_row")
        except RowRejected:
            self.canary_useless = self.canary_useless or evidence is None
            self._next_canary = sent + self._policy.poll_seconds
            self._admitted(sent, evidence)  # it was read, so it got past what denies
        except _Admitted:
            self._next_canary = self._loop.time() + self._policy.poll_seconds
            self._admitted(sent, evidence)
        except EngineRefused as error:
            self._next_canary = sent + self._policy.poll_seconds
            self._canary_denied(sent, error, evidence)
        except Transient as error:
            self._canary_failed(sent, error)
        except TimeoutError:
            self._canary_failed(sent, Transient("timeout", f"no answer within {self._policy.stall_seconds:.0f} s"))
        except EngineLost as error:
            self._worker.end(error)
        else:
            now = self._loop.time()
            self._canary_ok_at, self._canary_failures = now, 0
            # At most one per poll, and two in the time of a stall where it only says that hanging rows hang alone.
            self._next_canary = now + self._policy.poll_seconds
            self._next_quiet_canary = now + self._limit / QUIET_CANARIES
            self._tokens = None  # the canary's own token is no progress of rows
            self.succeeded(sent, now)
            self._admitted(sent, evidence)

    def _admitted(self, sent: float, evidence: Evidence | None) -> None:
        """A canary that no refused row asked for has other settings than rows: it shows nothing of their refusal."""
        if evidence == "answered_row":
            self._worker.failures.denials.answered_row_answered(sent)
        elif evidence == "canary":
            self._worker.failures.denials.canary_answered(sent)
        self._worker.failures.judge()

    async def _probe(self, answered_row: bool) -> None:
        """Evidence for refused rows. Raises _Admitted where the answer takes long: a refusal comes at once."""
        denials = self._worker.failures.denials
        prompt = denials.answered_prompt if answered_row else denials.oldest_prompt
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._engine.probe(prompt or b'"ping"', content=answered_row)
        except TimeoutError:
            raise _Admitted from None

    def _canary_denied(self, sent: float, error: EngineRefused, evidence: Evidence | None) -> None:
        """A row that was answered before and is denied now: the engine denies. Else only the canary may be meant."""
        denials = self._worker.failures.denials
        if evidence == "answered_row":
            self._worker.end(told(error, denials.answered_prompt))
            return
        self.canary_useless = self.canary_useless or evidence is None
        denied_at = denials.oldest
        if denied_at is not None and denied_at <= sent:
            denials.canary_denied(error)
            self.suspect()
            self._worker.failures.judge()

    def _canary_failed(self, sent: float, error: Transient) -> None:
        self.outage_at = self._loop.time()
        self._worker.failures.canary_failed(error, self.outage_at)
        if self._trouble_since is None:
            self._trouble_since = sent
        self._canary_failures += 1
        wait = backoff(self._policy.retry, self._canary_failures, error.retry_after, self._rng)
        self._next_canary = self.outage_at + max(wait / 2, error.retry_after or 0.0)

    # --- progress ---

    @property
    def _limit(self) -> float:
        return self._policy.stall_seconds * (self._policy.blind_factor if self._blind else 1.0)

    def _check_progress(self, now: float) -> None:
        trouble = 0.0 if self._trouble_since is None else now - self._trouble_since
        quiet = now - self._progress_at
        if trouble >= self._policy.stall_seconds or (trouble and quiet >= self._limit):
            reason = self._worker.failures.reason
            last = f", the last one with {reason}" if reason else ""
            said, never = f"every request failed for {trouble:.0f} s{last}", self.claims.arrived == float("-inf")
            self._worker.end(EngineLost("no_progress", said, never_answered=never))
            return
        if quiet < self._limit:
            return
        if self._canary_ok_at <= self._progress_at:
            self._worker.end(EngineLost("stalled", f"rows in flight, no token for {quiet:.0f} s"))
            return
        # The engine generates, but none of these rows. Without metrics they may be long ones: the request
        # time-out decides.
        if not self._blind:
            self._worker.abort_rows(now - self._limit / 2)
        self._progress_at = now
