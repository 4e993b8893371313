"""Versions of the fleet's tables, by Alembic. Each process that opens the database brings it to `HEAD` first.

A change of `gpu_runner.fleet_database.tables` needs a further file in `versions/`, which may only add to what is there
(workers of the version before may still be running), and `HEAD` names it. A test compares what the files make with the
tables.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from gpu_runner.errors import ExitStatus, UserFacingError
from gpu_runner.table_versions import TableVersions

__all__ = ["HEAD", "FleetDatabaseTooNew", "upgrade", "version_of"]

HEAD = "0008"
VERSION_TABLE = "fleet_alembic_version"  # Dagster's own `alembic_version` may stand in the same database
_LOCK = 0x62617463  # of Postgres' advisory locks: one upgrade at a time


class FleetDatabaseTooNew(UserFacingError, ValueError):
    """The database was written by a later version of this program than the one that opens it."""

    exit_status = ExitStatus.WRONG_REQUEST

    def __init__(self, found: str) -> None:
        super().__init__(
            f"database of the fleet: expected version {HEAD} or an earlier one, found {found}: a later version of "
            "batch-assets has written it; install that version here, too"
        )


_VERSIONS = TableVersions(HEAD, VERSION_TABLE, _LOCK, Path(__file__).parent, FleetDatabaseTooNew)


def version_of(connection: sa.Connection) -> str | None:
    """The version of the tables; None where no version was ever written: they are older, or not there."""
    return _VERSIONS.version_of(connection)


def upgrade(connection: sa.Connection, version: str = HEAD) -> None:
    """Bring the tables to this version, in the transaction of the connection. Raises FleetDatabaseTooNew."""
    _VERSIONS.upgrade(connection, version)
