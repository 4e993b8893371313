"""What the capacity sensor planned for a request, how a request ended, and what the sensor keeps from tick to tick.

JSON in three columns of `datasets`. `pause` holds a `Pause`, while there is one. While a request is under way, `plan`
holds a `CapacityPlan`, afterwards its `RequestSummary`; `memory` holds a `CapacityMemory`. What an earlier or later
version of this program wrote is read as far as it is known: other keys are left out, missing ones have their default.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

MEMORY_VERSION = 1


@dataclass(frozen=True, slots=True)
class Assignment:
    """An instance that is given up, and the offer (`Offer.name`) of which one takes its place.

    `successor` None: it is drained at once. Else its run works on until the successor answers. `beside`: the command's
    number counts both of them, so that a run that waits may lease the successor, too: who is first has the place.
    """

    instance: str
    successor: str | None = None
    beside: bool = False


class PauseKind(enum.StrEnum):
    """Why nothing may be rented for a request."""

    BUDGET_REACHED = "budget_reached"  # by the plan: what is left pays for no instance and its end
    LEASE_REFUSED = "lease_refused"  # by the fleet's database, which holds the budget to the cent
    QUALITY = "quality"  # gates have tripped: the rows that come are bad too often
    UNKNOWN = "unknown"  # of a later version of this program


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing may be rented. `text`: the rule that says so with its numbers, one sentence for people.

    `enough_usd`: US dollars with which the work would be done; None where nobody knows. `gates`: with QUALITY, those
    that have tripped, and what each says; somebody has to accept all of them.
    """

    kind: PauseKind
    text: str
    enough_usd: float | None = None
    gates: tuple[tuple[str, str], ...] = ()

    def describe(self) -> str:
        """For people."""
        return self.text or self.kind.value.replace("_", " ")


def pause_of_gates(gates: Mapping[str, str]) -> Pause | None:
    """The pause for gates that have tripped, each with what it says; None without any."""
    return Pause(PauseKind.QUALITY, "; ".join(gates.values()), gates=tuple(gates.items())) if gates else None


def pause_to_json(pause: Pause | None) -> str:
    """For the column; "" without a pause."""
    return "" if pause is None else json.dumps(asdict(pause))


