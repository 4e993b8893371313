"""The second requests for late rows of a feed: the first answer counts, and the other request is cancelled.

A late row stays with the engine worker that sent it, IN_FLIGHT, while another engine (or the same one, where there is
no other) is asked for it too. Whatever happens to its first request happens as without the second one, which is then
cancelled. If the second request is answered first, the row moves to the engine worker that asked, in one step in which
nobody waits: so it is settled once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_runner.client.protocol import EngineError, EngineLost, EngineRefused, RequestDenied
from gpu_runner.inference.engine_worker import EngineWorker
from gpu_runner.inference.late_rows import LateRequest
from gpu_runner.inference.row_queue import Work
from gpu_runner.inference.row_state import Item, RowState


@dataclass(frozen=True, slots=True, eq=False)
class _Second:
    """A second request, of `target`, for the rows of a late one, which `owner` has."""

    late: LateRequest
    owner: EngineWorker
    target: EngineWorker

    @property
    def rows(self) -> tuple[Item, ...]:
        return self.late.rows


class SecondRequests:
    """Those of one feed. `workers`: all its engine workers."""

    def __init__(self, work: Work, workers: Callable[[], Sequence[EngineWorker]]) -> None:
        self._work, self._workers = work, workers

    def ask(self, owner: EngineWorker, late: LateRequest) -> None:
        """Asks once more for rows that this engine worker has, where an engine has room for them."""
        loop = asyncio.get_running_loop()
        alike = [one for one in self._workers() if one.work is owner.work]
        fit = [one for one in alike if one.may_be_asked(len(late.rows), loop.time())]
        target = min(fit, key=lambda one: (one is owner, len(one.in_flight)), default=None)
        if target is None:
            return
        for item in late.rows:
            self._work.hedge(item)
        second = _Second(late, owner, target)
        target.take_guests(len(late.rows))
        task = late.request.second = target.spawn(self._serve(second))
        task.add_done_callback(lambda task: self._ended(second, task))

    async def _serve(self, second: _Second) -> None:
        """Asks the target; its answer counts if the rows have none."""
        target, rows, sent = second.target, second.rows, asyncio.get_running_loop().time()
        oldest = min(rows, key=lambda item: item.order)  # its batch always moves: the answer waits as this row may
        memory, read = self._work.memory, 0

        async def admit(size: int) -> None:
            nonlocal read
            await memory.admit(oldest.batch.bytes, size, at_once=not target.life.serving)
            read = size

        try:
            completions = await target.ask_too(rows, admit)
            if _is_first(second):
                second.owner.give_away(second.late.request)
                target.take_over(rows, completions, sent)
            else:
                target.pay_in_vain(completions)
        except RequestDenied:
            self._work.count_failure()  # what it means, the first request shows
        except (EngineLost, EngineRefused) as error:
            target.end(error)
        except EngineError:
            self._work.count_failure()
        except Exception as error:
            target.end(error)
        finally:
            if read:
                memory.done_reading(oldest.batch.bytes, read)

    def _ended(self, second: _Second, task: asyncio.Task[None]) -> None:
        """The second request is over, one way or the other."""
        second.target.asked_too(len(second.rows), given_up=task.cancelled())
        if second.late.request.second is task:
            second.late.request.second = None


def _is_first(second: _Second) -> bool:
    """Whether the second answer is the first one: nothing has come of the late request yet."""
    in_flight, request = second.owner.in_flight, second.late.request
    return all(in_flight.get(item) is request and item.state is RowState.IN_FLIGHT for item in second.rows)
