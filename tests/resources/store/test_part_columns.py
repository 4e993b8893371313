from __future__ import annotations

from resources.store.outcome_columns import OUTCOME_COLUMNS, PART_COLUMNS, TURNS, WRITTEN_TURNS
from resources.store.outcome_tables import PART_FIELDS, outcome_schema


def test_the_names_of_columns_are_those_of_the_tables():
    assert tuple(item.name for item in PART_FIELDS) == PART_COLUMNS
    assert tuple(outcome_schema("chat").names) == (*OUTCOME_COLUMNS, TURNS, WRITTEN_TURNS)
