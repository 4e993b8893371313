"""The end of a bill is the same for a row that was read and for the database that adds bills up."""

from __future__ import annotations

from itertools import product

import pytest
import sqlalchemy as sa

from gpu_runner.fleet_database.accounting.bill_end import bill_end, ended_at, existed
from gpu_runner.fleet_database.connection import INSTANCES

CREATED, ENDED, NOW = 100.0, 250.0, 400.0


def in_sql(row: dict[str, object], now: float | sa.ColumnElement[float]) -> float:
    """`bill_end` of a table with this one row."""
    columns = (sa.literal(value, INSTANCES.c[name].type).label(name) for name, value in row.items())
    there = sa.select(*columns).cte("instances")
    query = sa.select(bill_end(now)).select_from(INSTANCES)
    with sa.create_engine("sqlite://").connect() as connection:
        return float(connection.execute(query.add_cte(there), {"now": NOW}).scalar_one())


@pytest.mark.parametrize("now", [NOW, sa.bindparam("now", type_=sa.Float)], ids=["a number", "a parameter"])
def test_a_row_and_sql_say_the_same_of_every_state(now: float | sa.ColumnElement[float]) -> None:
    for machine_id, seen_at, end in product((None, "m-1"), (None, 110.0), (None, ENDED)):
        row = {"machine_id": machine_id, "seen_at": seen_at, "ended_at": end, "created_at": CREATED}
        by_row = ended_at(row)
        assert in_sql(row, now) == (NOW if by_row is None else by_row), row


def test_an_open_bill_has_no_end_and_one_of_an_instance_that_never_existed_ends_where_it_began() -> None:
    never = {"machine_id": None, "seen_at": None, "ended_at": ENDED, "created_at": CREATED}
    assert not existed(never) and ended_at(never) == CREATED
    assert ended_at({**never, "ended_at": None}) is None
    assert ended_at({**never, "machine_id": "m-1"}) == ended_at({**never, "seen_at": 110.0}) == ENDED
