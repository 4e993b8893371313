"""Arrow types of columns of a published table that no outcome has: the prompt, and what is made of the output."""

from __future__ import annotations

import pyarrow as pa

from gpu_runner.client.json_schemas.column_types import ColumnType, Kind
from gpu_runner.rows import Task

_PLAIN = {
    Kind.STRING: pa.string(),
    Kind.INTEGER: pa.int64(),
    Kind.NUMBER: pa.float64(),
    Kind.BOOLEAN: pa.bool_(),
    Kind.JSON: pa.string(),
}
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_CALL = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)])
_CONVERSATION = pa.list_(
    pa.struct(
        [
            *[(name, pa.string()) for name in ("role", "content", "name")],
            ("tool_calls", pa.list_(_CALL)),
            *[(name, pa.string()) for name in ("tool_call_id", "refusal", "reasoning", "reasoning_content")],
        ]
    )
)


def prompt_type(task: Task, *, conversations: bool = False) -> pa.DataType:
    """The type of the column `prompt`. `conversations`: messages may hold more than a role and a text."""
    if task != "chat":
        return pa.string()
    return _CONVERSATION if conversations else _MESSAGES


def arrow_type(kind: ColumnType) -> pa.DataType:
    """The type of a column that is made of the output."""
    if kind.kind is Kind.LIST and kind.item is not None:
        return pa.list_(arrow_type(kind.item))
    if kind.kind is Kind.STRUCT:
        return pa.struct([pa.field(name, arrow_type(one)) for name, one in kind.fields])
    return _PLAIN[kind.kind]
