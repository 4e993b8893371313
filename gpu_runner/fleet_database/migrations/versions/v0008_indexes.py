"""Indexes for what looks for live leases and standing instances among all that there ever were."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the indexes."""
    live = sa.text("released_at IS NULL")
    op.create_index("leases_by_dataset", "leases", ["dataset"])
    op.create_index("leases_open", "leases", ["dataset"], sqlite_where=live, postgresql_where=live)
    op.create_index("instances_by_state", "instances", ["state"])
    op.create_index("instances_by_end", "instances", ["ended_at"])


def downgrade() -> None:
    """What is rented and what it cost is never thrown away."""
    raise NotImplementedError("the fleet's tables are not downgraded: restore a copy of the database")
