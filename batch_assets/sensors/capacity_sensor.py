"""The capacity sensor: how many instances each dataset may lease now, and why.

It only looks and writes down. What to do is decided in `gpu_runner.planner.controller`; runs obey the fleet's database
by themselves, and Dagster's pools follow. Nothing is remembered here: a second sensor, or one that was killed, finds
all in the fleet's database.
"""

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import dagster as dg

from batch_assets.capacity_planning.capacity_question import CapacityQuestion, ask_planner, decision_of, write_command
from batch_assets.capacity_planning.decision import Decision, observation
from batch_assets.capacity_planning.planner_input import (
    FleetView,
    Markets,
    PlannerInput,
    ask,
    with_idle_tail,
)
from batch_assets.catalog import ledger
from batch_assets.catalog.backfills import last_done_at
from batch_assets.orchestration.active_request import ActiveDataset
from batch_assets.orchestration.assets import set_pool
from batch_assets.orchestration.capacity_report import alerts_of, check_event, done_event, pause_event, requests_fail
from batch_assets.orchestration.request_summary import request_status, summary_of
from batch_assets.sensors.instance import fleet_database_of, instance_of
from batch_assets.sensors.open_datasets import Datasets, Open, OpenDatasets, Seen
from batch_assets.tags import ENDPOINT_TAG
from gpu_runner.fleet_database.capacity_plan import Assignment, Pause, PauseKind
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.targets import DatasetTarget
from gpu_runner.money import round_up_usd
from gpu_runner.offers.offer import Objective
from gpu_runner.planner.budget import needed_usd
from gpu_runner.planner.controller import Command
from gpu_runner.planner.types import ControlTiming, Plan, Target
from resources.alerts import Alert, AlertConfig, Alerts
from resources.fleet.fleet_config import ENDPOINT_VARIABLE
from resources.fleet.resource import FleetConfigError, GpuFleet
from resources.pricing.price_files import PricingError
from resources.store.dataset_store import BatchStore

SPARE_SLOTS = 1
FAILING_SECONDS = 60.0  # for so long all requests of a run fail before operators hear of it


def capacity_sensor(datasets: Callable[[], Datasets], seconds: float) -> dg.SensorDefinition:
    """One sensor for all datasets: those with the earliest deadline are served first. `datasets` is asked each time."""
    ticks = _Ticks(datasets, seconds)

    @dg.sensor(
        name="capacity",
        minimum_interval_seconds=max(1, round(seconds)),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Decides how many instances each dataset may lease: deadline, budget, prices, measured speed.",
    )
    def capacity(context: dg.SensorEvaluationContext, store: BatchStore, fleet: GpuFleet) -> dg.SensorResult:
        return ticks.tick(context, store, fleet)

    return capacity


class _Ticks:
    """The sensor's ticks, and what its process keeps from one to the next to be quick: nothing that decides."""

    def __init__(self, datasets: Callable[[], Datasets], seconds: float) -> None:
        self._open = OpenDatasets(datasets)
        self._markets, self._timing = Markets(), ControlTiming.of_sensor(seconds)

    def tick(self, context: dg.SensorEvaluationContext, store: BatchStore, fleet: GpuFleet) -> dg.SensorResult:
        """Looks at every dataset whose turn it is, and decides for those with open work."""
        announced = _announced(context.cursor)
        events: list[Any] = []
        with fleet_database_of(context, fleet) as fleet_db:
            seen = self._open.look(context, store, fleet_db)
            if seen.questions or seen.over:
                events = self._decide(context, fleet, fleet_db, seen, announced)
        if events:
            context.log.info("; ".join(seen.said))
        reason = "; ".join(seen.said) or "no dataset is being made"
        return dg.SensorResult(skip_reason=reason, asset_events=events, cursor=json.dumps(announced))

    def _decide(
        self,
        context: dg.SensorEvaluationContext,
        fleet: GpuFleet,
        fleet_db: FleetDatabase,
        seen: Seen,
        announced: dict[str, dict[str, Any]],
    ) -> list[Any]:
        """Ends what is over, commands the rest, and returns the events about what is new."""
        try:
            around = FleetView.look(fleet, fleet_db, self._markets)
        except (FleetConfigError, PricingError) as error:
            raise dg.Failure(f"nothing is decided until this is mended: {error}") from None
        events: list[Any] = []
        for target, missing in seen.over:
            events += _finish(context, fleet_db, target, missing)
            if announced.pop(target.dataset, {}).get("paused"):
                events.append(pause_event(target.dataset, None))
        reports = answer(instance_of(context), fleet_db, around, seen.questions, self._timing)
        for report in reports:
            events += _announce(report, announced)
            seen.said.append(f"{report.dataset}: {report.reason}")
        for one in seen.questions:
            if one.open.work is None:  # nothing is decided about a regenerate: its gates pause it
                events += _announce_pause(one.spec.name, one.target.pause, announced)
        ended = [target for target, _ in seen.over]
        more = [*overdue(seen.questions), *failing(seen.questions)]
        _tell(fleet_db, around.config.alerts, reports, ended, more)
        return events


