"""All tables of the service: files, batches, API keys, rate limits. Times are Unix seconds.

`number` is the order of creation. A further table stands on `METADATA`, here or in a module beside this one, and a file
in `migrations/versions` makes it.
"""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData()

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")

ID_LENGTH = 64


def is_id(name: str) -> bool:
    """Whether this can be an id at all: databases refuse some texts, and ours are short."""
    return len(name) <= ID_LENGTH and name.isascii() and name.isprintable()


# `lines`: of an uploaded file, without blank ones at its end; null: not counted yet.
FILES = sa.Table(
    "api_files",
    METADATA,
    sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(ID_LENGTH), nullable=False, unique=True),
    sa.Column("tenant", sa.String(128), nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("filename", sa.String(512), nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.Integer, nullable=False),
    sa.Column("expires_at", sa.Integer),
    sa.Column("lines", sa.BigInteger),
    sa.Index("api_files_by_tenant", "tenant", "number"),
    sa.Index("api_files_by_expiry", "expires_at"),
)

# `holder`, `held_until`, `epoch`: which worker brings it on, until when without a sign of life, and how often it
# changed hands. `errors`, `metadata`: JSON. `digest`: what was asked for; `idempotency_key`: as the client named it.
# `reported`: the catalog has all of its partitions. `traceparent`: of the request that created it, if traced.
# `contents_deleted_at`: the store has nothing of it any more. `waiting_for`, `waiting_since`: what its lines wait for.
BATCHES = sa.Table(
    "api_batches",
    METADATA,
    sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(ID_LENGTH), nullable=False, unique=True),
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
    sa.Column("traceparent", sa.String(55)),
    sa.Column("contents_deleted_at", sa.Integer),
    sa.Column("waiting_for", sa.String(200)),
    sa.Column("waiting_since", sa.Integer),
    sa.UniqueConstraint("tenant", "idempotency_key", name="api_batches_once"),
    sa.Index("api_batches_by_tenant", "tenant", "number"),
    sa.Index("api_batches_by_status", "status"),
)

# Of a key only a digest is kept. `scopes`: their names, with spaces between them.
API_KEYS = sa.Table(
    "api_keys",
    METADATA,
    sa.Column("key_id", sa.String(32), primary_key=True),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("name", sa.String(100), nullable=False),
    sa.Column("scopes", sa.String(500), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False, unique=True),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger),
    sa.Column("revoked_at", sa.BigInteger),
)

# What is left of a tenant's limit of a kind (`requests`, `tokens`) a minute.
RATE_BUCKETS = sa.Table(
    "api_rate_buckets",
    METADATA,
    sa.Column("tenant", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("tokens", sa.Float, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
)

# One row: which records these are. What a service keeps elsewhere is named by it: files of DAGSTER_HOME, its claim on
# the fleet.
IDENTITY = sa.Table(
    "api_identity",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("identity", sa.String(16), nullable=False),
)
