"""Run by Alembic: the revisions of `versions/`, on the connection that `upgrade` was given."""

from __future__ import annotations

from alembic import context

import batch_assets.api.database.usage_tables  # noqa: F401  # puts its tables onto METADATA
from batch_assets.api.database.migrations import VERSION_TABLE
from batch_assets.api.database.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, version_table=VERSION_TABLE
)
with context.begin_transaction():
    context.run_migrations()
