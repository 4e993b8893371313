"""A request's budget: what was spent, what is rented will cost until it can be ended, and when to stop.

A bill belongs to the datasets whose leases stood on the instance: from the moment at which a lease was taken to that at
which the next one was, boots and idleness included, the lease's dataset pays. The first lease is written with the
intent, so these segments add up to the bill exactly.

A lease is only given or kept while what was spent, and what everything that the dataset pays for will cost if nobody
renews it again, are within the budget. So the budget holds whatever dies: leases run out, and the next sweep ends what
they stood on. Each function works inside a transaction that began at `now`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from gpu_runner.fleet_database.accounting.bill_end import bill_end
from gpu_runner.fleet_database.connection import DATASETS, INSTANCES, LEASES
from gpu_runner.money import format_usd
from gpu_runner.offers.offer import HOUR

# From a lease's end to the machine's: a sweep comes at least every ten seconds, and its call takes time.
END_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Spend:
    """US dollars of a dataset since its request began. Seconds are real ones.

    `usd`: spent until now. `usd_per_second`: of the instances that it pays for now. `reserve_usd`: what these will cost
    until they are ended, if from now on nobody renews a lease on them. `granted_usd`: what engines that are paid by the
    token may still spend (`gpu_runner.fleet_database.grants`).
    """

    usd: float = 0.0
    usd_per_second: float = 0.0
    reserve_usd: float = 0.0
    granted_usd: float = 0.0

    def bound(self, drain_seconds: float = 0.0) -> float:
        """What will have been spent at the most, if all go on for `drain_seconds` and are then given up."""
        return self.usd + self.held_back(drain_seconds)

    def held_back(self, drain_seconds: float = 0.0) -> float:
        """What is not to be spent on other work: it ends what is rented, or is granted."""
        return self.reserve_usd + self.granted_usd + self.usd_per_second * drain_seconds

    def rule(self, drain_seconds: float = 0.0) -> str:
        """What was spent and what is held back, in words."""
        held_back = _held_back_words(self.held_back(drain_seconds), drain_seconds)
        return f"{format_usd(self.usd)} $ spent, what is rented costs {held_back}"


def _held_back_words(usd: float, drain_seconds: float) -> str:
    drain = f"{drain_seconds:.0f} s to drain, " if drain_seconds else ""
    until = f"({drain}its lease, {END_SECONDS:.0f} s until a sweep has ended it)"
    return f"{format_usd(usd)} $ until it could be ended {until}"


@dataclass(frozen=True, slots=True)
class BudgetRefusal:
    """A lease that a budget does not pay for, in US dollars since the request began.

    `held_back_usd`: what all that is rented would cost with it until it could be ended, a drain of `drain_seconds`
    included. `boot_usd`: its boot, which must fit twice; 0 for an instance that is ready. `row_usd`: of an engine that
    is paid by the token, what one row may cost; 0: an instance was refused.
    """

    budget_usd: float
    spent_usd: float
    held_back_usd: float
    drain_seconds: float
    boot_usd: float
    row_usd: float = 0.0

    @property
    def enough_usd(self) -> float:
        """US dollars since the request began with which it would not have been refused."""
        return self.spent_usd + self.held_back_usd + 2 * self.boot_usd + self.row_usd

    def words(self) -> str:
        """One sentence for people."""
        if self.row_usd:
            held = f", {format_usd(self.held_back_usd)} $ are promised to others" if self.held_back_usd else ""
            return (
                f"budget of {format_usd(self.budget_usd)} $ leaves no room for another row: "
                f"{format_usd(self.spent_usd)} $ are spent{held}, and a row may cost {format_usd(self.row_usd)} $"
            )
        boot = f" and {format_usd(2 * self.boot_usd)} $ for twice its boot" if self.boot_usd else ""
        held_back = _held_back_words(self.held_back_usd, self.drain_seconds)
        return (
            f"budget of {format_usd(self.budget_usd)} $ leaves no room for another instance: "
            f"{format_usd(self.spent_usd)} $ are spent, and with it {held_back}{boot} would be held back"
        )


class BudgetReached(Exception):
    """The dataset may lease nothing more for its request; says why. `refusal`: the numbers."""

    def __init__(self, refusal: BudgetRefusal) -> None:
        super().__init__(refusal.words())
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of a dataset's request in US dollars, and since when its spending counts."""

    dataset: str
    usd: float
    since: float


@dataclass(frozen=True, slots=True)
class Line:
    """A line that was reached, in words. `hard`: nothing more may be given; otherwise there is time to drain."""

    hard: bool
    reason: str


def budget_of(connection: sa.Connection, dataset: str) -> Budget | None:
    """The budget that holds now; None without a request or without a budget."""
    found = connection.execute(_BUDGETS.where(DATASETS.c.dataset == dataset)).first()
    return None if found is None else Budget(*found)


