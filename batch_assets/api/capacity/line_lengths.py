"""How many tokens a line of each open batch has: measured in what it has finished, else estimated from its first lines.

What a batch has finished is in the usage ledger, whichever replica did it. Before 250 lines are done its first lines
are read, once: a token for each four bytes of the prompt, and half of the tokens that the answer may have.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from batch_assets.api.batches.snapshot import SNAPSHOT, TASKS, batch_store
from batch_assets.api.billing.spending import LIMITS
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.batch_records import BatchRecord
from batch_assets.capacity_planning.workload_estimate import BYTES_PER_TOKEN, OUTPUT_SHARE
from batch_assets.spec.models import DEFAULT_MAX_TOKENS
from resources.objects.opening import CorruptObject, Objects
from resources.objects.store_health import is_store_trouble

log = logging.getLogger(__name__)

SAMPLES = 8  # batches whose first lines are read at one look; a look in a store that is far takes seconds
MOST_TOKENS = 131_072  # of a prompt, and of answers: whoever names more is refused by the engine, and plans for nobody
AGAIN_LINES, AGAIN_SHARE = 250, 1.05  # so many further lines, and so many times what was counted, before it is again
UNKNOWN_PROMPT = 200.0  # tokens, of a batch that was not read yet and is the first of its model


@dataclass(frozen=True, slots=True)
class LineLength:
    """Mean tokens of a line: prompt and answer. `longest`: the most that one of those looked at may have."""

    prompt: float
    output: float
    longest: int
    measured: bool = False

    @property
    def tokens(self) -> float:
        """Prompt and answer, at least one."""
        return max(1.0, self.prompt + self.output)


class LineLengths:
    """Remembers what it has read of open batches. For one thread."""

    def __init__(self, objects: Objects, ledger: UsageLedger) -> None:
        self._objects, self._ledger = objects, ledger
        self._sampled: dict[str, LineLength] = {}
        self._measured: dict[str, tuple[int, tuple[float, float]]] = {}  # lines that were counted, and their mean
        self._tries: dict[str, int] = {}  # by batch that could not be read

    def of(self, records: Sequence[BatchRecord]) -> Mapping[str, LineLength]:
        """By batch id. Of batches that cannot be looked at now: the mean of others of their model."""
        self._sampled = {one.id: self._sampled[one.id] for one in records if one.id in self._sampled}
        self._read_some([one for one in records if one.id not in self._sampled])
        known = dict(self._sampled)
        for batch_id, (prompt, output) in self._measure(records).items():
            longest = known[batch_id].longest if batch_id in known else 0
            known[batch_id] = LineLength(prompt, output, max(longest, round(prompt + output)), True)
        return {one.id: known[one.id] if one.id in known else _like(one, records, known) for one in records}

    def _measure(self, records: Sequence[BatchRecord]) -> Mapping[str, tuple[float, float]]:
        """Tokens of prompt and answer of a finished line, by batch. The ledger adds up all objects of a batch, so it is
        asked again only when many more are done: of a batch of n objects it adds up some twenty times n in all."""
        self._measured = {one.id: self._measured[one.id] for one in records if one.id in self._measured}
        due = [one.id for one in records if self._is_due(one)]
        for batch_id, usage in (self._ledger.usage_of_batches(due) if due else {}).items():
            if (answers := usage.requests) > 0 and usage.tokens > 0:
                self._measured[batch_id] = answers, (usage.input_tokens / answers, usage.output_tokens / answers)
        return {batch_id: mean for batch_id, (_, mean) in self._measured.items()}

    def _is_due(self, record: BatchRecord) -> bool:
        counted, _ = self._measured.get(record.id, (0, None))
        return record.completed >= max(counted + AGAIN_LINES, counted * AGAIN_SHARE)

    def _read_some(self, new: Sequence[BatchRecord]) -> None:
        """The largest of those that were tried least, none more once the store has not answered."""
        self._tries = {one.id: self._tries[one.id] for one in new if one.id in self._tries}
        for record in sorted(new, key=lambda one: (self._tries.get(one.id, 0), -one.total))[:SAMPLES]:
            try:
                found = self._sample(record)
            except Exception as error:
                if not is_store_trouble(error):
                    raise
                return
            if found is not None:
                self._sampled[record.id] = found

    def _sample(self, record: BatchRecord) -> LineLength | None:
        """What the first lines say; None: they are damaged, or there are none. Raises as the store."""
        tries = self._tries[record.id] = self._tries.get(record.id, 0) + 1
        store = batch_store(self._objects, record.id)
        try:
            manifest, entries = store.manifest(SNAPSHOT), store.entries(SNAPSHOT)[:1]
            tables = [table for _, table in store.prompt_tables(manifest, entries, ("prompt",))]
        except (CorruptObject, FileNotFoundError) as error:
            if tries == 1:
                log.warning("batch %s: its lines are not measured: %s", record.id, type(error).__name__)
            return None
        return estimate(body for table in tables for body in table.column("prompt").to_pylist())


def estimate(bodies: Iterable[bytes]) -> LineLength | None:
    """The mean of these requests; None: there are none."""
    found = [_tokens(orjson.loads(body)) for body in bodies]
    if not found:
        return None
    longest = max(prompt + most for prompt, most in found)
    output = OUTPUT_SHARE * statistics.fmean(most for _, most in found)
    return LineLength(statistics.fmean(prompt for prompt, _ in found), output, round(longest))


def _tokens(fields: Mapping[str, Any]) -> tuple[float, float]:
    """(tokens of the prompt, most tokens of the answer)."""
    kind = next((name for name in ("messages", "prompt", "input") if name in fields), "")
    asked = fields.get(kind, "")
    prompt = min(len(orjson.dumps(asked)) / BYTES_PER_TOKEN, float(MOST_TOKENS))
    if kind == "input":
        return prompt, 0.0
    limits = [value for name in LIMITS if isinstance(value := fields.get(name), int) and value > 0]
    answers = value if isinstance(value := fields.get("n"), int) and value > 0 else 1
    return prompt, float(min(max(limits, default=DEFAULT_MAX_TOKENS) * answers, MOST_TOKENS))


def _like(record: BatchRecord, records: Sequence[BatchRecord], known: Mapping[str, LineLength]) -> LineLength:
    kind = (record.model, TASKS[record.endpoint])
    others = [known[one.id] for one in records if one.id in known and (one.model, TASKS[one.endpoint]) == kind]
    if others:
        prompt, output = (statistics.fmean(getattr(one, name) for one in others) for name in ("prompt", "output"))
        return LineLength(prompt, output, max(one.longest for one in others))
    output = 0.0 if kind[1] == "embedding" else OUTPUT_SHARE * DEFAULT_MAX_TOKENS
    return LineLength(UNKNOWN_PROMPT, output, round(UNKNOWN_PROMPT + 2 * output))
