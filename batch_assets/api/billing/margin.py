"""What was charged beside what the engines cost in the same time. Pure.

The fleet keeps a bill for each model of the front door (`fleet_name`). A model's bill of a day is shared out to those
who used the model on that day, by their tokens, input and output alike; what nobody used is a line without a tenant.
So the table adds up to the ledger to the token, and to the fleet's bills.
"""

from __future__ import annotations

import datetime
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from batch_assets.api.billing.usage import Kind, UsageKey, Used
from batch_assets.api.billing.usage_ledger import UsageLine
from gpu_runner.fleet_database.accounting.charges import SpendLine

FLEET_PREFIX = "api/"
UNUSED = "unused"
LONGEST_NAME = 128  # of a dataset in the fleet's tables


def fleet_name(model: str) -> str:
    """Under which name the fleet leases engines of a model for the front door, as if that were a dataset."""
    name = f"{FLEET_PREFIX}{model}"
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(model.encode()).hexdigest()[:16]
    return f"{name[: LONGEST_NAME - 17]}-{digest}"


@dataclass(frozen=True, slots=True)
class Margin:
    """What was used and charged, and its share of what the engines cost, in US dollars."""

    used: Used
    gpu_usd: float

    @property
    def margin_usd(self) -> float:
        """What is left of what was charged."""
        return self.used.usd - self.gpu_usd


@dataclass(frozen=True, slots=True)
class MarginLine(Margin):
    """One line of the table."""

    key: UsageKey


def margin_lines(usage: Sequence[UsageLine], spend: Sequence[SpendLine]) -> list[MarginLine]:
    """All lines of the ledger with their shares, and lines of `unused` engines, by day, tenant, class and model."""
    tokens: defaultdict[tuple[datetime.date, str], int] = defaultdict(int)
    for line in usage:
        tokens[line.key.day, fleet_name(line.key.model)] += line.used.tokens
    cost = engine_cost(spend)
    found = []
    for line in usage:
        place = (line.key.day, fleet_name(line.key.model))
        share = line.used.tokens / tokens[place] if tokens[place] > 0 else 0.0
        found.append(MarginLine(line.used, cost.get(place, 0.0) * share, line.key))
    for (day, name), usd in cost.items():
        if tokens.get((day, name), 0) <= 0:
            key = UsageKey(day, "", UNUSED, name.removeprefix(FLEET_PREFIX), Kind.COMPLETIONS)
            found.append(MarginLine(Used(), usd, key))
    return sorted(found, key=lambda line: (line.key.day, line.key.tenant, line.key.service_class, line.key.model))


def engine_cost(spend: Sequence[SpendLine]) -> dict[tuple[datetime.date, str], float]:
    """US dollars by day and name in the fleet, of what was leased for the front door."""
    found: defaultdict[tuple[datetime.date, str], float] = defaultdict(float)
    for line in spend:
        if line.dataset.startswith(FLEET_PREFIX):
            found[line.day, line.dataset] += line.usd
    return dict(found)


def by_class(lines: Sequence[MarginLine]) -> dict[str, Margin]:
    """All lines of each class together, in the order of their names."""
    found: dict[str, Margin] = {}
    for line in lines:
        before = found.get(line.key.service_class, Margin(Used(), 0.0))
        found[line.key.service_class] = Margin(before.used.plus(line.used), before.gpu_usd + line.gpu_usd)
    return dict(sorted(found.items()))