def refuse_beyond(
    connection: sa.Connection, now: float, dataset: str, drain_seconds: float, boot_usd: float = 0.0
) -> None:
    """Raises BudgetReached when a lease that was just written would not fit into the dataset's budget.

    It must leave room for a drain, and for a new instance for twice its boot: else it could not earn what it costs.
    """
    if (budget := budget_of(connection, dataset)) is None:
        return
    spend = _count(connection, now, budget)
    if spend.bound(drain_seconds) + 2 * boot_usd > budget.usd:
        held_back = spend.held_back(drain_seconds)
        raise BudgetReached(BudgetRefusal(budget.usd, spend.usd, held_back, drain_seconds, boot_usd))


def far_from_budget(connection: sa.Connection, now: float, instance: str, ttl: float, drain_seconds: float) -> bool:
    """Whether the dataset that pays for the instance has no budget, or all that it pays for fits into it for sure, if
    every lease is renewed for `ttl` seconds now.

    One row to read: since it was last added up, spending grew by no more than its rate.
    """
    return _near_budget(connection, now, instance, ttl, drain_seconds) is None


def _near_budget(
    connection: sa.Connection, now: float, instance: str, ttl: float, drain_seconds: float
) -> Budget | None:
    of = {"instance": instance, "now": now, "until": ttl + END_SECONDS, "drain": drain_seconds}
    found = connection.execute(_PAYERS_BUDGET, of).first()
    if found is None:
        return None
    *words, bound = found
    budget = Budget(*words)
    return None if bound is not None and bound <= budget.usd else budget


def line_reached(connection: sa.Connection, now: float, instance: str, ttl: float, drain_seconds: float) -> Line | None:
    """What the dataset that pays for the instance has reached, now that a lease on it was renewed for `ttl` seconds."""
    budget = _near_budget(connection, now, instance, ttl, drain_seconds)
    if budget is None:
        return None
    spend = _count(connection, now, budget)
    if spend.bound() > budget.usd:
        return Line(True, f"budget of {format_usd(budget.usd)} $ reached ({spend.rule()})")
    if spend.bound(drain_seconds) > budget.usd:
        return Line(False, f"budget of {format_usd(budget.usd)} $ is nearly reached ({spend.rule(drain_seconds)})")
    return None


def budgets_reached(connection: sa.Connection, now: float, datasets: Iterable[str]) -> dict[str, str]:
    """Those of the datasets whose instances may not stand idle until the next sweep, with the reason."""
    named = set(datasets)
    found = [Budget(*line) for line in connection.execute(_BUDGETS).all() if line[0] in named] if named else []
    spends = [(budget, _count(connection, now, budget)) for budget in found]
    return {
        budget.dataset: f"budget of {format_usd(budget.usd)} $ reached ({spend.rule()})"
        for budget, spend in spends
        if spend.bound() > budget.usd
    }


def payer() -> sa.ColumnElement[str]:
    """The dataset that pays for an instance now, as `charges` has it.

    That is the dataset of its latest lease, live or not; of one that was never leased, whoever ordered it.
    """
    latest = sa.select(LEASES.c.dataset).where(LEASES.c.instance == INSTANCES.c.name)
    latest = latest.order_by(LEASES.c.epoch.desc()).limit(1).correlate(INSTANCES)
    return sa.func.coalesce(latest.scalar_subquery(), INSTANCES.c.dataset)


def begin_spending(connection: sa.Connection, dataset: str) -> None:
    """A request of the dataset begins: what its leases cost by the token until now is not its spending."""
    cost = LEASES.c.useful_usd + LEASES.c.wasted_usd
    changed = (LEASES.c.dataset == dataset) & (LEASES.c.before_usd != cost)
    connection.execute(LEASES.update().where(changed).values(before_usd=cost))


def count_anew(connection: sa.Connection) -> None:
    """A bill turned out longer than it was: what was added up before is not the most any more."""
    connection.execute(DATASETS.update().values(counted_at=None))


_BUDGETS = sa.select(
    DATASETS.c.dataset, sa.func.coalesce(DATASETS.c.budget_override, DATASETS.c.budget_usd), DATASETS.c.since
).where((DATASETS.c.request != "") & sa.func.coalesce(DATASETS.c.budget_override, DATASETS.c.budget_usd).is_not(None))


_PAYER = sa.select(payer()).where(INSTANCES.c.name == sa.bindparam("instance"))
# At every renewal of a lease: the budget, and what will have been spent at the most since it was last added up.
_MOST = DATASETS.c.counted_usd + DATASETS.c.counted_rate * (
    sa.bindparam("now", type_=sa.Float)
    - DATASETS.c.counted_at
    + sa.bindparam("until", type_=sa.Float)
    + sa.bindparam("drain", type_=sa.Float)
)
_PAYERS_BUDGET = _BUDGETS.add_columns(_MOST.label("most")).where(DATASETS.c.dataset == _PAYER.scalar_subquery())