def read_pause(text: str) -> Pause | None:
    """From the column; None without a pause. Earlier programs wrote the sentence alone."""
    if not text:
        return None
    try:
        found = json.loads(text)
        kind, words, enough = str(found["kind"]), str(found["text"]), found.get("enough_usd")
        enough = None if enough is None else float(enough)
        gates = tuple((str(name), str(said)) for name, said in found.get("gates") or ())
    except (ValueError, TypeError, KeyError, AttributeError):
        return Pause(PauseKind.BUDGET_REACHED, text)
    return Pause(PauseKind(kind) if kind in [*PauseKind] else PauseKind.UNKNOWN, words, enough, gates)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The last decision for a request that is under way, and what is expected of it.

    `kind`: of the command. `reason`: a sentence for people. Moments are Unix seconds by the database's clock, money is
    in US dollars since the request began; P50 is the median of what is expected, P95 is passed in 5 of 100 cases.
    `on_time`: is the deadline expected to be met (P50); None without one. `instances_wanted`: with those that the limit
    of the fleet leaves no room for. `assignments`: instances that are given up; their runs carry them out. `next_best`:
    other plans, in words.
    """

    kind: str = ""
    reason: str = ""
    planned_at: float = 0.0
    instances_wanted: int = 0
    feasible: bool = True
    on_time: bool | None = None
    finish_p50: float | None = None
    finish_p95: float | None = None
    usd_p50: float | None = None
    usd_p95: float | None = None
    usd_spent: float = 0.0
    assignments: tuple[Assignment, ...] = ()
    rows_left: int = 0
    rows_total: int = 0
    next_best: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """How a request ended, kept until the next one begins.

    Units as in `CapacityPlan`. `request`: its name. `on_time`: whether its deadline was met; None without one, or when
    `missing` batches were not there at its end. `usd_p50`, `usd_p95`: what was expected last. `clock`: what its seconds
    and dollars mean where a clock was scaled.
    """

    request: str = ""
    deadline: float | None = None
    budget_usd: float | None = None
    on_time: bool | None = None
    finished_at: float = 0.0
    usd_spent: float = 0.0
    usd_wasted: float = 0.0
    usd_p50: float | None = None
    usd_p95: float | None = None
    instances: int = 1
    reason: str = ""
    missing: int = 0
    clock: str = ""


@dataclass(frozen=True, slots=True)
class ControllerState:
    """What the controller keeps: the last command's fleet (`Offer.name` and number), the offers that had a pilot, and
    the successors that it assigned."""

    offers: tuple[tuple[str, int], ...] = ()
    tried: tuple[str, ...] = ()
    assignments: tuple[Assignment, ...] = ()


@dataclass(frozen=True, slots=True)
class ToldAlert:
    """An alert that was delivered `at` (Unix seconds by the database's clock). `over`: what it said is so no more."""

    kind: str
    at: float
    over: bool = False


@dataclass(frozen=True, slots=True)
class CapacityMemory:
    """What the capacity sensor keeps of a dataset from tick to tick, while a request is under way."""

    controller: ControllerState = ControllerState()
    alerts: tuple[ToldAlert, ...] = ()


NO_MEMORY = CapacityMemory()


def memory_to_json(memory: CapacityMemory) -> str:
    """For the column, in the format of MEMORY_VERSION."""
    told = {one.kind: {"at": one.at, "over": one.over} for one in memory.alerts}
    return json.dumps({"version": MEMORY_VERSION, "controller": asdict(memory.controller), "alerts": told})


def read_memory(text: str) -> CapacityMemory:
    """From the column; `{}` is the beginning, and so is what cannot be read. No version: 1."""
    try:
        found = json.loads(text)
        if int(found.get("version", MEMORY_VERSION)) > MEMORY_VERSION:
            return NO_MEMORY
        return CapacityMemory(_controller(found.get("controller") or {}), _told(found.get("alerts") or {}))
    except (ValueError, TypeError, AttributeError):
        return NO_MEMORY


def _controller(found: Mapping[str, Any]) -> ControllerState:
    return ControllerState(
        offers=tuple((str(name), int(number)) for name, number in found.get("offers", ())),
        tried=tuple(str(name) for name in found.get("tried", ())),
        assignments=tuple(read_assignment(one) for one in found.get("assignments", ())),
    )


def _told(found: Mapping[str, Any]) -> tuple[ToldAlert, ...]:
    """What was told; nothing when any of it cannot be read, so that it is told again."""
    try:
        return tuple(ToldAlert(str(kind), float(one["at"]), bool(one["over"])) for kind, one in found.items())
    except (ValueError, TypeError, AttributeError, KeyError):
        return ()


def to_json(plan: CapacityPlan | RequestSummary | None) -> str:
    """For the column; `{}` for None."""
    return json.dumps({} if plan is None else asdict(plan))


def read_plan(text: str) -> CapacityPlan | None:
    """From the column of a request that is under way; None before the first decision."""
    found = json.loads(text)
    if not found:
        return None
    assignments = tuple(read_assignment(one) for one in found.get("assignments") or ())
    lists = {"assignments": assignments, "next_best": tuple(found.get("next_best") or ())}
    return CapacityPlan(**_known(CapacityPlan, found) | lists)


def read_assignment(found: Mapping[str, Any]) -> Assignment:
    """From its fields as JSON."""
    return Assignment(**_known(Assignment, found))


def read_summary(text: str) -> RequestSummary | None:
    """From the column of a dataset without a request; None when there never was one."""
    found = json.loads(text)
    return RequestSummary(**_known(RequestSummary, found)) if found else None


def _known(cls: type[Assignment | CapacityPlan | RequestSummary], found: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: found[field.name] for field in fields(cls) if found.get(field.name) is not None}
