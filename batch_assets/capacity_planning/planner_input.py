"""What the planner is asked about a dataset: its work, what can be rented, what it holds, what is wanted.

Shared by the capacity sensor and by `batch-assets plan`, so that both give the same answer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from batch_assets.capacity_planning.workload_estimate import ESTIMATE_SPREAD, FIRST_SPREAD
from batch_assets.spec.hardware import HardwareSpec
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.request_options import request_options
from batch_assets.tags import BUDGET_TAG, DEADLINE_TAG, ENDPOINT_TAG, INSTANCES_TAG, OBJECTIVE_TAG
from gpu_runner.fleet_database.accounting.request_budget import Spend
from gpu_runner.fleet_database.database import FleetDatabase, Instance
from gpu_runner.fleet_database.targets import DatasetTarget
from gpu_runner.money import format_usd
from gpu_runner.offers.offer import Objective, Offer, Ranking
from gpu_runner.offers.selection import MEMORY, OfferFailure
from gpu_runner.offers.speed import Basis, Measurement, Speed
from gpu_runner.offers.workload import Assumption, Subject, Workload
from gpu_runner.planner.planner import in_detail, make_plan
from gpu_runner.planner.speed_model import HardwareType
from gpu_runner.planner.types import ControlTiming, HeldInstance, Plan, PlannedOffer, Target, Work
from gpu_runner.rows import Task
from gpu_runner.token_price import TokenPrice
from resources.engine_options import PLAIN, EngineOptions
from resources.fleet.fleet_config import ENDPOINT_VARIABLE, EngineConfig, FleetConfigError
from resources.fleet.hosted_engines import (
    BatchVerdict,
    engine_speed,
    hosted_engines,
    hosted_options,
    unpriced_engines,
    unpriced_options,
    weigh_batches,
)
from resources.fleet.leased_engine import instance_offer
from resources.fleet.planner_options import Beliefs, beliefs, held, options
from resources.fleet.resource import FleetConfig, GpuFleet
from resources.pricing.market import Market, OfferSnapshot
from resources.pricing.model_catalog import DeclaredModel

FREE = TokenPrice(0.0, 0.0)


class Planned(Protocol):
    """For what is planned: a dataset, or a model of the front door. `name`: in the fleet's database."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def task(self) -> Task: ...
    @property
    def hardware(self) -> HardwareSpec: ...
    @property
    def engine(self) -> EngineOptions: ...
    def declared(self, model: str) -> DeclaredModel | None: ...


class Markets:
    """The market of a fleet.yaml while the file says the same: it remembers what a silent provider offered."""

    def __init__(self) -> None:
        self._known: tuple[FleetConfig, Market, Mapping[str, float]] | None = None

    def of(self, fleet: GpuFleet, config: FleetConfig) -> tuple[Market, Mapping[str, float]]:
        """The market, and simulated seconds per real second of each provider. Raises PricingError."""
        if self._known is None or self._known[0] != config:
            providers = fleet.providers(config)
            clocks = {name: one.clock for name, one in providers.items()}
            self._known = config, fleet.market(config, providers), clocks
        return self._known[1], self._known[2]


@dataclass(frozen=True, slots=True)
class FleetView:
    """What all datasets share at one moment. `seen_at`: when, by the clock of the fleet's database."""

    config: FleetConfig
    market: Market
    clocks: Mapping[str, float]
    instances: Sequence[Instance]
    failures: Sequence[OfferFailure]
    measurements: Sequence[Measurement]
    seen_at: float

    @classmethod
    def look(cls, fleet: GpuFleet, fleet_db: FleetDatabase, markets: Markets | None = None) -> FleetView:
        """As they are now. `markets` remembers what providers offered. Raises FleetConfigError and PricingError."""
        config = fleet.config()
        market, clocks = (markets or Markets()).of(fleet, config)
        seen_at = fleet_db.now()  # before what is seen: whatever ends meanwhile may count as held
        failures, measured = fleet_db.offer_failures(MEMORY.horizon), fleet_db.measurements()
        return cls(config, market, clocks, fleet_db.fleet(), failures, measured, seen_at)

    def of(self, dataset: str) -> list[Instance]:
        """Instances that work or boot for the dataset and are to stay, also where each run has its last rows in flight.

        A range smaller than the window of its engine is all in flight at once: its lease drains from the start.
        """
        mine = [one for one in self.instances if one.works_for == dataset]
        return [one for one in mine if one.state in ("intent", "booting", "ready") and not one.retiring]

    def idle(self, dataset: str, seconds: float) -> tuple[str, ...]:
        """Instances that the dataset pays for and that have stood without a lease for so long, whoever ordered them."""
        mine = [one for one in self.instances if one.payer == dataset and not one.retiring]
        return tuple(one.name for one in mine if one.idle_seconds is not None and one.idle_seconds >= seconds)

    def ranking(
        self,
        spec: Planned,
        work: Workload,
        objective: Objective,
        stock: OfferSnapshot | None = None,
        *,
        measured: bool = True,
    ) -> Ranking:
        """What can be rented for the work. `stock`: these offers instead, whatever is wanted of hardware now.

        `measured` False: with estimated speeds only.
        """
        return self.market.ranking(
            spec.model,
            spec.task,
            work.mix,
            work.tokens,
            objective=objective,
            measurements=self.measurements if measured else (),
            longest=work.longest,
            max_model_len=spec.hardware.max_model_len,
            declared=spec.declared(spec.model),
            stock=stock,
            **({} if stock else {"accept": spec.hardware.accept()}),
        )


