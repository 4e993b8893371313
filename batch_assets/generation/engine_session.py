"""One engine at work for a run, why it is left, and what a look of the supervisor comes to."""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field

from batch_assets.generation.loop_thread import Running
from batch_assets.generation.pending_lease import BackgroundTask
from gpu_runner.client.protocol import EngineRefused
from gpu_runner.reachability import Reachability
from resources.fleet.leased_engine import LeaseSignals
from resources.fleet.resource import LeasedEngine

WAITS = "waits for batches that another run works on"
UNREACHABLE_SECONDS = 3.0  # a way that is broken for less is not worth a word


class LeaveKind(enum.Enum):
    """Why an engine takes no more rows of a run."""

    OTHER_RUN = "other_run"  # what is left is another run's to make
    MIGRATION = "migration"  # another instance takes its place
    PREEMPTION_NOTICE = "preemption_notice"  # its provider takes it away
    RETIRED = "retired"  # the fleet gives it up
    BUDGET = "budget"  # it is paid by the token, and the budget pays for no further row


@dataclass(frozen=True, slots=True)
class LeaveReason:
    """`detail`: of a migration the decision, of a retired instance why the fleet gives it up; sentences for people.

    `notice_seconds`: with PREEMPTION_NOTICE, until it is taken away; `detail` then has its provider's words for why.
    """

    kind: LeaveKind
    detail: str = ""
    notice_seconds: float = 0.0

    def describe(self) -> str:
        """For people."""
        if self.kind is LeaveKind.OTHER_RUN:
            return WAITS
        if self.kind is LeaveKind.BUDGET:
            return "the budget pays for no further row"
        if self.kind is LeaveKind.PREEMPTION_NOTICE:
            return f"it will be taken away in {self.notice_seconds:.0f} s" + (f": {self.detail}" if self.detail else "")
        return self.detail


class StepKind(enum.Enum):
    """What a look of the supervisor comes to."""

    CONTINUE = "continue"
    DONE = "done"  # nothing is left to do
    FAILED = "failed"  # the run cannot go on


@dataclass(frozen=True, slots=True)
class StepResult:
    """`failure`: why the run cannot go on, for people; "" otherwise. `refused`: the engine refuses every request."""

    kind: StepKind
    failure: str = ""
    refused: bool = False


CONTINUE = StepResult(StepKind.CONTINUE)
DONE = StepResult(StepKind.DONE)


def failed(why: object) -> StepResult:
    """The run cannot go on."""
    return StepResult(StepKind.FAILED, str(why), refused=isinstance(why, EngineRefused))


@dataclass(eq=False)
class EngineSession:
    """One engine at work. `leaving`: why it takes no more rows; `handing_on`: telling that others may have it.

    `looking`: what its instance's row says, asked for now and then. `succeeded`: another run has it already.
    `unreachable`: the way to it is being made anew, and has been for UNREACHABLE_SECONDS.
    """

    leased: LeasedEngine
    serving: Running[None]
    stop: asyncio.Event
    leaving: LeaveReason | None = None
    retire: bool = False
    handing_on: BackgroundTask[bool] | None = None
    looking: BackgroundTask[LeaseSignals] | None = None
    look_at: float = 0.0
    succeeded: bool = False
    began: float = field(default_factory=time.monotonic)
    unreachable: bool = False
    broken_at: float | None = None

    def reachability_changed(self, now: float) -> bool:
        """Look at the way to it; whether `unreachable` is another one now. `now`: by the clock of all looks."""
        if self.leased.reachability() is not Reachability.RESTORING:
            self.broken_at = None
        elif self.broken_at is None:
            self.broken_at = now
        before, self.unreachable = (
            self.unreachable,
            self.broken_at is not None and now - self.broken_at >= UNREACHABLE_SECONDS,
        )
        return before != self.unreachable
