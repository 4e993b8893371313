"""When an instance's bill ends: now while it is open, and where it began for an instance that never existed.

Said twice, for a row that was read and for sums that the database adds up; both must say the same.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from gpu_runner.fleet_database.connection import INSTANCES


def existed(row: Any) -> bool:
    """There was a machine: the provider said so, in an answer or in its list."""
    return row["machine_id"] is not None or row["seen_at"] is not None


def ended_at(row: Any) -> float | None:
    """When the bill ended; None while it is open."""
    end: float | None = row["ended_at"]
    return row["created_at"] if end is not None and not existed(row) else end


def bill_end(now: float | sa.ColumnElement[float]) -> sa.ColumnElement[float]:
    """The end of a bill in SQL, over the table of instances; `now` for one that is open."""
    c = INSTANCES.c
    there = c.machine_id.is_not(None) | c.seen_at.is_not(None)
    return sa.case((c.ended_at.is_(None), now), (there, c.ended_at), else_=c.created_at)
