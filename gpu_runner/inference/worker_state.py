"""The life of an engine worker: its states, and the transitions between them.

STARTING  made; takes no rows yet
SERVING   takes rows
DRAINING  takes no more rows; those in flight are answered
ENDED     takes no more rows and waits for no answer; `WorkerLife.error` says why it ended
CLOSED    its tasks have ended and its rows are given back; terminal
"""

from __future__ import annotations

import asyncio
import enum

from gpu_runner.inference.row_state import InvalidTransition


class WorkerState(enum.Enum):
    """Where an engine worker is; the module's docstring says what each means."""

    STARTING = enum.auto()
    SERVING = enum.auto()
    DRAINING = enum.auto()
    ENDED = enum.auto()
    CLOSED = enum.auto()


_OVER = frozenset({WorkerState.ENDED, WorkerState.CLOSED})


class WorkerLife:
    """The state of one worker. `ended` is set from ENDED on; `error`: why it ended, None: in good order.

    Several may want an end at once, and `drain` may come too late: these are not defects. The others are, and raise
    InvalidTransition.
    """

    def __init__(self) -> None:
        self.state = WorkerState.STARTING
        self.error: BaseException | None = None
        self.ended = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Whether the worker takes rows."""
        return self.state is WorkerState.SERVING

    @property
    def draining(self) -> bool:
        """Whether the worker takes no more rows and waits for answers."""
        return self.state is WorkerState.DRAINING

    @property
    def over(self) -> bool:
        """Whether the worker has ended, and may be closed."""
        return self.state in _OVER

    def start(self) -> None:
        """STARTING → SERVING."""
        self._change(WorkerState.STARTING, WorkerState.SERVING)

    def drain(self) -> bool:
        """SERVING → DRAINING. False when that is not to be any more."""
        if not self.serving:
            return False
        self._change(WorkerState.SERVING, WorkerState.DRAINING)
        return True

    def end(self, error: BaseException | None = None) -> None:
        """STARTING, SERVING or DRAINING → ENDED. Only the first call counts."""
        if not self.over:
            self.error = error
            self._change(self.state, WorkerState.ENDED)
            self.ended.set()

    def close(self) -> None:
        """ENDED → CLOSED."""
        self._change(WorkerState.ENDED, WorkerState.CLOSED)

    def _change(self, source: WorkerState, target: WorkerState) -> None:
        if self.state is not source:
            raise InvalidTransition(f"engine worker: expected {source.name}, found {self.state.name}")
        self.state = target
