"""Which records these are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Make the table. Its row comes with the first process that asks."""
    op.create_table(
        "api_identity",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("identity", sa.String(16), nullable=False),
    )


def downgrade() -> None:
    """What waits on local disks would belong to nobody."""
    raise NotImplementedError("the service's tables are not downgraded: restore a copy of the database")
