"""Leases: one run's exclusive right to an instance, and what its holder may still do.

A lease has a time to live and an epoch that only grows per instance. Everything a holder does is fenced: in the same
transaction the lease must be unreleased and unexpired by the database's clock. A *draining* lease is a live one whose
run submits no new rows: it no longer keeps the next run off the instance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from gpu_runner.cost_meter import LeaseUsage
from gpu_runner.fleet_database.accounting.request_budget import far_from_budget, line_reached, refuse_beyond
from gpu_runner.fleet_database.connection import INSTANCES, LEASES, RUNS, Tables

NOTHING = LeaseUsage()
STANDING = ("intent", "booting", "ready")
NOT_ENDED = (*STANDING, "ending")  # named, so that an index finds them among all that have ended


class RunEnded(Exception):
    """The run was declared dead while it was silent. It may have a successor: it leases nothing any more."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"run {run_id} gave no heartbeat and was declared dead; another run continues its work")


@dataclass(frozen=True, slots=True)
class Lease:
    """One run's exclusive right to an instance. Two leases of one instance never share an epoch."""

    instance: str
    epoch: int
    run_id: str
    dataset: str


@dataclass(frozen=True, slots=True)
class LastLease:
    """For which dataset it is or was, and for how many seconds it has been over: 0.0 while it is live."""

    dataset: str
    over_seconds: float


class Leases(Tables):
    """The transactions on leases."""

    def try_lease(
        self,
        instance: str,
        run_id: str,
        dataset: str,
        ttl: float,
        *,
        limit: int | None = None,
        replaces: Lease | None = None,
        drain_seconds: float = 0.0,
    ) -> Lease | None:
        """Take the instance for `ttl` seconds with an epoch above all before.

        None when a live lease stands on it that does not drain; when it is a rented instance that is not ready, is to
        end or has a notice; or when the dataset holds `limit` leases already, without draining ones and without
        `replaces`, the lease that this one is to take over from. Raises RunEnded for a run that was declared dead,
        and BudgetReached for a rented instance that the dataset's budget does not pay for until it could be ended.
        """
        with self._transaction() as (connection, now):
            refuse_dead(connection, run_id)
            if limit is not None and count_leases(connection, dataset, now, replaces) >= limit:
                return None
            rented = connection.execute(
                sa.select(INSTANCES.c.state, INSTANCES.c.notice_at, INSTANCES.c.retire_at).where(
                    INSTANCES.c.name == instance
                )
            ).first()
            if rented is not None and tuple(rented) != ("ready", None, None):
                return None
            held = sa.select(LEASES.c.epoch).where((LEASES.c.instance == instance) & blocking(now))
            if connection.execute(held).first() is not None:
                return None
            lease = add_lease(connection, now, instance, run_id, dataset, ttl)
            if rented is not None:
                refuse_beyond(connection, now, dataset, drain_seconds)
            return lease

    def holder(self, instance: str) -> str | None:
        """Run that holds a live lease on the instance, or None; where one follows another, the later."""
        with self._reading() as (connection, now):
            query = sa.select(LEASES.c.run_id).where((LEASES.c.instance == instance) & live(now))
            return connection.execute(query.order_by(LEASES.c.epoch.desc()).limit(1)).scalar()

    def last_lease(self, instance: str) -> LastLease | None:
        """The latest lease on an instance, or on an engine of fleet.yaml, whether it is live or not."""
        query = sa.select(LEASES.c.dataset, LEASES.c.released_at, LEASES.c.expires_at)
        query = query.where(LEASES.c.instance == instance).order_by(LEASES.c.epoch.desc()).limit(1)
        with self._reading() as (connection, now):
            found = connection.execute(query).first()
        if found is None:
            return None
        ended_at = found.expires_at if found.released_at is None else found.released_at
        return LastLease(found.dataset, max(0.0, now - ended_at))

    def leases_of(self, dataset: str) -> int:
        """How many live leases the dataset's runs hold, without draining ones."""
        with self._reading() as (connection, now):
            return count_leases(connection, dataset, now)

    def history(self, run_id: str) -> list[tuple[str, int, bool]]:
        """(instance, epoch, released) of every lease a run ever had."""
        query = sa.select(LEASES.c.instance, LEASES.c.epoch, LEASES.c.released_at).where(LEASES.c.run_id == run_id)
        with self._reading() as (connection, _):
            return [(line[0], line[1], line[2] is not None) for line in connection.execute(query)]

    def renew(self, lease: Lease, ttl: float, spent: LeaseUsage = NOTHING, drain_seconds: float = 0.0) -> bool:
        """Extend the lease and record what it did so far. False: it lapsed or was ended; the holder must stand down.

        It is refused, too, when what is rented would pass the budget of the dataset that pays before all of it can be
        ended; its instance then ends with its last lease. When `drain_seconds` more would do that, the lease is
        extended and the instance retired: the holder is to leave it while there is time.
        """
        with self._beside_its_like() as (connection, now, alone):
            renewed = _renew(connection, now, lease, ttl, spent, drain_seconds, alone=alone)
        if renewed is None:
            with self._transaction(durable=False) as (connection, now):
                renewed = _renew(connection, now, lease, ttl, spent, drain_seconds, alone=True)
        return bool(renewed)

    def drain(self, lease: Lease) -> bool:
        """The holder submits no new rows: the next run may lease the instance. False when the lease is not ours."""
        with self._transaction() as (connection, now):
            return _change(connection, now, lease, draining_at=sa.func.coalesce(LEASES.c.draining_at, now))

    def release(self, lease: Lease, spent: LeaseUsage = NOTHING, *, reason: str = "", retire: bool = False) -> bool:
        """Give the instance back. False when it was no longer ours; what its holder did is written down all the same.

        `retire`: nobody shall lease it again. It is `ending` at once, or when the last live lease on it has ended.
        """
        with self._transaction() as (connection, now):
            end = {"renewed_at": now, "released_at": now, "reason": reason[:300]}
            if not _change(connection, now, lease, spent, **end):
                _last_word(connection, now, lease, spent)
                return False
            if retire:
                mark_retired(connection, now, lease.instance, reason)
            end_retired(connection, now, [lease.instance])
            return True

    def give_up(self, lease: Lease, reason: str, spent: LeaseUsage = NOTHING) -> bool:
        """The instance is of no more use (boot failed, engine dead, moved away): release it and let it end."""
        return self.release(lease, spent, reason=reason, retire=True)

    def release_run(self, run_id: str) -> int:
        """End every lease of a run that is known to be dead; returns how many there were."""
        with self._transaction() as (connection, now):
            return release_leases(connection, now, LEASES.c.run_id == run_id, "run ended")


