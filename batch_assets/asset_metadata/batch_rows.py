"""A few rows of a batch as a Markdown table, for the page of its partition in Dagster's UI.

They are made while the batch is committed, of what is in memory: nothing is read for them. Texts of a source and of a
model are not to be trusted, see `sample_rows`. The event log holds them for good, so their bytes are bounded, and of a
dataset of very many batches only some have them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from batch_assets.asset_metadata.sample_rows import INLINE_LETTERS, cut, escaped, said, text_of
from gpu_runner.rows import Outcome, Row

SHOWN_ROWS = 5
MOST_BYTES = 1500  # of the table in an event, which is JSON in ASCII
ALL_BATCHES = 2000  # a dataset with more of them shows rows of so many
_FAILED_MORE = 10  # times as many are shown of those that have rows without an answer
_LETTERS = (120, 80, 50, 30, 15, 5)
_KEPT_LETTERS = 4 * _LETTERS[0]


@dataclass(frozen=True, slots=True)
class ShownBatches:
    """Which of so many batches show rows: all, or about `ALL_BATCHES`, evenly spread ones, and ten times as many of
    those with rows that have no answer. Decided by the key: a batch that is made again shows rows as before.
    """

    batches: int

    def shows(self, key: str, *, failed: bool) -> bool:
        """Whether a batch shows rows. `failed`: it has rows without an answer."""
        every = math.ceil(self.batches / ALL_BATCHES) or 1
        return int(key) % (math.ceil(every / _FAILED_MORE) if failed else every) == 0


def shown_prompts(rows: Sequence[Row]) -> dict[str, str]:
    """Beginnings of the prompts of the first rows, by row id."""
    return {row.row_id: _prompt_text(row.prompt)[:_KEPT_LETTERS] for row in rows[:SHOWN_ROWS]}


def batch_rows_markdown(prompts: Mapping[str, str], outcomes: Sequence[Outcome]) -> str:
    """The first rows of a batch, each output below its prompt; rows without an answer that come later stand in place
    of the last ones, by their ids. At most `MOST_BYTES` as JSON, and so short that the UI shows it on the page.

    `prompts`: as `shown_prompts` gives them.
    """
    first = [one for one in outcomes if one.row_id in prompts]
    dead = [one for one in outcomes if not one.ok and one.row_id not in prompts][: SHOWN_ROWS // 2]
    shown = [*first[: SHOWN_ROWS - len(dead)], *dead]
    lines = [(cut(_asked(one, prompts), _LETTERS[0]), cut(_answered(one), _LETTERS[0])) for one in shown]
    found = ""
    for letters in _LETTERS:
        cells = [(escaped(cut(asked, letters)), escaped(cut(answered, letters))) for asked, answered in lines]
        rows = [line for asked, answered in cells for line in (f"| {asked} |", f"| → {answered} |")]
        found = "\n".join(("| prompt → output |", "| --- |", *rows))
        if len(found) < INLINE_LETTERS and len(json.dumps(found)) <= MOST_BYTES:
            break
    return found


def _asked(one: Outcome, prompts: Mapping[str, str]) -> str:
    """The prompt, of a conversation the last that the user said; the id of a row whose prompt is not at hand."""
    return one.turns[-1].user if one.turns else prompts.get(one.row_id, one.row_id)


def _answered(one: Outcome) -> str:
    if one.output is None:
        return f"no completion: {one.error}"
    return one.output if isinstance(one.output, str) else text_of(list(one.output))


def _prompt_text(prompt: bytes) -> str:
    """What a prompt of the snapshot asks: of messages the last one; of images and sounds in it only what they are."""
    value = orjson.loads(prompt)
    if not isinstance(value, list) or not value:
        return text_of(value)
    last: Mapping[str, Any] = value[-1]
    content = last.get("content")
    if not isinstance(content, list):
        return said(last)
    return " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
