"""A request's budget: what was spent, what is rented will cost until it can be ended, and when to stop.

A bill belongs to the datasets whose leases stood on the instance: from the moment at which a lease was taken to that at
which the next one was, boots and idleness included, the lease's dataset pays. The first lease is written with the
intent, so these segments add up to the bill exactly.

A lease is only given or kept while what was spent, and what everything that the dataset pays for will cost if nobody
renews it again, are within the budget. So the budget holds whatever dies: leases run out, and the next sweep ends what
they stood on. Each function works inside a transaction that began at `now`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from gpu_runner.fleet_tables import DATASETS, INSTANCES, LEASES

# From a lease's end to the machine's: a sweep comes at least every ten seconds, and its call takes time.
END_SECONDS = 15.0


class BudgetReached(Exception):
    """The dataset may lease nothing more for its request; says why."""


@dataclass(frozen=True, slots=True)
class Spend:
    """US dollars of a dataset since its request began. Seconds are real ones.

    `usd`: spent until now. `usd_per_second`: of the instances that it pays for now. `reserve_usd`: what these will cost
    until they are ended, if from now on nobody renews a lease on them.
    """

    usd: float = 0.0
    usd_per_second: float = 0.0
    reserve_usd: float = 0.0

    def bound(self, drain_seconds: float = 0.0) -> float:
        """What will have been spent at the most, if all go on for `drain_seconds` and are then given up."""
        return self.usd + self.reserve_usd + self.usd_per_second * drain_seconds


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of a dataset's request in US dollars, and since when its spending counts."""

    usd: float
    since: float


def budget_of(connection: sa.Connection, dataset: str) -> Budget | None:
    """The budget that holds now; None without a request or without a budget."""
    usd = sa.func.coalesce(DATASETS.c.budget_override, DATASETS.c.budget_usd)
    query = sa.select(usd, DATASETS.c.since).where((DATASETS.c.dataset == dataset) & (DATASETS.c.request != ""))
    found = connection.execute(query).first()
    return None if found is None or found[0] is None else Budget(found[0], found[1])


def spend_of(connection: sa.Connection, now: float, dataset: str, since: float) -> Spend:
    """What the dataset spent from `since` on."""
    part = _segments(now, since).subquery()
    seconds = part.c.stopped - part.c.began
    spent = sa.case((seconds > 0, part.c.rate * seconds), else_=0.0)
    pays = sa.case((part.c.running, part.c.rate), else_=0.0)
    rest = sa.case((part.c.running & (part.c.held_until > now), part.c.rate * (part.c.held_until - now)), else_=0.0)
    query = sa.select(sa.func.sum(spent), sa.func.sum(pays), sa.func.sum(rest)).where(part.c.dataset == dataset)
    usd, rate, reserve = (float(value or 0.0) for value in connection.execute(query).one())
    return Spend(usd, rate, reserve + rate * END_SECONDS)


def _segments(now: float, since: float) -> sa.Select[Any]:
    """Of every instance that was billed after `since`: whose dataset paid from when to when, and US dollars per second.

    `running`: it pays now. `held_until`: when the last live lease on the instance runs out.
    """
    open_bill = INSTANCES.c.ended_at.is_(None)
    never_existed = INSTANCES.c.machine_id.is_(None) & INSTANCES.c.seen_at.is_(None)
    bill_ends = sa.case(
        (open_bill, sa.literal(now)), (never_existed, INSTANCES.c.created_at), else_=INSTANCES.c.ended_at
    )
    following = sa.func.lead(LEASES.c.acquired_at).over(partition_by=LEASES.c.instance, order_by=LEASES.c.epoch)
    runs_out = sa.case((LEASES.c.released_at.is_(None), LEASES.c.expires_at))
    return (
        sa.select(
            LEASES.c.dataset,
            _later(_later(LEASES.c.acquired_at, INSTANCES.c.created_at), sa.literal(since)).label("began"),
            _earlier(sa.func.coalesce(following, bill_ends), bill_ends).label("stopped"),
            (INSTANCES.c.price_per_hour / 3600.0 * INSTANCES.c.clock).label("rate"),
            (open_bill & following.is_(None)).label("running"),
            sa.func.max(runs_out).over(partition_by=LEASES.c.instance).label("held_until"),
        )
        .join(INSTANCES, INSTANCES.c.name == LEASES.c.instance)
        .where(open_bill | (INSTANCES.c.ended_at > since))
    )


def _later(one: sa.ColumnElement[Any], other: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.case((one > other, one), else_=other)


def _earlier(one: sa.ColumnElement[Any], other: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.case((one < other, one), else_=other)
