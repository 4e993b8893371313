"""Records of batches: what `/v1/batches` says of them, and which worker brings each one on."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from batch_assets.api.database.file_records import FileRecord, UnknownCursor, add_file
from batch_assets.api.database.service_database import Check, Records, unchecked
from batch_assets.api.database.states import CANCEL, OPEN, TERMINAL, UNDER_WAY, BatchStatus, Transition
from batch_assets.api.database.tables import BATCHES, FILES, is_id
from batch_assets.api.database.usage_tables import USAGE_PARTS


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch. Times are Unix seconds, None until they happen. `errors`, `usage`, `metadata` are JSON.

    `output_seconds`: how long its output files live; None: the default. `holder`: the worker that brings it on.
    `waiting_for`: what its lines wait for, `waiting_since` then; None: an engine serves them.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    digest: str
    status: str = BatchStatus.VALIDATING.value
    model: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: str | None = None
    errors: str | None = None
    metadata: str | None = None
    output_seconds: int | None = None
    idempotency_key: str | None = None
    epoch: int = 0
    traceparent: str | None = None
    holder: str | None = field(default=None, compare=False)
    waiting_for: str | None = field(default=None, compare=False)
    waiting_since: int | None = field(default=None, compare=False)

    @property
    def state(self) -> BatchStatus:
        """Its status."""
        return BatchStatus(self.status)

    def metadata_values(self) -> dict[str, str]:
        """What the client attached."""
        found: dict[str, str] = {} if self.metadata is None else json.loads(self.metadata)
        return found


class KeyReused(ValueError):
    """The idempotency key was used before, for another request."""


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a list, and whether more follows."""

    batches: list[BatchRecord]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Held:
    """The right of one worker to write to a batch. A later epoch ends it."""

    batch_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """What a worker asks of every open batch, several times a second."""

    id: str
    epoch: int
    status: str


def new_batch_id() -> str:
    """An id that nobody can guess."""
    return f"batch_{secrets.token_hex(12)}"


QUICK_SECONDS = 60
_NAMES = list(BatchRecord.__dataclass_fields__)
_COLUMNS = [BATCHES.c[name] for name in _NAMES]


def _record(row: Any) -> BatchRecord:
    return BatchRecord(**dict(zip(_NAMES, row, strict=True)))


