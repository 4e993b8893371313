"""What a run says of itself with each heartbeat: a sentence for people, and what it waits for, typed.

Programs read the `WaitReason` only. It lies in columns of the table of runs (`WAIT_COLUMNS`), in this module's format.
"""

from __future__ import annotations

import enum
from dataclasses import astuple, dataclass, replace
from typing import Any

import sqlalchemy as sa

from gpu_runner.fleet.accounting.budget import BudgetRefusal


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
    INTERACTIVE = "interactive"  # interactive requests, which it sends to engines that other runs lease


@dataclass(frozen=True, slots=True)
class WaitReason:
    """What a run waits for; `refusal`: the numbers of a refused lease, with WaitKind.BUDGET."""

    kind: WaitKind
    refusal: BudgetRefusal | None = None


@dataclass(frozen=True, slots=True)
class RunActivity:
    """What a run does now: `note` for people, and what it waits for, if it waits."""

    note: str = ""
    wait: WaitReason | None = None


_NUMBERS = ("wait_budget_usd", "wait_spent_usd", "wait_held_back_usd", "wait_drain_seconds", "wait_boot_usd")
_ROW = "wait_row_usd"  # NULL where a worker of the version before wrote the others
WAIT_COLUMNS = ("wait_kind", *_NUMBERS, _ROW)


def wait_columns(wait: WaitReason | None) -> dict[str, Any]:
    """The values of `WAIT_COLUMNS`; all None when the run does not wait."""
    if wait is None:
        return dict.fromkeys(WAIT_COLUMNS)
    names = (*_NUMBERS, _ROW)
    numbers = (None,) * len(names) if wait.refusal is None else astuple(wait.refusal)
    return {"wait_kind": wait.kind.value, **dict(zip(names, numbers, strict=True))}


def read_wait(row: sa.RowMapping) -> WaitReason | None:
    """From a row with `WAIT_COLUMNS`. None also for a kind that only a later version of this program knows."""
    try:
        kind = WaitKind(row["wait_kind"])
    except ValueError:
        return None
    numbers = [row[name] for name in _NUMBERS]
    if None in numbers:
        return WaitReason(kind)
    return WaitReason(kind, replace(BudgetRefusal(*numbers), row_usd=row[_ROW] or 0.0))