@dataclass(frozen=True, slots=True)
class PlannerInput:
    """What the planner is asked. `measured`: how fast one of the instances held is has been seen, not estimated.

    `speeds`: by the name of an offer or engine how fast it is taken to be, on its own clock, and how that is known.
    """

    work: Work
    options: tuple[PlannedOffer, ...]
    held: tuple[HeldInstance, ...]
    target: Target
    measured: bool
    ranking: Ranking
    speeds: Mapping[str, Speed] = field(default_factory=dict)


def build_input(
    around: FleetView,
    spec: Planned,
    workload: Workload,
    target: Target,
    *,
    batches: int,
    spread: float,
    rows_total: int,
    started_ago: float = 0.0,
    taken: Mapping[str, int] | None = None,
) -> PlannerInput:
    """Put the question. `taken`: instances by offer that other datasets are about to rent."""
    ranking = around.ranking(spec, workload, target.objective)
    instances = around.of(spec.name)
    # Also of what is held and of what is not offered any more, whatever is wanted of hardware now.
    stock = around.market.stock()
    known = OfferSnapshot((*stock.offers, *stock.silent, *(instance_offer(one) for one in instances)), (), ())
    speeds = around.ranking(spec, workload, target.objective, known)
    believed = beliefs(speeds, around.ranking(spec, workload, target.objective, known, measured=False))
    known_by = {HardwareType(*one.offer.hardware): one.speed for one in reversed(speeds.ranked)}
    standing = Counter(instance_offer(one).name for one in around.instances if one.state == "ready")
    there = options(ranking, around.clocks, around.failures, believed, standing)
    accepted = spec.hardware.accept()
    if silent := tuple(one for one in stock.silent if not accepted.reasons(one)):
        missed = around.ranking(spec, workload, target.objective, OfferSnapshot(silent, (), ()))
        there += options(missed, around.clocks, around.failures, believed, standing)
    mine = held(instances, around.failures, believed)
    return PlannerInput(
        Work(
            tokens=workload.tokens,
            total_tokens=max(workload.rows, rows_total) * workload.mix.tokens,
            started_ago=started_ago,
            units=batches,
            spread=spread,
        ),
        tuple(_less(one, (taken or {}).get(one.name, 0)) for one in there),
        tuple(mine),
        target,
        any(_basis(known_by, instance_offer(one)) == "measured" for one in instances),
        ranking,
        _speeds([*there, *(one.option for one in mine)], known_by, believed),
    )


def _speeds(
    planned: Sequence[PlannedOffer], known: Mapping[HardwareType, Speed], believed: Beliefs
) -> dict[str, Speed]:
    """By the name of an offer: as it is believed, and how it is known."""
    return {
        one.name: replace(known[kind], tokens_per_second=believed[kind].tokens_per_second)
        for one in planned
        if (kind := one.hardware_type) in known and kind in believed
    }


def _basis(known: Mapping[HardwareType, Speed], offer: Offer) -> Basis | None:
    found = known.get(HardwareType(*offer.hardware))
    return None if found is None else found.basis


