"""That a run was declared dead, in a column of its own: nothing reads it out of its note any more."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

NOTE = "declared dead"  # what version 0002 wrote into `note`


def upgrade() -> None:
    """Add the column. Runs that were declared dead stay so, since their last beat.

    Workers of the version before obey the note, which is written as before. Nobody of them declares a run dead after
    this: whoever does opens the database anew each time, and is refused.
    """
    op.add_column("batch_runs", sa.Column("declared_dead_at", sa.Float))
    columns = (sa.column("state", sa.String), sa.column("note", sa.String), sa.column("beat_at", sa.Float))
    runs = sa.table("batch_runs", *columns, sa.column("declared_dead_at", sa.Float))
    dead = (runs.c.state == "ended") & (runs.c.note == NOTE)
    op.execute(runs.update().where(dead).values(declared_dead_at=runs.c.beat_at))


def downgrade() -> None:
    """What is rented and what it cost is never thrown away."""
    raise NotImplementedError("the fleet's tables are not downgraded: restore a copy of the database")
