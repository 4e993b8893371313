"""The tables as they were when versions began. A database from before gets what it lacks: tables, and columns."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

TABLES = sa.MetaData()
sa.Table(
    "batch_runs",
    TABLES,
    sa.Column("run_id", sa.String(64), primary_key=True),
    sa.Column("dataset", sa.String(128), nullable=False),
    sa.Column("first_key", sa.String(16), nullable=False),
    sa.Column("last_key", sa.String(16), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("note", sa.String(300), nullable=False),
    sa.Column("rows_done", sa.Integer, nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("beat_at", sa.Float, nullable=False),
)
sa.Table(
    "leases",
    TABLES,
    sa.Column("instance", sa.String(200), primary_key=True),
    sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("run_id", sa.String(64), nullable=False),
    sa.Column("dataset", sa.String(128), nullable=False),
    sa.Column("acquired_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("released_at", sa.Float),
    sa.Column("renewed_at", sa.Float),
    sa.Column("draining_at", sa.Float),
    sa.Column("useful_seconds", sa.Float, nullable=False, server_default="0"),
    sa.Column("wasted_seconds", sa.Float, nullable=False, server_default="0"),
    sa.Column("rows", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("reason", sa.String(300), nullable=False, server_default=""),
)
sa.Table(
    "datasets",
    TABLES,
    sa.Column("dataset", sa.String(128), primary_key=True),
    sa.Column("instances", sa.Integer, nullable=False),
    sa.Column("request", sa.String(200), nullable=False, server_default=""),
    sa.Column("since", sa.Float, nullable=False, server_default="0"),
    sa.Column("deadline_at", sa.Float),
    sa.Column("deadline_override", sa.Float),
    sa.Column("budget_usd", sa.Float),
    sa.Column("budget_override", sa.Float),
    sa.Column("objective", sa.String(32), nullable=False, server_default=""),
    sa.Column("max_instances", sa.Integer),
    sa.Column("offers", sa.Text, nullable=False, server_default="[]"),
    sa.Column("pause", sa.Text, nullable=False, server_default=""),
    sa.Column("memory", sa.Text, nullable=False, server_default="{}"),
    sa.Column("plan", sa.Text, nullable=False, server_default="{}"),
    sa.Column("updated_at", sa.Float),
    sa.Column("counted_at", sa.Float),
    sa.Column("counted_usd", sa.Float, nullable=False, server_default="0"),
    sa.Column("counted_rate", sa.Float, nullable=False, server_default="0"),
)
sa.Table(
    "instances",
    TABLES,
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("provider", sa.String(300), nullable=False),
    sa.Column("region", sa.String(300), nullable=False),
    sa.Column("instance_type", sa.String(300), nullable=False),
    sa.Column("gpu", sa.String(300), nullable=False),
    sa.Column("gpus", sa.Integer, nullable=False),
    sa.Column("gpu_memory_gib", sa.Float, nullable=False),
    sa.Column("spot", sa.Boolean, nullable=False),
    sa.Column("price_per_hour", sa.Float, nullable=False),
    sa.Column("clock", sa.Float, nullable=False),
    sa.Column("boot_seconds", sa.Float, nullable=False),
    sa.Column("engine_key", sa.String(300), nullable=False),
    sa.Column("model", sa.String(300), nullable=False),
    sa.Column("max_num_seqs", sa.Integer),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("endpoint", sa.String(300)),
    sa.Column("machine_id", sa.String(200)),
    sa.Column("reason", sa.String(300), nullable=False, server_default=""),
    sa.Column("run_id", sa.String(64), nullable=False),
    sa.Column("dataset", sa.String(128), nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("ready_at", sa.Float),
    sa.Column("ending_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("notice_at", sa.Float),
    sa.Column("seen_at", sa.Float),
    sa.Column("retire_at", sa.Float),
    sa.Column("missing_since", sa.Float),
)
sa.Table(
    "batch_claims",
    TABLES,
    sa.Column("dataset", sa.String(128), primary_key=True),
    sa.Column("object", sa.String(200), primary_key=True),
    sa.Column("run_id", sa.String(64), nullable=False),
    sa.Column("claimed_at", sa.Float, nullable=False),
)
sa.Table(
    "offer_failures",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("provider", sa.String(300), nullable=False),
    sa.Column("offer", sa.String(300), nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("reason", sa.String(300), nullable=False),
)
sa.Table(
    "fleet_facts",
    TABLES,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.String(300), nullable=False),
)
sa.Table(
    "clocks",
    TABLES,
    sa.Column("host", sa.String(120), primary_key=True),
    sa.Column("wall", sa.Float, nullable=False),
    sa.Column("low", sa.Float, nullable=False),
    sa.Column("high", sa.Float, nullable=False),
    sa.Column("jumps", sa.Float, nullable=False),
)
sa.Table(
    "clock_jumps",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),
)


def upgrade() -> None:
    """Create what is not there."""
    connection = op.get_bind()
    inspector = sa.inspect(connection)
    before = set(inspector.get_table_names())
    TABLES.create_all(connection)
    for table in TABLES.sorted_tables:
        if table.name in before:
            there = {column["name"] for column in inspector.get_columns(table.name)}
            for column in table.columns:
                if column.name not in there:
                    words = sa.schema.CreateColumn(column).compile(dialect=connection.dialect)
                    connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {words}")


def downgrade() -> None:
    """What is rented and what it cost is never thrown away."""
    raise NotImplementedError("the fleet's tables are not downgraded: restore a copy of the database")
