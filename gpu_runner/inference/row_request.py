"""One request that is under way: its rows, and the slot that waits for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from gpu_runner.inference.row_state import Item
from gpu_runner.micro_batches.bisection import RefusedList

# Entered around each request of an engine, with the jobs of its rows, each once.
RequestContext = Callable[[Sequence[str]], AbstractContextManager[object]]


@dataclass(slots=True, eq=False)
class Request:
    """A request to an engine for these rows.

    `refused`: the list of which these rows are a part, where that was refused. `slot`: the task that waits for the
    answer. `answered`: the answer has come, and waits for room. `broken_off`: nobody wants the answer any more, nor
    what else comes of it; the rows are elsewhere, or are over. `second`: a request for the same rows, as this one is
    late (second_requests.py).
    """

    rows: Sequence[Item]
    refused: RefusedList | None = None
    slot: asyncio.Task[None] | None = None
    answered: bool = False
    broken_off: bool = False
    second: asyncio.Task[None] | None = None

    def cancel_second(self) -> None:
        """This one has ended, or its answer is being read: the second one is not waited for."""
        second, self.second = self.second, None
        if second is not None and second is not asyncio.current_task():
            second.cancel()

    @property
    def jobs(self) -> list[str]:
        """The jobs of its rows, each once, in the order of the rows."""
        return list(dict.fromkeys([item.batch.job for item in self.rows]))
