"""The usage ledger, and what batches with a budget have cost."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

TABLES = sa.MetaData()


def _counts() -> list[sa.Column[int]]:
    names = ("requests", "unmetered", "input_tokens", "cached_tokens", "output_tokens", "unpriced_tokens", "amount")
    return [sa.Column(name, sa.BigInteger, nullable=False, server_default="0") for name in names]


sa.Table(
    "api_usage",
    TABLES,
    sa.Column("day", sa.Date, primary_key=True),
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("service_class", sa.String(80), primary_key=True),
    sa.Column("model", sa.String(300), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    *_counts(),
    sa.Index("api_usage_by_tenant", "tenant", "day"),
)

sa.Table(
    "api_usage_parts",
    TABLES,
    sa.Column("batch_id", sa.String(64), primary_key=True),
    sa.Column("part", sa.String(16), primary_key=True),
    *_counts(),
)

sa.Table(
    "api_batch_spending",
    TABLES,
    sa.Column("batch_id", sa.String(64), primary_key=True),
    sa.Column("amount", sa.BigInteger, nullable=False),
    sa.Column("paused", sa.Boolean, nullable=False),
)

sa.Table(
    "api_usage_journals",
    TABLES,
    sa.Column("journal", sa.String(64), primary_key=True),
    sa.Column("applied", sa.BigInteger, nullable=False),
)


def upgrade() -> None:
    """Make the tables of the usage ledger."""
    TABLES.create_all(op.get_bind())


def downgrade() -> None:
    """What tenants have used is never thrown away."""
    raise NotImplementedError("the service's tables are not downgraded: restore a copy of the database")