# What other transactions on the same tables are made of: each works inside a transaction that began at `now`.


def live(now: float) -> sa.ColumnElement[bool]:
    """The lease is neither released nor expired."""
    return LEASES.c.released_at.is_(None) & (LEASES.c.expires_at > now)


def blocking(now: float) -> sa.ColumnElement[bool]:
    """The lease is live and does not drain: nobody else may lease the instance."""
    return live(now) & LEASES.c.draining_at.is_(None)


def leased(now: float) -> sa.ColumnElement[bool]:
    """Whether an instance is leased: a live lease stands on it, draining or not."""
    return sa.exists().where((LEASES.c.instance == INSTANCES.c.name) & live(now))


def count_leases(connection: sa.Connection, dataset: str, now: float, without: Lease | None = None) -> int:
    """Live leases of the dataset that do not drain."""
    counted = (LEASES.c.dataset == dataset) & blocking(now)
    if without is not None:
        counted &= (LEASES.c.instance != without.instance) | (LEASES.c.epoch != without.epoch)
    return int(connection.execute(sa.select(sa.func.count()).where(counted)).scalar_one())


def count_draining(connection: sa.Connection, dataset: str, now: float, without: Lease | None = None) -> int:
    """Instances that only drain, the latest of their leases for the dataset. Those that are to end do not count."""
    newest = LEASES.alias("newest")
    latest = sa.select(sa.func.max(newest.c.epoch)).where(newest.c.instance == LEASES.c.instance)
    latest = latest.where(newest.c.released_at.is_(None) & (newest.c.expires_at > now))
    staying = INSTANCES.c.state.in_(STANDING) & INSTANCES.c.retire_at.is_(None) & INSTANCES.c.notice_at.is_(None)
    counted = staying & live(now) & LEASES.c.draining_at.is_not(None) & (LEASES.c.dataset == dataset)
    counted &= LEASES.c.epoch == latest.scalar_subquery()
    if without is not None:
        counted &= LEASES.c.instance != without.instance
    both = LEASES.join(INSTANCES, INSTANCES.c.name == LEASES.c.instance)
    return int(connection.execute(sa.select(sa.func.count()).select_from(both).where(counted)).scalar_one())


def refuse_dead(connection: sa.Connection, run_id: str) -> None:
    """Raises RunEnded for a run that was declared dead."""
    if connection.execute(sa.select(RUNS.c.state).where(RUNS.c.run_id == run_id)).scalar() == "ended":
        raise RunEnded(run_id)


def add_lease(connection: sa.Connection, now: float, instance: str, run_id: str, dataset: str, ttl: float) -> Lease:
    """A lease with the next epoch of the instance."""
    newest = sa.select(sa.func.max(LEASES.c.epoch)).where(LEASES.c.instance == instance)
    lease = Lease(instance, (connection.execute(newest).scalar() or 0) + 1, run_id, dataset)
    times = {"acquired_at": now, "renewed_at": now, "expires_at": now + ttl}
    connection.execute(LEASES.insert().values(**asdict(lease), **times))
    return lease


