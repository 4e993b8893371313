"""Claims: which run asks for the rows of which batch, so that two runs of one range pay for no row twice.

A claim is on a batch *object*, the one that the run will write: a regenerate writes the next generation, and so is
other work than the run that writes the first. A claim stands while its run lives: until it is released, its run ends,
or its run has given no heartbeat for some seconds. Whatever goes wrong with claims costs money, never a row: objects
are created once, and who comes second adopts what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from gpu_runner.fleet_database.connection import CLAIMS, RUNS, Tables

MANY = 500  # names that go into one query


@dataclass(frozen=True, slots=True)
class Claim:
    """What came of asking for one of several objects.

    `object`: the claimed one; None: living runs hold all of them. `rivals`: the other runs of these batches since the
    asking run began; they may have committed some. `gone`: those of them that live no more, and may have left journals.
    """

    object: str | None = None
    rivals: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()


class Claims(Tables):
    """The transactions on claims."""

    def claim(self, run_id: str, dataset: str, objects: Sequence[str], silent: float) -> Claim:
        """Claim the first of these objects that no other living run holds.

        A run that gave no heartbeat for `silent` seconds is not living. One that has ended itself claims nothing.
        """
        with self._transaction() as (connection, now):
            own = connection.execute(sa.select(RUNS).where(RUNS.c.run_id == run_id)).mappings().first()
            if own is None or own["state"] == "ended":
                return Claim()
            alive = (RUNS.c.state != "ended") & (RUNS.c.beat_at > now - silent)
            overlaps = (RUNS.c.dataset == dataset) & (RUNS.c.run_id != run_id)
            overlaps &= (RUNS.c.first_key <= own["last_key"]) & (RUNS.c.last_key >= own["first_key"])
            overlaps &= RUNS.c.beat_at > own["started_at"] - silent
            rivals = {
                line[0]: bool(line[1]) for line in connection.execute(sa.select(RUNS.c.run_id, alive).where(overlaps))
            }
            taken = _held(connection, dataset, objects, (RUNS.c.run_id != run_id) & alive)
            free = next((name for name in objects if name not in taken), None)
            if free is not None:
                same = (CLAIMS.c.dataset == dataset) & (CLAIMS.c.object == free)
                connection.execute(CLAIMS.delete().where(same))
                connection.execute(CLAIMS.insert().values(dataset=dataset, object=free, run_id=run_id, claimed_at=now))
            gone = frozenset(name for name, lives in rivals.items() if not lives)
            return Claim(free, frozenset(rivals), gone)

    def release_claims(self, run_id: str, dataset: str, objects: Sequence[str]) -> None:
        """Give these claims up: the objects are committed, or others may write them."""
        with self._transaction() as (connection, _):
            mine = (CLAIMS.c.dataset == dataset) & (CLAIMS.c.run_id == run_id)
            for start in range(0, len(objects), MANY):
                named = CLAIMS.c.object.in_(objects[start : start + MANY])
                connection.execute(CLAIMS.delete().where(mine & named))

    def claims(self, dataset: str) -> dict[str, str]:
        """Every claim on the dataset's objects: object to run, of living runs and of dead ones."""
        query = sa.select(CLAIMS.c.object, CLAIMS.c.run_id).where(CLAIMS.c.dataset == dataset)
        with self._reading() as (connection, _):
            return {line[0]: line[1] for line in connection.execute(query)}


def _held(connection: sa.Connection, dataset: str, objects: Sequence[str], by: sa.ColumnElement[bool]) -> set[str]:
    """Those of the objects that one of such runs holds."""
    found: set[str] = set()
    for start in range(0, len(objects), MANY):
        named = (CLAIMS.c.dataset == dataset) & CLAIMS.c.object.in_(objects[start : start + MANY])
        held = sa.select(CLAIMS.c.object).join(RUNS, RUNS.c.run_id == CLAIMS.c.run_id).where(named & by)
        found.update(connection.execute(held).scalars())
    return found
