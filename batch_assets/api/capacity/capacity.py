"""How many engines the front door may have of each model: what the capacity sensor does for datasets, for batches.

The path is the same: work, windows, budgets and offers go to the planner, its command into the fleet's database under
`api/MODEL`, and leases obey that. Nothing of it is remembered here: another replica, or the next process, goes on from
the database. The replica that holds a model's oldest open batch decides for it; when two take themselves for that one
for a moment, each writes what is right by what it sees.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import dagster as dg

from batch_assets.api.billing.margin import FLEET_PREFIX, fleet_name
from batch_assets.api.billing.spending import BUDGET, SpendingRecords
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.capacity.backlog import Backlog, BatchBudgets, backlogs, with_work
from batch_assets.api.capacity.early_speeds import at_slow_speed, is_too_late_to_measure, until_measured
from batch_assets.api.capacity.line_lengths import LineLengths
from batch_assets.api.capacity.windows import Demand, binding_demand, demands_of
from batch_assets.api.database.batch_records import BatchRecord
from batch_assets.api.execution.catalog import KEY
from batch_assets.capacity_planning.capacity_question import (
    Answer,
    CapacityQuestion,
    ask_planner,
    decision_of,
    write_command,
)
from batch_assets.capacity_planning.decision import Decision, observation
from batch_assets.capacity_planning.planner_input import FleetView, Markets, PlannerInput, build_input
from batch_assets.spec.hardware import HardwareSpec
from gpu_runner.fleet_database.capacity_plan import RequestSummary
from gpu_runner.fleet_database.database import FleetDatabase, FleetDatabaseError, Instance
from gpu_runner.fleet_database.targets import DatasetTarget
from gpu_runner.planner.controller import Command
from gpu_runner.planner.types import ControlTiming, Target
from gpu_runner.rows import Task
from resources.engine_options import PLAIN, EngineOptions
from resources.fleet.resource import FleetConfigError, GpuFleet
from resources.objects.opening import Objects
from resources.pricing.model_catalog import DeclaredModel
from resources.pricing.price_files import PricingError

log = logging.getLogger(__name__)

IDLE_SECONDS = 30.0  # without open batches, until a model's instances beyond its reserve end
PILOTS = 3  # as of a dataset that does not say
ROWS_OF_ENGINE = 32  # an engine for fewer lines has too little to do at once: a feed gives any line to any engine
NOT_MEASURED_IN_TIME = "no speed can be measured in time to add engines, so slow ones (P95) are counted on"

Engines = Mapping[tuple[str, Task], int]


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """What is planned: a model, under its name in the fleet."""

    name: str
    model: str
    task: Task
    hardware: HardwareSpec = field(default_factory=HardwareSpec)
    engine: EngineOptions = PLAIN

    def declared(self, model: str) -> DeclaredModel | None:
        """Nothing is stated of a model that callers of the service name."""
        return None


@dataclass(frozen=True, slots=True)
class _Idle:
    """Since when (`steady`) a model has no open batch, while its plan is that of `planned_at`."""

    since: float
    planned_at: float | None


class ModelCapacity:
    """Called often, by one thread; decides for a model every `seconds`, and at once for one that had no batches.

    `reserve`: the least number of engines by model. `clock`: Unix seconds; `steady`: seconds that never jump.
    `decided` hears of every new decision.
    """

    def __init__(
        self,
        fleet: GpuFleet,
        objects: Objects,
        ledger: UsageLedger,
        spending: SpendingRecords,
        reserve: Mapping[str, int],
        seconds: float,
        *,
        decided: Callable[[dg.AssetObservation], None],
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._spending = fleet, spending
        self._reserve = {fleet_name(model): number for model, number in reserve.items()}
        self._seconds, self._timing = seconds, ControlTiming.of_sensor(seconds)
        self._decided, self._clock, self._steady = decided, clock, steady
        self._lengths, self._markets = LineLengths(objects, ledger), Markets()
        self._decided_at: dict[str, float] = {}
        self._failed: set[str] = set()  # of which nothing could be planned: tried again in their turn
        self._idle: dict[str, _Idle] = {}
        self._announced: dict[str, str] = {}
        self._nothing_open = False  # at the last look, neither here nor in the fleet's database

    def look(self, open_batches: Sequence[BatchRecord], mine: Collection[str]) -> Engines:
        """How many engines each feed of a worker may have that holds the batches `mine`. Blocks: the fleet's database,
        offers. Raises what they raise. Feeds that are not named need no more than their reserve. 0: lines of other
        feeds need what is leased, and engines of the same kind are shared.
        """
        budgeted = [one.id for one in open_batches if BUDGET in one.metadata_values()]
        spent, now = self._spending.read(budgeted), self._clock()
        records = with_work(open_batches, spent, now)
        if not records and self._nothing_open:
            return {}
        found = backlogs(records, self._lengths.of(records), spent, now)
        with self._fleet.open_database() as fleet_db:
            targets = {one.dataset: one for one in fleet_db.targets() if one.dataset.startswith(FLEET_PREFIX)}
            under_way = {name: one for name, one in targets.items() if one.request}
            named = {fleet_name(one.model): one for one in found}
            self._end_idle(fleet_db, [one for name, one in under_way.items() if name not in named])
            due = [one for one in found if one.first in mine and self._is_due(fleet_name(one.model), under_way)]
            if due:
                self._decide_all(fleet_db, due, targets)
                targets |= {one.dataset: one for one in fleet_db.targets()}
            self._nothing_open = not found and not under_way
        engines: dict[tuple[str, Task], int] = {}
        for name, backlog in named.items():
            shares = backlog.shares(mine, self._instances(name, targets))
            engines |= {(backlog.model, task): shares.get(task, 0) for task in {*backlog.served_tasks, *shares}}
        return engines

    def _instances(self, name: str, targets: Mapping[str, DatasetTarget]) -> int:
        target = targets.get(name)
        planned = target.instances if target is not None and target.request else 1
        return max(planned, self._reserve.get(name, 1), 1)

    def _is_due(self, name: str, under_way: Collection[str]) -> bool:
        if name not in under_way and name not in self._failed:
            return True
        return self._steady() - self._decided_at.get(name, float("-inf")) >= self._seconds

    def _end_idle(self, fleet_db: FleetDatabase, over: Sequence[DatasetTarget]) -> None:
        """What has no open batch. A replica may have planned for one that opened after this look read the records: the
        time begins again with each plan."""
        now, before = self._steady(), self._idle
        self._idle = {}
        for target in over:
            name = target.dataset
            planned_at = None if target.plan is None else target.plan.planned_at
            idle = before.get(name)
            if idle is None or idle.planned_at != planned_at:
                idle = _Idle(now, planned_at)
            if now - idle.since < IDLE_SECONDS:
                self._idle[name] = idle
                continue
            end_model(fleet_db, target, self._reserve.get(name, 0))
            self._announced.pop(name, None)

    def _decide_all(
        self, fleet_db: FleetDatabase, due: Sequence[Backlog], targets: Mapping[str, DatasetTarget]
    ) -> None:
        """The model with the earliest window first; those after it have what is left. One that cannot be planned keeps
        what it has."""
        try:
            around = FleetView.look(self._fleet, fleet_db, self._markets)
        except (FleetConfigError, PricingError) as error:
            log.warning("nothing is planned for batches until this is mended: %s", error)
            for backlog in due:
                self._note_failed(fleet_name(backlog.model))
            return
        taken: Counter[str] = Counter()
        left = max(0, around.config.max_instances - len(around.instances))
        for backlog in due:
            name = fleet_name(backlog.model)
            self._decided_at[name] = self._steady()
            try:
                decision = self._decide(fleet_db, around, backlog, targets.get(name), taken, left)
            except FleetDatabaseError:
                raise
            except Exception as error:  # of one model: the others are planned
                log.error(
                    "model %s: its engines are not planned: %s", backlog.model, type(error).__name__, exc_info=error
                )
                self._note_failed(name)
                continue
            self._failed.discard(name)
            if decision is None:
                continue
            new = Counter(dict(decision.command.offers))
            new.subtract(one.option.name for one in decision.held)
            taken.update({offer: count for offer, count in new.items() if count > 0})
            left = max(0, left - max(0, decision.command.instances - len(decision.held)))
            self._tell(decision, backlog.model)

    def _note_failed(self, name: str) -> None:
        self._failed.add(name)
        self._decided_at[name] = self._steady()

    def _decide(
        self,
        fleet_db: FleetDatabase,
        around: FleetView,
        backlog: Backlog,
        before: DatasetTarget | None,
        taken: Counter[str],
        room: int,
    ) -> Decision | None:
        """Ask the planner about the binding window; write its command. None: no window can be kept any more."""
        need = ModelNeed(fleet_name(backlog.model), backlog.model, backlog.task)
        work, total = backlog.workload, backlog.workload.all_rows
        units = _units(work.rows)
        asked = build_input(
            around, need, work, Target(), batches=units, spread=backlog.spread, rows_total=total, taken=taken
        )
        timing = self._timing_of(asked, work.mix.tokens)
        boots = [one.boot_seconds for one in asked.options if one.capacity != 0 and one.tokens_per_second > 0]
        demand = binding_demand(demands_of(backlog.windows), asked.held, min(boots, default=0.0))
        if demand is None:
            return None
        request = before.request if before is not None and before.request else f"batches since {backlog.first}"
        deadline_at = fleet_db.now() + demand.seconds
        target = fleet_db.begin_request(need.name, request, deadline_at=deadline_at, objective="cheapest")
        most = max(1, len(around.of(need.name)) + room)
        asked = _bound(asked, demand, _budget_usd(fleet_db, target, backlog.budget), most)
        question = CapacityQuestion(
            dataset=need.name,
            model=need.model,
            asked=asked,
            target=target,
            work=work,
            rows_total=total,
            units=asked.work.units,
            pilots=PILOTS,
            room=room,
            timing=timing,
            most=most,  # engines that stand already boot no more
            detail=False,  # the curve is most of the time, and this process answers requests too
        )
        decision = decision_of(fleet_db, around, question, _in_time(question))
        least = max(1, self._reserve.get(need.name, 0), backlog.feeds)
        decision.command = at_least(decision.command, [one.instance for one in asked.held], least)
        _write(fleet_db, decision)
        return decision

    def _timing_of(self, asked: PlannerInput, tokens: float) -> ControlTiming:
        measuring = max(self._timing.measuring, until_measured(asked, tokens))
        return replace(self._timing, measuring=measuring)

    def _tell(self, decision: Decision, model: str) -> None:
        """Into the catalog, once for each new command."""
        if self._announced.get(decision.dataset) == decision.signature:
            return
        self._announced[decision.dataset] = decision.signature
        said = observation(decision, KEY)
        log.info("model %s: %s", model, decision.reason)
        metadata = {**said.metadata, "model": dg.MetadataValue.text(model)}
        self._decided(dg.AssetObservation(KEY, description=f"{model}: {decision.reason}", metadata=metadata))


def _in_time(question: CapacityQuestion) -> Answer:
    """The planner's answer; with slow speeds where it is too late to measure any."""
    answer = ask_planner(question)
    if not is_too_late_to_measure(question.asked, answer[0], question.timing):
        return answer
    command, state, plan = ask_planner(replace(question, asked=at_slow_speed(question.asked)))
    return replace(command, reason=f"{NOT_MEASURED_IN_TIME}; {command.reason}"), state, plan


