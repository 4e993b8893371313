"""What the lines of a batch wait for, and since when."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add the columns. Whoever holds a batch fills them."""
    op.add_column("api_batches", sa.Column("waiting_for", sa.String(200)))
    op.add_column("api_batches", sa.Column("waiting_since", sa.Integer))


def downgrade() -> None:
    """As of all versions."""
    raise NotImplementedError("the service's tables are not downgraded: restore a copy of the database")