class BatchRecords:
    """The table of batches, for requests. A batch of another tenant is not there."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def create(
        self, batch: BatchRecord, *, retried_since: float | None = None, check: Check = unchecked
    ) -> BatchRecord:
        """Add a batch, or return the one that the same request made before.

        The same: of the same idempotency key, or, where `retried_since` says that a client repeats itself, with the
        same digest since then and still under way, or ended by itself within QUICK_SECONDS of its creation: a small
        batch is done before its client repeats itself. Raises KeyReused.

        `check`: of a batch that is to be added, in the same transaction; what it raises ends it.
        """
        try:
            with self._records.writing() as connection:
                if (before := self._before(connection, batch, retried_since)) is not None:
                    return before
                check(connection)
                connection.execute(sa.insert(BATCHES).values(**asdict(batch)))
        except IntegrityError:  # at the same time, of the same key
            with self._records.reading() as connection:
                if (before := self._before(connection, batch, None)) is not None:
                    return before
            raise
        return batch

    def made_before(self, batch: BatchRecord, *, retried_since: float | None = None) -> BatchRecord | None:
        """What `create` would return in place of a new batch, whatever has become of its files. Raises KeyReused."""
        with self._records.reading() as connection:
            return self._before(connection, batch, retried_since)

    def _before(self, connection: sa.Connection, batch: BatchRecord, since: float | None) -> BatchRecord | None:
        own = BATCHES.c.tenant == batch.tenant
        if batch.idempotency_key is not None:
            query = sa.select(*_COLUMNS).where(own, BATCHES.c.idempotency_key == batch.idempotency_key)
        elif since is not None:
            open_still = BATCHES.c.status.in_([state.value for state in UNDER_WAY])
            quick = BATCHES.c.status.in_([BatchStatus.COMPLETED.value, BatchStatus.FAILED.value])
            just_made = BATCHES.c.created_at >= batch.created_at - QUICK_SECONDS
            fits = sa.or_(open_still, sa.and_(quick, just_made))
            same = (BATCHES.c.digest == batch.digest, BATCHES.c.created_at >= since, fits)
            query = sa.select(*_COLUMNS).where(own, *same).order_by(BATCHES.c.number.desc()).limit(1)
        else:
            return None
        row = connection.execute(query).one_or_none()
        if row is None:
            return None
        found = _record(row)
        if found.digest != batch.digest:
            raise KeyReused(batch.idempotency_key)
        return found

    def get(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """One batch of this tenant."""
        if not is_id(batch_id):
            return None
        with self._records.reading() as connection:
            query = sa.select(*_COLUMNS).where(BATCHES.c.tenant == tenant, BATCHES.c.id == batch_id)
            row = connection.execute(query).one_or_none()
        return None if row is None else _record(row)

    def page(self, tenant: str, *, after: str | None, limit: int) -> Page:
        """Batches of this tenant, newest first, from behind `after`. Raises UnknownCursor."""
        query = sa.select(*_COLUMNS).where(BATCHES.c.tenant == tenant)
        with self._records.reading() as connection:
            if after is not None:
                if not is_id(after):
                    raise UnknownCursor(after)
                own = (BATCHES.c.tenant == tenant, BATCHES.c.id == after)
                at = connection.scalar(sa.select(BATCHES.c.number).where(*own))
                if at is None:
                    raise UnknownCursor(after)
                query = query.where(BATCHES.c.number < at)
            rows = connection.execute(query.order_by(BATCHES.c.number.desc()).limit(limit + 1)).all()
        return Page([_record(row) for row in rows[:limit]], len(rows) > limit)

    def cancel(self, tenant: str, batch_id: str, now: int) -> BatchRecord | None:
        """Begin to cancel a batch that has not ended; returns it as this transaction leaves it. None: it is not there.

        What comes after it, as the end of the cancel, does not change the answer.
        """
        if not is_id(batch_id):
            return None
        own = (BATCHES.c.tenant == tenant, BATCHES.c.id == batch_id)
        with self._records.writing() as connection:
            row = connection.execute(sa.select(*_COLUMNS).where(*own).with_for_update()).one_or_none()
            found = None if row is None else _record(row)
            if found is None or found.state not in CANCEL.sources:
                return found
            cancelling = replace(found, status=CANCEL.target.value, cancelling_at=now)
            values = {"status": cancelling.status, "cancelling_at": now}
            connection.execute(sa.update(BATCHES).where(*own).values(values))
        return cancelling

    def of_any_tenant(self, batch_id: str) -> BatchRecord | None:
        """One batch, for who operates the service."""
        with self._records.reading() as connection:
            row = connection.execute(sa.select(*_COLUMNS).where(BATCHES.c.id == batch_id)).one_or_none()
        return None if row is None else _record(row)

    # of workers

    def open_batches(self) -> list[OpenBatch]:
        """All batches that have not ended, in no order."""
        with self._records.reading() as connection:
            query = sa.select(BATCHES.c.id, BATCHES.c.epoch, BATCHES.c.status)
            rows = connection.execute(query.where(BATCHES.c.status.in_([state.value for state in OPEN])))
            return [OpenBatch(*row) for row in rows]

    def open_records(self) -> list[BatchRecord]:
        """The same, whole, those first whose window ends first: for what plans with them, every few seconds."""
        with self._records.reading() as connection:
            query = sa.select(*_COLUMNS).where(BATCHES.c.status.in_([state.value for state in OPEN]))
            return [_record(row) for row in connection.execute(query.order_by(BATCHES.c.expires_at, BATCHES.c.number))]

    def claim(self, batch_id: str, holder: str, now: float, seconds: float, gone: Sequence[str] = ()) -> Held | None:
        """Take a batch that nobody holds (or one of `gone`, or nobody any more). None: it is another's, or ended."""
        with self._records.writing() as connection:
            epoch = connection.scalar(
                sa.update(BATCHES)
                .where(
                    BATCHES.c.id == batch_id, _free(now, gone), BATCHES.c.status.in_([state.value for state in OPEN])
                )
                .values(holder=holder, held_until=now + seconds, epoch=BATCHES.c.epoch + 1)
                .returning(BATCHES.c.epoch)
            )
        return None if epoch is None else Held(batch_id, epoch)

    def free(self, now: float, gone: Sequence[str] = ()) -> list[str]:
        """Ids of the batches that `claim` would take now, those first whose window ends first."""
        with self._records.reading() as connection:
            states = BATCHES.c.status.in_([state.value for state in OPEN])
            query = sa.select(BATCHES.c.id).where(states, _free(now, gone))
            return [batch_id for (batch_id,) in connection.execute(query.order_by(BATCHES.c.expires_at))]

    def holders(self) -> set[str]:
        """The services that hold open batches."""
        with self._records.reading() as connection:
            query = sa.select(BATCHES.c.holder).where(BATCHES.c.status.in_([state.value for state in OPEN]))
            return {holder for (holder,) in connection.execute(query.distinct()) if holder is not None}

    def renew(self, holder: str, now: float, seconds: float) -> None:
        """A sign of life of a worker, for all open batches that it holds."""
        with self._records.writing() as connection:
            held = (BATCHES.c.holder == holder, BATCHES.c.status.in_([state.value for state in OPEN]))
            connection.execute(sa.update(BATCHES).where(*held).values(held_until=now + seconds))

    def release(self, holder: str) -> None:
        """A worker holds nothing any more."""
        with self._records.writing() as connection:
            connection.execute(
                sa.update(BATCHES).where(BATCHES.c.holder == holder).values(holder=None, held_until=None)
            )

    def current(self, held: Held) -> BatchRecord | None:
        """The batch as it is now; None: it is another's."""
        with self._records.reading() as connection:
            row = connection.execute(sa.select(*_COLUMNS).where(*_mine(held))).one_or_none()
        return None if row is None else _record(row)

    def count(self, held: Held, completed: int, failed: int) -> None:
        """Lines that are done and kept, of a batch that has not ended. Counts never fall."""
        c = BATCHES.c
        with self._records.writing() as connection:
            connection.execute(
                sa.update(BATCHES)
                .where(*_mine(held), c.status.in_([state.value for state in OPEN]))
                .values(
                    completed=sa.case((c.completed < completed, completed), else_=c.completed),
                    failed=sa.case((c.failed < failed, failed), else_=c.failed),
                )
            )

    def wait(self, held: Held, waiting_for: str | None, since: int | None) -> None:
        """What the lines of a batch that has not ended wait for, and since when; None: for nothing."""
        with self._records.writing() as connection:
            states = BATCHES.c.status.in_([state.value for state in OPEN])
            values = {"waiting_for": waiting_for, "waiting_since": since}
            connection.execute(sa.update(BATCHES).where(*_mine(held), states).values(values))

    def describe(self, held: Held, total: int, model: str | None) -> None:
        """What validation has found of a batch that goes on, or is being cancelled."""
        with self._records.writing() as connection:
            connection.execute(sa.update(BATCHES).where(*_mine(held)).values(total=total, model=model))

    def move(
        self,
        held: Held,
        transition: Transition,
        now: int,
        files: Sequence[FileRecord] = (),
        *,
        also: Callable[[sa.Connection], None] | None = None,
        **values: Any,
    ) -> bool:
        """Carry a transition out, with the files that come with it, and what is to be written in the same transaction.

        False: the batch is another's, or elsewhere.
        """
        with self._records.writing() as connection:
            states = BATCHES.c.status.in_([state.value for state in transition.sources])
            moved = connection.execute(
                sa.update(BATCHES)
                .where(*_mine(held), states)
                .values(**{"status": transition.target.value, transition.time: now, **values})
            )
            if moved.rowcount != 1:
                return False
            for file in files:
                add_file(connection, file)
            if also is not None:
                also(connection)
        return True

    def unreported(self, most: int = 20) -> list[BatchRecord]:
        """Ended batches of which the catalog may not have all partitions."""
        with self._records.reading() as connection:
            ended = BATCHES.c.status.not_in([state.value for state in OPEN])
            query = sa.select(*_COLUMNS).where(ended, BATCHES.c.reported.is_(False), BATCHES.c.total > 0)
            return [_record(row) for row in connection.execute(query.limit(most))]

    def set_reported(self, batch_id: str) -> None:
        """The catalog has all partitions of this batch."""
        with self._records.writing() as connection:
            connection.execute(sa.update(BATCHES).where(BATCHES.c.id == batch_id).values(reported=True))

    def without_files(self, now: float, most: int = 100) -> list[BatchRecord]:
        """Ended batches that have no file any more, of whose contents the store may have something. Those whose input
        was refused need none.
        """
        ours = [BATCHES.c.input_file_id, BATCHES.c.output_file_id, BATCHES.c.error_file_id]
        lives = sa.or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > now)
        has_file = sa.exists().where(sa.or_(*(FILES.c.id == name for name in ours)), lives)
        refused = BATCHES.c.status == BatchStatus.FAILED.value
        over = BATCHES.c.status.in_([state.value for state in TERMINAL])
        query = sa.select(*_COLUMNS).where(over, BATCHES.c.contents_deleted_at.is_(None), sa.or_(refused, ~has_file))
        with self._records.reading() as connection:
            return [_record(row) for row in connection.execute(query.limit(most))]

    def set_contents_deleted(self, batch_id: str, now: int) -> None:
        """The store has nothing of this batch any more. What of its usage was in the ledger is not asked for again."""
        with self._records.writing() as connection:
            connection.execute(sa.delete(USAGE_PARTS).where(USAGE_PARTS.c.batch_id == batch_id))
            connection.execute(sa.update(BATCHES).where(BATCHES.c.id == batch_id).values(contents_deleted_at=now))


def _free(now: float, gone: Sequence[str]) -> sa.ColumnElement[bool]:
    return sa.or_(BATCHES.c.holder.is_(None), BATCHES.c.held_until < now, BATCHES.c.holder.in_([*gone]))


def lock_open(connection: sa.Connection, held: Held) -> bool:
    """Whether the batch is still held so, and has not ended; it stays so until the end of the transaction."""
    states = BATCHES.c.status.in_([state.value for state in OPEN])
    return connection.scalar(sa.select(BATCHES.c.id).where(*_mine(held), states).with_for_update()) is not None


def _mine(held: Held) -> tuple[sa.ColumnElement[bool], ...]:
    return (BATCHES.c.id == held.batch_id, BATCHES.c.epoch == held.epoch)
