"""The tables as they were when versions began. A database from before has them, or gets what it lacks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

TABLES = sa.MetaData()
_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
sa.Table(
    "api_files",
    TABLES,
    sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("tenant", sa.String(128), nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("filename", sa.String(512), nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.Integer, nullable=False),
    sa.Column("expires_at", sa.Integer),
    sa.Index("api_files_by_tenant", "tenant", "number"),
    sa.Index("api_files_by_expiry", "expires_at"),
)
sa.Table(
    "api_batches",
    TABLES,
    sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("tenant", sa.String(128), nullable=False),
    sa.Column("endpoint", sa.String(64), nullable=False),
    sa.Column("model", sa.String(300)),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    sa.Column("completion_window", sa.String(64), nullable=False),
    sa.Column("created_at", sa.Integer, nullable=False),
    sa.Column("expires_at", sa.Integer, nullable=False),
    sa.Column("in_progress_at", sa.Integer),
    sa.Column("finalizing_at", sa.Integer),
    sa.Column("completed_at", sa.Integer),
    sa.Column("failed_at", sa.Integer),
    sa.Column("expired_at", sa.Integer),
    sa.Column("cancelling_at", sa.Integer),
    sa.Column("cancelled_at", sa.Integer),
    sa.Column("total", sa.Integer, nullable=False, server_default="0"),
    sa.Column("completed", sa.Integer, nullable=False, server_default="0"),
    sa.Column("failed", sa.Integer, nullable=False, server_default="0"),
    sa.Column("usage", sa.Text),
    sa.Column("errors", sa.Text),
    sa.Column("metadata", sa.Text),
    sa.Column("output_seconds", sa.Integer),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("idempotency_key", sa.String(256)),
    sa.Column("holder", sa.String(128)),
    sa.Column("held_until", sa.Float),
    sa.Column("epoch", sa.Integer, nullable=False, server_default="0"),
    sa.Column("reported", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.UniqueConstraint("tenant", "idempotency_key", name="api_batches_once"),
    sa.Index("api_batches_by_tenant", "tenant", "number"),
    sa.Index("api_batches_by_status", "status"),
)
sa.Table(
    "api_keys",
    TABLES,
    sa.Column("key_id", sa.String(32), primary_key=True),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("name", sa.String(100), nullable=False),
    sa.Column("scopes", sa.String(500), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False, unique=True),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger),
    sa.Column("revoked_at", sa.BigInteger),
)
sa.Table(
    "api_rate_buckets",
    TABLES,
    sa.Column("tenant", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("tokens", sa.Float, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
)


def upgrade() -> None:
    """Create what is not there."""
    TABLES.create_all(op.get_bind())


def downgrade() -> None:
    """What tenants have brought is never thrown away."""
    raise NotImplementedError("the service's tables are not downgraded: restore a copy of the database")
