"""What a tenant holds now: open batches, lines that wait in them, bytes of files. Counted from the records.

What decides is asked within the transaction that adds a batch or a file, one such transaction of a tenant at a time:
with SQLite there is one writer, and Postgres has a lock for each tenant.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import sqlalchemy as sa

from batch_assets.api.access.rate_limits import TenantLimits, check_quota
from batch_assets.api.database.service_database import Check, Records
from batch_assets.api.database.states import OPEN
from batch_assets.api.database.tables import BATCHES, FILES

_STORED = "bytes of files"


@dataclass(frozen=True, slots=True)
class Held:
    """What one tenant holds. A batch that is not validated yet holds all lines of its input file."""

    open_batches: int
    queued_lines: int
    storage_bytes: int


class Quotas:
    """Looks into the records. Safe to use from several threads."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def held(self, tenant: str) -> Held:
        """What this tenant holds now."""
        with self._records.reading() as connection:
            return _held(connection, tenant)

    def check_stored(self, tenant: str, limits: TenantLimits, size: int) -> int:
        """Refuse a new file of `size` bytes that would be too much. Returns bytes held. Raises ApiError 429."""
        held = self.held(tenant).storage_bytes
        check_stored(limits, held, size)
        return held

    @staticmethod
    def of_new_batch(tenant: str, limits: TenantLimits, lines: int) -> Check:
        """For the transaction that adds a batch of so many lines. It raises ApiError 429."""

        def check(connection: sa.Connection) -> None:
            _alone(connection, tenant)
            held = _held(connection, tenant)
            check_quota("open batches", limits.open_batches, held.open_batches)
            check_quota("queued lines", limits.queued_lines, held.queued_lines, lines)

        return check

    @staticmethod
    def of_new_file(tenant: str, limits: TenantLimits, size: int) -> Check:
        """For the transaction that adds a file of `size` bytes. It raises ApiError 429."""

        def check(connection: sa.Connection) -> None:
            _alone(connection, tenant)
            check_stored(limits, _held(connection, tenant).storage_bytes, size)

        return check


def check_stored(limits: TenantLimits, held: int, size: int) -> None:
    """Refuse a file that has `size` bytes or more, beside those held. Raises ApiError 429."""
    check_quota(_STORED, limits.storage_bytes, held, size, ends_by_itself=False)


def _alone(connection: sa.Connection, tenant: str) -> None:
    """Until the end of the transaction no other one of this tenant comes past here."""
    if connection.dialect.name == "postgresql":  # in SQLite one transaction writes at a time
        digest = hashlib.sha256(f"batch-assets quotas {tenant}".encode()).digest()
        number = int.from_bytes(digest[:8], "big", signed=True)
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(number)))


def _held(connection: sa.Connection, tenant: str) -> Held:
    own = (BATCHES.c.tenant == tenant, BATCHES.c.status.in_([status.value for status in OPEN]))
    left = BATCHES.c.total - BATCHES.c.completed - BATCHES.c.failed
    validated = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(left), 0)).where(*own)
    unknown = (
        sa.select(sa.func.coalesce(sa.func.sum(FILES.c.lines), 0))
        .select_from(BATCHES.join(FILES, FILES.c.id == BATCHES.c.input_file_id))
        .where(*own, BATCHES.c.total == 0)
    )
    stored = sa.select(sa.func.coalesce(sa.func.sum(FILES.c.bytes), 0)).where(FILES.c.tenant == tenant)
    count, lines = connection.execute(validated).one()
    waiting, size = (connection.execute(query).scalar_one() for query in (unknown, stored))
    return Held(int(count), int(lines) + int(waiting), int(size))
