"""Amounts of money in the tables of usage, as SQL: picodollars, whole numbers of any size, in two columns.

A column holds 2^63 picodollars, which is 9.2 million dollars. So `amount_millions` has whole millions of dollars, and
`amount` picodollars beyond them, or all of them where an earlier version has written. What they say together counts;
each addition carries over what `amount` has too much.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

MILLION_DOLLARS = 10**18  # picodollars
_HALF = 10**9


def split_amount(picodollars: int) -> dict[str, int]:
    """The columns of an amount of any size and sign."""
    millions = abs(picodollars) // MILLION_DOLLARS * (1 if picodollars >= 0 else -1)
    return {"amount": picodollars - millions * MILLION_DOLLARS, "amount_millions": millions}


def added_amount(kept: sa.Table, more: sa.ColumnCollection[str, Any]) -> dict[str, sa.ColumnElement[int]]:
    """The columns of a kept amount and one more together. No step of it exceeds a column, whatever stands in both:
    division and remainder of databases have the sign of the amount.
    """
    before, after, million = kept.c.amount, more.amount, sa.literal(MILLION_DOLLARS, sa.BigInteger)
    millions = kept.c.amount_millions + more.amount_millions
    return {
        "amount": before % million + after % million,
        "amount_millions": millions + before // million + after // million,
    }


def amount_sums(table: sa.Table) -> tuple[sa.ColumnElement[int], ...]:
    """What `whole_amount` makes the sum of all amounts of: none of these sums exceeds a column."""
    parts = (table.c.amount_millions, table.c.amount // _HALF, table.c.amount % _HALF)
    return tuple(sa.func.coalesce(sa.func.sum(part), 0) for part in parts)


def whole_amount(millions: int, high: int, low: int) -> int:
    """Picodollars, from what `amount_sums` gave."""
    return int(millions) * MILLION_DOLLARS + int(high) * _HALF + int(low)
