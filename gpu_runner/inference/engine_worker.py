"""One engine serving a feed: its rows in flight.

A freed slot takes its next row at once, in the task that freed it. Where the engine takes lists, a slot takes several
rows for one request; they are counted, judged and kept one by one. A list that is refused is cut in halves until the
rows at fault are alone (micro_batches/bisection.py). Rows that are late are asked for once more, here or elsewhere
(second_requests.py). What becomes of rows: row_outcomes.py of those that were answered, or that the engine still had at
its end; failed_requests.py of those whose request failed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

from gpu_runner.bounded_http.bounded_read import Admit
from gpu_runner.client.protocol import (
    Completion,
    EngineError,
    EngineLost,
    EngineRefused,
    RequestDenied,
    RowRejected,
    Transient,
)
from gpu_runner.cost_meter import CostMeter
from gpu_runner.inference.engine_liveness import EngineLiveness
from gpu_runner.inference.engine_monitor import Engine, ListEngine, Watchdog
from gpu_runner.inference.failed_requests import FailedRequests
from gpu_runner.inference.late_rows import LateRequest, RequestDurations, late_requests
from gpu_runner.inference.poison_rows import Group
from gpu_runner.inference.policy import FeedPolicy
from gpu_runner.inference.row_outcomes import RowOutcomes, return_rows
from gpu_runner.inference.row_queue import Work, end_tasks
from gpu_runner.inference.row_state import Item, Request, RequestContext, RowState
from gpu_runner.inference.windows.concurrency_window import Window
from gpu_runner.inference.windows.rate_limit import RateLimit
from gpu_runner.inference.worker_state import WorkerLife
from gpu_runner.micro_batches.bisection import RefusedList, halves
from gpu_runner.micro_batches.list_limits import ListSize, take_list
from gpu_runner.rows import Origin

# New connections are opened in bursts that a listening socket's backlog holds (uvicorn: 2,048): beyond it they
# are dropped or reset. Slots that are already at work take their next row without this.
BURST = 256
BURST_SECONDS = 0.02
MONEY_SECONDS = 0.2  # until it is looked again whether money for a row is granted
# Rows of a request take the places of rows of requests: a list is sent when so large a part of the window is free, so
# that many small lists do not go on as many small lists.
FREE_SHARE = 4

_NO_CONTEXT = nullcontext()


class EngineWorker:
    """One `serve` call. `wake` is called when rows may move: something became ready, or complete.

    `ask_again` is called for a late request whose rows are to be asked for once more. `rate`: None where the engine
    takes any number of requests. `context`: entered around each request.
    """

    def __init__(
        self,
        engine: Engine,
        origin: Origin,
        work: Work,
        policy: FeedPolicy,
        rng: random.Random,
        window: Window,
        wake: Callable[[], None],
        spending: CostMeter,
        ask_again: Callable[[LateRequest], None],
        rate: RateLimit | None = None,
        context: RequestContext | None = None,
    ) -> None:
        self.engine, self.origin, self.work, self.policy, self.window = engine, origin, work, policy, window
        self.spending, self.rate, self._context = spending, rate, context
        self.in_flight: dict[Item, Request] = {}
        self._loop = asyncio.get_running_loop()
        self.liveness = EngineLiveness(self._loop.time())
        self.failures = FailedRequests(self.liveness, work, policy, rng, window, wake)
        self._answered_rows = 0  # in flight, though only for want of room here
        self.group: Group[Item] | None = None
        self.life = WorkerLife()
        self.watchdog = Watchdog(engine, self.liveness, self.failures, policy, rng)
        self._wake = wake
        self._tasks: set[asyncio.Task[None]] = set()
        self._filling: asyncio.TimerHandle | None = None
        self._paced: asyncio.TimerHandle | None = None
        self._list_engine = engine if isinstance(engine, ListEngine) and engine.takes_lists else None
        self._lists = ListSize(policy.lists)
        self._ask_again, self._durations = ask_again, RequestDurations(policy.hedging)
        self.late_rows = 0  # at the last look
        self._guests = 0  # rows of second requests to this engine
        self.outcomes = RowOutcomes(engine.generation, origin, work, spending, wake)

    # --- life ---

    def start(self) -> None:
        """Begins to take rows."""
        self.life.start()
        self.work.holds_back = self.policy.holds_back
        self.spawn(self._watch())
        self.fill()

    def drain(self) -> None:
        """Takes no more rows; the worker ends when the last one in flight is answered."""
        if self.life.drain():
            self.work.memory.let_all_in()
            self._end_if_drained()

    def end(self, error: BaseException | None = None) -> None:
        """Stops taking rows; `serve` then closes the worker. The first call counts."""
        self.life.end(error)

    async def close(self) -> None:
        """Cancels every request and gives the rows back; rows of a lost engine bear its death."""
        self.end()
        for timer in (self._filling, self._paced):
            if timer is not None:
                timer.cancel()
        try:
            await end_tasks(self._tasks)
        finally:
            self.spending.lose(self._loop.time())
            failed, taken = self.failures.give_up()
            held = [*self.in_flight, *failed]
            lost = self.life.error
            innocent = isinstance(lost, EngineLost) and lost.never_answered
            blamed = [] if innocent else [*self.in_flight, *taken]
            for request in self.in_flight.values():
                request.cancel_second()
            self.in_flight.clear()
            self.spending.fly(0)
            return_rows(self.work, self.policy, self.outcomes, self.life.error, self.group, held, blamed)
            self.group = None
            if self.policy.holds_back:
                self.work.holds_back = False
                self.work.release()
            self.work.end_trial(self)
            self.work.count_canaries(self.watchdog.canaries)
            self.life.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with this worker."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- rows ---

    def fill(self) -> None:
        """Gives every free slot a row, some hundreds at a time."""
        if self._filling is not None:
            return
        for _ in range(BURST):
            request = self._take()
            if request is None:
                return
            request.slot = self.spawn(self._work(request))
        self._filling = self._loop.call_later(BURST_SECONDS, self._fill_on)

    def _fill_on(self) -> None:
        self._filling = None
        self.fill()

    def _fill_after(self, seconds: float) -> None:
        """As `fill`, then, for the pace of rows. A call before that looks again: the pace may have changed."""
        if self._paced is not None:
            self._paced.cancel()
        self._paced = self._loop.call_later(seconds, self.fill)

    async def _work(self, first: Request) -> None:
        """One slot: requests one after the other, until there is no row to take."""
        slot, request = asyncio.current_task(), cast("Request | None", first)
        try:
            while request is not None:
                request.slot = slot
                await (self._try(request) if len(request.rows) == 1 else self._try_list(request))
                request = self._take()
        except Exception as error:
            self.end(error)
        self._end_if_drained()

    def _fly(self, rows: Sequence[Item], refused: RefusedList | None = None) -> Request:
        """A request for these rows, which are in flight from now on."""
        request = Request(rows, refused)
        for item in rows:
            self.in_flight[item] = request
        return request

    def _take(self) -> Request | None:
        """The next request; None where none is to be sent now."""
        free = self.window.size - self._slots_taken
        if not self.life.serving or free <= 0:
            return None
        now = self._loop.time()
        if (room := self.spending.room) < free and (free := room) <= 0:
            self._fill_after(MONEY_SECONDS)
            return None
        if now < self.liveness.resting_until:
            return None
        if self._list_engine is None and (wait := self.window.wait_to_send(now)):
            self._fill_after(wait)
            return None
        if self.rate is not None and (wait := self.rate.wait(now)):  # before a row has a slot, and a time-out
            self._fill_after(wait)
            return None
        in_trial = self.group is not None or self.work.may_begin_trial(self)
        if in_trial and not self._in_trial():
            return None
        source = self.work if self.group is None else self.group
        if self._list_engine is not None:
            if self.in_flight and not in_trial and free < min(self._lists.most, self.window.size // FREE_SHARE):
                return None
            rows: Sequence[Item] = take_list(
                source.take,
                source.put_first,
                self._lists,
                most=free,
                bytes_of=_prompt_bytes,
                companions=self._companions,
                kind_of=self._kind_of,
            )
        else:
            rows = () if (item := source.take()) is None else (item,)
            if rows:
                self.window.on_sent()
        if not rows:
            if self.work.held_back and not self.in_flight and not self.work.exhausted:  # they keep others from coming
                self.work.release()
                self._loop.call_soon(self._wake)
            return None
        for item in rows:
            item.send(now)
        request = self._fly(rows)
        self.count_flying()
        self.spending.begin(now)
        if self.rate is not None:
            self.rate.on_sent(rows[0], sum(map(_prompt_bytes, rows)), now, len(rows))
        return request

    def _kind_of(self, item: Item) -> object:
        return None if self._list_engine is None else self._list_engine.list_kind(item.prompt)

    def _companions(self, item: Item) -> int:
        return self._lists.with_tries_left(item.tries, self.policy.retry.max_tries)

    def _in_trial(self) -> bool:
        """Whether suspects may be sent now: they wait until nothing else is in flight."""
        self.work.begin_trial(self)
        if self.group is None:
            if self.in_flight or self.failures or self._guests:
                self.work.memory.let_all_in()
                return False
            self.group = self.work.next_group()
            self._loop.call_soon(self.fill)
        return True

    def _around(self, request: Request) -> AbstractContextManager[object]:
        return _NO_CONTEXT if self._context is None else self._context(request.jobs)

    async def _try_list(self, request: Request) -> None:
        """One request for several rows."""
        assert self._list_engine is not None
        rows = request.rows
        for item in rows:
            self.work.start(item, time.time())
        try:
            with self._around(request):
                prompts = [item.prompt for item in rows]
                completions = await self._list_engine.generate_list(prompts, admit=partial(self._admit, request))
        except (EngineLost, EngineRefused, Transient, RowRejected) as error:
            if not self._list_failed(request, error):
                return
        else:
            if not request.broken_off:
                self._note(request.refused, completions, len(rows))
                self._list_answered(rows, completions)
            return
        finally:
            self._done_reading(request)
        first = self._cut(request)
        await (self._try(first) if len(first.rows) == 1 else self._try_list(first))

    def _list_failed(self, request: Request, error: EngineError) -> bool:
        """Whether the list itself is refused: its halves are asked for."""
        rows, of_account = request.rows, isinstance(error, RequestDenied) and error.of_account
        if isinstance(error, EngineLost | EngineRefused) and not isinstance(error, RequestDenied):
            self.end(error)
            return False
        if request.broken_off:
            return False
        if isinstance(error, Transient):
            self._note(request.refused, None, len(rows))
            self.failures.failed(rows, error, self._answered(*rows), len(self.in_flight))
            return False
        if isinstance(error, RequestDenied) and of_account:  # smaller lists would be refused as well
            self._note(request.refused, None, len(rows))
            now = self._answered(*rows)
            for item in rows:
                self.failures.denied(item, error, now, len(self.in_flight))
                self._judge()
            return False
        return True

    def _cut(self, request: Request) -> Request:
        """Sends the second half of a refused list; returns the first."""
        request.cancel_second()
        self.liveness.answered(self._loop.time())
        refused = request.refused or RefusedList(len(request.rows))
        first, second = (self._fly(half, refused) for half in halves(request.rows))
        if self.rate is not None:
            for half in (first.rows, second.rows):
                self.rate.on_sent(half[0], sum(map(_prompt_bytes, half)), self._loop.time(), len(half))
        first.slot, second.slot = request.slot, self.spawn(self._work(second))
        return first

    def _list_answered(self, rows: Sequence[Item], completions: Sequence[Completion]) -> None:
        now = self._loop.time()
        self.liveness.answered(now)
        tokens = sum([completion.prompt_tokens for completion in completions])
        size = sum([len(item.prompt) for item in rows])
        self._lists.counted(tokens, size)
        self._durations.answered(size, now - rows[0].sent, len(rows))
        if self.rate is not None:
            completion_tokens = sum([completion.completion_tokens for completion in completions])
            self.rate.on_answer(rows[0], tokens, completion_tokens, now, len(rows))
        self.outcomes.answered_together = len(rows)
        try:
            for item, completion in zip(rows, completions, strict=True):
                self.outcomes.answered_together -= 1
                self._answered(item)
                self.window.refusals.on_served()
                self._add_tokens(item, completion)
                self._note_trial(self.outcomes.completed(item, completion, len(self.in_flight)))
        finally:
            self.outcomes.answered_together = 0
        if self.failures.answered(rows[-1], now):
            self._judge()

    def _note(self, refused: RefusedList | None, answer: Sequence[Completion] | EngineError | None, rows: int) -> None:
        """What became of a part of a refused list: answered, refused (alone), or failed (None)."""
        if refused is None:
            return
        if answer is None:
            refused.failed(rows)
        elif isinstance(answer, EngineError):
            refused.refused_alone()
        else:
            refused.answered(rows)
        if refused.most_taken is not None:
            self._lists.refuses_more_than(refused.most_taken)

    async def _try(self, request: Request) -> None:
        item = request.rows[0]
        self.work.start(item, time.time())
        try:
            with self._around(request):
                completion = await self.engine.generate(
                    item.prompt,
                    repair=item.repair,
                    admit=partial(self._admit, request),
                    fields=item.fields,
                    max_tokens=item.max_tokens,
                    free=item.goes_on,
                    user=bool(item.user_request),
                )
        except EngineError as error:
            self._failed(request, item, error)
        else:
            if not request.broken_off:
                self._note(request.refused, (completion,), 1)
                self._row_answered(item, completion)
        finally:
            self._done_reading(request)

    def _failed(self, request: Request, item: Item, error: EngineError) -> None:
        """The request for one row was not answered."""
        if isinstance(error, EngineLost | EngineRefused) and not isinstance(error, RequestDenied):
            self.end(error)
        elif request.broken_off:
            return
        elif isinstance(error, RowRejected):
            # No proof of life: the API server refuses a row without asking the engine behind it.
            self._note(request.refused, error, 1)
            self.liveness.answered(self._answered(item))
            self.window.refusals.on_served()
            self._note_trial(self.outcomes.rejected(item, error, len(self.in_flight)))
        elif isinstance(error, Transient):
            self._note(request.refused, None, 1)
            self.failures.failed((item,), error, self._answered(item), len(self.in_flight))
        elif isinstance(error, RequestDenied):
            self._note(request.refused, error, 1)
            self.failures.denied(item, error, self._answered(item), len(self.in_flight))
            self._judge()
        else:
            raise error

    def _row_answered(self, item: Item, completion: Completion) -> None:
        if self.rate is not None:
            self.rate.on_answer(item, completion.prompt_tokens, completion.completion_tokens, self._loop.time())
        now = self._answered(item)
        self._durations.answered(len(item.prompt), now - item.sent)
        self.liveness.answered(now)
        self.window.refusals.on_served()
        self._add_tokens(item, completion)
        asked = item.asked_row
        self._note_trial(self.outcomes.completed(item, completion, len(self.in_flight)))
        if self.failures.answered(item, now, asked):
            self._judge()

    async def _admit(self, request: Request, size: int) -> None:
        """A large answer has come: waits until there is room for it. The engine has done its part meanwhile.

        The row of the oldest batch waits for all: another's room may depend on that batch's commit.
        """
        rows = request.rows
        oldest = min(rows, key=_order)
        request.cancel_second()
        for item in rows:
            item.wait_for_room()
        request.answered = True
        self._answered_rows += len(rows)
        admitted = 0
        try:
            at_once = not self.life.serving or oldest.group is not None
            await self.work.memory.admit(oldest.batch.bytes, size, at_once=at_once)
            admitted = size
        finally:
            if request.broken_off:  # while it waited
                if admitted:
                    self.work.memory.done_reading(oldest.batch.bytes, admitted)
            else:
                for item in rows:
                    item.read_answer(admitted if item is oldest else 0)
                request.answered = False
                self._answered_rows -= len(rows)
        self.liveness.answered(self._loop.time())

    def _done_reading(self, request: Request) -> None:
        memory = self.work.memory
        if request.broken_off:
            self._loop.call_soon(self._wake)
        elif memory.reading:
            was_full = memory.full
            self._read(request)
            if was_full and not memory.full:
                self._loop.call_soon(self._wake)

    def _read(self, request: Request) -> None:
        for item in request.rows:
            if item.reading:
                self.work.memory.done_reading(item.batch.bytes, item.done_reading())

    def _break_off(self, request: Request) -> None:
        """The request is under way, and nobody waits for it any more: it may have to be paid. Its rows leave."""
        if request.answered:
            self._answered_rows -= len(request.rows)
        self._read(request)
        request.broken_off = True
        request.cancel_second()
        for item in request.rows:
            del self.in_flight[item]
        self.spending.give_up(len(request.rows))
        self.count_flying()
        if self.rate is not None:
            self.rate.on_end(request.rows[0])
        if not self.in_flight:
            self.spending.rest(self._loop.time())
        if request.slot is not None:
            request.slot.cancel()
        self._loop.call_soon(self._end_if_drained)

    def end_jobs(self) -> None:
        """Rows of jobs that have ended leave; other rows of their requests are to be asked for again."""
        for request in dict.fromkeys(one for item, one in self.in_flight.items() if item.batch.ended):
            self._break_off(request)
            self._note(request.refused, None, len(request.rows))
            for item in request.rows:
                if item.batch.ended:
                    self.work.cancel(item)
                    continue
                if request.answered:
                    item.read_answer(0)
                self.work.soon(item)
        waiting = [] if self.group is None else self.group.remove(_has_ended)
        for item in self.failures.remove(_has_ended) + waiting:
            self.work.cancel(item)
        if self.group is not None and not self.group.left:
            self.trial_over()

    def _add_tokens(self, item: Item, answer: Completion) -> None:
        item.add_tokens(answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens)
        self.spending.count(answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens)

    def _answered(self, *rows: Item) -> float:
        now = self._loop.time()
        for item in rows:
            request = self.in_flight.pop(item)
            if request.second is not None:
                request.cancel_second()
            item.add_seconds(now)
            self.window.on_answer(now - item.sent)
        self.count_flying()
        if self.rate is not None:
            self.rate.on_end(rows[0])
        if not self.in_flight:
            self.spending.rest(now)
        return now

    # --- late rows ---

    def may_be_asked(self, rows: int, now: float) -> bool:
        """Whether this engine takes so many late rows more, does not refuse for their number, and they can be paid.

        The rows beside which they are asked for keep their places: a few more are in flight.
        """
        most = max(1, int(self.policy.hedging.share * self.window.size))
        free = not self._guests or self._guests + rows <= most
        calm = self.window.refusals.cap is None and now >= self.liveness.resting_until
        calm = calm and not self.window.wait_to_send(now)
        room = self._slots_taken + rows <= self.window.most and rows <= self.spending.room
        room = room and (self.rate is None or not self.rate.wait(now))
        return free and self.life.serving and self.group is None and calm and room

    def take_guests(self, rows: int) -> None:
        """A second request for so many rows is sent to this engine; `asked_too` follows."""
        self._guests += rows
        self.count_flying()

    async def ask_too(self, rows: Sequence[Item], admit: Admit) -> Sequence[Completion]:
        """A second request for late rows. Raises as `Engine.generate`."""
        self.spending.begin(self._loop.time())
        self.count_request(sum(map(_prompt_bytes, rows)), len(rows))
        first = rows[0]
        with self._around(Request(rows)):
            if len(rows) == 1:
                answer = await self.engine.generate(
                    first.prompt,
                    repair=first.repair,
                    admit=admit,
                    fields=first.fields,
                    max_tokens=first.max_tokens,
                    free=first.goes_on,
                    user=bool(first.user_request),
                )
                return (answer,)
            assert self._list_engine is not None
            return await self._list_engine.generate_list([item.prompt for item in rows], admit=admit)

    def count_request(self, prompt_bytes: int, rows: int) -> None:
        """A request that is none of a row which has a slot here: it counts in the engine's limits a minute."""
        if self.rate is not None:
            self.rate.on_sent(self, prompt_bytes, self._loop.time(), rows)
            self.rate.on_end(self)

    def count_flying(self) -> None:
        """The rows with the engine have changed: so many are to be paid."""
        self.spending.fly(len(self.in_flight) + self._guests)

    def asked_too(self, rows: int, *, given_up: bool) -> None:
        """A second request has ended; `given_up`: it was broken off."""
        self._guests -= rows
        if given_up:
            self.spending.give_up(rows)
        self.count_flying()
        if not self.in_flight:
            self.spending.rest(self._loop.time())
        self._loop.call_soon(self._wake)

    def give_away(self, request: Request) -> None:
        """Another request for its rows was answered first."""
        self._break_off(request)

    def pay_in_vain(self, completions: Sequence[Completion]) -> None:
        """The answer to a second request, which came after the first one."""
        for completion in completions:
            self.spending.count(completion.prompt_tokens, completion.completion_tokens, completion.cached_tokens)

    def take_over(self, rows: Sequence[Item], completions: Sequence[Completion], sent: float) -> None:
        """The answer to a request that was sent to this engine at `sent`, the first one for these rows."""
        for item in rows:
            item.answer_hedge(sent)
        self._fly(rows)
        if len(rows) == 1:
            self._row_answered(rows[0], completions[0])
        else:
            self._list_answered(rows, completions)

    # --- failed requests, and suspects ---

    def _judge(self) -> None:
        """Does what the failures so far say of rows and of the engine."""
        if self.failures.denials and not self.life.over:
            self.fill()  # rows to take bring evidence
        if self.life.over:
            return
        verdicts = self.failures.judge(len(self.in_flight))
        if verdicts.refused is not None:
            self.end(verdicts.refused)
        for dead in verdicts.dead:
            self._note_trial(self.outcomes.end_dead(dead.item, dead.code, dead.message, len(self.in_flight), dead.last))

    def _note_trial(self, over: bool) -> None:
        if over:
            self.trial_over()

    def trial_over(self) -> None:
        """Every row of the group of suspects has its outcome."""
        self.group = None
        if not self.work.suspects:
            self.work.end_trial(self)
        self._loop.call_soon(self._wake)

    # --- what the watchdog decides ---

    async def _watch(self) -> None:
        """Looks at the engine every `poll_seconds` until cancelled, and does what is to be done."""
        try:
            while True:
                look = await self.watchdog.look()
                if look.ticked:
                    self.window.on_tick(look.load, self.rows_in_flight)
                if look.lost is not None:
                    self.end(look.lost)
                self._judge()
                orders = self.watchdog.decide(len(self.in_flight), self.rows_in_flight)
                if orders.canary:
                    self.spawn(self._send_canary())
                if orders.lost is not None:
                    self.end(orders.lost)
                if orders.abort_before is not None:
                    self.abort_rows(orders.abort_before)
                self._look_for_late_rows()
                self._wake()
                await self.watchdog.rest()
        except Exception as error:
            self.end(error)

    def _look_for_late_rows(self) -> None:
        late: list[LateRequest] = []
        if self.group is None:
            late = late_requests(self.in_flight, self._durations, self.policy.hedging, self._loop.time())
        self.late_rows = sum(len(one.rows) for one in late)
        for one in late:
            if one.asks:
                self._ask_again(one)

    async def _send_canary(self) -> None:
        self.count_request(0, 0)
        found = await self.watchdog.canary(len(self.in_flight))
        if found.error is not None:
            self.end(found.error)
        if found.judge:
            self._judge()

    @property
    def _slots_taken(self) -> int:
        return self.rows_in_flight + self.failures.slots_kept + self._guests

    @property
    def rows_in_flight(self) -> int:
        """Rows that the server is to answer; not those whose answers wait for room here."""
        return len(self.in_flight) - self._answered_rows

    def abort_rows(self, sent_before: float) -> None:
        """Ends requests that hang on an engine which answers others; each is a failure like any other."""
        for item, request in list(self.in_flight.items()):
            if item.sent <= sent_before and request.slot is not None and item.state is RowState.IN_FLIGHT:
                self._read(request)
                request.broken_off = True
                request.slot.cancel()
                error = Transient("timeout", "no answer while others were answered")
                self.failures.failed((item,), error, self._answered(item), len(self.in_flight))
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        if self.life.draining and not self.in_flight:
            self.end()


def _prompt_bytes(item: Item) -> int:
    return len(item.prompt)


def _order(item: Item) -> int:
    return item.order


def _has_ended(item: Item) -> bool:
    return item.batch.ended
