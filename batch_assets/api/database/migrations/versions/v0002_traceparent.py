"""The trace of the request that created a batch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column. Batches from before belong to no trace."""
    op.add_column("api_batches", sa.Column("traceparent", sa.String(55)))


def downgrade() -> None:
    """What tenants have brought is never thrown away."""
    raise NotImplementedError("the service's tables are not downgraded: restore a copy of the database")
