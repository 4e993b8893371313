"""Since when a run waits, and what its requests meet, in columns of their own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the columns. What runs wait for already counts from their next beat."""
    op.add_column("batch_runs", sa.Column("wait_code", sa.String(64)))
    op.add_column("batch_runs", sa.Column("wait_status", sa.Integer))
    op.add_column("batch_runs", sa.Column("wait_sentence", sa.String(300)))
    op.add_column("batch_runs", sa.Column("wait_since", sa.Float))


def downgrade() -> None:
    """What is rented and what it cost is never thrown away."""
    raise NotImplementedError("the fleet's tables are not downgraded: restore a copy of the database")
