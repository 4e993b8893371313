"""How many instances of what: the question about one dataset, or about one model of the service, and its decision.

Who asks says what is left to do and by when; the planner's answer becomes a decision here, and the fleet's database
gets it. What an asker adds (what a refused budget means, a least number of engines) it adds to the decision's command.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from batch_assets.capacity_planning.decision import Decision, capacity_plan
from batch_assets.capacity_planning.planner_input import FleetView, PlannerInput
from batch_assets.capacity_planning.standing_engines import with_standing_engines
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.targets import DatasetTarget
from gpu_runner.offers.workload import Workload
from gpu_runner.planner.controller import Command, ControllerState, decide
from gpu_runner.planner.types import ControlTiming, Plan
from resources.engine_options import PLAIN, EngineOptions

Answer = tuple[Command, ControllerState, Plan]


@dataclass(frozen=True, slots=True)
class CapacityQuestion:
    """`dataset`: its name in the fleet. `work` is left; `rows_total` when the request began. `units`: most engines that
    have work. `room`: instances that the fleet may have besides those that it has. `most`: engines that stand in
    fleet.yaml and instances together, None: as many as the target allows. `detail`: also the other fleets that were
    considered.
    """

    dataset: str
    model: str
    asked: PlannerInput
    target: DatasetTarget
    work: Workload
    rows_total: int
    units: int
    pilots: int
    room: int
    timing: ControlTiming
    most: int | None = None
    endpoint: str | None = None
    options: EngineOptions = PLAIN
    detail: bool = True


def ask_planner(question: CapacityQuestion) -> Answer:
    """What the controller says. Pure."""
    asked = question.asked
    return decide(
        asked.work,
        asked.options,
        asked.held,
        asked.target,
        question.target.memory.controller,
        measured=asked.measured,
        pilots=question.pilots,
        detail=question.detail,
        timing=question.timing,
        room=question.room,
    )


def decision_of(fleet_db: FleetDatabase, around: FleetView, question: CapacityQuestion, answer: Answer) -> Decision:
    """The answer, with engines that stand in fleet.yaml, and all that it rests on."""
    command, state, plan = answer
    asked, wanted = question.asked, question.asked.target
    most = wanted.max_instances if question.most is None else question.most
    command = with_standing_engines(
        fleet_db,
        around.config,
        command,
        replace(wanted, max_instances=most),
        dataset=question.dataset,
        model=question.model,
        endpoint=question.endpoint,
        options=question.options,
        units=question.units,
        rents=bool(asked.held) or any(one.row_usd is None for one in asked.options),
        planned=[one.name for one in asked.options],
    )
    return Decision(
        dataset=question.dataset,
        work=question.work,
        target=question.target,
        command=command,
        plan=plan,
        held=asked.held,
        idle=(),
        wanted=wanted,
        spend=fleet_db.spend(question.dataset),
        now=around.seen_at,
        rows_total=question.rows_total,
        clocks=around.clocks,
        memory=replace(question.target.memory, controller=state),
    )


def write_command(fleet_db: FleetDatabase, decision: Decision) -> bool:
    """Leases obey it from now on. False: another request has begun meanwhile, and it is not written."""
    command, target = decision.command, decision.target
    return fleet_db.command(
        target.dataset,
        target.request,
        command.instances,
        command.offers,
        command.pause,
        decision.memory,
        capacity_plan(decision),
        decided_at=decision.now,
    )
