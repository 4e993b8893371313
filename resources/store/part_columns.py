"""The parts of an answer as Arrow columns: tool calls, reasoning, a refusal, log-probabilities.

Published tables of chat and text outcomes have all of them, null where an answer has no such part. Batch objects and
journal segments have those that some answer of theirs has, and are read as if they had all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

from gpu_runner.answers import NO_PARTS, Alternative, AnswerParts, EntryColumns, Logprobs, TokenLogprob, ToolCall
from resources.store.outcome_columns import PART_COLUMNS

_CALL = pa.struct([(name, pa.string()) for name in ("id", "type", "name", "arguments")])
_ALTERNATIVE = pa.struct([("token", pa.string()), ("logprob", pa.float32()), ("bytes", pa.binary())])
_TOKEN = pa.struct([*_ALTERNATIVE, ("text_offset", pa.int32()), ("top_logprobs", pa.list_(_ALTERNATIVE))])

PART_FIELDS: tuple[pa.Field, ...] = (
    pa.field("tool_calls", pa.list_(_CALL)),
    pa.field("reasoning", pa.string()),
    pa.field("refusal", pa.string()),
    pa.field("logprobs", pa.list_(_TOKEN)),
)


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
