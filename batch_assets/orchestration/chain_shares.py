"""A chain of refreshes under one deadline and one budget: what each step may take of it.

A step gets of what is left a share by its expected tokens, among those of the steps that are not done. What earlier
steps have spent is not left any more; what they did not need is. So the last step may take all that is left.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from batch_assets import settings
from batch_assets.capacity_planning.workload_estimate import PromptLengths, WorkloadEstimator, work_of
from batch_assets.orchestration.active_request import same_chain
from batch_assets.orchestration.source_place import at_its_place
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.chain import ChainError, round_of, steps_to
from batch_assets.spec.discovery import Datasets
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.request_options import InvalidTag, request_options
from batch_assets.tags import (
    BUDGET_TAG,
    CHAIN_BUDGET_TAG,
    CHAIN_DEADLINE_TAG,
    CHAIN_SINCE_TAG,
    CHAIN_TAG,
    DEADLINE_TAG,
    STREAMING_TAG,
    UPSTREAM_TAG,
)
from gpu_runner.fleet_database.database import FleetDatabase
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import DatasetStore

LEAST_USD = 0.000001  # of a step for which nothing is left: it pauses as soon as something costs


@dataclass(frozen=True, slots=True)
class Chain:
    """The whole: since when, by when (Unix seconds of the fleet's database) and for how many US dollars."""

    run_id: str
    since: float
    deadline_at: float | None = None
    budget_usd: float | None = None

    @classmethod
    def of(cls, run: dg.DagsterRun, last: GeneratedDatasetSpec, now: float) -> Chain:
        """As the first run wishes it, or the dataset at the end; then as its tags have it. Raises InvalidTag."""
        tags = run.tags
        if CHAIN_SINCE_TAG not in tags:
            wanted = request_options(last, tags)
            due = wanted.deadline.at(now) if wanted.deadline else None
            return cls(run.root_run_id or run.run_id, now, due, wanted.budget_usd)
        wanted = request_options(
            last.model_copy(update={"deadline": None, "budget_usd": None}),
            {ours: tags[whole] for ours, whole in _WHOLE.items() if whole in tags},
        )
        due = wanted.deadline.at(now) if wanted.deadline else None
        return cls(tags.get(CHAIN_TAG, run.run_id), float(tags[CHAIN_SINCE_TAG]), due, wanted.budget_usd)

    def tags(self) -> dict[str, str]:
        """As they stand on each run of the chain."""
        found = {CHAIN_TAG: self.run_id, CHAIN_SINCE_TAG: repr(self.since)}
        found |= {} if self.deadline_at is None else {CHAIN_DEADLINE_TAG: moment(self.deadline_at)}
        return found | ({} if self.budget_usd is None else {CHAIN_BUDGET_TAG: repr(self.budget_usd)})


_WHOLE = {DEADLINE_TAG: CHAIN_DEADLINE_TAG, BUDGET_TAG: CHAIN_BUDGET_TAG}


def share(left: float, weights: Sequence[float]) -> float:
    """What the first of several steps gets of something: by its weight; equal shares where nobody weighs anything."""
    whole = math.fsum(weights)
    return max(0.0, left) * (weights[0] / whole if whole > 0 else 1 / len(weights))


def moment(seconds: float) -> str:
    """Unix seconds as a deadline is written."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def step_tags(
    instance: dg.DagsterInstance,
    fleet_db: FleetDatabase,
    run: dg.DagsterRun,
    name: str,
    last: str,
    datasets: Datasets,
    store_of: Callable[[str], DatasetStore],
) -> dict[str, str]:
    """Tags of one refresh of a chain that ends with `last`: the whole of it, and deadline and budget of this step.
    Raises InvalidTag.

    What other steps under way may spend is theirs: where steps overlap, no two of them count on the same dollar. So no
    two refreshes of a chain may be here at a time.
    """
    specs = {one: spec for one, (spec, _) in datasets.items()}
    steps = _steps(specs, last, name)
    now = fleet_db.now()
    chain = Chain.of(run, specs[steps[-1]], now)
    at = steps.index(name)
    if chain.deadline_at is None and chain.budget_usd is None:
        return chain.tags()
    weights = expected_tokens(instance, {one: datasets[one] for one in steps}, store_of)
    own = request_options(specs[name], {})
    found, streams = chain.tags(), STREAMING_TAG in run.tags
    state = {one: _Step.of(instance, fleet_db, one, chain) for one in steps}
    if chain.budget_usd is not None:
        # Steps before are over when a table was read of them: what they spent is all. Others may be at work.
        over = () if streams else steps[:at]
        others = (state[one].spent if one in over else state[one].most for one in steps if one != name)
        left = chain.budget_usd - math.fsum(others)
        waiting = [place for place in range(at + 1, len(steps)) if not state[steps[place]].under_way]
        usd = share(left, [weights[place] for place in (at, *waiting)]) - state[name].spent_before
        found[BUDGET_TAG] = f"{max(LEAST_USD, min(usd, own.budget_usd or math.inf)):.6f}"
    if chain.deadline_at is not None:
        before = state[steps[at - 1]].deadline_at if streams else None
        begins = now if before is None else min(max(now, before), chain.deadline_at)
        due = begins + share(
            chain.deadline_at - begins, [*weights[at:], _later_rounds(specs, name, weights, steps, store_of)]
        )
        found[DEADLINE_TAG] = moment(min(due, own.deadline.at(now)) if own.deadline is not None else due)
    return found


def _later_rounds(
    specs: Mapping[str, GeneratedDatasetSpec],
    name: str,
    weights: Sequence[float],
    steps: Sequence[str],
    store_of: Callable[[str], DatasetStore],
) -> float:
    """Tokens of the rounds after this one, of all of their steps, for a step after the first one of a round: that one
    counts its own rows to come in its work, as it is asked for all of them."""
    for wants in specs.values():
        rounds = round_of(specs, wants) if wants.want is not None else []
        if name not in rounds[1:] or wants.name not in steps:
            continue
        store = store_of(wants.name)
        snapshot = store.current_snapshot()
        manifest = None if snapshot is None else store.manifest(snapshot)
        if manifest is None or manifest.wanted is None:
            continue
        each_round = math.fsum(weight for step, weight in zip(steps, weights, strict=True) if step in rounds)
        return each_round * manifest.wanted.to_come[1] / max(1, manifest.rows)
    return 0.0


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of a chain, in US dollars since it began. `spent`: with what ends its machines. `spent_before`: before the
    request that is `under_way`; all where none is. `most`: what the step may have spent in the end."""

    spent: float
    spent_before: float
    most: float
    under_way: bool
    deadline_at: float | None

    @classmethod
    def of(cls, instance: dg.DagsterInstance, fleet_db: FleetDatabase, name: str, chain: Chain) -> _Step:
        target, spent = fleet_db.target(name), spent_since(fleet_db, [name], chain.since)
        ended = spent + promised(fleet_db, [name])
        if target is None or not same_chain(instance, target.request, chain.run_id):
            return cls(ended, spent, ended, False, None)
        before = max(0.0, spent - fleet_db.spend(name).usd)
        return cls(ended, before, max(ended, before + (target.budget_usd or 0.0)), True, target.deadline_at)


def _steps(specs: Mapping[str, GeneratedDatasetSpec], last: str, name: str) -> list[str]:
    try:
        steps = steps_to(specs, last) if last in specs else []
    except ChainError as error:
        raise InvalidTag(UPSTREAM_TAG, str(error)) from None
    if name not in steps:
        raise InvalidTag(UPSTREAM_TAG, f"expected a dataset that reads what {name} makes, found {last[:80]!r}")
    return steps


def spent_since(fleet_db: FleetDatabase, datasets: Sequence[str], since: float) -> float:
    """US dollars that datasets were charged from a moment of the fleet's database on."""
    parts = (charge.between(since, math.inf) for name in datasets for charge in fleet_db.charges_of(name))
    return math.fsum(part.usd.total for part in parts if part is not None)


def promised(fleet_db: FleetDatabase, datasets: Sequence[str]) -> float:
    """US dollars that instances which datasets pay for will cost until they are ended: those of a request with a budget
    are, at the next tick of the capacity sensor."""
    return math.fsum(fleet_db.spend(name).held_back(settings.capacity_seconds()) for name in datasets)


def expected_tokens(
    instance: dg.DagsterInstance, steps: Datasets, store_of: Callable[[str], DatasetStore]
) -> list[float]:
    """Tokens of each step as a whole, in order: of its last snapshot, else of its source; where that is not there yet,
    of as many rows as the step before has."""
    found: list[float] = []
    rows = 1
    for name, (spec, folder) in steps.items():
        try:
            store = store_of(name)
            placed = at_its_place(spec, instance, store.objects) if store.current_snapshot() is None else spec
            work = WorkloadEstimator(placed, store, folder).look()
        except (SourceError, CorruptObject, FileNotFoundError):
            work = work_of(spec.generation(), rows, rows, PromptLengths(0.0, 0.0), ())
        rows = work.all_rows
        found.append(rows * work.mix.tokens)
    return found
