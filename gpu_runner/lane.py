"""One engine serving a feed: its rows in flight, its failures not yet judged, its watchdog.

A freed slot takes its next row at once, in the task that freed it. A failed request keeps its slot until it is
judged (retry.py): so no more rows than one window can fail before somebody knows whether the engine lives,
and an outage or a storm of refusals costs one window of requests, not the whole dataset.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from gpu_runner.retry import Proof, RetryPolicy, backoff, judge
from gpu_runner.rows import Generation, Origin, Outcome, Output
from gpu_runner.schema import Check, compile_check
from gpu_runner.suspects import Group
from gpu_runner.window import Window, WindowPolicy
from gpu_runner.wire import (
    Completion,
    EngineError,
    EngineLoad,
    EngineLost,
    EngineRefused,
    Repair,
    RowRejected,
    Transient,
)
from gpu_runner.work import Item, Work, end_tasks


class Engine(Protocol):
    """What a feed needs of an engine; `EngineClient` is one."""

    @property
    def generation(self) -> Generation: ...
    async def generate(self, prompt: bytes, *, repair: Repair | None = None) -> Completion: ...
    async def canary(self) -> None: ...
    async def load(self) -> EngineLoad | None: ...
    async def healthy(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class FeedPolicy:
    """Seconds, rows and counts; the defaults suit real engines, tests use smaller ones.

    `stall_seconds` without progress end an engine; one that shows no metrics gets `blind_factor` times that.
    An engine is lost when /health failed `health_tries` times in a row over at least `dead_seconds`.
    `suspect_deaths`: engine deaths after which a row is tried alone. `alone_deaths`: deaths alone that make a
    dead letter; two, because an engine may also die by chance.
    `commits` on_batch calls run at once; no batch is read while `commit_backlog` wait for one, nor while more
    rows are open than `open_windows` windows (at least `open_rows`). `ahead` rows are read in advance.
    """

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    window: WindowPolicy = field(default_factory=WindowPolicy)
    poll_seconds: float = 1.0
    stall_seconds: float = 120.0
    blind_factor: float = 5.0
    health_tries: int = 3
    dead_seconds: float = 2.0
    suspect_deaths: int = 2
    alone_deaths: int = 2
    commits: int = 4
    commit_backlog: int = 16
    open_windows: int = 8
    open_rows: int = 16_000
    ahead: int = 500


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request that keeps its slot until it is judged."""

    item: Item
    error: Transient
    at: float


