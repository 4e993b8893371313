"""The clock of the fleet's database is set while things run: the fleet's database go on as if it had not been.

Whoever opens a transaction compares the database's clock with his own steady one (`gpu_runner.boot_clock`). When it was
set, all times of what is open are moved along in the same transaction: leases, unfinished runs, bills that are open or
belong to a request under way, and when that began. So each of them lasts as long as it really did: no lease expires, no
hour is billed that nobody worked. Of what is over nothing is touched. Each jump is written down once, for all hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from gpu_runner.boot_clock import ClockReading, jump
from gpu_runner.fleet_database.tables import CLOCK_JUMPS, CLOCKS, DATASETS, INSTANCES, LEASES, OFFER_FAILURES, RUNS

log = logging.getLogger(__name__)

KEPT_SECONDS = 10.0  # the moment that the database keeps of a host is at most so old while the host writes
FORGOTTEN_SECONDS = 7 * 86400.0  # what it keeps of a host that nobody has heard of since


@dataclass(frozen=True, slots=True)
class ClockJump:
    """The database's clock was set by `seconds` (negative: back), `age` seconds ago."""

    age: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Agreed:
    """A moment at which a process or a host agreed with the fleet's database. `jumps`: the sum of those known then."""

    moment: ClockReading
    jumps: float

    def since(self, jumps: float) -> ClockReading:
        """The same moment by the clock as it is after all jumps that are known now."""
        return replace(self.moment, wall=self.moment.wall + jumps - self.jumps)


def kept(connection: sa.Connection, host: str) -> Agreed | None:
    """What the database keeps of this host's last moment."""
    row = connection.execute(sa.select(CLOCKS).where(CLOCKS.c.host == host)).mappings().first()
    return None if row is None else Agreed(ClockReading(row["wall"], row["low"], row["high"]), row["jumps"])


def settle(connection: sa.Connection, host: str, now: Agreed, before: Agreed | None) -> Agreed:
    """Inside a transaction: when the clock was set, move along what is open; keep this moment for others.

    `before`: what this process remembers, for a host without a boot name or of which nothing is kept.
    """
    known = (kept(connection, host) if host else None) or before
    seconds = 0.0 if known is None else jump(known.since(now.jumps), now.moment)
    if seconds:
        if connection.dialect.name == "postgresql":  # until those have ended that have taken the time before
            connection.exec_driver_sql("LOCK TABLE clock_jumps IN EXCLUSIVE MODE")
        _move(connection, seconds)
        connection.execute(CLOCK_JUMPS.insert().values(at=now.moment.wall, seconds=seconds))
        log.warning("the clock of the fleet's database jumped by %+.0f s: leases and bills go on without it", seconds)
    agreed = Agreed(now.moment, now.jumps + seconds)
    if host:
        old = CLOCKS.c.wall < now.moment.wall - FORGOTTEN_SECONDS
        connection.execute(CLOCKS.delete().where(old & (CLOCKS.c.host != host)))
        _write(connection, host, agreed)
    return agreed


def keep(connection: sa.Connection, host: str, now: Agreed, before: Agreed | None) -> bool:
    """In Postgres, inside a transaction beside which nobody can `settle`: keep this moment for others. False, and
    nothing is written: the clock was set.

    Processes of one host may do so at once. Whichever is last, its moment and its jumps belong together.
    """
    known = (kept(connection, host) if host else None) or before
    if known is not None and jump(known.since(now.jumps), now.moment):
        return False
    if host:
        _write(connection, host, now)
    return True


def _write(connection: sa.Connection, host: str, agreed: Agreed) -> None:
    values = {**asdict(agreed.moment), "jumps": agreed.jumps}
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    written = insert(CLOCKS).values(host=host, **values)
    connection.execute(written.on_conflict_do_update(index_elements=["host"], set_=values))


def total_of_jumps() -> sa.ScalarSelect[float]:
    """The sum of all jumps that the fleet's database knows, in seconds."""
    return sa.select(sa.func.coalesce(sa.func.sum(CLOCK_JUMPS.c.seconds), 0.0)).scalar_subquery()


def jumps_since(connection: sa.Connection, now: float, horizon: float) -> list[ClockJump]:
    """Jumps of the last `horizon` seconds, the latest first."""
    query = sa.select(CLOCK_JUMPS).order_by(CLOCK_JUMPS.c.id.desc()).limit(100)
    found, later = [], 0.0
    for row in connection.execute(query).mappings():
        age = max(0.0, now - (row["at"] + later))  # by the clock as it is now
        later += row["seconds"]
        if age <= horizon:
            found.append(ClockJump(age, row["seconds"]))
    return found


def _move(connection: sa.Connection, seconds: float) -> None:
    under_way = DATASETS.c.request != ""
    began = connection.execute(sa.select(sa.func.min(DATASETS.c.since)).where(under_way)).scalar()
    open_bill = INSTANCES.c.ended_at.is_(None)
    if began is not None:
        open_bill |= INSTANCES.c.ended_at > began
    billed = sa.select(INSTANCES.c.name).where(open_bill)
    which = LEASES.c.released_at.is_(None) | LEASES.c.instance.in_(billed)
    _add(connection, LEASES, which, seconds, ("acquired_at", "expires_at", "released_at", "renewed_at", "draining_at"))
    of_instance = (
        "created_at",
        "ready_at",
        "ending_at",
        "ended_at",
        "notice_at",
        "seen_at",
        "retire_at",
        "missing_since",
    )
    _add(connection, INSTANCES, open_bill, seconds, of_instance)
    _add(connection, RUNS, RUNS.c.state != "ended", seconds, ("started_at", "beat_at", "wait_since"))
    _add(connection, OFFER_FAILURES, sa.true(), seconds, ("at",))
    _add(connection, DATASETS, under_way, seconds, ("since", "updated_at", "counted_at"))


def _add(
    connection: sa.Connection, table: sa.Table, which: sa.ColumnElement[bool], seconds: float, columns: Iterable[str]
) -> None:
    connection.execute(table.update().where(which).values({name: table.c[name] + seconds for name in columns}))
