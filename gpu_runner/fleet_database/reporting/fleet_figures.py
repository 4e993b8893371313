"""What Prometheus is told of the fleet: instances, leases and runs by state, what was spent. SQL adds it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from gpu_runner.fleet_database.accounting.bill_end import bill_end
from gpu_runner.fleet_database.connection import INSTANCES, LEASES, RUNS, Tables
from gpu_runner.fleet_database.leases import live

INSTANCE_STATES = ("intent", "booting", "ready", "ending")
RUN_STATES = ("waiting", "leased")


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """`instances`, `runs`: those that have not ended, by state. `leases`: `live`, `draining`, and `expired` ones that
    nobody has ended yet. `spent_usd`: all there ever was, by provider, or by engine where the token is paid;
    `usd_per_hour`: what stands now. `silent_seconds`: since the last heartbeat of the run that is silent longest.
    """

    instances: Mapping[str, int]
    leases: Mapping[str, int]
    runs: Mapping[str, int]
    spent_usd: Mapping[str, float]
    usd_per_hour: float
    silent_seconds: float


class Figures(Tables):
    """Sums over the fleet's tables, cheap however long they are."""

    def figures(self) -> FleetFigures:
        """Now, by the database's clock."""
        i, r = INSTANCES.c, RUNS.c
        standing, alive = i.state != "ended", r.state != "ended"
        with self._reading() as (connection, now):
            states = sa.select(i.state, sa.func.count()).where(standing).group_by(i.state)
            counted: dict[str, int] = dict(connection.execute(states).tuples().all())
            leases = connection.execute(_leases(now)).one()
            beats = sa.select(r.state, sa.func.count(), sa.func.min(r.beat_at)).where(alive).group_by(r.state)
            runs = connection.execute(beats)
            found = {state: (count, beat) for state, count, beat in runs}
            spent = {provider: float(usd) for provider, usd in connection.execute(_spent(now))}
            spent |= {engine: float(usd) for engine, usd in connection.execute(_SPENT_BY_TOKENS)}
            rate = connection.scalar(sa.select(sa.func.sum(i.price_per_hour * i.clock)).where(standing))
        return FleetFigures(
            instances={state: counted.get(state, 0) for state in (*INSTANCE_STATES, *sorted(counted))},
            leases=dict(zip(("live", "draining", "expired"), (int(count or 0) for count in leases), strict=True)),
            runs={state: found.get(state, (0, now))[0] for state in (*RUN_STATES, *sorted(found))},
            spent_usd=spent,
            usd_per_hour=float(rate or 0.0),
            silent_seconds=max((max(0.0, now - beat) for _, beat in found.values()), default=0.0),
        )

    def engines_held(self) -> Counter[str]:
        """Engines that runs of a dataset lease, by dataset: rented ones that answer and are not to end, and those of
        fleet.yaml. Where one lease of an engine follows another, the later counts.
        """
        i, c = INSTANCES.c, LEASES.c
        stays = i.name.is_(None) | ((i.state == "ready") & i.retire_at.is_(None))
        leases = sa.select(c.instance, c.dataset).select_from(LEASES.outerjoin(INSTANCES, i.name == c.instance))
        with self._reading() as (connection, now):
            found = connection.execute(leases.where(live(now) & stays).order_by(c.epoch)).tuples().all()
        return Counter(dict(found).values())


def _leases(now: float) -> sa.Select[tuple[int, int, int]]:
    c = LEASES.c
    live, draining = c.expires_at > now, c.draining_at.is_not(None)
    counts = (live & ~draining, live & draining, ~live)
    return sa.select(*(sa.func.count().filter(which) for which in counts)).where(c.released_at.is_(None))


def _spent(now: float) -> sa.Select[tuple[str, float]]:
    """Bills by provider: an instance that never existed costs nothing."""
    c = INSTANCES.c
    usd = (bill_end(now) - c.created_at) * c.price_per_hour * c.clock / 3600.0
    return sa.select(c.provider, sa.func.sum(usd)).group_by(c.provider)


_USD = LEASES.c.useful_usd + LEASES.c.wasted_usd
_SPENT_BY_TOKENS = sa.select(LEASES.c.instance, sa.func.sum(_USD)).where(_USD > 0).group_by(LEASES.c.instance)
