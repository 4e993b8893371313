"""Outcomes as Arrow tables: the columns of a batch object, a journal segment and the published table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import pyarrow as pa

from gpu_runner.answers import NO_PARTS, Alternative, AnswerParts, EntryColumns, Logprobs, TokenLogprob, ToolCall
from gpu_runner.rows import Origin, Outcome, Task, Turn, UserTurn
from resources.store.outcome_columns import (
    OPTIONAL_COLUMNS,
    OUTCOME_COLUMNS,
    PART_COLUMNS,
    PROVENANCE,
    REUSED_FROM,
    TURNS,
    WRITTEN_TURNS,
)

# The parts of an answer as Arrow columns: tool calls, reasoning, a refusal, log-probabilities.
#
# Published tables of chat and text outcomes have all of them, null where an answer has no such part. Batch objects and
# journal segments have those that some answer of theirs has, and are read as if they had all.

_CALL = pa.struct([(name, pa.string()) for name in ("id", "type", "name", "arguments")])
_ALTERNATIVE = pa.struct([("token", pa.string()), ("logprob", pa.float32()), ("bytes", pa.binary())])
_TOKEN = pa.struct([*_ALTERNATIVE, ("text_offset", pa.int32()), ("top_logprobs", pa.list_(_ALTERNATIVE))])

PART_FIELDS: tuple[pa.Field, ...] = (
    pa.field("tool_calls", pa.list_(_CALL)),
    pa.field("reasoning", pa.string()),
    pa.field("refusal", pa.string()),
    pa.field("logprobs", pa.list_(_TOKEN)),
)

_SPENT: tuple[tuple[str, pa.DataType], ...] = (
    *[(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens")],
    ("tries", pa.int32()),
    *[(name, pa.float64()) for name in ("seconds", "usd")],
)
_TURN = pa.struct([*[(name, pa.string()) for name in ("user", "output", "finish_reason", "reasoning")], *_SPENT])
TURNS_FIELD = pa.field(TURNS, pa.list_(_TURN))
# What the model took that wrote the user's words: of each turn from the second one on.
_WRITTEN = pa.struct([("model", pa.string()), ("finish_reason", pa.string()), *_SPENT])
WRITTEN_FIELD = pa.field(WRITTEN_TURNS, pa.list_(_WRITTEN))


def part_arrays(parts: Sequence[AnswerParts]) -> dict[str, pa.ChunkedArray]:
    """One array per column, one value per answer."""
    columns: dict[str, pa.ChunkedArray] = {}
    for item in PART_FIELDS:
        values = [getattr(part, item.name) for part in parts]
        if not any(value is not None for value in values):
            columns[item.name] = pa.chunked_array([pa.nulls(len(values), item.type)])
        elif item.name == "logprobs":
            # Answer by answer: the tokens of all would be gigabytes as Python objects.
            columns[item.name] = pa.chunked_array([pa.concat_arrays([_token_array(value) for value in values])])
        elif item.name == "tool_calls":
            columns[item.name] = pa.chunked_array([pa.array([_call_lines(value) for value in values], item.type)])
        else:
            columns[item.name] = pa.chunked_array([pa.array(values, item.type)])
    return columns


def parts_of(table: pa.Table) -> list[AnswerParts]:
    """The parts of every line; none for a table without these columns."""
    there = [name for name in PART_COLUMNS if name in table.column_names and table[name].null_count < len(table)]
    if not there:
        return [NO_PARTS] * len(table)
    columns = {name: table.column(name) for name in there}
    return [_parts({name: column[number].as_py() for name, column in columns.items()}) for number in range(len(table))]


def _parts(line: Mapping[str, Any]) -> AnswerParts:
    if not any(value is not None for value in line.values()):
        return NO_PARTS
    calls, tokens = line.get("tool_calls"), line.get("logprobs")
    return AnswerParts(
        None if calls is None else tuple([ToolCall(**call) for call in calls]),
        line.get("reasoning"),
        line.get("refusal"),
        None if tokens is None else Logprobs.of([_token(token) for token in tokens]),
    )


def _token(line: Mapping[str, Any]) -> TokenLogprob:
    top = tuple([Alternative(**other) for other in line["top_logprobs"]])
    return TokenLogprob(line["token"], line["logprob"], line["bytes"], line["text_offset"], top)


def _call_lines(calls: Sequence[ToolCall] | None) -> list[dict[str, Any]] | None:
    if calls is None:
        return None
    return [{"id": c.id, "type": c.type, "name": c.name, "arguments": c.arguments} for c in calls]


def _token_array(tokens: Logprobs | None) -> pa.ListArray:
    """The column's value for one answer. Column by column: as mappings, a thousand tokens take half a second."""
    if tokens is None:
        return pa.nulls(1, pa.list_(_TOKEN))
    found = tokens.columns()
    starts = pa.array([0, *accumulate(found.alternatives)], pa.int32())
    top = pa.ListArray.from_arrays(starts, pa.StructArray.from_arrays(_entries(found.top), fields=list(_ALTERNATIVE)))
    arrays = [*_entries(found), pa.array(found.text_offset, pa.int32()), top.cast(pa.list_(_ALTERNATIVE))]
    lines = pa.StructArray.from_arrays(arrays, fields=list(_TOKEN))
    return pa.ListArray.from_arrays(pa.array([0, len(lines)], pa.int32()), lines).cast(pa.list_(_TOKEN))


def _entries(found: EntryColumns) -> list[pa.Array]:
    return [
        pa.array(found.token, pa.string()),
        pa.array(found.logprob, pa.float32()),
        pa.array(found.bytes, pa.binary()),
    ]


def outcome_schema(task: Task) -> pa.Schema:
    """Schema of a batch object. `output` is text (or JSON text), and a list of float32 for embeddings.

    An embedding is all there is of its answer: its table has no columns of parts, nor of turns.
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
            *(() if task == "embedding" else (TURNS_FIELD, WRITTEN_FIELD)),
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
    for item in (TURNS_FIELD, WRITTEN_FIELD):
        if item.name not in table.schema.names:
            table = table.append_column(item, pa.nulls(table.num_rows, item.type))
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
        columns[TURNS] = [[_turn_line(turn) for turn in outcome.turns] or None for outcome in outcomes]
        columns[WRITTEN_TURNS] = [_written_lines(outcome.turns) or None for outcome in outcomes]
    columns["started_at"] = [datetime.fromtimestamp(outcome.started_at, UTC) for outcome in outcomes]
    return pa.Table.from_pydict(columns, schema=outcome_schema(task))


def _turn_line(turn: Turn) -> dict[str, Any]:
    return {item.name: getattr(turn, item.name) for item in _TURN}


def _written_lines(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    return [asdict(turn.user_model) for turn in turns if turn.user_model is not None]


def _turns(line: Mapping[str, Any]) -> tuple[Turn, ...]:
    turns = [Turn(**turn) for turn in line.get(TURNS) or ()]
    for at, written in enumerate(line.get(WRITTEN_TURNS) or (), 1):
        turns[at] = replace(turns[at], user_model=UserTurn(**written))
    return tuple(turns)


def outcomes_from(table: pa.Table) -> Iterable[Outcome]:
    """The outcomes of a table made by `outcomes_table`; extra columns are ignored."""
    origins: dict[tuple[Any, ...], Origin] = {}
    there = set(table.schema.names)
    plain = [
        name
        for name in (*OUTCOME_COLUMNS, TURNS, WRITTEN_TURNS)
        if name not in OPTIONAL_COLUMNS or (name in (REUSED_FROM, TURNS, WRITTEN_TURNS) and name in there)
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
            turns=_turns(line),
        )
