"""The usage ledger: who used how many tokens of which model and class on which day, and what that costs.

Each addition has a name of its own (a place in a journal, a part of a batch), which is written in the same transaction:
what is added a second time, after a kill, changes nothing. An online request that is answered twice is charged once:
its id is kept for TASK_SECONDS.
"""

from __future__ import annotations

import datetime
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from batch_assets.api.billing.usage import Kind, TaskUsage, UsageKey, Used
from batch_assets.api.database.amounts import (
    MILLION_DOLLARS,
    added_amount,
    amount_sums,
    split_amount,
    whole_amount,
)
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.states import OPEN
from batch_assets.api.database.tables import BATCHES
from batch_assets.api.database.usage_tables import COUNTS as TOKENS_AND_REQUESTS
from batch_assets.api.database.usage_tables import USAGE, USAGE_JOURNALS, USAGE_PARTS, USAGE_TASKS

TASK_SECONDS = 2 * 86_400  # a request lives for an hour at the most; the rest is for journals that are read late
REST = "rest"  # of a batch: what its parts did not say
TOGETHER = 500  # ids in one query
COUNTS = tuple(Used.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Settlement:
    """`rest`: what the whole batch has beyond its parts. `lines`: the same by heading, as it is to be added."""

    rest: Used
    lines: dict[UsageKey, Used]


def settlement(whole: Used, parts: Sequence[tuple[UsageKey, Used]], today: UsageKey) -> Settlement:
    """What brings the lines of a batch to `whole` at its end: what its parts did not say is added, what they said too
    much is taken back. `parts`: what it has added so far, the oldest first.

    More is of today. Less is taken from where it was added, from the newest part on: a heading loses no more of
    anything than the batch gave it, so none falls below 0.
    """
    said = Used()
    for _, used in parts:
        said = said.plus(used)
    rest = whole.plus(said, -1)
    lines: defaultdict[UsageKey, dict[str, int]] = defaultdict(dict)
    for name in Used.__dataclass_fields__:
        left = getattr(rest, name)
        for key, used in reversed(parts):
            back = max(0, min(-left, getattr(used, name)))
            if back:
                lines[key][name] = lines[key].get(name, 0) - back
                left += back
        if left:
            lines[today][name] = lines[today].get(name, 0) + left
    return Settlement(rest, {key: Used(**changes) for key, changes in lines.items()})


@dataclass(frozen=True, slots=True)
class UsageLine:
    """One line of the ledger."""

    key: UsageKey
    used: Used


@dataclass(frozen=True, slots=True)
class LedgerTotals:
    """The whole ledger, added up, and its last day; None: it is empty."""

    used: Used = field(default_factory=Used)
    last_day: datetime.date | None = None


class UsageLedger:
    """Reads and writes the ledger. Calls block for a short transaction; safe from several threads and processes."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def close(self) -> None:
        """Close all connections."""
        self._records.close()

    # interactive requests, from a journal

    def applied(self, journal: str) -> int:
        """Bytes of this journal that are in the ledger."""
        with self._records.reading() as connection:
            return _applied(connection, journal)

    def apply(
        self, journal: str, begin: int, end: int, found: Mapping[UsageKey, Used], tasks: Sequence[TaskUsage] = ()
    ) -> bool:
        """Add what bytes `begin` to `end` of a journal say. False: these are not the next ones; nothing is added.

        `tasks`: online requests, of which those that were charged before are left out.
        """
        with self._records.writing() as connection:
            if begin == 0:
                insert = upsert(connection, USAGE_JOURNALS).values(journal=journal, applied=0)
                connection.execute(insert.on_conflict_do_nothing())
            place = (USAGE_JOURNALS.c.journal == journal) & (USAGE_JOURNALS.c.applied == begin)
            if connection.execute(sa.update(USAGE_JOURNALS).where(place).values(applied=end)).rowcount != 1:
                return False
            whole = dict(found)
            for task in _new_tasks(connection, tasks):
                whole[task.key] = whole.get(task.key, Used()).plus(task.used)
            _add(connection, whole.items())
        return True

    def forget(self, journal: str) -> None:
        """A journal that is in the ledger as a whole was deleted."""
        with self._records.writing() as connection:
            connection.execute(sa.delete(USAGE_JOURNALS).where(USAGE_JOURNALS.c.journal == journal))

    # batches

    def add_part(self, batch_id: str, part: str, key: UsageKey, used: Used) -> bool:
        """Add a part of a batch that is under way. False: it is there already, or its batch has ended."""
        with self._records.writing() as connection:
            locked = sa.select(BATCHES.c.status).where(BATCHES.c.id == batch_id).with_for_update()
            if connection.scalar(locked) not in [state.value for state in OPEN]:
                return False
            if not _note_part(connection, batch_id, part, key, used):
                return False
            _add(connection, [(key, used)])
        return True

    @staticmethod
    def settle(connection: sa.Connection, batch_id: str, key: UsageKey, used: Used) -> None:
        """All that a batch used, in the transaction that ends it: what its parts do not say yet is added under `key`,
        what they say too much is taken back where they said it. A second call changes nothing.
        """
        found = settlement(used, _parts(connection, batch_id, key), key)
        if _note_part(connection, batch_id, REST, key, found.rest):
            _add(connection, found.lines.items())

    def batch_usage(self, batch_id: str) -> Used:
        """What is in the ledger of one batch, until its contents are deleted."""
        sums = sa.select(*_sums(USAGE_PARTS)).where(USAGE_PARTS.c.batch_id == batch_id)
        with self._records.reading() as connection:
            return _used(connection.execute(sums).one())

    def usage_of_batches(self, batch_ids: Sequence[str]) -> dict[str, Used]:
        """What is in the ledger of each of these batches that it has something of."""
        found = {}
        query = sa.select(USAGE_PARTS.c.batch_id, *_sums(USAGE_PARTS)).group_by(USAGE_PARTS.c.batch_id)
        with self._records.reading() as connection:
            for start in range(0, len(batch_ids), TOGETHER):
                some = batch_ids[start : start + TOGETHER]
                for batch_id, *row in connection.execute(query.where(USAGE_PARTS.c.batch_id.in_(some))):
                    found[str(batch_id)] = _used(row)
        return found

    # reading

    def lines(
        self, tenant: str | None = None, since: datetime.date | None = None, until: datetime.date | None = None
    ) -> list[UsageLine]:
        """Lines of a tenant (None: of all), of the days `since` ≤ day < `until`, in the order of the key."""
        return read_lines(self._records, tenant, since, until)

    def totals(self) -> LedgerTotals:
        """All lines together, added up by the database."""
        with self._records.reading() as connection:
            *sums, last = connection.execute(sa.select(*_sums(USAGE), sa.func.max(USAGE.c.day))).one()
        return LedgerTotals(_used(sums), last)


def texts_fit(key: UsageKey) -> bool:
    """Whether the ledger can hold this key. Databases refuse longer texts and NUL in them, and the whole transaction
    with them.
    """
    texts = {column.name: column.type for column in USAGE.primary_key.columns}
    for name, kind in texts.items():
        if isinstance(kind, sa.String) and (len(text := getattr(key, name)) > (kind.length or 0) or "\0" in text):
            return False
    return True


def counts_fit(counts: Sequence[object]) -> bool:
    """Whether the ledger can hold these counts of one answer, in the order of COUNTS: whole numbers of 63 bits."""
    return all(type(count) is int and 0 <= count < 1 << 63 for count in counts)


def used_of(counts: Iterable[int]) -> Used:
    """What was used, from its counts in the order of COUNTS. Raises ValueError for more or fewer."""
    return Used(**dict(zip(COUNTS, counts, strict=True)))


def read_lines(
    records: Records,
    tenant: str | None = None,
    since: datetime.date | None = None,
    until: datetime.date | None = None,
) -> list[UsageLine]:
    """As `UsageLedger.lines`."""
    query = sa.select(USAGE).order_by(*USAGE.primary_key.columns)
    if tenant is not None:
        query = query.where(USAGE.c.tenant == tenant)
    if since is not None:
        query = query.where(USAGE.c.day >= since)
    if until is not None:
        query = query.where(USAGE.c.day < until)
    with records.reading() as connection:
        return [_line(row) for row in connection.execute(query).mappings()]


def _line(row: sa.RowMapping) -> UsageLine:
    key = UsageKey(row["day"], row["tenant"], row["service_class"], row["model"], Kind(row["kind"]))
    amount = row["amount_millions"] * MILLION_DOLLARS + row["amount"]
    return UsageLine(key, Used(**{name: row[name] for name in TOKENS_AND_REQUESTS}, amount=amount))


def _sums(table: sa.Table) -> list[sa.ColumnElement[int]]:
    counts = [sa.func.coalesce(sa.func.sum(table.c[name]), 0) for name in TOKENS_AND_REQUESTS]
    return [*counts, *amount_sums(table)]


def _used(row: Sequence[Any]) -> Used:
    """The usage in a row that `_sums` asks for."""
    counts = dict(zip(TOKENS_AND_REQUESTS, (int(value) for value in row[:-3]), strict=True))
    return Used(**counts, amount=whole_amount(*row[-3:]))


def _applied(connection: sa.Connection, journal: str) -> int:
    found = sa.select(USAGE_JOURNALS.c.applied).where(USAGE_JOURNALS.c.journal == journal)
    return int(connection.scalar(found) or 0)


def _new_tasks(connection: sa.Connection, tasks: Sequence[TaskUsage]) -> list[TaskUsage]:
    """Those that were not charged before; from now on they were."""
    if not tasks:
        return []
    first = {task.task_id: task for task in reversed(tasks)}
    rows = [{"task_id": task_id, "at": int(first[task_id].at)} for task_id in sorted(first)]  # one order, as in _add
    insert = upsert(connection, USAGE_TASKS).on_conflict_do_nothing().returning(USAGE_TASKS.c.task_id)
    new = connection.execute(insert, rows).scalars().all()
    newest = int(max(task.at for task in tasks))
    connection.execute(sa.delete(USAGE_TASKS).where(USAGE_TASKS.c.at < newest - TASK_SECONDS))
    return [first[task_id] for task_id in new]


def _parts(connection: sa.Connection, batch_id: str, today: UsageKey) -> list[tuple[UsageKey, Used]]:
    """What a batch has added, by heading, the oldest day first. Of what an earlier version added nobody knows the
    day: that is today, which may fall below 0 by it; sums over all days are exact."""
    place = (USAGE_PARTS.c.day, USAGE_PARTS.c.service_class)
    query = sa.select(*place, *_sums(USAGE_PARTS)).where(USAGE_PARTS.c.batch_id == batch_id).group_by(*place)
    found = []
    for day, service_class, *sums in connection.execute(query):
        key = today if day is None else replace(today, day=day, service_class=service_class)
        found.append((key, _used(sums)))
    return sorted(found, key=lambda one: _order(one[0]))


def _note_part(connection: sa.Connection, batch_id: str, part: str, key: UsageKey, used: Used) -> bool:
    """False: it was noted before."""
    place = {"day": key.day, "service_class": key.service_class}
    row = {"batch_id": batch_id, "part": part, **place, **_values(used)}
    added = connection.execute(upsert(connection, USAGE_PARTS).values(row).on_conflict_do_nothing())
    return bool(added.rowcount == 1)


def _add(connection: sa.Connection, found: Iterable[tuple[UsageKey, Used]]) -> None:
    """Add to the lines of the ledger, in one order in all processes: they cannot wait for each other in a circle."""
    adding = _adding(connection.dialect.name)
    for key, used in sorted(found, key=lambda one: _order(one[0])):
        connection.execute(adding, {**_key_values(key), **_values(used)})


@functools.cache
def _adding(dialect: str) -> Any:
    """The statement that adds to one line. Made once: making it takes longer than the database needs to execute it."""
    insert = _insert(dialect, USAGE)
    sums = {name: USAGE.c[name] + insert.excluded[name] for name in TOKENS_AND_REQUESTS}
    sums |= added_amount(USAGE, insert.excluded)
    return insert.on_conflict_do_update(index_elements=list(USAGE.primary_key.columns), set_=sums)


def _order(key: UsageKey) -> tuple[datetime.date, str, str, str, str]:
    return key.day, key.tenant, key.service_class, key.model, key.kind.value


def _key_values(key: UsageKey) -> dict[str, Any]:
    return {
        "day": key.day,
        "tenant": key.tenant,
        "service_class": key.service_class,
        "model": key.model,
        "kind": key.kind.value,
    }


def _values(used: Used) -> dict[str, int]:
    return {**{name: getattr(used, name) for name in TOKENS_AND_REQUESTS}, **split_amount(used.amount)}


def upsert(connection: sa.Connection, table: sa.Table) -> Any:
    """An INSERT that knows ON CONFLICT, which SQLite and Postgres have in the same words."""
    return _insert(connection.dialect.name, table)


def _insert(dialect: str, table: sa.Table) -> Any:
    return (postgresql if dialect == "postgresql" else sqlite).insert(table)