class Lane:
    """One `serve` call. `wake` is called when rows may move: something became ready, or complete."""

    def __init__(
        self,
        engine: Engine,
        origin: Origin,
        work: Work,
        policy: FeedPolicy,
        rng: random.Random,
        window: Window,
        wake: Callable[[], None],
    ) -> None:
        self.engine, self.origin, self.work, self.policy, self.window = engine, origin, work, policy, window
        self.in_flight: dict[Item, float] = {}
        self.undecided: deque[Failure] = deque()
        self.group: Group[Item] | None = None
        self.draining = False
        self.error: BaseException | None = None
        self.ended = asyncio.Event()
        self._rng, self._wake = rng, wake
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        schema = engine.generation.json_schema
        self._check: Check | None = None if schema is None else compile_check(schema)
        self._proof = Proof()
        self._progress_at = self._loop.time()
        self._tokens = -1
        self._paused_until = 0.0
        self._outage_at = float("-inf")
        self._trouble_since: float | None = None
        self._canary_task: asyncio.Task[None] | None = None
        self._next_canary = 0.0
        self._canary_failures = 0
        self._canary_useless = False
        self._blind = False
        self._bad_health: list[float] = []
        self._kick = asyncio.Event()

    # --- life ---

    def start(self) -> None:
        """Begins to take rows."""
        self._spawn(self._watch())
        self.fill()

    def drain(self) -> None:
        """Takes no more rows; the lane ends when the last one in flight is answered."""
        self.draining = True
        self._end_if_drained()

    def end(self, error: BaseException | None = None) -> None:
        """Stops taking rows; `serve` then closes the lane. The first call counts."""
        if not self.ended.is_set():
            self.error = error
            self.ended.set()

    async def close(self) -> None:
        """Cancels every request and gives the rows back; rows of a lost engine bear its death."""
        self.end()
        try:
            await end_tasks(self._tasks)
        finally:
            self._return_rows()

    def _return_rows(self) -> None:
        held = [*self.in_flight, *(failure.item for failure in self.undecided)]
        blamed: list[Item] = []
        if isinstance(self.error, EngineLost):
            self.work.counts.engine_deaths += 1
            blamed = [*self.in_flight, *(failure.item for failure in self.undecided if failure.error.taken)]
        self.in_flight.clear()
        self.undecided.clear()
        if self.group is not None:
            self._return_group(self.group, held, blamed)
        else:
            for item in blamed:
                item.deaths += 1
            suspects = [item for item in blamed if item.deaths >= self.policy.suspect_deaths]
            self.work.suspect(suspects)
            marked = set(suspects)
            self.work.give_back(item for item in held if item not in marked)
        self.group = None
        if self.work.trial is self:
            self.work.trial = None

    def _return_group(self, group: Group[Item], held: list[Item], blamed: list[Item]) -> None:
        guilty = set(blamed)
        rest = [item for item in held if item not in guilty] + self.work.leave_group(group)
        for item in (*held, *rest):
            item.group = None
        if not blamed:
            self.work.suspects.put_back(group, rest)
            return
        if len(blamed) == 1:
            item = blamed[0]
            item.alone_deaths += 1
            item.tries += 1
            if item.alone_deaths >= self.policy.alone_deaths:
                blamed = []
                self.work.settle(item, self._dead(item, "engine_killed", f"{item.alone_deaths} times: {self.error}", 0))
        self.work.suspects.died(group, blamed, rest)

    def _spawn(self, work: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- rows ---

    def fill(self) -> None:
        """Gives every free slot a row."""
        while (item := self._take()) is not None:
            self._spawn(self._work(item))

    async def _work(self, item: Item | None) -> None:
        """One slot: rows one after the other, until there is none to take."""
        try:
            while item is not None:
                await self._try(item)
                item = self._take()
        except Exception as error:
            self.end(error)
        self._end_if_drained()

    def _take(self) -> Item | None:
        if self.draining or self.ended.is_set() or len(self.in_flight) + len(self.undecided) >= self.window.size:
            return None
        now = self._loop.time()
        if now < self._paused_until:
            return None
        work = self.work
        if self.group is not None or (work.suspects and work.trial in (None, self)):
            item = self._take_suspect()
        else:
            item = work.take()
        if item is not None:
            self.in_flight[item] = now
        return item

    def _take_suspect(self) -> Item | None:
        self.work.trial = self
        if self.group is None:
            if self.in_flight or self.undecided:
                return None
            self.group = self.work.next_group()
            self._loop.call_soon(self.fill)
        return self.group.waiting.popleft() if self.group.waiting else None

    async def _try(self, item: Item) -> None:
        sent = self.in_flight[item]
        if item.started_at == 0.0:
            item.started_at = time.time()
        self.work.counts.requests += 1
        try:
            completion = await self.engine.generate(item.row.prompt, repair=item.repair)
        except RowRejected as error:
            # The API server refuses a row without asking the engine behind it: no proof of that one's life.
            self._progress_at = self._answered(item, sent)
            self.window.on_served()
            self._settle(item, self._dead(item, error.code, error.message))
        except Transient as error:
            self._failed(item, error, self._answered(item, sent))
        except (EngineLost, EngineRefused) as error:
            self.end(error)
        else:
            now = self._answered(item, sent)
            item.prompt_tokens += completion.prompt_tokens
            item.completion_tokens += completion.completion_tokens
            self._completed(item, completion)
            self._alive(sent, now)

    def _answered(self, item: Item, sent: float) -> float:
        now = self._loop.time()
        del self.in_flight[item]
        item.seconds += now - sent
        return now

    def _completed(self, item: Item, completion: Completion) -> None:
        if self._check is not None and isinstance(completion.output, str):
            problem = self._check(completion.output)
            if problem is not None:
                if completion.finish_reason == "length":
                    problem += "; the answer was cut at the token limit"
                self._repair(item, completion.output, problem)
                return
        self._settle(item, self._outcome(item, completion.output, completion.finish_reason, None, None, item.tries + 1))

    def _repair(self, item: Item, answer: str, problem: str) -> None:
        attempt = 1 if item.repair is None else item.repair.attempt + 1
        if attempt > self.engine.generation.repair_tries:
            self._settle(item, self._dead(item, "schema_invalid", problem))
            return
        item.repair = Repair(answer, problem, attempt)
        self.work.counts.repairs += 1
        self.work.soon(item)

    def _settle(self, item: Item, outcome: Outcome) -> None:
        self.work.settle(item, outcome)
        group = item.group
        if group is not None:
            item.group = None
            group.left -= 1
            if group.left == 0:
                self.work.suspects.survived(group)
                self.group = None
                if not self.work.suspects:
                    self.work.trial = None
                self._loop.call_soon(self._wake)
        if item.batch.left == 0:
            self._loop.call_soon(self._wake)

    def _dead(self, item: Item, code: str, message: str, last: int = 1) -> Outcome:
        return self._outcome(item, None, None, code, message, item.tries + last)

    def _outcome(
        self,
        item: Item,
        output: Output | None,
        finish_reason: str | None,
        error: str | None,
        message: str | None,
        tries: int,
    ) -> Outcome:
        row = item.row
        return Outcome(
            row.row_id,
            row.row_key,
            output,
            finish_reason,
            item.prompt_tokens,
            item.completion_tokens,
            tries,
            error,
            message,
            self.origin,
            item.started_at,
            item.seconds,
        )

    # --- failures ---

    def _failed(self, item: Item, error: Transient, now: float) -> None:
        self.work.counts.failures += 1
        self.undecided.append(Failure(item, error, now))
        first = item.tries == 0 and item.voids == 0
        if error.overload and first and self.window.on_refused(len(self.in_flight)) and error.retry_after:
            self._pause(now + min(error.retry_after, self.policy.retry.retry_after_max))
        if error.unreached:
            self._kick.set()

    def _pause(self, until: float) -> None:
        if until > self._paused_until:
            self._paused_until = until
            self._loop.call_at(until, self._wake)

    def _alive(self, sent: float, now: float) -> None:
        """An answer came that only a working engine gives."""
        self._progress_at = now
        self.window.on_served()
        if self.undecided:
            self._trouble_since = None
            self._proof.success(sent, now)
            self._judge()

    def _judge(self) -> None:
        """Frees the slots of failures that can be judged now, oldest first."""
        judged = False
        while self.undecided:
            failure = self.undecided[0]
            verdict = judge(
                self.policy.retry,
                self._proof,
                failure.at,
                failure.error,
                voids=failure.item.voids,
                outage=failure.at <= self._outage_at,
                throttled=self.window.throttled,
                health_counts=self._canary_useless,
            )
            if verdict == "undecided":
                break
            self.undecided.popleft()
            self._try_again(failure, charged=verdict == "charged")
            judged = True
        if judged:
            self._loop.call_soon(self._wake)

    def _try_again(self, failure: Failure, *, charged: bool) -> None:
        item, error, policy = failure.item, failure.error, self.policy.retry
        if charged:
            item.tries += 1
            self.work.counts.charged += 1
            if item.tries >= policy.max_tries:
                self._settle(item, self._dead(item, error.code, error.message, 0))
                return
        else:
            item.voids += 1
            self.work.counts.voided += 1
        wait = backoff(policy, item.tries if charged else item.voids, error.retry_after, self._rng)
        self.work.later(item, failure.at + wait)

    def _end_if_drained(self) -> None:
        if self.draining and not self.in_flight:
            self.end()

    # --- watchdog ---

    async def _watch(self) -> None:
        try:
            while True:
                await self._look()
                uneasy = bool(self._bad_health) or any(f.error.unreached for f in self.undecided)
                wait = min(0.3, self.policy.poll_seconds) if uneasy else self.policy.poll_seconds
                self._kick.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._kick.wait(), wait)
        except Exception as error:
            self.end(error)

    async def _look(self) -> None:
        reached = await self._read_load()
        now = self._loop.time()
        quiet = bool(self.in_flight) and now - self._progress_at > 5 * self.policy.poll_seconds
        if not reached or self.undecided or quiet or self._bad_health:
            await self._check_health()
        now = self._loop.time()
        if not self.in_flight and not self.undecided:
            self._progress_at = now
        if self.undecided:
            self._judge()
            self._send_canary(now)
        else:
            self._trouble_since = None
        self._check_progress(now)
        self._wake()

    async def _read_load(self) -> bool:
        """Feeds the window; False when the engine could not be asked."""
        try:
            load = await self.engine.load()
        except EngineError:
            return False
        self._blind = load is None
        self.window.on_tick(load, len(self.in_flight))
        if load is not None and load.generated_tokens != self._tokens:
            if load.generated_tokens > self._tokens:
                self._progress_at = self._loop.time()
            self._tokens = load.generated_tokens
        return True

    async def _check_health(self) -> None:
        asked = self._loop.time()
        healthy = await self.engine.healthy()
        now = self._loop.time()
        if healthy:
            self._proof.health = asked
            self._bad_health.clear()
            return
        if self._progress_at > asked:
            return
        self._bad_health.append(now)
        since = now - self._bad_health[0]
        if len(self._bad_health) >= self.policy.health_tries and since >= self.policy.dead_seconds:
            self.end(EngineLost("unreachable", f"/health failed for {since:.1f} s"))

    def _send_canary(self, now: float) -> None:
        waited = now - self.undecided[0].at
        busy = self._canary_task is not None and not self._canary_task.done()
        if busy or self._canary_useless or waited < 2 * self.policy.retry.proof_lag:
            return
        if now >= max(self._next_canary, self._paused_until):
            self._canary_task = self._spawn(self._canary())

    async def _canary(self) -> None:
        """One token from the engine proves that it lives; a failure proves that it is not the rows' fault."""
        self.work.counts.canaries += 1
        sent = self._loop.time()
        try:
            await asyncio.wait_for(self.engine.canary(), self.policy.stall_seconds)
        except (RowRejected, EngineRefused):
            self._canary_useless = True
        except (Transient, TimeoutError) as error:
            self._outage_at = self._loop.time()
            self._trouble_since = self._trouble_since or sent
            self._canary_failures += 1
            retry = self.policy.retry
            asked = error.retry_after if isinstance(error, Transient) else None
            self._next_canary = self._outage_at + backoff(retry, self._canary_failures, asked, self._rng) / 2
        except EngineLost as error:
            self.end(error)
        else:
            self._canary_failures = 0
            self._next_canary = 0.0
            self._alive(sent, self._loop.time())

    def _check_progress(self, now: float) -> None:
        limit = self.policy.stall_seconds * (self.policy.blind_factor if self._blind else 1.0)
        if now - self._progress_at >= limit:
            self.end(EngineLost("stalled", f"rows in flight, no token for {now - self._progress_at:.0f} s"))
        elif self._trouble_since is not None and now - self._trouble_since >= self.policy.stall_seconds:
            self.end(EngineLost("no_progress", f"every request failed for {now - self._trouble_since:.0f} s"))
