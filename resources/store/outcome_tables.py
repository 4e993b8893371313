"""Outcomes as Arrow tables: the columns of a batch object, a journal segment and the published table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from gpu_runner.rows import Origin, Outcome, Task
from resources.store.outcome_columns import OPTIONAL_COLUMNS, OUTCOME_COLUMNS, PART_COLUMNS, PROVENANCE, REUSED_FROM
from resources.store.part_columns import PART_FIELDS, part_arrays, parts_of


def outcome_schema(task: Task) -> pa.Schema:
    """Schema of a batch object. `output` is text (or JSON text), and a list of float32 for embeddings.

    An embedding is all there is of its answer: its table has no columns of parts.
    """
    return pa.schema(
        [
            pa.field("row_id", pa.string(), nullable=False),
            pa.field("row_key", pa.string(), nullable=False),
            pa.field("output", pa.list_(pa.float32()) if task == "embedding" else pa.string()),
            pa.field("finish_reason", pa.string()),
            *(() if task == "embedding" else PART_FIELDS),
            pa.field("prompt_tokens", pa.int64(), nullable=False),
            pa.field("completion_tokens", pa.int64(), nullable=False),
            pa.field("tries", pa.int32(), nullable=False),
            pa.field("error", pa.string()),
            pa.field("error_message", pa.string()),
            pa.field("model", pa.string()),
            pa.field("engine", pa.string()),
            pa.field("provider", pa.string()),
            pa.field("instance_type", pa.string()),
            pa.field("spot", pa.bool_()),
            pa.field("run_id", pa.string()),
            pa.field("started_at", pa.timestamp("us", tz="UTC")),
            pa.field("seconds", pa.float64()),
            pa.field("usd", pa.float64()),
            pa.field(REUSED_FROM, pa.string()),
        ]
    )


def is_outcomes_table(table: pa.Table) -> bool:
    """True when a table has exactly the columns and types that `outcomes_table` writes, for either kind of output.

    Optional columns may be missing: see `without_empty_columns`.
    """
    there = set(table.schema.names)
    for task in ("chat", "embedding"):
        kind = [item for item in outcome_schema(task) if item.name in there or item.name not in OPTIONAL_COLUMNS]
        if [(item.name, item.type) for item in table.schema] == [(item.name, item.type) for item in kind]:
            return True
    return False


def without_empty_columns(table: pa.Table) -> pa.Table:
    """The same outcomes without the optional columns in which all is null: each would cost a kilobyte per object.

    What is left is, of plain texts that were asked for, what versions wrote that knew no such columns.
    """
    empty = [name for name in OPTIONAL_COLUMNS if name in table.schema.names and table[name].null_count == len(table)]
    return table.drop_columns(empty)


def with_all_columns(table: pa.Table) -> pa.Table:
    """The same outcomes with every optional column, null where it was not written. Embeddings have no parts."""
    if REUSED_FROM not in table.schema.names:
        at = table.schema.get_field_index("usd") + 1
        table = table.add_column(at, pa.field(REUSED_FROM, pa.string()), pa.nulls(table.num_rows, pa.string()))
    if pa.types.is_list(table.schema.field("output").type):
        return table
    at = table.schema.get_field_index("finish_reason") + 1
    for number, item in enumerate(PART_FIELDS):
        if item.name not in table.schema.names:
            table = table.add_column(at + number, item, pa.nulls(table.num_rows, item.type))
    return table


def outcomes_table(outcomes: Sequence[Outcome], task: Task) -> pa.Table:
    """One line per outcome, in the order given."""
    columns: dict[str, Any] = {
        name: [getattr(outcome, name) for outcome in outcomes]
        for name in OUTCOME_COLUMNS
        if name not in (*PROVENANCE, *PART_COLUMNS, "started_at")
    }
    for name in PROVENANCE:
        columns[name] = [getattr(outcome.origin, name) for outcome in outcomes]
    if task != "embedding":
        columns |= part_arrays([outcome.parts for outcome in outcomes])
    columns["started_at"] = [datetime.fromtimestamp(outcome.started_at, UTC) for outcome in outcomes]
    return pa.Table.from_pydict(columns, schema=outcome_schema(task))


def outcomes_from(table: pa.Table) -> Iterable[Outcome]:
    """The outcomes of a table made by `outcomes_table`; extra columns are ignored."""
    origins: dict[tuple[Any, ...], Origin] = {}
    there = set(table.schema.names)
    plain = [
        name for name in OUTCOME_COLUMNS if name not in OPTIONAL_COLUMNS or (name == REUSED_FROM and name in there)
    ]
    for line, parts in zip(table.select(plain).to_pylist(), parts_of(table), strict=True):
        source = tuple(line[name] for name in PROVENANCE)
        origin = origins.setdefault(source, Origin(*source))
        output = line["output"]
        yield Outcome(
            row_id=line["row_id"],
            row_key=line["row_key"],
            output=tuple(output) if isinstance(output, list) else output,
            finish_reason=line["finish_reason"],
            prompt_tokens=line["prompt_tokens"],
            completion_tokens=line["completion_tokens"],
            tries=line["tries"],
            error=line["error"],
            error_message=line["error_message"],
            origin=origin,
            started_at=line["started_at"].timestamp(),
            seconds=line["seconds"],
            usd=line["usd"],
            parts=parts,
            reused_from=line.get(REUSED_FROM),
        )