def ask(
    around: FleetView,
    fleet_db: FleetDatabase,
    spec: GeneratedDatasetSpec,
    workload: Workload,
    target: Target,
    *,
    endpoint: str | None,
    batches: int,
    spread: float,
    rows_total: int,
    started_ago: float = 0.0,
    taken: Mapping[str, int] | None = None,
) -> tuple[PlannerInput, Workload]:
    """The question about a dataset, as the capacity sensor and `plan` put it: what can be rented, and the engines of
    fleet.yaml. Also the work with what is assumed of them. `taken`: as in `build_input`.
    """
    work = with_price_of_user(workload, spec, around.config)
    asked = build_input(
        around,
        spec,
        work,
        target,
        batches=batches,
        spread=spread,
        rows_total=rows_total,
        started_ago=started_ago,
        taken=taken,
    )
    return with_engines(asked, around.config, fleet_db, work, spec, endpoint)


def with_engines(
    asked: PlannerInput,
    config: FleetConfig,
    fleet_db: FleetDatabase,
    work: Workload,
    spec: GeneratedDatasetSpec,
    endpoint: str | None,
) -> tuple[PlannerInput, Workload]:
    """The planner's input with the engines of fleet.yaml, as fast as earlier runs measured them, and the work with what
    is assumed of them.
    """
    try:
        engines = config.engines_for(spec.model, endpoint, spec.engine)
    except FleetConfigError:
        engines = ()
    speeds = fleet_db.engine_speeds([one.name for one in engines], spec.name)
    verdicts = batch_verdicts(asked, config, work, model=spec.model, endpoint=endpoint, options=spec.engine)
    own = {one.name: engine_speed(one.name, speeds) for one in engines if one.kind != "batch_api"}
    asked = replace(asked, speeds={**asked.speeds, **own})
    hosted = hosted_engines(config, spec.model, endpoint, spec.engine)
    if hosted or any(one.taken for one in verdicts):
        asked = with_hosted_engines(asked, hosted, verdicts, work, speeds, endpoint)
    elif unpriced := unpriced_engines(config, spec.model, endpoint, spec.engine):
        free = free_engines(fleet_db, unpriced, spec.name)
        return with_unpriced_engines(asked, unpriced, free, work, speeds, endpoint)
    return asked, work


def with_hosted_engines(
    asked: PlannerInput,
    engines: Sequence[EngineConfig],
    verdicts: Sequence[BatchVerdict],
    work: Workload,
    speeds: Mapping[str, Speed],
    endpoint: str | None,
) -> PlannerInput:
    """The planner's input with engines that are paid by the token.

    They are taken before anything is rented, so they alone are planned for, unless time presses. With an `endpoint`
    nothing else ever serves: whatever else is offered counts for nothing.
    """
    left_out = {one.engine.name for one in verdicts if not one.taken}
    if taken := [one.engine for one in verdicts if one.taken]:
        return replace(asked, options=hosted_options(taken[:1], work, speeds), held=(), measured=True)
    hosted = hosted_options([one for one in engines if one.name not in left_out], work, speeds)
    rents = bool(asked.options or asked.held)
    if endpoint or (hosted and not (rents and time_presses(asked.target))):
        return replace(asked, options=hosted, held=(), measured=True)
    return replace(asked, options=(*asked.options, *hosted)) if hosted else asked


def batch_verdicts(
    asked: PlannerInput,
    config: FleetConfig,
    work: Workload,
    *,
    model: str,
    endpoint: str | None,
    options: EngineOptions = PLAIN,
) -> list[BatchVerdict]:
    """Of each Batch API of fleet.yaml that serves the model: whether the work goes there, and why."""
    try:
        engines = config.engines_for(model, endpoint, options)
    except FleetConfigError:
        return []
    return [
        weigh_batches(
            one,
            work,
            deadline_in=asked.target.deadline,
            objective=asked.target.objective,
            rivals=[engine for engine in engines if engine.kind != "batch_api"],
            rented=() if endpoint else asked.ranking.ranked,
            sent_ago=asked.work.started_ago,
        )
        for one in engines
        if one.kind == "batch_api"
    ]


def free_engines(fleet_db: FleetDatabase, engines: Sequence[EngineConfig], dataset: str) -> list[EngineConfig]:
    """Those that no run of another dataset holds now."""
    others = {beat.run_id for beat in fleet_db.runs() if beat.dataset != dataset}
    return [one for one in engines if fleet_db.holder(one.name) not in others]


