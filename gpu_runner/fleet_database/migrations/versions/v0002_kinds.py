"""What a run waits for, and how an offer failed, in columns of their own: nothing reads the sentences any more."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

NUMBERS = ("wait_budget_usd", "wait_spent_usd", "wait_held_back_usd", "wait_drain_seconds", "wait_boot_usd")
KINDS = {"no capacity": "no_capacity", "lost": "lost"}  # what version 0001 wrote into `reason`


def upgrade() -> None:
    """Add the columns. Failures that are remembered get their kind; runs say with their next beat what they wait for.

    A run of the version before writes failures without a kind: they count as plain ones.
    """
    op.add_column("batch_runs", sa.Column("wait_kind", sa.String(32)))
    for name in NUMBERS:
        op.add_column("batch_runs", sa.Column(name, sa.Float))
    op.add_column("offer_failures", sa.Column("kind", sa.String(32), nullable=False, server_default="failed"))
    failures = sa.table("offer_failures", sa.column("reason", sa.String), sa.column("kind", sa.String))
    for reason, kind in KINDS.items():
        op.execute(failures.update().where(failures.c.reason == reason).values(kind=kind))


def downgrade() -> None:
    """What is rented and what it cost is never thrown away."""
    raise NotImplementedError("the fleet's tables are not downgraded: restore a copy of the database")
