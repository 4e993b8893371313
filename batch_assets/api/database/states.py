"""The states of a batch, as OpenAI names them, and the transitions between them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class BatchStatus(enum.StrEnum):
    """`status` of a batch object."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Transition:
    """A named change of state. `time`: the field of the batch object that says when it happened."""

    name: str
    sources: frozenset[BatchStatus]
    target: BatchStatus

    @property
    def time(self) -> str:
        """Name of the field with its time."""
        return f"{self.target.value}_at"


def _transition(name: str, target: BatchStatus, *sources: BatchStatus) -> Transition:
    return Transition(name, frozenset(sources), target)


_VALIDATING, _IN_PROGRESS = BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS
REFUSE = _transition("refuse the input", BatchStatus.FAILED, _VALIDATING)
ACCEPT = _transition("accept the input", BatchStatus.IN_PROGRESS, _VALIDATING)
GIVE_UP = _transition("give up", BatchStatus.FAILED, _IN_PROGRESS)  # nothing can ever serve its model
FINALIZE = _transition("finalize", BatchStatus.FINALIZING, _IN_PROGRESS)
COMPLETE = _transition("complete", BatchStatus.COMPLETED, BatchStatus.FINALIZING)
# A batch whose input or results cannot be read ends with its window, wherever it stands.
EXPIRE = _transition("expire", BatchStatus.EXPIRED, _IN_PROGRESS, _VALIDATING, BatchStatus.FINALIZING)
CANCEL = _transition("cancel", BatchStatus.CANCELLING, _VALIDATING, _IN_PROGRESS, BatchStatus.FINALIZING)
END_CANCEL = _transition("end the cancel", BatchStatus.CANCELLED, BatchStatus.CANCELLING)

TRANSITIONS = (REFUSE, ACCEPT, GIVE_UP, FINALIZE, COMPLETE, EXPIRE, CANCEL, END_CANCEL)
TERMINAL = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})
OPEN = frozenset(BatchStatus) - TERMINAL
UNDER_WAY = OPEN - {BatchStatus.CANCELLING}
