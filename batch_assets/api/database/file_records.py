"""Records of files: what `/v1/files` says of them. Their contents are in the store."""

from __future__ import annotations

import enum
import secrets
from dataclasses import asdict, dataclass
from typing import Literal

import sqlalchemy as sa

from batch_assets.api.database.service_database import Check, Records, unchecked
from batch_assets.api.database.tables import BATCHES, FILES, is_id

Order = Literal["asc", "desc"]
SHORTEST_LIFE, LONGEST_LIFE = 3_600, 2_592_000  # seconds, as documented for `expires_after`


class Purpose(enum.StrEnum):
    """What a file is for."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file. Times are Unix seconds; `expires_at` None: it stays until it is deleted.

    `lines`: of an uploaded file, without blank ones at its end; None: not counted.
    """

    id: str
    tenant: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    lines: int | None = None

    @property
    def path(self) -> str:
        """Where its content is in the store."""
        return content_path(self.id)


class UnknownCursor(ValueError):
    """`after` names no object of this list."""


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a list, and whether more follows."""

    files: list[FileRecord]
    has_more: bool


def content_path(file_id: str) -> str:
    """Path of a file's content in the store."""
    return f"api/files/{file_id}"


def new_file_id() -> str:
    """An id that nobody can guess."""
    return f"file-{secrets.token_hex(12)}"


_COLUMNS = [FILES.c[name] for name in FileRecord.__dataclass_fields__]


class FileRecords:
    """The table of files. A file of another tenant, deleted or expired, is not there."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def add(self, file: FileRecord, check: Check = unchecked) -> None:
        """A file whose content is in the store. `check`: in the same transaction, before it; what it raises ends it."""
        with self._records.writing() as connection:
            check(connection)
            add_file(connection, file)

    def set_lines(self, file_id: str, lines: int) -> None:
        """How many lines a file has that was uploaded before they were counted."""
        with self._records.writing() as connection:
            connection.execute(sa.update(FILES).where(FILES.c.id == file_id).values(lines=lines))

    def get(self, tenant: str, file_id: str, now: float) -> FileRecord | None:
        """One file of this tenant."""
        if not is_id(file_id):
            return None
        with self._records.reading() as connection:
            query = sa.select(*_COLUMNS).where(FILES.c.tenant == tenant, FILES.c.id == file_id, _lives(now))
            row = connection.execute(query).one_or_none()
        return None if row is None else FileRecord(*row)

    def has(self, file_id: str) -> bool:
        """The record is there, whether the file may still be read or not."""
        with self._records.reading() as connection:
            return connection.scalar(sa.select(FILES.c.id).where(FILES.c.id == file_id)) is not None

    def page(
        self, tenant: str, now: float, *, purpose: str | None, after: str | None, limit: int, order: Order
    ) -> Page:
        """Files of this tenant in the order of creation, from behind `after`. Raises UnknownCursor."""
        query = sa.select(*_COLUMNS).where(FILES.c.tenant == tenant, _lives(now))
        if purpose is not None:
            query = query.where(FILES.c.purpose == purpose)
        with self._records.reading() as connection:
            if after is not None:
                if not is_id(after):
                    raise UnknownCursor(after)
                at = connection.scalar(sa.select(FILES.c.number).where(FILES.c.tenant == tenant, FILES.c.id == after))
                if at is None:
                    raise UnknownCursor(after)
                query = query.where(FILES.c.number < at if order == "desc" else FILES.c.number > at)
            query = query.order_by(FILES.c.number.desc() if order == "desc" else FILES.c.number.asc())
            rows = connection.execute(query.limit(limit + 1)).all()
        return Page([FileRecord(*row) for row in rows[:limit]], len(rows) > limit)

    def delete(self, tenant: str, file_id: str, now: float) -> bool:
        """The file is there no more; its content goes with the next `expired`. False: it was not there."""
        with self._records.writing() as connection:
            gone = connection.execute(
                sa.update(FILES)
                .where(FILES.c.tenant == tenant, FILES.c.id == file_id, _lives(now))
                .values(expires_at=int(now))
            )
        return gone.rowcount == 1

    def expired(self, now: float, most: int = 100) -> list[FileRecord]:
        """Files whose time is over, of all tenants; not those that a batch is yet to read."""
        unread = sa.select(BATCHES.c.input_file_id).where(BATCHES.c.status.in_(["validating", "cancelling"]))
        over = sa.select(*_COLUMNS).where(FILES.c.expires_at <= now, FILES.c.id.not_in(unread))
        with self._records.reading() as connection:
            return [FileRecord(*row) for row in connection.execute(over.limit(most))]

    def forget(self, file_id: str) -> None:
        """Delete a record whose content is gone."""
        with self._records.writing() as connection:
            connection.execute(sa.delete(FILES).where(FILES.c.id == file_id))


def add_file(connection: sa.Connection, file: FileRecord) -> None:
    """The same within a transaction of others."""
    connection.execute(sa.insert(FILES).values(**asdict(file)))


def _lives(now: float) -> sa.ColumnElement[bool]:
    return sa.or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > now)
