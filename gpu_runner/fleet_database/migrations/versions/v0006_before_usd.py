"""What a lease of an engine that is paid by the token had cost when its dataset's request began."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the column. A lease that is older than its dataset's request counts with what it costs from now on."""
    op.add_column("leases", sa.Column("before_usd", sa.Float, nullable=False, server_default="0"))
    op.execute(
        "UPDATE leases SET before_usd = useful_usd + wasted_usd "
        "WHERE acquired_at < (SELECT since FROM datasets WHERE datasets.dataset = leases.dataset)"
    )


def downgrade() -> None:
    """What is rented and what it cost is never thrown away."""
    raise NotImplementedError("the fleet's tables are not downgraded: restore a copy of the database")
