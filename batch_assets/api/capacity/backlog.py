"""What is left of each model's open batches: lines, tokens, windows, budgets. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from batch_assets.api.batches.create import priority_of
from batch_assets.api.batches.snapshot import TASKS
from batch_assets.api.billing.spending import Spending, parse_budget
from batch_assets.api.billing.usage import PICODOLLARS
from batch_assets.api.capacity.line_lengths import LineLength
from batch_assets.api.capacity.windows import WindowWork
from batch_assets.api.database.batch_records import BatchRecord
from batch_assets.api.database.states import BatchStatus
from batch_assets.capacity_planning.workload_estimate import ESTIMATE_SPREAD, FIRST_SPREAD
from gpu_runner.offers.speed import LengthMix
from gpu_runner.offers.workload import Basis, Workload
from gpu_runner.rows import Task

ROUNDING = 1e-6  # engines
SERVED_TASKS = tuple(TASKS.values())


@dataclass(frozen=True, slots=True)
class BatchBudgets:
    """Budgets of open batches together, in US dollars: their limits, and what they may still be charged.

    `tokens_done`: of their finished lines.
    """

    limit_usd: float
    left_usd: float
    tokens_done: float

    def left_beside(self, rent_usd: float, tokens: float) -> float:
        """US dollars that engines may still cost, after they cost `rent_usd` for `tokens` tokens of these and others.

        Of the rent these batches bear their share by tokens; all of it while nothing is done.
        """
        share = min(1.0, self.tokens_done / tokens) if tokens > 0 else 1.0
        return max(0.0, min(self.left_usd, self.limit_usd - share * rent_usd))


@dataclass(frozen=True, slots=True)
class Backlog:
    """The open work of one model. `first`: its oldest batch, whose holder decides. `tokens`: left, by batch. `tasks`:
    by batch.

    `feeds`: of workers that hold batches of it, one for each kind of task; each leases engines of its own.
    `budget`: of all its batches together; None where one of them has none. `spread`: relative standard deviation of its
    tokens.
    """

    model: str
    first: str
    windows: tuple[WindowWork, ...]
    workload: Workload
    spread: float
    budget: BatchBudgets | None
    tokens: Mapping[str, float]
    tasks: Mapping[str, Task]
    feeds: int

    @property
    def task(self) -> Task:
        """What most of its tokens are for: an engine is chosen for that."""
        sums: defaultdict[Task, float] = defaultdict(float)
        for batch_id, tokens in self.tokens.items():
            sums[self.tasks[batch_id]] += tokens
        return max(sums, key=lambda task: sums[task])

    @property
    def served_tasks(self) -> frozenset[Task]:
        """Those that its batches' engines serve: an engine makes embeddings, or generates."""
        kinds = {task == "embedding" for task in self.tasks.values()}
        return frozenset(task for task in SERVED_TASKS if (task == "embedding") in kinds)

    def shares(self, mine: Collection[str], instances: int) -> dict[Task, int]:
        """How many of these engines are for each feed of a worker that holds `mine`: by tokens, rounded up."""
        whole, own = sum(self.tokens.values()), defaultdict[Task, float](float)
        for batch_id in self.tokens.keys() & set(mine):
            own[self.tasks[batch_id]] += self.tokens[batch_id]
        # Of sums of fractions: what is one engine too many by rounding alone is none.
        return {task: max(1, math.ceil(instances * tokens / whole - ROUNDING)) for task, tokens in own.items()}


def lines_left(record: BatchRecord) -> int:
    """Lines without a result."""
    return max(0, record.total - record.completed - record.failed)


def with_work(records: Sequence[BatchRecord], spending: Mapping[str, Spending], now: float) -> list[BatchRecord]:
    """Those whose lines can be sent: neither done, nor over, nor paused by their budget."""
    return [
        one
        for one in records
        if one.state is BatchStatus.IN_PROGRESS
        and one.model
        and lines_left(one)
        and one.expires_at > now
        and not (one.id in spending and spending[one.id].paused)
    ]


def backlogs(
    records: Sequence[BatchRecord], lengths: Mapping[str, LineLength], spending: Mapping[str, Spending], now: float
) -> list[Backlog]:
    """The backlog of each model of these batches, which all have work (`with_work`); that with the earliest window
    first.
    """
    by_model: defaultdict[str, list[BatchRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda one: one.expires_at):
        by_model[record.model or ""].append(record)
    return [_backlog(model, own, lengths, spending, now) for model, own in by_model.items()]


def _backlog(
    model: str,
    records: Sequence[BatchRecord],
    lengths: Mapping[str, LineLength],
    spending: Mapping[str, Spending],
    now: float,
) -> Backlog:
    left = {one.id: lines_left(one) for one in records}
    tokens = {batch_id: rows * lengths[batch_id].tokens for batch_id, rows in left.items()}
    rows = sum(left.values())
    output = sum(left[one.id] * lengths[one.id].output for one in records) / rows
    mix = LengthMix(sum(tokens.values()) / rows - output, output)
    measured = sum(tokens[one.id] for one in records if lengths[one.id].measured) >= sum(tokens.values()) / 2
    basis: Basis = "measured" if measured else "estimated"
    longest = max(lengths[one.id].longest for one in records)
    workload = Workload(rows, sum(one.total for one in records), mix, longest, basis, basis)
    return Backlog(
        model,
        min(records, key=lambda one: (one.created_at, one.id)).id,
        tuple(
            WindowWork(
                one.tenant, priority_of(one.metadata_values()), one.expires_at - now, left[one.id], tokens[one.id]
            )
            for one in records
        ),
        workload,
        FIRST_SPREAD if measured else ESTIMATE_SPREAD,
        _budget(records, lengths, spending),
        tokens,
        {one.id: TASKS[one.endpoint] for one in records},
        len({(one.holder, TASKS[one.endpoint]) for one in records}),
    )


def _budget(
    records: Sequence[BatchRecord], lengths: Mapping[str, LineLength], spending: Mapping[str, Spending]
) -> BatchBudgets | None:
    limits = left = 0
    for record in records:
        if (limit := parse_budget(record.metadata_values())) is None:
            return None
        limits += limit
        left += max(0, limit - (spending[record.id].amount if record.id in spending else 0))
    done = sum(one.completed * lengths[one.id].tokens for one in records)
    return BatchBudgets(limits / PICODOLLARS, left / PICODOLLARS, done)