def fenced(lease: Lease, now: float) -> sa.ColumnElement[bool]:
    """The lease is live: its holder may write."""
    return (LEASES.c.instance == lease.instance) & (LEASES.c.epoch == lease.epoch) & live(now)


_HELD = sa.select(LEASES).where(
    (LEASES.c.instance == sa.bindparam("instance"))
    & (LEASES.c.epoch == sa.bindparam("epoch"))
    & LEASES.c.released_at.is_(None)
    & (LEASES.c.expires_at > sa.bindparam("now", type_=sa.Float))
)


def _held(connection: sa.Connection, now: float, lease: Lease) -> sa.RowMapping | None:
    """The row of a lease that is live: `fenced`, built once, as every renewal asks for it."""
    of = {"instance": lease.instance, "epoch": lease.epoch, "now": now}
    return connection.execute(_HELD, of).mappings().first()


def _renew(
    connection: sa.Connection,
    now: float,
    lease: Lease,
    ttl: float,
    spent: LeaseUsage,
    drain_seconds: float,
    *,
    alone: bool,
) -> bool | None:
    """Renew a lease. None, and nothing is written: near a budget only the one writer can say whether that pays for it,
    as renewals that are made at the same time do not see each other.
    """
    held = _held(connection, now, lease)
    if held is None:
        return False
    if not alone and not far_from_budget(connection, now, lease.instance, ttl, drain_seconds):
        return None
    _write(connection, now, lease, held, spent, renewed_at=now, expires_at=now + ttl)
    line = line_reached(connection, now, lease.instance, ttl, drain_seconds) if alone else None
    if line is not None:
        mark_retired(connection, now, lease.instance, line.reason)
    if line is not None and line.hard:
        _change(connection, now, lease, expires_at=held["expires_at"])
        return False
    return True


def _change(connection: sa.Connection, now: float, lease: Lease, spent: LeaseUsage = NOTHING, **values: Any) -> bool:
    """Write to a lease if it is live. Totals never fall, so that one who has nothing to say erases nothing."""
    row = _held(connection, now, lease)
    if row is None:
        return False
    _write(connection, now, lease, row, spent, **values)
    return True


def _write(
    connection: sa.Connection, now: float, lease: Lease, held: sa.RowMapping, spent: LeaseUsage, **values: Any
) -> None:
    """Write to a lease that was just found live, in a transaction that no other writer to it interleaves with."""
    totals = {name: max(held[name], value) for name, value in asdict(spent).items()}
    connection.execute(LEASES.update().where(fenced(lease, now)).values(**totals, **values))


def _last_word(connection: sa.Connection, now: float, lease: Lease, spent: LeaseUsage) -> None:
    """What the holder of a lease says of it that was ended by others: its totals count, up to the lease's end.

    Else rows that it has written would be on no bill, and their time would count as lost.
    """
    if spent == NOTHING:
        return
    own = (LEASES.c.instance == lease.instance) & (LEASES.c.epoch == lease.epoch) & (LEASES.c.run_id == lease.run_id)
    row = connection.execute(sa.select(LEASES).where(own)).mappings().first()
    if row is None:
        return
    totals = {name: max(row[name], value) for name, value in asdict(spent).items()}
    ended = row["expires_at"] if row["released_at"] is None else row["released_at"]
    connection.execute(LEASES.update().where(own).values(**totals, renewed_at=min(now, ended)))


def release_leases(connection: sa.Connection, now: float, which: sa.ColumnElement[bool], reason: str) -> int:
    """End leases on behalf of holders that are gone, no later than they expired; returns how many there were."""
    end = sa.case((LEASES.c.expires_at < now, LEASES.c.expires_at), else_=now)
    change = LEASES.update().where(which & LEASES.c.released_at.is_(None))
    return connection.execute(change.values(released_at=end, reason=reason)).rowcount


def mark_retired(connection: sa.Connection, now: float, instance: str, reason: str) -> bool:
    """Let an instance take no new lease and end with its last one. False: it was to end already; the first reason
    stands.
    """
    staying = (INSTANCES.c.name == instance) & INSTANCES.c.state.in_(STANDING) & INSTANCES.c.retire_at.is_(None)
    change = INSTANCES.update().where(staying).values(retire_at=now, reason=reason[:300])
    return connection.execute(change).rowcount == 1


def end_retired(connection: sa.Connection, now: float, names: Iterable[str]) -> None:
    """Instances that were to end with their last lease, and have none any more, are `ending`."""
    due = INSTANCES.c.name.in_(list(names)) & INSTANCES.c.retire_at.is_not(None) & ~leased(now)
    due &= INSTANCES.c.state.in_(STANDING)
    connection.execute(INSTANCES.update().where(due).values(state="ending", ending_at=now))
