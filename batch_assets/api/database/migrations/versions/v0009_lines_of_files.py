"""How many lines an uploaded file has: a batch of it counts with them until it is validated."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add the column. Files that are there are counted when a batch is made of them."""
    op.add_column("api_files", sa.Column("lines", sa.BigInteger))


def downgrade() -> None:
    """Batches that are not validated would count for nothing again."""
    raise NotImplementedError("the service's tables are not downgraded: restore a copy of the database")
