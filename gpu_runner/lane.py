"""One engine serving a feed: its rows in flight, and its failures that are not judged yet.

A freed slot takes its next row at once, in the task that freed it. A failed request keeps its slot until it is
judged (retry.py): so no more rows than one window can fail before somebody knows whether the engine lives,
and an outage or a storm of refusals costs one window of requests, not the whole dataset.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from sys import getsizeof
from typing import Any

from gpu_runner.answer_memory import bytes_of
from gpu_runner.answer_parts import NO_PARTS
from gpu_runner.denials import Denial, Denials
from gpu_runner.policy import FeedPolicy
from gpu_runner.retry import backoff, judge
from gpu_runner.rows import Origin, Outcome, Output
from gpu_runner.schema import Check, compile_check
from gpu_runner.spend import Spending
from gpu_runner.suspects import Group
from gpu_runner.watchdog import Engine, Watchdog
from gpu_runner.window import Window
from gpu_runner.wire import Completion, EngineLost, EngineRefused, Repair, RequestDenied, RowRejected, Transient
from gpu_runner.work import Item, Work, end_tasks

# New connections are opened in bursts that a listening socket's backlog holds (uvicorn: 2,048): beyond it they
# are dropped or reset. Slots that are already at work take their next row without this.
BURST = 256
BURST_SECONDS = 0.02
BATCH_FULL = "the answers of its batch have more than {} MiB: lower batch_rows or max_tokens"


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
        spending: Spending,
    ) -> None:
        self.engine, self.origin, self.work, self.policy, self.window = engine, origin, work, policy, window
        self.spending = spending
        self.in_flight: dict[Item, asyncio.Task[None] | None] = {}
        self.undecided: deque[Failure] = deque()
        self.denials = Denials()
        self._answered_rows = 0  # in flight, though only for want of room here
        self.group: Group[Item] | None = None
        self.draining = False
        self.error: BaseException | None = None
        self.ended = asyncio.Event()
        self.watchdog = Watchdog(engine, self, window, policy, rng)
        self._rng, self._wake = rng, wake
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        schema = engine.generation.json_schema
        self._filling: asyncio.TimerHandle | None = None
        self._check: Check | None = None if schema is None else compile_check(schema)

    # --- life ---

    def start(self) -> None:
        """Begins to take rows."""
        self._spawn(self.watchdog.run(self._wake, self._spawn))
        self.fill()

    def drain(self) -> None:
        """Takes no more rows; the lane ends when the last one in flight is answered."""
        self.draining = True
        self.work.memory.let_all_in()
        self._end_if_drained()

    def end(self, error: BaseException | None = None) -> None:
        """Stops taking rows; `serve` then closes the lane. The first call counts."""
        if not self.ended.is_set():
            self.error = error
            self.ended.set()

    async def close(self) -> None:
        """Cancels every request and gives the rows back; rows of a lost engine bear its death."""
        self.end()
        if self._filling is not None:
            self._filling.cancel()
        try:
            await end_tasks(self._tasks)
        finally:
            self.spending.lose(self._loop.time())
            self._return_rows()
            self.work.counts.canaries += self.watchdog.canaries

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _return_rows(self) -> None:
        held = [*self.in_flight, *(failure.item for failure in self.undecided), *self.denials.give_up()]
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
            suspects = {item for item in blamed if item.deaths >= self.policy.suspect_deaths}
            self.work.suspect(suspects)
            self.work.give_back(item for item in held if item not in suspects)
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
            if item.alone_deaths >= self.policy.alone_deaths:
                blamed = []
                message = f"alone in flight at {item.alone_deaths} engine deaths, the last: {self.error}"
                self.work.settle(item, self._dead(item, "engine_killed", message, item.alone_deaths))
        self.work.suspects.died(group, blamed, rest)

    # --- rows ---

    def fill(self) -> None:
        """Gives every free slot a row, some hundreds at a time."""
        if self._filling is not None:
            return
        for _ in range(BURST):
            item = self._take()
            if item is None:
                return
            self.in_flight[item] = self._spawn(self._work(item))
        self._filling = self._loop.call_later(BURST_SECONDS, self._fill_on)

    def _fill_on(self) -> None:
        self._filling = None
        self.fill()

    async def _work(self, item: Item) -> None:
        """One slot: rows one after the other, until there is none to take."""
        slot = asyncio.current_task()
        try:
            while True:
                await self._try(item)
                following = self._take()
                if following is None:
                    break
                item = following
                self.in_flight[item] = slot
        except Exception as error:
            self.end(error)
        self._end_if_drained()

    def _take(self) -> Item | None:
        if self.draining or self.ended.is_set() or self._slots_taken >= self.window.size:
            return None
        now = self._loop.time()
        if now < self.watchdog.resting_until:
            return None
        work = self.work
        if self.group is not None or (work.suspects and work.trial in (None, self)):
            item = self._take_suspect()
        else:
            item = work.take()
        if item is not None:
            item.sent = now
            self.in_flight[item] = None
            self.spending.begin(now)
        return item

    def _take_suspect(self) -> Item | None:
        self.work.trial = self
        if self.group is None:
            if self.in_flight or self.undecided or self.denials:
                self.work.memory.let_all_in()
                return None
            self.group = self.work.next_group()
            self._loop.call_soon(self.fill)
        return self.group.waiting.popleft() if self.group.waiting else None

    async def _try(self, item: Item) -> None:
        if item.started_at == 0.0:
            item.started_at = time.time()
        self.work.counts.requests += 1
        try:
            admit = partial(self._admit, item)
            completion = await self.engine.generate(item.row.prompt, repair=item.repair, admit=admit)
        except RowRejected as error:
            # No proof of life: the API server refuses a row without asking the engine behind it.
            self.watchdog.answered(self._answered(item))
            self.window.refusals.on_served()
            self._settle(item, self._dead(item, error.code, error.message))
        except Transient as error:
            self._failed(item, error, self._answered(item))
        except RequestDenied as error:
            self._denied(item, error, self._answered(item))
        except (EngineLost, EngineRefused) as error:
            self.end(error)
        else:
            now = self._answered(item)
            self.watchdog.answered(now)
            self.window.refusals.on_served()
            item.prompt_tokens += completion.prompt_tokens
            item.completion_tokens += completion.completion_tokens
            self._completed(item, completion)
            if self.undecided or self.denials:
                self.watchdog.succeeded(item.sent, now)
                self.judge()
        finally:
            if item.reading:
                self._done_reading(item)

    async def _admit(self, item: Item, size: int) -> None:
        """A large answer has come: waits until there is room for it. The engine has done its part meanwhile."""
        item.answered = True
        self._answered_rows += 1
        try:
            at_once = self.draining or item.group is not None
            await self.work.memory.admit(item.batch.bytes, size, at_once=at_once)
            item.reading = size
        finally:
            item.answered = False
            self._answered_rows -= 1
        self.watchdog.answered(self._loop.time())

    def _done_reading(self, item: Item) -> None:
        memory = self.work.memory
        was_full = memory.full
        memory.done_reading(item.batch.bytes, item.reading)
        item.reading = 0
        if was_full and not memory.full:
            self._loop.call_soon(self._wake)

    def _answered(self, item: Item) -> float:
        now = self._loop.time()
        del self.in_flight[item]
        item.seconds += now - item.sent
        return now

    def _usd(self, item: Item) -> float | None:
        now = self._loop.time()
        return self.spending.settle(item.prompt_tokens, item.completion_tokens, len(self.in_flight), now)

    def _completed(self, item: Item, completion: Completion) -> None:
        if not self.work.memory.fits(item.batch.bytes, bytes_of(completion)[1]):
            self._settle(item, self._dead(item, "answer_too_large", BATCH_FULL.format(item.batch.bytes.most >> 20)))
            return
        if isinstance(completion.output, tuple) and (problem := self._check_vector(item, len(completion.output))):
            self._settle(item, self._dead(item, "vector_length", problem))
            return
        if self._check is not None and isinstance(completion.output, str):
            problem = self._check(completion.output)
            if problem is not None:
                if completion.finish_reason == "length":
                    problem += "; the answer was cut at the token limit"
                self._repair(item, completion.output, problem)
                return
        answered = self._outcome(item, completion.output, completion.finish_reason, None, None, item.tries + 1)
        self._settle(item, answered if completion.parts is NO_PARTS else replace(answered, parts=completion.parts))

    def _check_vector(self, item: Item, length: int) -> str | None:
        try:
            return self.work.vectors.check(length)
        except EngineRefused:
            self.work.soon(item)
            raise

    def _repair(self, item: Item, answer: str, problem: str) -> None:
        attempt = 1 if item.repair is None else item.repair.attempt + 1
        if attempt > self.engine.generation.repair_tries:
            self._settle(item, self._dead(item, "schema_invalid", problem))
            return
        self.work.repair(item, Repair(answer, problem, attempt), getsizeof(answer))

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
        """A dead letter; `last` counts the requests to charge that are not among the row's tries yet."""
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
        return Outcome(
            item.row.row_id,
            item.row.row_key,
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
            self._usd(item),
        )

    # --- failures ---

    @property
    def _slots_taken(self) -> int:
        return len(self.in_flight) - self._answered_rows + len(self.undecided) + len(self.denials)

    @property
    def rows_in_flight(self) -> int:
        """Rows that the server is to answer; not those whose answers wait for room here."""
        return len(self.in_flight) - self._answered_rows

    @property
    def oldest_failure(self) -> float | None:
        """Since when a failure waits to be judged."""
        return self.undecided[0].at if self.undecided else None

    @property
    def oldest_break(self) -> float | None:
        """The same, of failures in which the connection was lost or refused."""
        return next((failure.at for failure in self.undecided if failure.error.broken), None)

    def _failed(self, item: Item, error: Transient, now: float) -> None:
        self.work.counts.failures += 1
        if not self.in_flight:
            self.spending.rest(now)
        self.undecided.append(Failure(item, error, now))
        first = item.tries == 0 and item.voids == 0
        if error.overload and self.window.on_refused(len(self.in_flight), first=first) and error.retry_after:
            self._rest_until(now + min(error.retry_after, self.policy.retry.retry_after_max))
        if error.broken:
            self.watchdog.suspect()

    def _denied(self, item: Item, error: RequestDenied, now: float) -> None:
        """The row waits until it is known whether it is the row that is not wanted, or we are."""
        self.work.counts.failures += 1
        if not self.in_flight:
            self.spending.rest(now)
        self.denials.add(Denial(item, error, now))
        if self.canary_due(now):
            self.watchdog.suspect()

    def canary_due(self, now: float) -> bool:
        """Whether denied rows wait for a canary."""
        return self.denials.due(now, self.window.size, len(self.in_flight))

    @property
    def oldest_denial(self) -> float | None:
        """Since when a denied row waits for evidence."""
        return self.denials.oldest

    def _rest_until(self, until: float) -> None:
        if until > self.watchdog.resting_until:
            self.watchdog.resting_until = until
            self._loop.call_at(until, self._wake)

    def abort_rows(self, sent_before: float) -> None:
        """Ends requests that hang on an engine which answers others; each is a failure like any other."""
        for item, slot in list(self.in_flight.items()):
            if item.sent <= sent_before and slot is not None and not item.answered:
                slot.cancel()
                self._failed(item, Transient("timeout", "no answer while others were answered"), self._answered(item))
        self._end_if_drained()

    def judge(self) -> None:
        """Frees the slots of failures that can be judged now, oldest first."""
        judged = self._bury_denied()
        while self.undecided and not self.ended.is_set():
            failure = self.undecided[0]
            verdict = judge(
                self.policy.retry,
                # A refusal for want of room was written by a server that lives.
                self.watchdog.claims if failure.error.overload else self.watchdog.proof,
                failure.at,
                failure.error,
                voids=failure.item.voids,
                outage=failure.at <= self.watchdog.outage_at,
                by_chance=self.window.refusals.by_chance(len(self.in_flight)),
                health_counts=self.watchdog.canary_useless,
            )
            if verdict == "undecided":
                break
            self.undecided.popleft()
            self._try_again(failure, charged=verdict == "charged")
            judged = True
        if judged:
            self._loop.call_soon(self._wake)

    def _bury_denied(self) -> bool:
        """Dead letters for the rows whose denial was their own."""
        proved = [] if self.ended.is_set() else self.denials.proved(self.watchdog.admitted)
        for denial in proved:
            self.watchdog.answered(self._loop.time())
            self._settle(denial.item, self._dead(denial.item, denial.error.code, denial.error.message))
        return bool(proved)

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
