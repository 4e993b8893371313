"""What is wanted of each dataset's request, and what the capacity sensor commands: the transactions on `datasets`.

A request is what is being made now: a refresh, a backfill. Its target (deadline, budget, objective, most instances) is
wished for in the spec and may be overridden by an operator; the command (instances, offers, pause) is the sensor's.
A dataset without a row may lease one instance and has no budget.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import sqlalchemy as sa

from gpu_runner.fleet_database.accounting.request_budget import Spend, begin_spending, spend_of
from gpu_runner.fleet_database.capacity_plan import (
    NO_MEMORY,
    CapacityMemory,
    CapacityPlan,
    Pause,
    PauseKind,
    RequestSummary,
    memory_to_json,
    pause_of_gates,
    pause_to_json,
    read_memory,
    read_pause,
    read_plan,
    read_summary,
    to_json,
)
from gpu_runner.fleet_database.connection import DATASETS, LEASES, Tables, patient
from gpu_runner.fleet_database.leases import end_retired, mark_retired

NO_COMMAND: Mapping[str, Any] = {
    **{"instances": 1, "offers": "[]", "pause": "", "memory": "{}", "plan": "{}"},
    **{
        "accepted_gates": "[]",
        "deadline_override": None,
        "budget_override": None,
        "updated_at": None,
        "counted_at": None,
    },
}
NO_TARGET: Mapping[str, Any] = {"deadline_at": None, "budget_usd": None, "objective": "", "max_instances": None}


@dataclass(frozen=True, slots=True)
class DatasetTarget:
    """A dataset's row. Times are Unix seconds by the database's clock, ages and `deadline_in` seconds.

    `request` "": nothing is being made. `deadline_at`, `budget_usd`: with what an operator overrode. `offers`: names
    (`Offer.name`) and how many instances of each, best first. `pause`: why nothing may be leased. `memory`: what the
    capacity sensor keeps for itself from tick to tick. `plan`: its last decision; None before the first one of a
    request. `ended`: how the last request ended, until the next one begins. `updated_age`: since the last command;
    None: there was none.
    """

    dataset: str
    instances: int
    request: str
    since: float
    age: float
    deadline_at: float | None
    deadline_in: float | None
    budget_usd: float | None
    objective: str
    max_instances: int | None
    offers: tuple[tuple[str, int], ...]
    pause: Pause | None
    memory: CapacityMemory
    plan: CapacityPlan | None
    ended: RequestSummary | None
    updated_age: float | None


class Targets(Tables):
    """The transactions on requests and commands."""

    def now(self) -> float:
        """The database's clock: Unix seconds."""
        with self._reading() as (_, now):
            return now

    def target(self, dataset: str) -> DatasetTarget | None:
        """The dataset's row, or None."""
        with self._reading() as (connection, now):
            return _read(connection, dataset, now)

    def targets(self) -> list[DatasetTarget]:
        """Every dataset's row, by name."""
        with self._reading() as (connection, now):
            rows = connection.execute(sa.select(DATASETS).order_by(DATASETS.c.dataset)).mappings().all()
        return [_target(row, now) for row in rows]

    def instances(self, dataset: str) -> int:
        """How many instances the dataset may lease now; 1 until somebody commands otherwise."""
        query = sa.select(DATASETS.c.instances).where(DATASETS.c.dataset == dataset)
        with self._reading() as (connection, _):
            found = connection.execute(query).scalar()
        return 1 if found is None else int(found)

    def set_instances(self, dataset: str, instances: int) -> None:
        """Command how many instances the dataset may lease, and nothing else."""
        with self._transaction() as (connection, _):
            _write(connection, dataset, instances=instances)

    @patient
    def begin_request(
        self,
        dataset: str,
        request: str,
        *,
        deadline_at: float | None = None,
        budget_usd: float | None = None,
        objective: str = "",
        max_instances: int | None = None,
        accepted_gates: Collection[str] = (),
    ) -> DatasetTarget:
        """What is wanted of `request`, which is made now.

        A new request starts with one instance, and its spending counts from this moment. Of the one that stands there
        already only the wishes are updated. `accepted_gates` pause it never. Raises ValueError for a request without a
        name.
        """
        if not request:
            raise ValueError("begin_request: expected the name of a request, found none")
        wishes: dict[str, Any] = {"deadline_at": deadline_at, "budget_usd": budget_usd}
        wishes |= {"objective": objective, "max_instances": max_instances}
        with self._reading() as (connection, now):  # the capacity sensor says it at each tick, of each open dataset
            row = connection.execute(sa.select(DATASETS).where(DATASETS.c.dataset == dataset)).mappings().first()
        if row is not None and row["request"] == request and wishes.items() <= row.items():
            return _target(row, now)
        with self._transaction() as (connection, now):
            before = _read(connection, dataset, now)
            if before is not None and before.request == request:
                _write(connection, dataset, **wishes, counted_at=None)
            else:
                command = {**NO_COMMAND, "accepted_gates": json.dumps(sorted(accepted_gates))}
                _write(connection, dataset, **command, **wishes, request=request, since=now)
                begin_spending(connection, dataset)
            found = _read(connection, dataset, now)
        assert found is not None
        return found

    def continue_request(self, dataset: str, request: str, following: str) -> bool:
        """The request goes on under another name: its wishes, its time, its command and what it has spent stay. False
        when it was another one."""
        mine = (DATASETS.c.dataset == dataset) & (DATASETS.c.request == request) & (DATASETS.c.request != "")
        with self._transaction() as (connection, _):
            return connection.execute(DATASETS.update().where(mine).values(request=following)).rowcount == 1

    def override(
        self,
        dataset: str,
        *,
        deadline_at: float | EllipsisType | None = ...,
        budget_usd: float | EllipsisType | None = ...,
    ) -> bool:
        """An operator's word for the current request; None takes it back. False when there is no request."""
        said = {"deadline_override": deadline_at, "budget_override": budget_usd}
        values = {column: value for column, value in said.items() if value is not ...}
        with self._transaction() as (connection, now):
            before = _read(connection, dataset, now)
            if before is None or not before.request:
                return False
            _write(connection, dataset, **values, counted_at=None)
            return True

    def command(
        self,
        dataset: str,
        request: str,
        instances: int,
        offers: Sequence[tuple[str, int]] = (),
        pause: Pause | None = None,
        memory: CapacityMemory = NO_MEMORY,
        plan: CapacityPlan | None = None,
        decided_at: float | None = None,
    ) -> bool:
        """What the dataset may lease from now on. False when its request is another one by now: nothing is written.

        Gates that have tripped meanwhile allow no instance. `decided_at`: when that was seen which it rests on; None:
        now.
        """
        mine = (DATASETS.c.dataset == dataset) & (DATASETS.c.request == request)
        with self._transaction() as (connection, now):
            if (tripped := _quality_pause(connection, dataset)) is not None:
                instances, pause = 0, tripped
            words = {"offers": json.dumps([list(one) for one in offers]), "pause": pause_to_json(pause)}
            words |= {"memory": memory_to_json(memory), "plan": to_json(plan)}
            change = DATASETS.update().where(mine).values(instances=max(0, instances), **words, updated_at=now)
            if decided_at is not None:
                change = change.values(updated_at=min(now, decided_at))
            return connection.execute(change).rowcount == 1

    def trip_gate(self, dataset: str, gate: str, text: str) -> bool:
        """Pause what is being made of the dataset: nothing is leased for it until the gate is accepted.

        `text`: why, one sentence for people. False: somebody has accepted this gate, and nothing is paused.
        """
        with self._transaction() as (connection, _):
            if gate in _accepted(connection, dataset):
                return False
            before = _quality_pause(connection, dataset)
            gates = {gate: text} | dict(before.gates if before is not None else ())
            _write(connection, dataset, instances=0, pause=pause_to_json(pause_of_gates(gates)))
            return True

    def accept_gates(self, dataset: str, gates: Collection[str]) -> bool:
        """These gates pause the current request no more. False when there is no request.

        When none is left of those that have paused it, one instance may be leased until the next command.
        """
        with self._transaction() as (connection, now):
            found = _read(connection, dataset, now)
            if found is None or not found.request:
                return False
            accepted = {*_accepted(connection, dataset), *gates}
            values: dict[str, Any] = {"accepted_gates": json.dumps(sorted(accepted))}
            pause = _quality_pause(connection, dataset)
            if pause is not None:
                left = {name: said for name, said in pause.gates if name not in accepted}
                values["pause"] = pause_to_json(pause_of_gates(left))
                values |= {} if left else {"instances": 1}
            _write(connection, dataset, **values)
            return True

    def remember(self, dataset: str, request: str, memory: CapacityMemory) -> None:
        """Keep this for the next decision on the request, beside the command that stands."""
        mine = (DATASETS.c.dataset == dataset) & (DATASETS.c.request == request)
        with self._transaction() as (connection, _):
            connection.execute(DATASETS.update().where(mine).values(memory=memory_to_json(memory)))

    def leased_since_command(self, dataset: str) -> bool:
        """Whether a lease of the dataset's runs ended after the last command, which counted with what it stood on."""
        ends = sa.func.max(sa.func.coalesce(LEASES.c.released_at, LEASES.c.expires_at))
        last = sa.select(ends).where(LEASES.c.dataset == dataset).scalar_subquery()
        query = sa.select(DATASETS.c.dataset).where((DATASETS.c.dataset == dataset) & (last > DATASETS.c.updated_at))
        with self._reading() as (connection, _):
            return connection.execute(query).first() is not None

    def end_request(self, dataset: str, request: str, summary: RequestSummary | None = None) -> bool:
        """The request is over: no deadline, no budget, no command. False when it was another one.

        `summary`, how it ended, is kept until the next request.
        """
        mine = (DATASETS.c.dataset == dataset) & (DATASETS.c.request == request) & (DATASETS.c.request != "")
        with self._transaction() as (connection, now):
            over = {**NO_COMMAND, **NO_TARGET, "request": "", "since": now, "plan": to_json(summary)}
            ended = connection.execute(DATASETS.update().where(mine).values(**over)).rowcount == 1
            if ended:
                begin_spending(connection, dataset)
            return ended

    def spend(self, dataset: str) -> Spend:
        """What the dataset spent since its request began; without a row, all that it ever spent."""
        with self._reading() as (connection, now):
            since = connection.execute(sa.select(DATASETS.c.since).where(DATASETS.c.dataset == dataset)).scalar()
            return spend_of(connection, now, dataset, since or 0.0)

    def retire(self, instance: str, reason: str) -> bool:
        """Let an instance take no new lease and end with its last one, at once when there is none. False: it is to
        end anyway.

        Its holder sees the reason and leaves it.
        """
        with self._transaction() as (connection, now):
            marked = mark_retired(connection, now, instance, reason)
            end_retired(connection, now, [instance])
            return marked


