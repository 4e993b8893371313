"""Request fields of each row's own: templates under `sampling`, and tools in columns."""

from __future__ import annotations

from typing import Any

from batch_assets.snapshot.source.block import Block
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.sampling import check_tools
from batch_assets.spec.sampling_values import Unfit, read_field, read_json
from batch_assets.templates.prompt_template import Refused, Template, TemplateExhausted
from resources.yaml_errors import Unusable


class RowFields:
    """Those of a spec. `columns` are the names that they take from a row; `required` those that a row must have."""

    def __init__(self, spec: GeneratedDatasetSpec) -> None:
        sampling = spec.sampling
        self._sampling = spec.generation().sampling
        self._templates = {name: Template(text) for name, text in sampling.templates().items()}
        self._tools, self._choice = sampling.tools_from, sampling.tool_choice_from
        named = {name for name in (self._tools, self._choice) if name is not None}
        self.columns = {name for template in self._templates.values() for name in template.columns} | named
        self.required = {name for template in self._templates.values() for name in template.required}

    def __bool__(self) -> bool:
        return bool(self._templates or self._tools or self._choice)

    def of(self, block: Block, refused: dict[int, str]) -> list[dict[str, Any]]:
        """The fields of every row; why a row cannot be used is put into `refused`."""
        rows: list[dict[str, Any]] = [{} for _ in block.lines]
        for name, template in self._templates.items():
            try:
                texts = template.render_column(block.columns, len(block.lines))
            except TemplateExhausted as error:
                where = f"{block.file}, lines {block.lines[0]} to {block.lines[-1]}: sampling.{name}"
                raise SourceError(f"{where}: {error}") from None
            for i, text in enumerate(texts):
                if isinstance(text, Refused):
                    refused.setdefault(i, f"sampling.{name}: {text.reason}")
                elif text.strip():  # else the row is without the field
                    try:
                        rows[i][name] = read_field(name, text)
                    except Unfit as error:
                        refused.setdefault(i, f"sampling.{name}: {error}")
        for i in [i for i in range(len(rows)) if i not in refused]:
            if self._tools or self._choice:
                self._read_tools(block, i, rows[i], refused)
            self._check(i, rows[i], refused)
        return rows

    def _read_tools(self, block: Block, row: int, fields: dict[str, Any], refused: dict[int, str]) -> None:
        for key, column in (("tools", self._tools), ("tool_choice", self._choice)):
            if column is None:
                continue
            try:
                value = read_json(block.columns[column][row])
            except Unfit as error:
                refused.setdefault(row, f"sampling.{key}_from: column {column!r}: {error}")
                return
            if value is not None and value != []:
                fields[key] = value
        try:
            check_tools({**self._sampling, **fields})
        except Unusable as error:
            words = error.expected if error.key.endswith("tool_choice") else f"{error.expected} in tools"
            refused.setdefault(row, f"{error.key.replace('sampling.extra.', '')}: expected {words}, found another one")

    def _check(self, row: int, fields: dict[str, Any], refused: dict[int, str]) -> None:
        whole = {**self._sampling, **fields}
        least, most = whole.get("min_tokens"), whole.get("max_tokens")
        if least is not None and most is not None and least > most:
            refused.setdefault(row, f"sampling.min_tokens: expected at most max_tokens ({most:,}), found {least:,}")
