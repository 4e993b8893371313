"""Amounts of any size, and no parts of batches whose contents are deleted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the columns, at 0: an earlier version's amounts are all in `amount`, also those that it adds from now on."""
    for table in ("api_usage", "api_usage_parts"):
        op.add_column(table, sa.Column("amount_millions", sa.BigInteger, nullable=False, server_default="0"))
    op.execute(
        "DELETE FROM api_usage_parts WHERE batch_id IN "
        "(SELECT id FROM api_batches WHERE contents_deleted_at IS NOT NULL)"
    )


def downgrade() -> None:
    """What tenants have used is never thrown away."""
    raise NotImplementedError("the service's tables are not downgraded: restore a copy of the database")
