"""Versions of the service's tables, by Alembic. Each process that opens the database brings it to `HEAD` first.

A change of `batch_assets.api.database.tables` needs a further file in `versions/`, which may only add to what is there
(replicas of the version before may still be running), and `HEAD` names it. A test compares what the files make with the
tables.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from gpu_runner.errors import ExitStatus, UserFacingError
from gpu_runner.table_versions import TableVersions

__all__ = ["HEAD", "RecordsTooNew", "upgrade", "version_of"]

HEAD = "0010"
VERSION_TABLE = "api_alembic_version"  # the fleet's and Dagster's own may stand in the same database
_LOCK = 0x62617069


class RecordsTooNew(UserFacingError):
    """The database was written by a later version of this program than the one that opens it."""

    exit_status = ExitStatus.WRONG_REQUEST

    def __init__(self, found: str) -> None:
        super().__init__(
            f"database of the front door (BATCH_ASSETS_API_DB): expected version {HEAD} or an earlier one, found "
            f"{found}: a later version of batch-assets has written it; install that version here, too"
        )


_VERSIONS = TableVersions(HEAD, VERSION_TABLE, _LOCK, Path(__file__).parent, RecordsTooNew)


def version_of(connection: sa.Connection) -> str | None:
    """The version of the tables; None where no version was ever written: they are older, or not there."""
    return _VERSIONS.version_of(connection)


def upgrade(connection: sa.Connection, version: str = HEAD) -> None:
    """Bring the tables to this version, in the transaction of the connection. Raises RecordsTooNew."""
    _VERSIONS.upgrade(connection, version)
