"""Figures for the asset checks of a published table, taken in one pass over it.

Rates are over the rows that were asked: a duplicate repeats another row's outcome by design and is left out of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from batch_assets.publishing.published_table import Hashes, PublishedTable, repeated_ids, table_batches
from resources.store.dataset_store import DatasetStore, SnapshotManifest

SCHEMA_SAMPLE = 100_000
_THINKING = r"</?think(ing)?>|<\|channel\|>analysis"
THINKING_OFF = "turn that off (sampling.chat_template_kwargs: {enable_thinking: false})"

CHECKS: Mapping[str, str] = {
    "one_outcome_per_row": "Every source row that was not rejected has one line, with an output or an error.",
    "ids_unique": "No row id stands on two lines.",
    "dead_letter_rate": "Rows without a completion, per row that was asked.",
    "schema_valid_rate": "Outputs that fit the declared JSON schema, per output looked at.",
    "empty_output_rate": "Outputs that are blank (tool calls aside), or vectors empty, zero or not finite, per output.",
    "cut_output_rate": "Outputs that end at the token limit (finish_reason `length`), per output.",
    "thinking_output_rate": "Outputs that hold the model's thinking, in tags or channels, per output.",
    "repeated_output_rate": "Share of the most frequent output among all outputs; 0 when no two are alike.",
}


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The spec's `checks`. None: the figure is reported and never fails."""

    max_dead_rate: float | None = None
    min_schema_valid_rate: float | None = None
    max_empty_rate: float | None = None
    max_repeated_rate: float | None = None
    max_cut_rate: float | None = None
    max_thinking_rate: float | None = None


@dataclass(frozen=True, slots=True)
class CheckFigure:
    """One figure of a table. `description` says in words what was found, and never quotes an output."""

    name: str
    passed: bool
    value: float
    threshold: float | None
    description: str
    severity: Literal["error", "warn"]


def quality(
    store: DatasetStore, table: PublishedTable, manifest: SnapshotManifest, thresholds: Thresholds
) -> list[CheckFigure]:
    """The figures of a table, in the order of CHECKS; `schema_valid_rate` only when the snapshot has a JSON schema.

    Memory is 16 bytes per row. Up to 100,000 outputs are held against the schema: all, or every k-th of a larger table.
    Raises CorruptObject.
    """
    settings = manifest.settings()
    thinks = (settings.sampling.get("chat_template_kwargs") or {}).get("enable_thinking") is not False
    counted = Counted(table.rows, settings.json_schema, settings.sampling.get("max_tokens"), thinks=thinks)
    # A table of an earlier version, or of embeddings, has no tool calls.
    calls = [column.name for column in table.columns if column.name == "tool_calls"]
    for batch in table_batches(store, table, ["row_id", "output", "error", "finish_reason", "duplicate_of", *calls]):
        counted.add(batch)
    repeated = len(repeated_ids(store, table, counted.ids))
    named = "source rows" if manifest.samples == 1 else f"source rows of {manifest.samples} samples each"
    return counted.figures(manifest.expected_rows, repeated, thresholds, named)