def _announced(cursor: str | None) -> dict[str, dict[str, Any]]:
    """By dataset, what the catalog was told last. Dagster keeps it together with the events: neither is lost alone."""
    try:
        found = json.loads(cursor or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _announce(report: Decision, announced: dict[str, dict[str, Any]]) -> list[Any]:
    """Events about what is new since the last tick."""
    before, leaving = announced.get(report.dataset, {}), sorted(report.command.retire)
    known = before.get("signature") == report.signature and set(leaving) <= set(before.get("leaving", ()))
    events: list[Any] = [] if known else [observation(report, ledger.rows_key(report.dataset))]
    if report.on_time is not None and report.on_time != before.get("on_time"):
        events.append(check_event(report))
    announced[report.dataset] = {
        "signature": report.signature,
        "on_time": report.on_time,
        "leaving": leaving,
        "paused": before.get("paused"),
    }
    return events + _announce_pause(report.dataset, report.command.pause, announced)


def _announce_pause(dataset: str, pause: Pause | None, announced: dict[str, dict[str, Any]]) -> list[Any]:
    """An event where the request is paused by something else than at the last tick, or no more."""
    told = announced.setdefault(dataset, {})
    why = None if pause is None else [pause.kind.value, *(gate for gate, _ in pause.gates)]
    before = told.get("paused") or None
    told["paused"] = why
    return [] if why == before else [pause_event(dataset, pause)]


def overdue(questions: Sequence[Open]) -> list[Alert]:
    """Requests past their deadline of which nothing is planned, because what they make is not missing: a regenerate."""
    late = [one for one in questions if one.open.work is None and (one.target.deadline_in or 0.0) < 0]
    return [Alert("late", one.spec.name, f"{one.spec.name} is late: its runs are under way", {}) for one in late]


def failing(questions: Sequence[Open]) -> list[Alert]:
    """Requests of which a run has had no answer from its engine for FAILING_SECONDS or longer."""
    found = []
    for one in questions:
        waits = [wait for wait in one.open.waits if wait.failure is not None and wait.seconds >= FAILING_SECONDS]
        if waits:
            found.append(requests_fail(one.spec.name, max(waits, key=lambda wait: wait.seconds)))
    return found


def answer(
    instance: dg.DagsterInstance,
    fleet_db: FleetDatabase,
    around: FleetView,
    questions: Sequence[Open],
    timing: ControlTiming,
) -> list[Decision]:
    """Decide for every dataset, the earliest deadline first; write the commands into the database and the pools.

    Each gets what it needs of what is left of the fleet, but one instance is kept for each that comes after it. Those
    without a deadline come last and share equally.
    """
    order = sorted(questions, key=_priority)
    left = around.config.max_instances
    taken: Counter[str] = Counter()
    reports: list[Decision] = []
    for number, question in enumerate(order):
        later = len(order) - number - 1
        share = left - later if question.target.deadline_in is not None else left // (later + 1)
        if question.open.work is None:
            continue  # its runs are under way, and no batch is missing
        report = _answer(fleet_db, around, question, max(1, share), taken, timing)
        left -= report.command.instances
        _count(taken, report)
        set_pool(instance, question.spec.name, slots_for(report.command, question.open))
        reports.append(report)
    return reports


def _priority(one: Open) -> tuple[float, float, str]:
    deadline = one.target.deadline_in
    return math.inf if deadline is None else deadline, one.target.since, one.spec.name


def slots_for(command: Command, found: ActiveDataset) -> int:
    """Runs that may be under way at once: one for each instance, one that stands ready, none without a batch."""
    return max(1, min(command.instances + SPARE_SLOTS, found.batches))


def _count(taken: Counter[str], report: Decision) -> None:
    """What this dataset is about to rent is not there for those after it."""
    held = Counter(one.option.name for one in report.held)
    for name, count in report.command.offers:
        taken[name] += max(0, count - held[name])


def _answer(
    fleet_db: FleetDatabase, around: FleetView, question: Open, share: int, taken: Counter[str], timing: ControlTiming
) -> Decision:
    spec, found, target = question.planned, question.open, question.target
    assert found.work is not None
    spend = fleet_db.spend(spec.name)
    rows_total = max(found.work.rows, target.plan.rows_total if target.plan else 0)
    endpoint = found.tags.get(ENDPOINT_TAG) or os.environ.get(ENDPOINT_VARIABLE)
    wanted = with_idle_tail(around.config, _wanted(question, share, spend.usd), timing)
    asked = _asked(fleet_db, around, question, wanted, rows_total, taken, endpoint)
    capacity = CapacityQuestion(
        dataset=spec.name,
        model=spec.model,
        options=spec.engine,
        asked=asked,
        target=target,
        work=found.work,
        rows_total=rows_total,
        units=found.units,
        pilots=spec.pilots,
        room=max(0, around.config.max_instances - len(around.instances)),
        timing=timing,
        endpoint=endpoint,
    )
    report = decision_of(fleet_db, around, capacity, ask_planner(capacity))
    if not asked.held:
        report.command = _unless_refused(report.command, question, spend.usd, report.plan, timing)
    report.command = _with_enough(report.command, spend.usd)
    if target.pause is not None and target.pause.kind is PauseKind.QUALITY:
        report.command = paused_by_gates(target.pause, [one.name for one in around.of(spec.name)])
    report.idle = around.idle(spec.name, timing.tick) if _bounded(target) else ()
    return _write(fleet_db, report)


def _asked(
    fleet_db: FleetDatabase,
    around: FleetView,
    question: Open,
    wanted: Target,
    rows_total: int,
    taken: Counter[str],
    endpoint: str | None,
) -> PlannerInput:
    """What the planner is asked."""
    found = question.open
    assert found.work is not None
    asked, _ = ask(
        around,
        fleet_db,
        question.planned,
        found.work,
        wanted,
        endpoint=endpoint,
        batches=found.units,
        spread=found.spread,
        rows_total=rows_total,
        started_ago=question.target.age,
        taken=taken,
    )
    return asked


def _wanted(question: Open, share: int, spent_usd: float) -> Target:
    """What the request asks for, with at most this share of the fleet."""
    spec, target = question.spec, question.target
    return Target(
        deadline=target.deadline_in,
        budget_usd=None if target.budget_usd is None else target.budget_usd - spent_usd,
        max_instances=min(share, target.max_instances or share),
        objective=cast(Objective, target.objective or spec.objective),
    )


def _unless_refused(command: Command, question: Open, spent: float, plan: Plan, timing: ControlTiming) -> Command:
    """A pause where the fleet's database refused this budget a first instance: it holds the budget to the cent, and
    knows better than the plan what one may cost. What it said of another budget, before it was raised, counts no more.
    """
    budget = question.target.budget_usd
    refusals = [wait.refusal for wait in question.open.waits if wait.refusal is not None]
    refused = None if budget is None else next((one for one in refusals if one.budget_usd == budget), None)
    if refused is None:
        return command
    enough = refused.enough_usd - spent
    if plan.chosen is not None:
        enough = max(enough, needed_usd(plan.chosen, timing.reserve))
    elif plan.least_usd is not None:
        enough = max(enough, plan.least_usd)
    return dataclasses.replace(command, pause=Pause(PauseKind.LEASE_REFUSED, refused.words(), enough), kind="paused")


def paused_by_gates(pause: Pause, held: Sequence[str]) -> Command:
    """Nothing is leased until somebody has accepted the gates, and what is held, by name, ends."""
    drained = tuple(Assignment(name) for name in held)
    return Command(0, (), tuple(held), pause=pause, kind="paused", reason=pause.text, assignments=drained)


def _with_enough(command: Command, spent: float) -> Command:
    """The command whose pause names what would be enough since the request began, not from now on."""
    if command.pause is None or command.pause.enough_usd is None:
        return command
    enough = round_up_usd(spent + command.pause.enough_usd)
    return dataclasses.replace(command, pause=dataclasses.replace(command.pause, enough_usd=enough))


def _write(fleet_db: FleetDatabase, report: Decision) -> Decision:
    command = report.command
    if not write_command(fleet_db, report):
        return report  # another sensor has begun another request meanwhile
    # What has a successor is left by its run once that one answers; the rest of what is given up is drained now.
    idle = report.idle[: max(0, len(report.held) + len(report.idle) - command.instances)]
    for name in (*report.drained, *idle):
        fleet_db.retire(name, command.reason)
    return report


def _tell(
    fleet_db: FleetDatabase,
    config: AlertConfig | None,
    reports: Sequence[Decision],
    ended: Sequence[DatasetTarget],
    more: Sequence[Alert],
) -> None:
    """Alerts, after all commands: a webhook that hangs holds up no instance. The database keeps what was told."""
    if config is None:
        return
    now = fleet_db.now()
    targets = (*(report.target for report in reports), *ended)
    state = {one.dataset: one.memory.alerts for one in targets if one.memory.alerts}
    alerts = [*more, *(alert for report in reports for alert in alerts_of(report))]
    alerts += [Alert("on_time", one.dataset, f"{one.dataset}: the request has ended") for one in ended]
    Alerts(config, state, clock=lambda: now).tell(alerts)
    for report in reports:
        if (told := state.get(report.dataset, ())) != report.memory.alerts:
            report.memory = dataclasses.replace(report.memory, alerts=told)
            fleet_db.remember(report.dataset, report.target.request, report.memory)


def _bounded(target: DatasetTarget) -> bool:
    """Time or money of the request are bounded: then nothing stays warm for whoever may come."""
    return target.deadline_at is not None or target.budget_usd is not None


def _finish(
    context: dg.SensorEvaluationContext, fleet_db: FleetDatabase, target: DatasetTarget, missing: int
) -> list[dg.AssetObservation]:
    """Nothing more is made: one instance may be leased again. Warm ones that the dataset pays for end at once where
    time or money was bounded, so that they cost nothing beyond the budget; else when they are idle for long enough.
    Where the last rows of others are in flight, they end with these."""
    if _bounded(target):
        for one in fleet_db.fleet():
            if one.payer == target.dataset and one.lease is None:
                fleet_db.retire(one.name, "the request has ended")
    done = _done_at(context, fleet_db, target, missing)
    met = None if target.deadline_at is None or missing else done <= target.deadline_at
    status = request_status(fleet_db, target.dataset)
    ended = summary_of(status, finished_at=done, on_time=met, missing=missing)
    if not fleet_db.end_request(target.dataset, target.request, ended):
        return []
    set_pool(instance_of(context), target.dataset, 1 + SPARE_SLOTS)
    lasted = dataclasses.replace(target, age=done - target.since)
    return [] if target.updated_age is None else [done_event(lasted, ended, done)]


def _done_at(
    context: dg.SensorEvaluationContext, fleet_db: FleetDatabase, target: DatasetTarget, missing: int
) -> float:
    """When the request was over, in Unix seconds: where Dagster ended together with it, long before this tick."""
    now = fleet_db.now()
    last = None if missing else last_done_at(instance_of(context), target.dataset, target.request)
    return now if last is None else min(now, max(target.since, last))