def _count(connection: sa.Connection, now: float, budget: Budget) -> Spend:
    """Add up what was spent, and keep it."""
    spend = spend_of(connection, now, budget.dataset, budget.since)
    # A lease keeps what was granted to it: it is spent by the token, and not at the rate.
    kept = {"counted_at": now, "counted_usd": spend.usd + spend.granted_usd, "counted_rate": spend.usd_per_second}
    connection.execute(DATASETS.update().where(DATASETS.c.dataset == budget.dataset).values(**kept))
    return spend


def spend_of(connection: sa.Connection, now: float, dataset: str, since: float) -> Spend:
    """What the dataset spent from `since` on."""
    of = {"now": now, "since": since, "dataset": dataset}
    usd, rate, reserve = (float(value or 0.0) for value in connection.execute(_SPEND, of).one())
    by_tokens, granted = (float(value or 0.0) for value in connection.execute(_SPEND_BY_TOKENS, of).one())
    return Spend(usd + by_tokens, rate, reserve + rate * END_SECONDS, granted)


def _later(one: sa.ColumnElement[Any], other: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.case((one > other, one), else_=other)


def _earlier(one: sa.ColumnElement[Any], other: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.case((one < other, one), else_=other)


_NOW, _SINCE = sa.bindparam("now", type_=sa.Float), sa.bindparam("since", type_=sa.Float)


def _segments() -> sa.Select[Any]:
    """Which dataset paid from when to when, for every instance billed after `since`, and US dollars per second.

    `running`: it pays now. `held_until`: when the last live lease on the instance runs out.
    """
    open_bill = INSTANCES.c.ended_at.is_(None)
    bill_ends = bill_end(_NOW)
    following = sa.func.lead(LEASES.c.acquired_at).over(partition_by=LEASES.c.instance, order_by=LEASES.c.epoch)
    runs_out = sa.case((LEASES.c.released_at.is_(None), LEASES.c.expires_at))
    billed = INSTANCES.alias("billed")  # asked first, by the index on their ends: leases are kept for ever
    billed_since = billed.c.ended_at.is_(None) | (billed.c.ended_at > _SINCE)
    return (
        sa.select(
            LEASES.c.dataset,
            _later(_later(LEASES.c.acquired_at, INSTANCES.c.created_at), _SINCE).label("began"),
            _earlier(sa.func.coalesce(following, bill_ends), bill_ends).label("stopped"),
            (INSTANCES.c.price_per_hour / HOUR * INSTANCES.c.clock).label("rate"),
            (open_bill & following.is_(None)).label("running"),
            sa.func.max(runs_out).over(partition_by=LEASES.c.instance).label("held_until"),
        )
        .join(INSTANCES, INSTANCES.c.name == LEASES.c.instance)
        .where(LEASES.c.instance.in_(sa.select(billed.c.name).where(billed_since)))
    )


def _spend() -> sa.Select[Any]:
    """Three sums over a dataset's segments: spent, dollars per second now, dollars until its leases run out."""
    part = _segments().subquery()
    seconds = part.c.stopped - part.c.began
    spent = sa.case((seconds > 0, part.c.rate * seconds), else_=0.0)
    pays = sa.case((part.c.running, part.c.rate), else_=0.0)
    held = part.c.running & (part.c.held_until > _NOW)
    rest = sa.case((held, part.c.rate * (part.c.held_until - _NOW)), else_=0.0)
    sums = (sa.func.sum(spent), sa.func.sum(pays), sa.func.sum(rest))
    return sa.select(*sums).where(part.c.dataset == sa.bindparam("dataset", type_=sa.String))


_SPEND = _spend()


def unspent(now: float | sa.ColumnElement[float]) -> sa.ColumnElement[float]:
    """What is granted to a lease and not spent yet; 0 once it is over."""
    spent = LEASES.c.useful_usd + LEASES.c.wasted_usd
    promised = LEASES.c.released_at.is_(None) & (LEASES.c.expires_at > now) & (LEASES.c.granted_usd > spent)
    return sa.case((promised, LEASES.c.granted_usd - spent), else_=0.0)


def _spend_by_tokens() -> sa.Select[Any]:
    """Two sums over the leases of engines that are paid by the token: spent since, and granted beyond that.

    A lease may outlive the request in which it began: what it costs after that belongs to the next request. No time is
    compared for this, so that it holds whenever the clock is set.
    """
    spent = LEASES.c.useful_usd + LEASES.c.wasted_usd - LEASES.c.before_usd
    sums = (sa.func.sum(spent), sa.func.sum(unspent(_NOW)))
    return sa.select(*sums).where(LEASES.c.dataset == sa.bindparam("dataset", type_=sa.String))


_SPEND_BY_TOKENS = _spend_by_tokens()