def with_unpriced_engines(
    asked: PlannerInput,
    engines: Sequence[EngineConfig],
    free: Sequence[EngineConfig],
    work: Workload,
    speeds: Mapping[str, Speed],
    endpoint: str | None,
) -> tuple[PlannerInput, Workload]:
    """The planner's input with engines of fleet.yaml that have no price, and the work with what is assumed of them.

    Runs take them before anything is rented: the first that is `free` alone is planned for, and where time presses all
    that are. They are not where something else can be had, and time presses or others hold them all.
    """
    presses, rents = time_presses(asked.target), bool(asked.options or asked.held) and not endpoint
    if rents and (presses or not free):
        said = (
            f"{', '.join(engine.name for engine in engines)} of fleet.yaml is taken before anything is rented, and is"
        )
        why = "no price of it is known" if free else "other datasets hold it now"
        return asked, _assuming(work, Assumption(Subject.SPEEDS, f"{said} not part of this plan: {why}"))
    taken = list(free or engines)[: None if presses else 1]
    said = f"{', '.join(engine.name for engine in taken)}: without a price it costs nothing here"
    options = unpriced_options(taken, work, speeds)
    return replace(asked, options=options, held=(), measured=True), _assuming(work, Assumption(Subject.SPEEDS, said))


def with_price_of_user(work: Workload, spec: GeneratedDatasetSpec, config: FleetConfig) -> Workload:
    """The work with the price of the engine that plays the user, where that is one of its own."""
    user = spec.prompt.user_model
    if work.user is None or user is None or user.engine is None or user.model is None:
        return work
    try:
        engine = config.user_engine(user.engine, user.model)
    except FleetConfigError:  # a run says it
        return work
    return replace(work, user=replace(work.user, price=engine.token_price or FREE, engine=engine.name))


def _assuming(work: Workload, *more: Assumption) -> Workload:
    return replace(work, assumptions=(*work.assumptions, *more))


def _unmeasured(plan: Plan, wanted: Target) -> list[Assumption]:
    """What a budget means where nobody has measured how fast the planned instances are."""
    names = [option.name for option, _ in plan.fleet if option.is_unmeasured and option.usd_per_hour > 0]
    if wanted.budget_usd is None or not names:
        return []
    said = f"the speed of {', '.join(names)} is estimated, not measured: within this budget a run may begin and pause"
    return [Assumption(Subject.SPEEDS, f"{said} later")]


def time_presses(wanted: Target) -> bool:
    """Whether time does."""
    return wanted.deadline is not None or wanted.objective == "fastest"


def _less(option: PlannedOffer, taken: int) -> PlannedOffer:
    if not taken or option.capacity is None:
        return option
    return replace(option, capacity=max(0, option.capacity - taken))


@dataclass(frozen=True, slots=True)
class PlannedSpeed:
    """How fast one instance of an offer, or an engine of fleet.yaml (`stands`), is taken to be, on its own clock."""

    offer: str
    speed: Speed
    stands: bool

    @property
    def basis(self) -> str:
        """`assumed` of an engine that was never used; else as in `Speed`."""
        return "assumed" if self.stands and self.speed.basis == "estimate" else self.speed.basis

    def describe(self) -> str:
        """For people."""
        rows = "1 row" if self.speed.rows == 1 else f"{self.speed.rows:,} rows"
        said = {
            "measured": f"measured on {rows}",
            "scaled": f"measured on {rows} of other lengths and carried over",
            "estimate": "estimated, not measured",
            "assumed": "assumed, as no run has measured it",
        }
        return f"{self.offer}: {self.speed.tokens_per_second:,.0f} tokens/s, {said[self.basis]}"


@dataclass(frozen=True, slots=True)
class Proposal:
    """What could be done now; nothing is rented for it. `request`, `spend`: of the request under way, if any.

    `clocks`: simulated seconds per real second, by provider. `batch_apis`: of each Batch API whether it is taken, a
    sentence. `speeds`: of what is planned.
    """

    dataset: str
    work: Workload
    target: Target
    plan: Plan
    held: tuple[HeldInstance, ...]
    request: str
    spend: Spend | None
    problems: tuple[str, ...]
    clocks: Mapping[str, float]
    batch_apis: tuple[str, ...] = ()
    speeds: tuple[PlannedSpeed, ...] = ()


