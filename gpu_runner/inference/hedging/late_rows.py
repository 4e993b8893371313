"""The second requests for late rows: the first answer counts, and the other request is cancelled.

A late row stays with the engine worker that sent it, IN_FLIGHT, while another engine (or the same one, where there is
no other) is asked for it too. Whatever happens to its first request happens as without the second one, which is then
cancelled. If the second request is answered first, the row moves to the engine worker that asked, in one step in which
nobody waits: so it is settled once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpu_runner.client.protocol import Completion, EngineError, EngineLost, EngineRefused, RequestDenied
from gpu_runner.http.bounded_read import Admit
from gpu_runner.inference.hedging.request_durations import HedgePolicy, RequestDurations
from gpu_runner.inference.row_queue import Work
from gpu_runner.inference.row_request import Request
from gpu_runner.inference.row_state import Item, RowState
from gpu_runner.inference.windows.concurrency_window import Window
from gpu_runner.inference.worker_state import WorkerLife


class Worker(Protocol):
    """What is needed of an engine worker: of the one that has the late rows, and of the one that asks for them too."""

    @property
    def life(self) -> WorkerLife: ...
    @property
    def window(self) -> Window: ...
    @property
    def late(self) -> LateRows: ...
    @property
    def in_flight(self) -> dict[Item, Request]: ...
    @property
    def in_trial(self) -> bool: ...
    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...
    def may_be_asked(self, rows: int, now: float) -> bool: ...
    async def ask_too(self, rows: Sequence[Item], admit: Admit) -> Sequence[Completion]: ...
    def give_away(self, request: Request) -> None: ...
    def take_over(self, rows: Sequence[Item], completions: Sequence[Completion], sent: float) -> None: ...
    def pay_in_vain(self, completions: Sequence[Completion]) -> None: ...
    def count_flying(self) -> None: ...
    def asked_too(self, given_up: int) -> None: ...
    def end(self, error: BaseException | None = None) -> None: ...


@dataclass(slots=True, eq=False)
class _Hedge:
    """A second request, for all rows of the `first` one."""

    rows: tuple[Item, ...]
    first: Request
    target: Worker
    task: asyncio.Task[None] | None = None


class LateRows:
    """Those of one engine worker. `peers`: all engine workers of the feed, this one among them.

    `count`: rows that were late at the last look. `guests`: rows of second requests to this engine.
    """

    def __init__(self, worker: Worker, work: Work, policy: HedgePolicy, peers: Callable[[], Sequence[Worker]]) -> None:
        self._worker, self._work, self._policy, self._peers = worker, work, policy, peers
        self._loop = asyncio.get_running_loop()
        self.durations = RequestDurations(policy)
        self.hedges: dict[Item, _Hedge] = {}
        self.count = self.guests = 0

    # --- of the rows that this engine was asked for first ---

    def answered(self, rows: Iterable[Item]) -> None:
        """The first request has ended, or its answer is being read: the second one is cancelled."""
        for item in rows:
            hedge = self.hedges.pop(item, None)
            if hedge is not None and hedge.task is not None and hedge.task is not asyncio.current_task():
                hedge.task.cancel()

    def close(self) -> None:
        """The engine worker is over: its rows are asked for anew."""
        self.answered(list(self.hedges))

    def look(self, now: float) -> None:
        """Asks once more for late rows. To be called often: rows lie in the order in which they were sent."""
        self.count = 0
        if not self._worker.in_trial:
            for rows, request, asks in self._late(now):
                self.count += len(rows)
                if asks and (target := self._target(len(rows), now)) is not None:
                    self._ask(rows, request, target)

    def _late(self, now: float) -> list[tuple[tuple[Item, ...], Request, bool]]:
        """(rows, their request, whether they are to be asked for once more) of every late request."""
        limits: dict[int, float | None] = {}
        found = []
        for request, rows in self._old(now).items():
            size = sum(len(item.row.prompt) for item in rows)
            if size.bit_length() not in limits:
                limits[size.bit_length()] = self.durations.limit(size, len(self._worker.in_flight))
            limit, repeats = limits[size.bit_length()], rows[0].repeats
            age = now - rows[0].sent
            if limit is not None and age >= limit:
                again = repeats < self._policy.most and age >= limit * 2**repeats
                found.append((tuple(rows), request, again and rows[0] not in self.hedges))
        return found

    def _old(self, now: float) -> dict[Request, list[Item]]:
        """Rows that wait for their answer for the shortest time after which one may be late, by request."""
        found: dict[Request, list[Item]] = {}
        for item, request in self._worker.in_flight.items():
            if now - item.sent < self._policy.floor_seconds:
                break
            if item.state is RowState.IN_FLIGHT and item.group is None:
                found.setdefault(request, []).append(item)
        return found

    def _target(self, rows: int, now: float) -> Worker | None:
        """The engine worker to ask: another one if there is one, with the fewest rows in flight."""
        fit = [one for one in self._peers() if one.late.has_room(rows, now)]
        return min(fit, key=lambda one: (one is self._worker, len(one.in_flight)), default=None)

    def _ask(self, rows: tuple[Item, ...], first: Request, target: Worker) -> None:
        hedge = _Hedge(rows, first, target)
        for item in rows:
            self._work.hedge(item)
            self.hedges[item] = hedge
        target.late.guests += len(rows)
        target.count_flying()
        hedge.task = target.spawn(target.late.serve(hedge, self))
        hedge.task.add_done_callback(lambda _: self._ended(hedge))

    def take(self, hedge: _Hedge) -> bool:
        """Whether the second answer is the first one: the rows then leave the engine worker that has them."""
        in_flight = self._worker.in_flight
        if any(in_flight.get(item) is not hedge.first or item.state is not RowState.IN_FLIGHT for item in hedge.rows):
            return False
        self._worker.give_away(hedge.first)
        return True

    def _ended(self, hedge: _Hedge) -> None:
        """The second request is over, one way or the other."""
        hedge.target.late.guests -= len(hedge.rows)
        given_up = hedge.task is not None and hedge.task.cancelled()
        hedge.target.asked_too(len(hedge.rows) if given_up else 0)
        for item in hedge.rows:
            if self.hedges.get(item) is hedge:
                del self.hedges[item]

    # --- of second requests to this engine ---

    def has_room(self, rows: int, now: float) -> bool:
        """Whether this engine may be asked for late rows now.

        The rows beside which they are asked for keep their places: a few more are in flight.
        """
        worker, most = self._worker, max(1, int(self._policy.share * self._worker.window.size))
        free = not self.guests or self.guests + rows <= most
        return free and worker.may_be_asked(rows, now)

    async def serve(self, hedge: _Hedge, owner: LateRows) -> None:
        """Asks this engine; its answer counts if the rows have none."""
        worker, rows = self._worker, hedge.rows
        oldest = min(rows, key=lambda item: item.order)  # its batch always moves: the answer waits as this row may
        sent, read = self._loop.time(), 0

        async def admit(size: int) -> None:
            nonlocal read
            at_once = not worker.life.serving
            await self._work.memory.admit(oldest.batch.bytes, size, at_once=at_once)
            read = size

        try:
            completions = await worker.ask_too(rows, admit)
            if owner.take(hedge):
                worker.take_over(rows, completions, sent)
            else:
                worker.pay_in_vain(completions)
        except RequestDenied:
            self._work.count_failure()  # what it means, the first request shows
        except (EngineLost, EngineRefused) as error:
            worker.end(error)
        except EngineError:
            self._work.count_failure()
        except Exception as error:
            worker.end(error)
        finally:
            if read:
                self._work.memory.done_reading(oldest.batch.bytes, read)