def _read(connection: sa.Connection, dataset: str, now: float) -> DatasetTarget | None:
    row = connection.execute(sa.select(DATASETS).where(DATASETS.c.dataset == dataset)).mappings().first()
    return None if row is None else _target(row, now)


def _accepted(connection: sa.Connection, dataset: str) -> frozenset[str]:
    found = connection.execute(sa.select(DATASETS.c.accepted_gates).where(DATASETS.c.dataset == dataset)).scalar()
    return frozenset(json.loads(found or "[]"))


def _quality_pause(connection: sa.Connection, dataset: str) -> Pause | None:
    found = connection.execute(sa.select(DATASETS.c.pause).where(DATASETS.c.dataset == dataset)).scalar()
    pause = read_pause(found or "")
    return pause if pause is not None and pause.kind is PauseKind.QUALITY else None


def _write(connection: sa.Connection, dataset: str, **values: Any) -> None:
    change = DATASETS.update().where(DATASETS.c.dataset == dataset).values(**values)
    if connection.execute(change).rowcount == 0:
        connection.execute(DATASETS.insert().values(**{"dataset": dataset, "instances": 1, **values}))


def _target(row: sa.RowMapping, now: float) -> DatasetTarget:
    deadline_at = row["deadline_at"] if row["deadline_override"] is None else row["deadline_override"]
    return DatasetTarget(
        dataset=row["dataset"],
        instances=row["instances"],
        request=row["request"],
        since=row["since"],
        age=max(0.0, now - row["since"]),
        deadline_at=deadline_at,
        deadline_in=None if deadline_at is None else deadline_at - now,
        budget_usd=row["budget_usd"] if row["budget_override"] is None else row["budget_override"],
        objective=row["objective"],
        max_instances=row["max_instances"],
        offers=tuple((name, count) for name, count in json.loads(row["offers"])),
        pause=read_pause(row["pause"]),
        memory=read_memory(row["memory"]),
        plan=read_plan(row["plan"]) if row["request"] else None,
        ended=None if row["request"] else read_summary(row["plan"]),
        updated_age=None if row["updated_at"] is None else max(0.0, now - row["updated_at"]),
    )
