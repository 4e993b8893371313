"""Rented instances: the transactions that order, end and settle them.

intent → booting → ready → ending → ended. The intent and its first lease are written before the provider is called,
so that whatever answer is lost, the reaper knows what may run. Nothing is `ending` while a live lease stands on it;
`ending` is final for us, `ended` is what the provider says. All seconds are real ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, Literal

import sqlalchemy as sa

from gpu_runner.fleet_database.accounting.bill_end import existed
from gpu_runner.fleet_database.accounting.request_budget import budgets_reached, count_anew, payer, refuse_beyond
from gpu_runner.fleet_database.connection import FACTS, INSTANCES, LEASES, OFFER_FAILURES
from gpu_runner.fleet_database.leases import (
    NOT_ENDED,
    STANDING,
    Lease,
    Leases,
    add_lease,
    count_draining,
    count_leases,
    end_retired,
    fenced,
    leased,
    refuse_dead,
    release_leases,
)
from gpu_runner.offers.offer import HOUR, Offer, offer_name
from gpu_runner.offers.selection import FailureKind, OfferFailure

InstanceState = Literal["intent", "booting", "ready", "ending", "ended"]

KEPT_FAILURES = 24 * 3600.0
# A run of version 0001 knows the first two by these words.
_WORDS = {kind: kind.value.replace("_", " ") for kind in FailureKind}


class FleetFull(Exception):
    """The fleet has as many instances that have not ended as it may have: `cap`."""

    def __init__(self, cap: int) -> None:
        super().__init__(f"the fleet holds all {cap} instances that it may have")


class Instances(Leases):
    """The transactions on instances."""

    def tag(self) -> str:
        """What every name of this fleet starts with; made once per database."""
        made = sa.select(FACTS.c.value).where(FACTS.c.name == "tag")
        with self._reader() as connection:
            if (found := connection.execute(made).scalar()) is not None:
                return str(found)
        with self._transaction() as (connection, _):
            found = connection.execute(made).scalar()
            if found is None:
                found = f"ba-{secrets.token_hex(3)}-"
                connection.execute(FACTS.insert().values(name="tag", value=found))
            return str(found)

    def new_name(self) -> str:
        """A name for an instance that nobody had."""
        return self.tag() + secrets.token_hex(4)

    # by the run that orders it; all but the first are fenced

    def intend(
        self,
        name: str,
        offer: Offer,
        *,
        clock: float,
        engine_key: str,
        model: str,
        run_id: str,
        dataset: str,
        ttl: float,
        limit: int | None,
        cap: int | None = None,
        replaces: Lease | None = None,
        drain_seconds: float = 0.0,
    ) -> Lease | None:
        """Write down that `name` is about to be ordered, with its first lease.

        None when the dataset has `limit` instances already, without that of `replaces`: those that its runs hold, and
        those that only drain and stay, which the next run may have. Raises FleetFull when the fleet has `cap` instances
        that have not ended, RunEnded for a run that was declared dead, and BudgetReached when the dataset's budget does
        not pay for the boot, as long again, and a drain.
        """
        described = {column: getattr(offer, column) for column in _OF_OFFER}
        with self._transaction() as (connection, now):
            refuse_dead(connection, run_id)
            count = count_leases(connection, dataset, now, replaces)
            if limit is not None and count + count_draining(connection, dataset, now, replaces) >= limit:
                return None
            standing = sa.select(sa.func.count()).where(INSTANCES.c.state.in_(NOT_ENDED))
            if cap is not None and connection.execute(standing).scalar_one() >= cap:
                raise FleetFull(cap)
            connection.execute(
                INSTANCES.insert().values(
                    name=name,
                    **described,
                    clock=clock,
                    engine_key=engine_key,
                    model=model,
                    state="intent",
                    run_id=run_id,
                    dataset=dataset,
                    created_at=now,
                )
            )
            lease = add_lease(connection, now, name, run_id, dataset, ttl)
            refuse_beyond(connection, now, dataset, drain_seconds, offer.price_per_hour / HOUR * offer.boot_seconds)
            return lease

    def created(self, lease: Lease, machine_id: str, *, just_now: bool = False) -> bool:
        """The provider accepted the order. False: the lease is not ours any more, or the instance is to end.

        The bill starts with the intent, or with this moment when the provider accepted `just_now`; but what stands
        since the provider's list has shown the machine is kept: it was billed before this moment.
        """
        values: dict[str, Any] = {"state": "booting", "machine_id": machine_id}
        with self._transaction() as (connection, now):
            began = sa.case((INSTANCES.c.seen_at.is_(None), now), else_=INSTANCES.c.created_at)
            values |= {"created_at": began} if just_now else {}
            return _advance(connection, now, lease, ["intent", "booting"], **values)

    def ready(self, lease: Lease, endpoint: str, max_num_seqs: int | None) -> bool:
        """Its engine answers. False: the lease is not ours any more, or the instance is to end."""
        with self._transaction() as (connection, now):
            values = {"state": "ready", "endpoint": endpoint, "max_num_seqs": max_num_seqs, "ready_at": now}
            return _advance(connection, now, lease, ["intent", "booting"], **values)

    def refused(self, lease: Lease, reason: str) -> bool:
        """The provider said no to the only order of this name: there is nothing to end or to pay. False: not ours."""
        with self._transaction() as (connection, now):
            if not _advance(connection, now, lease, ["intent"], state="ended", ended_at=now, reason=reason[:300]):
                return False
            release_leases(connection, now, fenced(lease, now), reason[:300])
            return True

    # by the reaper, and by whoever ends the fleet

    def begin_ending(self, name: str, reason: str) -> bool:
        """Decide that the instance ends. False when a live lease stands on it (draining counts), or it has ended."""
        with self._transaction() as (connection, now):
            if _get(connection, name, "state") == "ending":
                return True
            due = (INSTANCES.c.name == name) & INSTANCES.c.state.in_(STANDING) & ~leased(now)
            values = {"state": "ending", "ending_at": now, "reason": reason[:300]}
            return connection.execute(INSTANCES.update().where(due).values(**values)).rowcount == 1

    def end_overdue(self, idle_seconds: float) -> list[str]:
        """Close expired leases and decide which instances without a live lease end; says what was done.

        These are: boots whose run is gone, instances that were to end with their last lease, those with a notice, those
        that are idle for `idle_seconds`, and idle ones whose dataset has reached its budget.
        """
        with self._transaction() as (connection, now):
            said = _close_expired(connection, now)
            ends = sa.select(sa.func.max(LEASES.c.released_at)).where(LEASES.c.instance == INSTANCES.c.name)
            free = INSTANCES.c.state.in_(STANDING) & ~leased(now)
            query = sa.select(INSTANCES, ends.scalar_subquery().label("last_lease"), payer().label("payer")).where(free)
            # Sorted here: SQLite would read all that there ever was in the order of names.
            rows = sorted(connection.execute(query).mappings().all(), key=lambda row: str(row["name"]))
            reached = budgets_reached(connection, now, (row["payer"] for row in rows))
            for row in rows:
                if reason := _overdue(row, now, idle_seconds) or reached.get(row["payer"]):
                    values = {"state": "ending", "ending_at": now, "reason": reason[:300]}
                    connection.execute(INSTANCES.update().where(INSTANCES.c.name == row["name"]).values(**values))
                    said.append(f"{row['name']} ends: {reason}")
            return said

    def ended(
        self, name: str, ended_seconds: float | None, reason: str = "", billed_seconds: float | None = None
    ) -> None:
        """The machine is gone: the provider says since when its bill is closed, or lists it no longer (None).

        Its leases end too, and if there were any, its offer is remembered as one that loses what it gave. `reason`
        counts where there was none, or where it goes on from the one that there was. Without a time, the end is the
        latest possible: when it was first missing from the list. `billed_seconds`: see `seen`.
        """
        with self._transaction() as (connection, now):
            row = connection.execute(sa.select(INSTANCES).where(INSTANCES.c.name == name)).mappings().first()
            unproven = row is None or row["missing_since"] is not None or not existed(row)
            if row is None or (row["state"] == "ended" and (ended_seconds is None or not unproven)):
                return
            longer = reason.startswith(row["reason"])
            values: dict[str, Any] = {"state": "ended", "reason": (reason if longer else row["reason"])[:300]}
            if ended_seconds is not None:
                values |= _first_seen(connection, row, now, now - ended_seconds, billed_seconds)
                began = values.get("created_at", row["created_at"])
                values |= {"ended_at": max(began, now - ended_seconds), "missing_since": None}
            else:
                values["ended_at"] = _probable_end(connection, row, now)
            connection.execute(INSTANCES.update().where(INSTANCES.c.name == name).values(**values))
            count_anew(connection)
            taken = release_leases(connection, now, LEASES.c.instance == name, reason[:300] or "instance ended")
            if taken and row["state"] == "ready":
                name = offer_name(*(row[column] for column in _OF_NAME))
                _remember(connection, now, row["provider"], name, FailureKind.LOST)

    def notice(self, name: str, seconds: float, reason: str = "") -> None:
        """The provider takes the instance away in `seconds`: nobody leases it any more. `reason`: its words for why."""
        values: dict[str, Any] = {"reason": reason[:300]} if reason else {}
        with self._transaction() as (connection, now):
            standing = (INSTANCES.c.name == name) & INSTANCES.c.state.in_(STANDING)
            connection.execute(INSTANCES.update().where(standing).values(notice_at=now + seconds, **values))

    def seen(self, name: str, billed_seconds: float | None = None) -> None:
        """The provider lists the machine as alive. One that was taken for ended is `ending` again, and billed.

        `billed_seconds`: for how long the provider has billed it, where it says so. At first sight the bill begins
        then: the intent was written before the order, and an answer that was lost or late says less.
        """
        with self._transaction() as (connection, now):
            row = connection.execute(sa.select(INSTANCES).where(INSTANCES.c.name == name)).mappings().first()
            if row is None:
                return
            values: dict[str, Any] = {"missing_since": None}
            if row["state"] == "ended":
                began = row["ending_at"] if row["ending_at"] is not None else now
                values |= {"state": "ending", "ended_at": None, "ending_at": began}
                if not existed(row):
                    values["created_at"] = row["ended_at"]  # it was ordered after it had been written off
            values |= _first_seen(connection, row, now, now, billed_seconds)
            if "created_at" in values or row["state"] == "ended":
                count_anew(connection)
            connection.execute(INSTANCES.update().where(INSTANCES.c.name == name).values(**values))

    def missing(self, name: str) -> float:
        """The provider does not list the machine; returns for how many seconds it has been missing. 0 if it ended."""
        with self._transaction() as (connection, now):
            standing = (INSTANCES.c.name == name) & (INSTANCES.c.state != "ended")
            since = sa.func.coalesce(INSTANCES.c.missing_since, now)
            if connection.execute(INSTANCES.update().where(standing).values(missing_since=since)).rowcount == 0:
                return 0.0
            return now - float(_get(connection, name, "missing_since"))

    # what failed to start lately

    def offer_failed(self, provider: str, offer: str, kind: FailureKind, text: str = "") -> None:
        """Remember that an instance of this offer (`Offer.name`) was not to be had, or was lost. Forgets old ones."""
        with self._transaction() as (connection, now):
            _remember(connection, now, provider, offer, kind, text)

    def offer_failures(self, horizon: float) -> list[OfferFailure]:
        """Failures of the last `horizon` seconds, the latest first."""
        columns = OFFER_FAILURES.c
        with self._reading() as (connection, now):
            query = sa.select(columns.provider, columns.offer, now - columns.at, columns.kind, columns.reason)
            query = query.where(columns.at >= now - horizon).order_by(columns.at.desc(), columns.id.desc())
            lines = connection.execute(query).all()
        return [OfferFailure(provider, offer, age, _kind(kind), text) for provider, offer, age, kind, text in lines]


_OF_OFFER = (
    *("provider", "region", "instance_type", "gpu", "gpus", "gpu_memory_gib", "spot"),
    *("price_per_hour", "boot_seconds"),
)


_OF_NAME = ("provider", "region", "instance_type", "gpus", "gpu", "spot")


def _first_seen(
    connection: sa.Connection, row: Any, now: float, billed_until: float, billed_seconds: float | None
) -> dict[str, Any]:
    """When it was first listed, and since when it is billed, if the list says so then.

    Whatever the provider's clock did meanwhile, that is not before its intent: its first lease was written with that,
    and no dataset would pay for what comes before. Nor is it after now, or after the answer to its order.
    """
    if row["seen_at"] is not None:
        return {"seen_at": row["seen_at"]}
    if billed_seconds is None:
        return {"seen_at": now}
    intended = sa.select(sa.func.min(LEASES.c.acquired_at)).where(LEASES.c.instance == row["name"])
    first = connection.execute(intended).scalar()
    intent = row["created_at"] if first is None else first
    answered = row["created_at"] if row["created_at"] > intent else now
    began = min(now, answered, max(billed_until - billed_seconds, intent))
    return {"seen_at": now, "created_at": began if row["ready_at"] is None else min(began, row["ready_at"])}


def _remember(
    connection: sa.Connection, now: float, provider: str, offer: str, kind: FailureKind, text: str = ""
) -> None:
    values = {"kind": kind.value, "reason": (text or _WORDS[kind])[:300]}
    connection.execute(OFFER_FAILURES.delete().where(OFFER_FAILURES.c.at < now - KEPT_FAILURES))
    connection.execute(OFFER_FAILURES.insert().values(provider=provider, offer=offer, at=now, **values))


def _kind(value: str) -> FailureKind:
    """One that only a later version of this program knows is a plain failure."""
    try:
        return FailureKind(value)
    except ValueError:
        return FailureKind.FAILED


def _get(connection: sa.Connection, name: str, column: str) -> Any:
    return connection.execute(sa.select(INSTANCES.c[column]).where(INSTANCES.c.name == name)).scalar()


def _advance(connection: sa.Connection, now: float, lease: Lease, states: Iterable[str], **values: Any) -> bool:
    """Fenced: the instance of a live lease goes on from one of `states`."""
    mine = (INSTANCES.c.name == lease.instance) & INSTANCES.c.state.in_(list(states))
    mine &= sa.exists().where(fenced(lease, now))
    return connection.execute(INSTANCES.update().where(mine).values(**values)).rowcount == 1


def _close_expired(connection: sa.Connection, now: float) -> list[str]:
    """End the leases whose time ran out, and the instances that were to end with them."""
    expired = LEASES.c.released_at.is_(None) & (LEASES.c.expires_at <= now)
    found = connection.execute(sa.select(LEASES.c.instance, LEASES.c.run_id).where(expired)).all()
    release_leases(connection, now, LEASES.c.expires_at <= now, "expired")
    end_retired(connection, now, [instance for instance, _ in found])
    return [f"the lease of run {run} on {instance} expired" for instance, run in found]


def _overdue(row: Any, now: float, idle_seconds: float) -> str | None:
    """Why an instance without a live lease ends, or None."""
    if row["retire_at"] is not None:
        return row["reason"] or "it was to end with its last lease"
    if row["state"] != "ready":
        return "its run is gone, and it is not ready"
    if row["notice_at"] is not None:
        return row["reason"] or "the provider takes it away"
    idle = now - max(row["ready_at"], row["last_lease"] or 0.0)
    return f"idle for {idle:.0f} s" if idle >= idle_seconds else None


def _probable_end(connection: sa.Connection, row: Any, now: float) -> float:
    """When a machine that is not listed any more had ended at the latest."""
    if row["missing_since"] is None or row["seen_at"] is None:
        return now  # one that was never listed may have run until now
    last_word = sa.select(sa.func.max(LEASES.c.renewed_at)).where(LEASES.c.instance == row["name"])
    return float(max(row["missing_since"], connection.execute(last_word).scalar() or 0.0))
