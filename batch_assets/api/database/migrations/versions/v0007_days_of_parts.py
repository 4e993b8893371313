"""Under which day and class the usage of a part of a batch was added."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the columns. Of parts that an earlier version adds nobody knows."""
    op.add_column("api_usage_parts", sa.Column("day", sa.Date))
    op.add_column("api_usage_parts", sa.Column("service_class", sa.String(80)))


def downgrade() -> None:
    """What tenants have used is never thrown away."""
    raise NotImplementedError("the service's tables are not downgraded: restore a copy of the database")