class Counted:
    """What was counted over the lines of a table, added batch by batch."""

    def __init__(
        self, rows: int, json_schema: Mapping[str, Any] | None, max_tokens: int | None = None, *, thinks: bool = True
    ) -> None:
        """`max_tokens`: what the dataset asks for, named where answers are cut there. `thinks`: False where it asks a
        model not to think.
        """
        self.ids, self._outputs = Hashes(rows), Hashes(rows)
        self.rows = self.asked = self.dead = self.empty = self.torn = 0
        self.cut = self.thinking = 0
        self._max_tokens, self._thinks = max_tokens, thinks
        self.looked_at = self.valid = 0
        self._every = -(-max(rows, 1) // SCHEMA_SAMPLE)
        self._fits = _validator(json_schema) if json_schema is not None else None

    def add(self, batch: pa.RecordBatch) -> None:
        """Count the lines of a batch with the columns row_id, output, error, finish_reason, duplicate_of, and maybe
        tool_calls.

        Where a tool call is the whole answer, there is no output to judge.
        """
        self.ids.add(batch.column("row_id"))
        self.rows += batch.num_rows
        output, error = batch.column("output"), batch.column("error")
        self.torn += pc.sum(pc.equal(output.is_null(), error.is_null())).as_py() or 0
        asked = batch.column("duplicate_of").is_null()
        self.asked += pc.sum(asked).as_py() or 0
        self.dead += pc.sum(pc.and_(asked, error.is_valid())).as_py() or 0
        judged = pc.and_(pc.and_(asked, output.is_valid()), pc.invert(_calls_only(batch)))
        outputs = output.filter(judged)
        self.cut += pc.sum(pc.equal(batch.column("finish_reason").filter(judged), "length")).as_py() or 0
        self.thinking += _with_thinking(outputs)
        if self._fits is not None:
            # Every k-th completion of the whole table, wherever the batches begin.
            for text in outputs[-len(self._outputs) % self._every :: self._every].to_pylist():
                self.looked_at += 1
                self.valid += self._fits(text)
        self._outputs.add(outputs)
        self.empty += _empty(outputs)

    def figures(
        self, expected_rows: int, repeated: int, thresholds: Thresholds, named: str = "source rows"
    ) -> list[CheckFigure]:
        """The figures; `repeated` is the number of row ids that stand on more than one line, `named` what the expected
        rows are.
        """
        outputs = len(self._outputs)
        most = self._outputs.most_frequent()
        most = most if most > 1 else 0
        whole = self.rows == expected_rows and not self.torn
        found = [
            CheckFigure(
                "one_outcome_per_row",
                whole,
                self.rows,
                expected_rows,
                f"{self.rows:,} lines for {expected_rows:,} {named}"
                + (f"; {self.torn:,} with an output and an error, or with neither" if self.torn else ""),
                "error",
            ),
            CheckFigure(
                "ids_unique", not repeated, repeated, 0, f"{repeated:,} row ids on more than one line", "error"
            ),
            _at_most(
                "dead_letter_rate",
                self.dead,
                self.asked,
                thresholds.max_dead_rate,
                "rows without a completion",
                "error",
            ),
            _at_most("empty_output_rate", self.empty, outputs, thresholds.max_empty_rate, "empty outputs", "warn"),
            self._cut_figure(outputs, thresholds.max_cut_rate),
            self._thinking_figure(outputs, thresholds.max_thinking_rate),
            _at_most("repeated_output_rate", most, outputs, thresholds.max_repeated_rate, "times one output", "warn"),
        ]
        if self._fits is not None:
            found.insert(3, self._schema_figure(outputs, thresholds.min_schema_valid_rate))
        return found

    def _cut_figure(self, outputs: int, most: float | None) -> CheckFigure:
        figure = _at_most("cut_output_rate", self.cut, outputs, most, "outputs cut at the token limit", "warn")
        if figure.passed:
            return figure
        limit = f"sampling.max_tokens ({self._max_tokens:,})" if self._max_tokens else "sampling.max_tokens"
        hint = f": raise {limit}"
        if self._thinks:
            hint += f". A model that thinks spends it before it answers: {THINKING_OFF}, or give it more"
        return replace(figure, description=figure.description + hint)

    def _thinking_figure(self, outputs: int, most: float | None) -> CheckFigure:
        what = "outputs with the model's thinking in the text"
        figure = _at_most("thinking_output_rate", self.thinking, outputs, most, what, "warn")
        if figure.passed:
            return figure
        hint = f": {THINKING_OFF}, or start the server with a reasoning parser (vLLM: --reasoning-parser)"
        return replace(figure, description=figure.description + hint)

    def _schema_figure(self, outputs: int, least: float | None) -> CheckFigure:
        rate = self.valid / self.looked_at if self.looked_at else 1.0
        text = f"{self.valid:,} of {self.looked_at:,} outputs fit the schema"
        if self.looked_at < outputs:
            text += f" (every {self._every}th of {outputs:,} looked at)"
        return CheckFigure("schema_valid_rate", least is None or rate >= least, rate, least, text, "error")


def _at_most(
    name: str, count: int, total: int, most: float | None, what: str, severity: Literal["error", "warn"]
) -> CheckFigure:
    rate = count / total if total else 0.0
    text = f"{count:,} {what}, of {total:,}"
    return CheckFigure(name, most is None or rate <= most, rate, most, text, severity)


def _validator(json_schema: Mapping[str, Any]) -> Callable[[str], bool]:
    import jsonschema_rs

    validator = jsonschema_rs.validator_for(dict(json_schema))

    def fits(text: str) -> bool:
        try:
            return bool(validator.is_valid(orjson.loads(text)))
        except orjson.JSONDecodeError:
            return False

    return fits


def _calls_only(batch: pa.RecordBatch) -> pa.Array:
    """True for lines whose answer is a tool call without a text."""
    if "tool_calls" not in batch.schema.names:
        return pa.repeat(False, batch.num_rows)
    calls = pc.fill_null(pc.greater(pc.list_value_length(batch.column("tool_calls")), 0), False)
    return pc.and_(calls, pc.fill_null(pc.equal(pc.utf8_trim_whitespace(batch.column("output")), ""), False))


def _with_thinking(outputs: pa.Array) -> int:
    """Texts with a tag of a model's thinking: some servers leave out the first one, and a cut text has no last."""
    if pa.types.is_list(outputs.type):
        return 0
    return pc.sum(pc.match_substring_regex(outputs, _THINKING)).as_py() or 0


def _empty(outputs: pa.Array) -> int:
    if pa.types.is_list(outputs.type):
        lengths = np.asarray(pc.list_value_length(outputs))
        values = np.asarray(outputs.flatten())
        size = np.zeros(len(outputs))
        np.add.at(size, np.repeat(np.arange(len(outputs)), lengths), np.abs(values))
        return int(((size == 0) | ~np.isfinite(size)).sum())
    return pc.sum(pc.equal(pc.utf8_trim_whitespace(outputs), "")).as_py() or 0
