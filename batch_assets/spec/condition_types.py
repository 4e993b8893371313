"""Types of the columns that conditions look at, before there are rows: of a published table, of judged rows, of gates.

The types of kept columns are those of the source: they are known once it is read, and left out before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from batch_assets.spec.errors import Unusable, show
from batch_assets.spec.judge import (
    JUDGED_ID,
    JUDGED_PROMPT,
    JUDGED_TEXT,
    PAIRWISE_FIGURES,
    POINTWISE_FIGURES,
    SCORE,
    JudgeSpec,
)
from gpu_runner.client.answers.pooled_outputs import SCHEMAS
from gpu_runner.client.json_schemas.column_types import column_types
from gpu_runner.client.json_schemas.schema_limits import SchemaProblem
from gpu_runner.rows import Task
from resources.store.row_condition import TypeMisfit, check_types
from resources.store.snapshot_manifest import SAMPLE_INDEX

if TYPE_CHECKING:
    import pyarrow as pa

Types = Mapping[str, "pa.DataType"]
NO_TYPES: Types = MappingProxyType({})
_WHOLE = ("votes", "lost", "pairs", "wins", "losses", "ties")


def table_types(
    task: Task,
    *,
    conversations: bool,
    json_schema: Mapping[str, Any] | None,
    kept: Types,
    there: Collection[str],
) -> dict[str, pa.DataType]:
    """Of the columns of a published table that are `there`. `json_schema`: whose properties are columns; None: none
    are."""
    import pyarrow as pa

    from resources.store.outcome_tables import outcome_schema
    from resources.store.table_types import prompt_type

    found: dict[str, pa.DataType] = {one.name: one.type for one in outcome_schema(task)}
    found |= {"prompt": prompt_type(task, conversations=conversations), SAMPLE_INDEX: pa.int32()}
    found |= {"batch": pa.string(), "duplicate_of": pa.string()}
    found |= schema_types(SCHEMAS.get(task, json_schema))
    return {name: kind for name, kind in (found | dict(kept)).items() if name in there}


def schema_types(json_schema: Mapping[str, Any] | None) -> dict[str, pa.DataType]:
    """Of the columns that the properties of a JSON schema become."""
    from resources.store.table_types import arrow_type

    try:
        found = column_types(json_schema) if json_schema is not None else {}
    except SchemaProblem:
        return {}
    return {name: arrow_type(kind) for name, kind in found.items()}


def judged_types(judge: JudgeSpec, votes: Types, kept: Types) -> dict[str, pa.DataType]:
    """Of the columns of the judged rows. `votes`: those of the table of the votes."""
    import pyarrow as pa

    of_rows = {JUDGED_ID: "row_id", JUDGED_TEXT: "output", JUDGED_PROMPT: "prompt"}
    found = {name: kind for name, kind in votes.items() if name in judge.columns and name not in of_rows.values()}
    figures = (SCORE, *judge.scores, *(PAIRWISE_FIGURES if judge.pairwise else POINTWISE_FIGURES))
    found |= {name: pa.int64() if name in _WHOLE else pa.float64() for name in figures}
    for name, kind in kept.items():
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        of_two = judge.pairwise and name not in judge.groups and is_list
        found[of_rows.get(name, name)] = kind.value_type if of_two else kind
    return found


def gate_types(task: Task, json_schema: Mapping[str, Any] | None) -> dict[str, pa.DataType]:
    """Of what rules of `gates` look at: of a row while it comes, and of the fields of its JSON."""
    from batch_assets.gates.quality_gates import RULE_COLUMNS
    from resources.store.outcome_tables import outcome_schema

    of_rows = {one.name: one.type for one in outcome_schema(task) if one.name in RULE_COLUMNS}
    found = schema_types(json_schema) | of_rows
    if task == "embedding":
        del found["output"]  # a vector is no text: it is null there
    return found


def check_texts(key: str, column: str, types: Types) -> None:
    """Raises Unusable where a column is none of texts: numbers and the like are read as text, and of messages their
    contents."""
    import pyarrow as pa

    kind = types.get(column)
    if kind is None or not pa.types.is_nested(kind):
        return
    inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    if inner is None or not pa.types.is_struct(inner) or inner.get_field_index("content") < 0:
        raise Unusable("a column of texts", f"{show(column)}, which has values of type {kind}"[:200], key=key)


def check_vectors(key: str, column: str, types: Types) -> None:
    """Raises Unusable where a column is none of lists of numbers."""
    import pyarrow as pa

    kind = types.get(column)
    if kind is None:
        return
    inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) else None
    numeric = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    if pa.types.is_large_list(kind) or (inner is not None and any(is_kind(inner) for is_kind in numeric)):
        return
    text = pa.types.is_string(kind)
    found = f"{show(column)}, which has {'texts' if text else f'values of type {kind}'}"[:200]
    hint = "For texts there is near_duplicates; vectors are the output of task embedding." if text else ""
    raise Unusable("a column of lists of numbers", found, hint, key=key)


def check_condition(key: str, where: str, types: Types, *, hint: str) -> None:
    """Raises Unusable where no row with these columns can be held against a condition. `hint`: what else there is to do
    where `output` is not what it is taken for."""
    try:
        check_types(where, types)
    except TypeMisfit as error:
        said = f"{error}. {hint if error.columns == ['output'] else ''}".rstrip()
        raise Unusable("a condition that fits the types of its columns", show(where), said, key=key) from None
