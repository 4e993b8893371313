"""When what the store kept of a batch was deleted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the column. Of batches from before nothing was deleted."""
    op.add_column("api_batches", sa.Column("contents_deleted_at", sa.Integer))


def downgrade() -> None:
    """What tenants have brought is never thrown away."""
    raise NotImplementedError("the service's tables are not downgraded: restore a copy of the database")
