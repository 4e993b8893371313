"""What engines cost that are paid by the token, and what of a budget is granted to whoever leases them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the columns. Leases of the version before cost nothing by the token."""
    for name in ("useful_usd", "wasted_usd"):
        op.add_column("leases", sa.Column(name, sa.Float, nullable=False, server_default="0"))
    op.add_column("leases", sa.Column("granted_usd", sa.Float))
    op.add_column("batch_runs", sa.Column("wait_row_usd", sa.Float))


def downgrade() -> None:
    """What is rented and what it cost is never thrown away."""
    raise NotImplementedError("the fleet's tables are not downgraded: restore a copy of the database")
