"""What a fleet's database is told when it was brought back from a backup: nothing that it believes of the world holds.

Its runs are dead, its leases are over, and no instance of it is used again: each is ended, or has ended. Machines that
were rented after the backup are not in it; the reaper ends those by their names, as its tag is in the backup.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import sqlalchemy as sa

from gpu_runner.fleet_database.accounting.request_budget import count_anew
from gpu_runner.fleet_database.connection import CLAIMS, INSTANCES, LEASES, RUNS, Tables
from gpu_runner.fleet_database.leases import STANDING, add_lease, release_leases

REASON = "restored from a backup"


class AfterRestore(Tables):
    """The transactions after a restore. Each may be repeated."""

    def distrust(self, backup_at: float, listed: Mapping[str, Collection[str]]) -> tuple[int, int]:
        """End all runs, leases and instances of the backup, which was made at `backup_at` (Unix seconds).

        `listed`: the names of the machines that each provider lists as alive; providers that did not answer are not in
        it. Those instances, and those of providers that did not answer, are `ending`: the reaper settles them, and they
        are billed until then. Any other has ended: nobody knows when, so its bill ends with the backup. Returns how
        many are ending, and how many have ended.
        """
        with self._transaction() as (connection, now):
            connection.execute(CLAIMS.delete())
            alive = RUNS.c.state != "ended"
            connection.execute(RUNS.update().where(alive).values(state="ended", note=REASON, declared_dead_at=now))
            release_leases(connection, now, sa.true(), REASON)
            ending = ended = 0
            query = sa.select(INSTANCES).where(INSTANCES.c.state != "ended").order_by(INSTANCES.c.name)
            for row in connection.execute(query).mappings().all():
                own = INSTANCES.update().where(INSTANCES.c.name == row["name"])
                names = listed.get(row["provider"])
                if names is None or row["name"] in names:
                    if row["state"] in STANDING:
                        connection.execute(own.values(state="ending", ending_at=now, reason=REASON))
                    ending += 1
                else:
                    until = min(now, max(backup_at, row["created_at"]))
                    connection.execute(own.values(state="ended", ended_at=until, reason=REASON))
                    ended += 1
            count_anew(connection)
        return ending, ended

    def charge_restored(self, dataset: str, usd: float, rows: int) -> None:
        """Book what rows cost that were made after the backup, by what the store says of them, in US dollars.

        It is one lease of an engine of this reason's name, which is over: so it counts for the dataset's budget.
        """
        with self._transaction() as (connection, now):
            lease = add_lease(connection, now, f"{REASON}: {dataset}"[:200], REASON, dataset, 0.0)
            own = (LEASES.c.instance == lease.instance) & (LEASES.c.epoch == lease.epoch)
            values = {"released_at": now, "useful_usd": usd, "rows": rows, "reason": REASON}
            connection.execute(LEASES.update().where(own).values(**values))
            count_anew(connection)
