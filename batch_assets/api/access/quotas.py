"""What a tenant holds now: open batches, lines that wait in them, bytes of files. Counted from the records.

A check and what it allows are two transactions: requests that come at the same moment may together go a little over.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from batch_assets.api.access.rate_limits import TenantLimits, check_quota
from batch_assets.api.records.database import Records
from batch_assets.api.records.states import OPEN
from batch_assets.api.records.tables import BATCHES, FILES


@dataclass(frozen=True, slots=True)
class Held:
    """Of one tenant. Lines of batches that are not validated yet are not known, and not counted."""

    open_batches: int
    queued_lines: int
    storage_bytes: int


class Quotas:
    """Looks into the records. Safe to use from several threads."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def held(self, tenant: str) -> Held:
        """What this tenant holds now."""
        left = BATCHES.c.total - BATCHES.c.completed - BATCHES.c.failed
        batches = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(left), 0)).where(
            (BATCHES.c.tenant == tenant) & BATCHES.c.status.in_([status.value for status in OPEN])
        )
        files = sa.select(sa.func.coalesce(sa.func.sum(FILES.c.bytes), 0)).where(FILES.c.tenant == tenant)
        with self._records.reading() as connection:
            count, lines = connection.execute(batches).one()
            return Held(int(count), int(lines), int(connection.execute(files).scalar_one()))

    def check_batch(self, tenant: str, limits: TenantLimits) -> None:
        """Refuse a new batch that would be too much. Raises ApiError 429."""
        held = self.held(tenant)
        check_quota("open batches", limits.open_batches, held.open_batches)
        check_quota("queued lines", limits.queued_lines, held.queued_lines)

    def check_file(self, tenant: str, limits: TenantLimits, size: int) -> None:
        """Refuse a new file of `size` bytes that would be too much. Raises ApiError 429."""
        check_quota("bytes of files", limits.storage_bytes, self.held(tenant).storage_bytes, size)