def propose(
    around: FleetView,
    fleet_db: FleetDatabase,
    spec: GeneratedDatasetSpec,
    work: Workload,
    tags: Mapping[str, str],
    timing: ControlTiming,
    request: DatasetTarget | None = None,
) -> Proposal:
    """Plan for the work that is left; where nothing is, for all of it. `request`: the one under way; None: for a new
    one, which has spent nothing. `tags`: wishes that take the place of the spec's and of those of the request.
    `timing`: of the sensor that will decide. Raises InvalidTag."""
    if not work.rows:
        text = f"nothing is left to do: planned as if all {work.all_rows:,} rows were to be done"
        work = replace(_assuming(work, Assumption(Subject.ROWS, text)), rows=work.all_rows)
    spend = fleet_db.spend(spec.name) if request is not None else None
    wanted = wanted_of(spec, tags, request, spend, around.config.max_instances, fleet_db.now())
    wanted = with_idle_tail(around.config, wanted, timing)
    endpoint = tags.get(ENDPOINT_TAG) or os.environ.get(ENDPOINT_VARIABLE)
    asked, work = ask(
        around,
        fleet_db,
        spec,
        work,
        wanted,
        endpoint=endpoint,
        batches=-(-work.rows // spec.batch_rows),
        spread=FIRST_SPREAD if work.output_basis == "measured" else ESTIMATE_SPREAD,
        rows_total=work.all_rows,
        started_ago=request.age if request is not None else 0.0,
    )
    verdicts = batch_verdicts(asked, around.config, work, model=spec.model, endpoint=endpoint, options=spec.engine)
    if work.user is not None and work.user.engine and any(one.row_usd is None for one in asked.options):
        usd = format_usd(work.rows * work.mean_row_usd(None), fine=True)
        text = f"what the user says costs {usd} $ at {work.user.engine}, which is not in the sums of what is rented"
        work = _assuming(work, Assumption(Subject.LENGTHS, text))
    if not asked.held:  # as `gpu_runner.planner.controller.decide` begins
        wanted = replace(wanted, reserve_seconds=timing.reserve)
    plan = make_plan(asked.work, asked.options, asked.held, wanted)
    plan = in_detail(plan, asked.work, asked.options, asked.held, wanted)
    work = _assuming(work, *_unmeasured(plan, wanted))
    name, said = request.request if request is not None else "", tuple(one.describe() for one in verdicts)
    problems, speeds = around.market.stock().problems, planned_speeds(plan, asked)
    return Proposal(spec.name, work, wanted, plan, asked.held, name, spend, problems, around.clocks, said, speeds)


def planned_speeds(plan: Plan, asked: PlannerInput) -> tuple[PlannedSpeed, ...]:
    """How fast what is planned is taken to be; where nothing is, what would be done earliest."""
    one = plan.chosen or plan.earliest
    return tuple(
        PlannedSpeed(option.name, asked.speeds[option.name], option.row_usd is not None)
        for option, _ in (one.fleet if one is not None else ())
        if option.name in asked.speeds
    )


def with_idle_tail(config: FleetConfig, wanted: Target, timing: ControlTiming) -> Target:
    """The target with the seconds that an instance stands idle, and is paid, after its last row.

    One decision of the sensor where time or money is bounded: then nothing stays warm for whoever may come.
    """
    idle = config.idle_minutes * 60
    bounded = wanted.deadline is not None or wanted.budget_usd is not None
    return replace(wanted, idle_seconds=min(idle, timing.tick) if bounded else idle)


def wanted_of(
    spec: GeneratedDatasetSpec,
    tags: Mapping[str, str],
    request: DatasetTarget | None,
    spend: Spend | None,
    most: int,
    now: float,
) -> Target:
    """What is wanted, counted from now: what the tags say, else what the request under way wants, else the spec.

    What the request has spent already is not there any more. Raises InvalidTag.
    """
    said = request_options(spec, tags)
    deadline = said.deadline.at(now) - now if said.deadline else None
    budget, objective, limit = said.budget_usd, said.objective, said.max_instances
    if request is not None:
        deadline = deadline if DEADLINE_TAG in tags else request.deadline_in
        budget = budget if BUDGET_TAG in tags else request.budget_usd
        objective = objective if OBJECTIVE_TAG in tags else cast(Objective, request.objective or objective)
        limit = limit if INSTANCES_TAG in tags else request.max_instances
        budget = None if budget is None else budget - (spend.usd if spend is not None else 0.0)
    return Target(deadline, budget, min(most, limit or most), objective)
