"""Versions of a group of tables, by Alembic: each process that opens the database brings them to the newest one first.

SQLite's single writer, or an advisory lock of Postgres, lets one process at a time do it; the others then find it done.
Alembic keeps what it is doing in variables of its module, so within a process one thread at a time may: else tables of
one database are made in another one, which then is said to have its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from gpu_runner.errors import UserFacingError

ONE_UPGRADE = threading.RLock()  # to be held before the transaction begins, so that nobody waits for it with a lock


@dataclass(frozen=True, slots=True)
class TableVersions:
    """`head`: the newest version. `table`: where the database says its own; `lock`: of Postgres' advisory locks.

    `folder`: Alembic's `env.py` and `versions/`. `too_new`: the error for a database of an unknown version.
    """

    head: str
    table: str
    lock: int
    folder: Path
    too_new: Callable[[str], UserFacingError]

    def version_of(self, connection: sa.Connection) -> str | None:
        """The version of the tables; None where no version was ever written: they are older, or not there."""
        if not sa.inspect(connection).has_table(self.table):
            return None
        return connection.execute(sa.select(sa.column("version_num")).select_from(sa.table(self.table))).scalar()

    def upgrade(self, connection: sa.Connection, version: str) -> None:
        """Bring the tables to this version, in the transaction of the connection. Raises what `too_new` makes."""
        with ONE_UPGRADE:
            self._upgrade(connection, version)

    def _upgrade(self, connection: sa.Connection, version: str) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(self.lock)))
        found = self.version_of(connection)  # again, alone: another process may have done it meanwhile
        if found == version:
            return
        from alembic import command  # imported only here: most processes find the tables as they should be
        from alembic.config import Config
        from alembic.util.exc import CommandError

        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(self.folder).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        try:
            command.upgrade(config, version)
        except CommandError:
            if found is None:
                raise
            raise self.too_new(found) from None
