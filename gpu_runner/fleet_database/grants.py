"""What of a budget may be spent by whoever leases an engine that is paid by the token.

Its cost comes with each answer, not with time: so nobody could stop it between two renewals of the lease. Therefore a
part of the budget is granted beforehand, and the holder sends no row that could pass it. All that is granted counts
against the budget, so several runs and rented machines never pass it together. A holder that dies has spent at most
what was granted to it; of that the tokens count that it told with its last renewal.
"""

from __future__ import annotations

import sqlalchemy as sa

from gpu_runner.fleet_database.accounting.request_budget import (
    BudgetReached,
    BudgetRefusal,
    budget_of,
    spend_of,
    unspent,
)
from gpu_runner.fleet_database.connection import DATASETS, LEASES, Tables
from gpu_runner.fleet_database.leases import Lease, fenced


class Grants(Tables):
    """The transactions on grants."""

    def check_row(self, dataset: str, row_usd: float) -> None:
        """Raises BudgetReached where the dataset's budget does not pay for one row that may cost so many US dollars."""
        with self._reading() as (connection, now):
            if (budget := budget_of(connection, dataset)) is None:
                return
            spend = spend_of(connection, now, dataset, budget.since)
            if spend.bound() + row_usd > budget.usd:
                raise BudgetReached(BudgetRefusal(budget.usd, spend.usd, spend.held_back(), 0.0, 0.0, row_usd))

    def grant(self, lease: Lease, committed_usd: float, row_usd: float) -> float | None:
        """US dollars that the lease may spend in all; None: no budget bounds it.

        `committed_usd`: the most that it has spent with the rows it sent already; so much is always granted, and what
        is free beside it is shared with whoever else spends for the dataset. A lease that is over gets no more.
        """
        with self._reading() as (connection, _):
            if budget_of(connection, lease.dataset) is None:
                return None
        with self._transaction() as (connection, now):
            budget = budget_of(connection, lease.dataset)
            own = connection.execute(sa.select(_SPENT, unspent(now)).where(fenced(lease, now))).first()
            if budget is None or own is None:
                return None if budget is None else committed_usd
            spend = spend_of(connection, now, lease.dataset, budget.since)
            free = budget.usd - (spend.bound() - own[1]) - max(0.0, committed_usd - own[0])
            shared = free / (1 + _others(connection, lease, now) + (spend.usd_per_second > 0))
            granted: float = committed_usd + max(0.0, shared, min(free, row_usd))
            connection.execute(LEASES.update().where(fenced(lease, now)).values(granted_usd=granted))
            connection.execute(DATASETS.update().where(DATASETS.c.dataset == lease.dataset).values(counted_at=None))
            return granted


_SPENT = LEASES.c.useful_usd + LEASES.c.wasted_usd


def _others(connection: sa.Connection, lease: Lease, now: float) -> int:
    """Further live leases of the dataset to which something is granted."""
    mine = (LEASES.c.instance == lease.instance) & (LEASES.c.epoch == lease.epoch)
    live = LEASES.c.released_at.is_(None) & (LEASES.c.expires_at > now)
    others = live & ~mine & (LEASES.c.dataset == lease.dataset) & LEASES.c.granted_usd.is_not(None)
    return int(connection.execute(sa.select(sa.func.count()).where(others)).scalar_one())
