"""Outputs of a JSON schema as typed columns of the published table (`output.columns`), and scores, classes and ranked
lists, whose form is that of the task.

A row whose output does not match, and one without an output, is null in all of them. They are read some megabytes of
outputs at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_runner.client.answers.pooled_outputs import SCHEMAS
from gpu_runner.client.json_schemas.column_types import (
    ColumnType,
    Misfit,
    column_descriptions,
    column_types,
    fitted_row,
)
from gpu_runner.client.json_schemas.schema_limits import SchemaProblem
from resources.store.dataset_store import SnapshotManifest
from resources.store.table_types import arrow_type

DESCRIPTION_LETTERS = 300
_BLOCK_BYTES = 2 << 20  # of outputs; as Python objects they take up to forty times as much


class OutputColumns:
    """Those of one snapshot. `mismatches` counts rows that were asked and whose output does not match."""

    def __init__(self, types: Mapping[str, ColumnType], descriptions: Mapping[str, str]) -> None:
        self._types = types
        self.fields = [pa.field(name, arrow_type(kind)) for name, kind in types.items()]
        self.descriptions = {
            field.name: _said(field, descriptions.get(field.name, "field of the output")) for field in self.fields
        }
        self.mismatches = 0

    @classmethod
    def of(cls, manifest: SnapshotManifest, taken: Collection[str]) -> OutputColumns | None:
        """The columns that outputs of a snapshot have beside those of these names; None where they have none."""
        settings = manifest.settings()
        schema = settings.json_schema or SCHEMAS.get(settings.task)
        if schema is None:
            return None
        used = {name.lower() for name in taken}
        try:
            types = {name: kind for name, kind in column_types(schema).items() if name.lower() not in used}
        except SchemaProblem:
            return None  # of a snapshot that was made before the columns were asked for
        return cls(types, column_descriptions(schema)) if types else None

    def within(self, schema: pa.Schema) -> pa.Schema:
        """The schema of a table with them, behind its column `output`."""
        for number, item in enumerate(self.fields, schema.get_field_index("output") + 1):
            schema = schema.insert(number, item)
        return schema

    def add(self, rows: pa.Table, *, count: bool) -> pa.Table:
        """The rows with their columns. `count`: mismatches among them count."""
        chunks: list[list[pa.Array]] = [[] for _ in self.fields]
        for block in _blocks(rows.column("output")):
            values = [self._row(text, count=count) for text in block.to_pylist()]
            for field, found in zip(self.fields, chunks, strict=True):
                name = field.name
                found.append(pa.array([None if row is None else row[name] for row in values], field.type))
        for field, found in zip(self.fields, chunks, strict=True):
            rows = rows.append_column(field, pa.chunked_array(found, field.type))
        return rows

    @property
    def names(self) -> list[str]:
        """Their names, in their order."""
        return list(self._types)

    def values(self, output: object) -> Mapping[str, Any]:
        """Of one output, by their names; nothing where it does not match."""
        return self._row(output, count=False) or {} if isinstance(output, str) else {}

    def _row(self, text: str | None, *, count: bool) -> dict[str, Any] | None:
        if text is None:
            return None
        try:
            return fitted_row(text, self._types)
        except Misfit:
            self.mismatches += count
            return None


def _said(field: pa.Field, words: str) -> str:
    inner = f" ({field.type})" if pa.types.is_nested(field.type) else ""
    found = f"{' '.join(words.split())}{inner}"
    return found if len(found) <= DESCRIPTION_LETTERS else found[: DESCRIPTION_LETTERS - 1] + "…"


def _blocks(outputs: pa.ChunkedArray) -> Iterator[pa.Array]:
    """The outputs in blocks of about `_BLOCK_BYTES`; a longer one is a block of its own."""
    for chunk in outputs.chunks:
        ends = np.cumsum(pc.fill_null(pc.binary_length(chunk), 0).to_numpy(zero_copy_only=False), dtype=np.int64)
        first = 0
        while first < len(chunk):
            before = ends[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + _BLOCK_BYTES, side="right")))
            yield chunk.slice(first, last - first)
            first = last
