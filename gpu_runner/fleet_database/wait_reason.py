"""What a run says of itself with each heartbeat: a sentence for people, and what it waits for, typed.

Programs read the `WaitReason` only. It lies in columns of the table of runs (`WAIT_COLUMNS`), in this module's format.
"""

from __future__ import annotations

import enum
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from gpu_runner.fleet_database.accounting.request_budget import BudgetRefusal


class WaitKind(enum.StrEnum):
    """What a run waits for."""

    CAPACITY = "capacity"  # the command allows no instance
    PAUSED = "paused"  # the command pauses the request
    BUDGET = "budget"  # the fleet's database refused a lease: `WaitReason.refusal`
    DATASET_LIMIT = "dataset_limit"  # the dataset holds all instances that it may lease
    FLEET_LIMIT = "fleet_limit"  # the fleet holds all instances that it may have
    ENGINES_HELD = "engines_held"  # other runs hold the engines of fleet.yaml
    NO_OFFER = "no_offer"  # nothing suitable is offered
    OFFERS_FAILED = "offers_failed"  # what is suitable failed a moment ago
    OTHER_RUN = "other_run"  # another run works on the batches that are left
    STORE = "store"  # the store does not answer
    REQUESTS_FAIL = "requests_fail"  # every request to its engine fails: `WaitReason.failure`
    INTERACTIVE = "interactive"  # interactive requests, which it sends to engines that other runs lease


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """What every request meets: the code of the error (http_429), the HTTP status if one came, and the server's
    sentence, or what is wrong with its answer.
    """

    code: str
    status: int | None
    sentence: str


@dataclass(frozen=True, slots=True)
class WaitReason:
    """What a run waits for; `refusal`: the numbers of a refused lease, with WaitKind.BUDGET; `failure`: with
    WaitKind.REQUESTS_FAIL. `seconds`: for how long it has waited; a run says this of its first moment only.
    """

    kind: WaitKind
    refusal: BudgetRefusal | None = None
    failure: RequestFailure | None = None
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class RunActivity:
    """What a run does now: `note` for people, and what it waits for, if it waits."""

    note: str = ""
    wait: WaitReason | None = None


_NUMBERS = ("wait_budget_usd", "wait_spent_usd", "wait_held_back_usd", "wait_drain_seconds", "wait_boot_usd")
_ROW = "wait_row_usd"  # NULL where a worker of the version before wrote the others
_FAILURE = ("wait_code", "wait_status", "wait_sentence")
SENTENCE_LENGTH = 300
WAIT_COLUMNS = ("wait_kind", *_NUMBERS, _ROW, *_FAILURE)


def wait_columns(wait: WaitReason | None) -> dict[str, Any]:
    """The values of `WAIT_COLUMNS`; all None when the run does not wait."""
    values: dict[str, Any] = dict.fromkeys(WAIT_COLUMNS)
    if wait is None:
        return values
    values["wait_kind"] = wait.kind.value
    if wait.refusal is not None:
        values |= dict(zip((*_NUMBERS, _ROW), astuple(wait.refusal), strict=True))
    if wait.failure is not None:
        code, status, sentence = astuple(wait.failure)
        values |= dict(zip(_FAILURE, (code, status, sentence[:SENTENCE_LENGTH]), strict=True))
    return values


def read_wait(row: sa.RowMapping) -> WaitReason | None:
    """From a row with `WAIT_COLUMNS` and `wait_age`. None also for a kind that only a later version of this program
    knows.
    """
    try:
        kind = WaitKind(row["wait_kind"])
    except ValueError:
        return None
    numbers = [row[name] for name in _NUMBERS]
    refusal = None if None in numbers else replace(BudgetRefusal(*numbers), row_usd=row[_ROW] or 0.0)
    code, status, sentence = (row[name] for name in _FAILURE)
    failure = None if code is None else RequestFailure(code, status, sentence or "")
    return WaitReason(kind, refusal, failure, row["wait_age"] or 0.0)
