"""The tables of the usage ledger. Counts of tokens and requests are whole numbers, amounts picodollars.

An amount of the ledger is in two columns (`amounts`). One of them alone ends at 9.2 million dollars.
"""

from __future__ import annotations

import sqlalchemy as sa

from batch_assets.api.database.tables import METADATA

COUNTS = ("requests", "unmetered", "input_tokens", "cached_tokens", "output_tokens", "unpriced_tokens")


def _counts() -> list[sa.Column[int]]:
    names = (*COUNTS, "amount", "amount_millions")
    return [sa.Column(name, sa.BigInteger, nullable=False, server_default="0") for name in names]


USAGE = sa.Table(
    "api_usage",
    METADATA,
    sa.Column("day", sa.Date, primary_key=True),
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("service_class", sa.String(80), primary_key=True),
    sa.Column("model", sa.String(300), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    *_counts(),
    sa.Index("api_usage_by_tenant", "tenant", "day"),
)

# What was added to USAGE of each batch, by part, and at the end of the batch as `rest`: nothing twice. `day`,
# `service_class`: where it was added; NULL: an earlier version did, and said nothing.
USAGE_PARTS = sa.Table(
    "api_usage_parts",
    METADATA,
    sa.Column("batch_id", sa.String(64), primary_key=True),
    sa.Column("part", sa.String(16), primary_key=True),
    *_counts(),
    sa.Column("day", sa.Date),
    sa.Column("service_class", sa.String(80)),
)

# What a batch with a budget has cost so far, and whether it waits because of it.
BATCH_SPENDING = sa.Table(
    "api_batch_spending",
    METADATA,
    sa.Column("batch_id", sa.String(64), primary_key=True),
    sa.Column("amount", sa.BigInteger, nullable=False),
    sa.Column("paused", sa.Boolean, nullable=False),
)

# Online requests of the last days whose usage is in USAGE: what is answered twice is charged once. `at`: Unix seconds.
USAGE_TASKS = sa.Table(
    "api_usage_tasks",
    METADATA,
    sa.Column("task_id", sa.String(64), primary_key=True),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Index("api_usage_tasks_by_time", "at"),
)

# How many bytes of each journal of interactive usage are in USAGE.
USAGE_JOURNALS = sa.Table(
    "api_usage_journals",
    METADATA,
    sa.Column("journal", sa.String(64), primary_key=True),
    sa.Column("applied", sa.BigInteger, nullable=False),
)
