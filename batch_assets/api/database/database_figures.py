"""What Prometheus is told of the records: batches by state and age, lines that wait, what the catalog lacks."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from batch_assets.api.database.service_database import Records
from batch_assets.api.database.states import OPEN, BatchStatus
from batch_assets.api.database.tables import BATCHES, FILES
from batch_assets.api.database.usage_tables import USAGE

UNKNOWN_MODEL = ""  # of a batch that is not validated yet


@dataclass(frozen=True, slots=True)
class RecordFigures:
    """`batches`: by state, all of them. `oldest`: seconds since the creation of the oldest open batch of a state.

    `queued_lines`: lines without an outcome in open batches, by model. `windows`: seconds until the earliest window of
    these ends, 0 where it is over. `overdue_seconds`: how long the window of an
    open batch has been over, of the one that waits longest. `unreported`, `unreported_seconds`: ended batches that the
    catalog may not have whole, and how long the oldest of them has ended. `stored_bytes`: of all files. `day_tokens`,
    `day_unpriced_tokens`: in the usage ledger since midnight (UTC), and those among them that have no price.
    """

    batches: Mapping[BatchStatus, int]
    oldest: Mapping[BatchStatus, float]
    queued_lines: Mapping[str, int]
    windows: Mapping[str, float]
    overdue_seconds: float
    unreported: int
    unreported_seconds: float
    stored_bytes: int
    day_tokens: int
    day_unpriced_tokens: int


def record_figures(records: Records, now: float) -> RecordFigures:
    """The figures at `now`, in Unix seconds; four queries."""
    c = BATCHES.c
    open_states = c.status.in_([state.value for state in OPEN])
    ended_at = sa.func.coalesce(c.completed_at, c.failed_at, c.expired_at, c.cancelled_at)
    states = sa.select(c.status, sa.func.count(), sa.func.min(c.created_at)).group_by(c.status)
    left = sa.func.sum(c.total - c.completed - c.failed)
    ends = sa.func.min(c.expires_at)
    lines = sa.select(sa.func.coalesce(c.model, UNKNOWN_MODEL), left, ends).where(open_states).group_by(c.model)
    unreported = ~open_states & c.reported.is_(False) & (c.total > 0)
    today = datetime.datetime.fromtimestamp(now, datetime.UTC).date()
    sums = (sa.func.sum(USAGE.c.input_tokens + USAGE.c.output_tokens), sa.func.sum(USAGE.c.unpriced_tokens))
    used = sa.select(*sums).where(USAGE.c.day == today)
    lag = sa.select(sa.func.count(), sa.func.min(ended_at)).where(unreported)
    with records.reading() as connection:
        found = {BatchStatus(status): (count, since) for status, count, since in connection.execute(states)}
        queued = {model: (int(count), end) for model, count, end in connection.execute(lines)}
        waiting, since_end = connection.execute(lag).one()
        stored = connection.scalar(sa.select(sa.func.coalesce(sa.func.sum(FILES.c.bytes), 0)))
        tokens, unpriced = connection.execute(used).one()
    return RecordFigures(
        batches={state: found.get(state, (0, 0))[0] for state in BatchStatus},
        oldest={state: max(0.0, now - found[state][1]) if state in found else 0.0 for state in sorted(OPEN)},
        queued_lines={model: count for model, (count, _) in queued.items()},
        windows={model: max(0.0, end - now) for model, (_, end) in queued.items()},
        overdue_seconds=max((max(0.0, now - end) for _, end in queued.values()), default=0.0),
        unreported=waiting,
        unreported_seconds=0.0 if since_end is None else max(0.0, now - since_end),
        stored_bytes=int(stored or 0),
        day_tokens=int(tokens or 0),
        day_unpriced_tokens=int(unpriced or 0),
    )