def _units(rows: int) -> int:
    return -(-rows // ROWS_OF_ENGINE)


def _bound(asked: PlannerInput, demand: Demand, budget_usd: float | None, most: int) -> PlannerInput:
    """The question about one demand. Where no new instance would answer before its end, none is asked for."""
    most = most if demand.helped else max(1, min(most, len(asked.held)))
    work = replace(asked.work, tokens=demand.tokens, units=_units(demand.rows))
    return replace(asked, work=work, target=Target(demand.seconds, budget_usd, most))


def _budget_usd(fleet_db: FleetDatabase, target: DatasetTarget, budget: BatchBudgets | None) -> float | None:
    """What engines may still cost; None: no batch is to be kept from them by its budget."""
    if budget is None:
        return None
    paid = [one for one in fleet_db.charges(target.since) if one.dataset == target.dataset]
    tokens = sum(one.prompt_tokens + one.completion_tokens for one in paid)
    return budget.left_beside(sum(one.usd.total for one in paid), tokens)


def _write(fleet_db: FleetDatabase, decision: Decision) -> None:
    """The command, and what ends by it; nothing where it is another request's by now.

    An instance that is given up works on where its successor has room beside it. Else it ends at once, and a feed takes
    the successor in its place: leases of the front door do not move from one instance to another.
    """
    if not write_command(fleet_db, decision):
        log.info("model %s: another replica has begun another request", decision.dataset)
        return
    for one in decision.command.assignments:
        if not one.beside:
            fleet_db.retire(one.instance, decision.reason)


def at_least(command: Command, held: Sequence[str], least: int) -> Command:
    """The command with no fewer instances than that, of those `held` first, whatever a budget or the plan says.

    A first engine is what serves a model at all; budgets of batches bound what is rented beyond it.
    """
    if command.instances >= least:
        return command
    ended = [name for name in command.retire if name in held]
    kept = frozenset(ended[: max(0, least - (len(held) - len(ended)))])
    words = f"{least} stay: the reserve of the model, and one for each kind of task"
    return replace(
        command,
        instances=least,
        pause=None,
        retire=tuple(name for name in command.retire if name not in kept),
        replaced=tuple(name for name in command.replaced if name not in kept),
        assignments=tuple(one for one in command.assignments if one.instance not in kept),
        reason=f"{words}; {command.reason}",
    )


def end_model(fleet_db: FleetDatabase, target: DatasetTarget, reserve: int) -> bool:
    """No batch is open: what the model pays for ends at once, one instance or the reserve when it is idle for long.

    False: its request is another one by now.
    """
    spent, now = fleet_db.spend(target.dataset), fleet_db.now()
    summary = RequestSummary(
        request=target.request,
        finished_at=now,
        usd_spent=spent.usd,
        instances=max(1, reserve),
        reason="no batch is open",
    )
    if not fleet_db.end_request(target.dataset, target.request, summary):
        return False
    if reserve > 1:
        fleet_db.set_instances(target.dataset, reserve)
    mine = sorted((one for one in fleet_db.fleet() if _stands_for(one, target.dataset)), key=_leaves_last)
    for one in mine[max(1, reserve) :]:
        fleet_db.retire(one.name, "no batch is open")
    return True


def _stands_for(one: Instance, dataset: str) -> bool:
    return one.payer == dataset and not one.retiring and one.state in ("intent", "booting", "ready")


def _leaves_last(one: Instance) -> tuple[bool, bool, float]:
    """Leased and ready ones first, the cheapest of them."""
    return not one.leased, one.state != "ready", one.price_per_hour
