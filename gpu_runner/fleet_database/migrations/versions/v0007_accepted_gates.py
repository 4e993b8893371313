"""Which gates of a dataset pause its request no more."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column: no gate was accepted."""
    op.add_column("datasets", sa.Column("accepted_gates", sa.Text, nullable=False, server_default="[]"))


def downgrade() -> None:
    """What is rented and what it cost is never thrown away."""
    raise NotImplementedError("the fleet's tables are not downgraded: restore a copy of the database")
