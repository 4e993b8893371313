"""Which online requests were charged."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "api_usage_tasks",
        sa.Column("task_id", sa.String(64), primary_key=True),
        sa.Column("at", sa.BigInteger, nullable=False),
    )
    op.create_index("api_usage_tasks_by_time", "api_usage_tasks", ["at"])


def downgrade() -> None:
    """What tenants have used is never thrown away."""
    raise NotImplementedError("the service's tables are not downgraded: restore a copy of the database")
