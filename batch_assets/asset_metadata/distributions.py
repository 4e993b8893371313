"""How lengths, latencies and finish reasons of a published table are distributed, counted in one pass over it.

Numbers are counted rounded to three significant digits, so memory is a few thousand counters whatever the number of
rows, and a quantile is right to half a percent.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batch_assets.publishing.published_table import PublishedTable, table_batches
from resources.store.dataset_store import DatasetStore

MOST_BINS = 24
_FAR = 2.0  # values more than so many times as large as 99 in 100 share one last bin
_REASONS = 50
NO_COMPLETION = "no completion"


@dataclass(frozen=True, slots=True)
class Bin:
    """Values from `first` up to, not including, `last`; `last` is infinite for the bin of what is far off."""

    first: float
    last: float
    count: int


@dataclass
class Distribution:
    """Counts of numbers that are not negative."""

    _counts: Counter[float] = field(default_factory=Counter)

    def add(self, values: Any) -> None:
        """Count the values of a NumPy array; what is no finite number of 0 or more is left out."""
        values = np.asarray(values, np.float64)
        values = values[np.isfinite(values) & (values >= 0)]
        scale = 10.0 ** (np.floor(np.log10(np.maximum(values, 1e-6))) - 2)
        found, counts = np.unique(np.rint(values / scale) * scale, return_counts=True)
        for value, count in zip(found.round(9).tolist(), counts.tolist(), strict=True):
            self._counts[value] += count

    @property
    def count(self) -> int:
        """How many values there are."""
        return self._counts.total()

    @property
    def most(self) -> float:
        """The largest value; 0 when there is none."""
        return max(self._counts, default=0.0)

    def quantile(self, share: float) -> float:
        """The smallest value that so large a share of all values does not exceed; 0 when there is none."""
        wanted, seen = share * self.count, 0
        for value in sorted(self._counts):
            seen += self._counts[value]
            if seen >= wanted:
                return value
        return 0.0

    def bins(self, *, whole: bool) -> list[Bin]:
        """At most 25 bins of one round width, from the smallest value to the largest. `whole`: of whole numbers."""
        if not self._counts:
            return []
        low, high = min(self._counts), self.most
        top = self.quantile(0.99) if high > _FAR * self.quantile(0.99) > 0 else high
        width = max(1.0 if whole else 0.0, _round_up((top - low) / (MOST_BINS - 1))) or max(high, 1.0) / 10
        start = math.floor(low / width + 1e-9)
        found = [0] * (math.floor(top / width + 1e-9) - start + 1)
        far = 0
        for value, count in self._counts.items():
            place = math.floor(value / width + 1e-9) - start
            if place < len(found):
                found[place] += count
            else:
                far += count
        bins = [Bin((start + i) * width, (start + i + 1) * width, count) for i, count in enumerate(found)]
        return [*bins, Bin(bins[-1].last, math.inf, far)] if far else bins


@dataclass
class TableDistributions:
    """Distributions of the rows that were asked: completion tokens and seconds of those with a completion, finish
    reasons of all.
    """

    tokens: Distribution = field(default_factory=Distribution)
    seconds: Distribution = field(default_factory=Distribution)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, batch: pa.RecordBatch) -> None:
        """Count lines with the columns completion_tokens, finish_reason, error, seconds and duplicate_of."""
        asked = batch.filter(batch.column("duplicate_of").is_null())
        ok = asked.filter(asked.column("error").is_null())
        self.tokens.add(pc.fill_null(ok.column("completion_tokens"), 0))
        self.seconds.add(pc.fill_null(ok.column("seconds"), math.nan))
        for line in ok.column("finish_reason").value_counts().to_pylist():
            reason = line["values"] or "not said"
            known = reason in self.reasons or len(self.reasons) < _REASONS
            self.reasons[reason if known else "other"] += line["counts"]
        if dead := asked.num_rows - ok.num_rows:
            self.reasons[NO_COMPLETION] += dead


def table_distributions(store: DatasetStore, table: PublishedTable) -> TableDistributions:
    """The distributions of a table. Raises CorruptObject when a file cannot be read."""
    found = TableDistributions()
    for batch in table_batches(
        store, table, ["completion_tokens", "finish_reason", "error", "seconds", "duplicate_of"]
    ):
        found.add(batch)
    return found


def _round_up(width: float) -> float:
    """The next 1, 2 or 5 times a power of ten; 0 for 0."""
    if width <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(width))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width * (1 - 1e-9))
