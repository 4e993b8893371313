"""The capacity sensor: how many instances each dataset may lease now, and why (DESIGN section 8).

It only looks and writes down. What to do is decided in `gpu_runner.capacity`; runs obey the books by themselves, and
Dagster's pools follow. Nothing is remembered here: a second sensor, or one that was killed, finds all in the books.
"""

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import dagster as dg

from batch_assets.assets import set_pool
from batch_assets.backfills import datasets_with_backfills
from batch_assets.capacity_report import Report, alerts_of, check_event, done_event, figures, observation
from batch_assets.launcher import ENDPOINT_TAG
from batch_assets.open_work import OpenWork, WorkWatcher
from batch_assets.planning import Markets, Surroundings, ask
from batch_assets.spec import GeneratedDatasetSpec
from batch_assets.spec_errors import SpecError
from batch_assets.status import request_status
from batch_assets.turns import Turns
from batch_assets.wishes import WishError, begin
from gpu_runner.budget import no_room
from gpu_runner.capacity import Command, Memory, decide
from gpu_runner.fleet import FleetBook
from gpu_runner.offers import Objective
from gpu_runner.pilots import Pace
from gpu_runner.planner import Target
from gpu_runner.targets import DatasetTarget
from resources.alerts import Alert, AlertConfig, Alerts
from resources.fleet import FleetConfigError, GpuFleet
from resources.objects import StoreError
from resources.price_files import PricingError
from resources.store import BatchStore

Datasets = Mapping[str, tuple[GeneratedDatasetSpec, Path]]
SPARE_SLOTS = 1
LOOK_SECONDS = 20.0  # for datasets without open work, of a sensor's 60 s
WAITING = "waiting: paused: "  # how the note of a run begins that may lease nothing (resources/renting.py)


@dataclass(frozen=True, slots=True)
class Open:
    """One dataset with open work, and what is wanted of it."""

    spec: GeneratedDatasetSpec
    open: OpenWork
    target: DatasetTarget


def capacity_sensor(datasets: Callable[[], Datasets], seconds: float) -> dg.SensorDefinition:
    """One sensor for all datasets: those with the earliest deadline are served first. `datasets` is asked each time."""
    watchers: dict[str, tuple[GeneratedDatasetSpec, WorkWatcher]] = {}
    known: dict[str, Datasets] = {}
    markets, pace, turns = Markets(), Pace.of_sensor(seconds), Turns()

    def watcher(spec: GeneratedDatasetSpec, folder: Path, store: BatchStore) -> WorkWatcher:
        if spec.name not in watchers or watchers[spec.name][0] != spec:
            watchers[spec.name] = spec, WorkWatcher(spec, store.for_sensor(spec.name), folder)
        return watchers[spec.name][1]

    @dg.sensor(
        name="capacity",
        minimum_interval_seconds=max(1, round(seconds)),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Decides how many instances each dataset may lease: deadline, budget, prices, measured speed.",
    )
    def capacity(context: dg.SensorEvaluationContext, store: BatchStore, fleet: GpuFleet) -> dg.SensorResult:
        try:
            known["now"] = datasets()
        except SpecError as error:
            context.log.warning(f"the datasets as they were before: {error}")
        announced = _announced(context.cursor)
        events: list[Any] = []
        said: list[str] = []
        with fleet.open_book() as book:
            beats = book.runs()
            questions: list[Open] = []
            over: list[tuple[DatasetTarget, int]] = []
            targets = {target.dataset: target for target in book.targets()}
            working = {name for name, target in targets.items() if target.request}
            due = working | datasets_with_backfills(context.instance)
            due |= set(turns.due(context.instance, known.get("now", {})))
            began, specs = time.monotonic(), known.get("now", {})
            for name in sorted(due & specs.keys(), key=lambda one: (one not in working, turns.order(one))):
                took = time.monotonic() - began
                if took > LOOK_SECONDS:
                    if name in working:  # its command stands; the store is slow, or does not answer
                        said.append(f"{name} could not be looked at: no time was left")
                    continue  # the rest at the next tick; a new process looks at all of them once
                spec, folder = specs[name]
                target, watching = targets.get(name), watcher(spec, folder, store)
                try:
                    found = watching.look(context.instance, beats, target)
                except StoreError as error:
                    said.append(f"{name} {turns.failed(name, error)}")
                    context.log.warning(said[-1])
                    continue
                except Exception as error:  # of one dataset: the others are looked after
                    said.append(f"{name} {turns.failed(name, error)}")
                    context.log.exception(said[-1])
                    continue
                turns.looked(name, "settled" if found is None else "open")
                if found is not None:
                    questions.append(Open(spec, found, _begin(context, book, spec, found)))
                elif target is not None and target.request:
                    over.append((target, watching.missing))
            if questions or over:
                try:
                    around = Surroundings.look(fleet, book, markets)
                except (FleetConfigError, PricingError) as error:
                    raise dg.Failure(f"nothing is decided until this is mended: {error}") from None
                for target, missing in over:
                    events += _finish(context, book, target, missing)
                    announced.pop(target.dataset, None)
                reports = answer(context.instance, book, around, questions, pace)
                for report in reports:
                    events += _announce(report, announced)
                    said.append(f"{report.dataset}: {report.reason}")
                _tell(book, around.config.alerts, reports, [target for target, _ in over], overdue(questions))
        if events:
            context.log.info("; ".join(said))
        reason = "; ".join(said) or "no dataset is being made"
        return dg.SensorResult(skip_reason=reason, asset_events=events, cursor=json.dumps(announced))

    return capacity


def _announced(cursor: str | None) -> dict[str, dict[str, Any]]:
    """By dataset, what the catalog was told last. Dagster keeps it together with the events: neither is lost alone."""
    try:
        found = json.loads(cursor or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _announce(report: Report, announced: dict[str, dict[str, Any]]) -> list[Any]:
    """Events about what is new since the last tick."""
    before, leaving = announced.get(report.dataset, {}), sorted(report.command.retire)
    known = before.get("signature") == report.signature and set(leaving) <= set(before.get("leaving", ()))
    events: list[Any] = [] if known else [observation(report)]
    if report.on_time is not None and report.on_time != before.get("on_time"):
        events.append(check_event(report))
    announced[report.dataset] = {"signature": report.signature, "on_time": report.on_time, "leaving": leaving}
    return events


def overdue(questions: Sequence[Open]) -> list[Alert]:
    """Requests past their deadline of which nothing is planned, because what they make is not missing: a regenerate."""
    late = [one for one in questions if one.open.work is None and (one.target.deadline_in or 0.0) < 0]
    return [Alert("late", one.spec.name, f"{one.spec.name} is late: its runs are under way", {}) for one in late]


def _begin(
    context: dg.SensorEvaluationContext, book: FleetBook, spec: GeneratedDatasetSpec, found: OpenWork
) -> DatasetTarget:
    try:
        return begin(book, spec, found.request, found.tags)
    except WishError as error:
        context.log.warning(f"{spec.name}: {error}; it is left out")
        return begin(book, spec, found.request, {})


def answer(
    instance: dg.DagsterInstance, book: FleetBook, around: Surroundings, questions: Sequence[Open], pace: Pace
) -> list[Report]:
    """Decide for every dataset, the earliest deadline first; write the commands into the books and into the pools.

    Each gets what it needs of what is left of the fleet, but one instance is kept for each that comes after it. Those
    without a deadline come last and share equally.
    """
    order = sorted(questions, key=_urgency)
    left = around.config.max_instances
    taken: Counter[str] = Counter()
    reports: list[Report] = []
    for number, question in enumerate(order):
        later = len(order) - number - 1
        share = left - later if question.target.deadline_in is not None else left // (later + 1)
        if question.open.work is None:
            continue  # its runs are under way, and no batch is missing
        report = _answer(book, around, question, max(1, share), taken, pace)
        left -= report.command.instances
        _count(taken, report)
        set_pool(instance, question.spec.name, slots_for(report.command, question.open))
        reports.append(report)
    return reports


def _urgency(one: Open) -> tuple[float, float, str]:
    deadline = one.target.deadline_in
    return math.inf if deadline is None else deadline, one.target.since, one.spec.name


def slots_for(command: Command, found: OpenWork) -> int:
    """Runs that may be under way at once: one for each instance, one that stands ready, none without a batch."""
    return max(1, min(command.instances + SPARE_SLOTS, found.batches))


def _count(taken: Counter[str], report: Report) -> None:
    """What this dataset is about to rent is not there for those after it."""
    held = Counter(one.option.name for one in report.held)
    for name, count in report.command.offers:
        taken[name] += max(0, count - held[name])


def _answer(
    book: FleetBook, around: Surroundings, question: Open, share: int, taken: Counter[str], pace: Pace
) -> Report:
    spec, found, target = question.spec, question.open, question.target
    assert found.work is not None
    spend = book.spend(spec.name)
    rows_total = max(found.work.rows, int(target.plan.get("rows_total", 0)))
    wanted = Target(
        deadline=target.deadline_in,
        budget_usd=None if target.budget_usd is None else target.budget_usd - spend.usd,
        max_instances=min(share, target.max_instances or share),
        objective=cast(Objective, target.objective or spec.objective),
    )
    asked = ask(
        around,
        spec,
        found.work,
        wanted,
        batches=found.units,
        spread=found.spread,
        rows_total=rows_total,
        started_ago=target.age,
        taken=taken,
    )
    memory = Memory.from_json(target.memory.get("controller", {}))
    command, memory, plan = decide(
        asked.work,
        asked.options,
        asked.held,
        wanted,
        memory,
        target.age,
        measured=asked.measured,
        pilots=spec.pilots,
        pace=pace,
    )
    command = _with_standing(book, command, around, question, wanted, rents=bool(asked.options or asked.held))
    if not asked.held and target.budget_usd is not None:
        # The books hold the budget to the cent, and know better than the plan what a first instance may cost. What they
        # said of another budget, before it was raised, counts no more.
        refusals = [note.removeprefix(WAITING) for note in found.notes if note.startswith(WAITING)]
        if refused := next((note for note in refusals if note.startswith(no_room(target.budget_usd))), ""):
            command = dataclasses.replace(command, pause=refused, kind="paused")
    idle = around.idle(spec.name, pace.tick) if _bounded(target) else ()
    room = max(0, around.config.max_instances - len(around.instances))
    report = Report(
        dataset=spec.name,
        found=found,
        target=target,
        command=command,
        plan=plan,
        held=asked.held,
        idle=idle,
        room=room,
        wanted=wanted,
        spend=spend,
        now=book.now(),
        rows_total=rows_total,
        clocks=around.clocks,
    )
    return _write(book, report, memory)


def _with_standing(
    book: FleetBook, command: Command, around: Surroundings, question: Open, wanted: Target, *, rents: bool
) -> Command:
    """The engines of fleet.yaml, which cost nothing more. Those that others use do not count.

    Where time presses all of them on top of what is rented, else one instead of it.
    """
    dataset, endpoint = question.spec.name, question.open.tags.get(ENDPOINT_TAG)
    try:
        engines = around.config.engines_for(question.spec.model, endpoint)
    except FleetConfigError:
        engines = ()
    if not engines or command.pause:
        return command
    others = {beat.run_id for beat in book.runs() if beat.dataset != dataset}
    usable = [one for one in engines if book.holder(one.name) not in others]
    if not usable:
        return command
    presses = wanted.deadline is not None or wanted.objective == "fastest"
    standing = min(len(usable), wanted.max_instances, question.open.units) if presses else 1
    if rents and presses and not endpoint:
        return dataclasses.replace(command, instances=min(wanted.max_instances, command.instances + standing))
    reason = f"{standing} of {len(engines)} engines that stand in fleet.yaml; nothing is rented for it"
    return Command(standing, (), kind="steady", reason=reason)


def _write(book: FleetBook, report: Report, memory: Memory) -> Report:
    target, command = report.target, report.command
    report.memory = {"controller": memory.as_json(), "alerts": target.memory.get("alerts", {})}
    if not _command(book, report):
        return report  # another sensor has begun another request meanwhile
    # What is to be replaced is left by its run, when it has the other one; only what is too many is drained for good.
    idle = report.idle[: max(0, len(report.held) + len(report.idle) - command.instances)]
    for name in (*report.surplus, *idle):
        book.retire(name, command.reason)
    return report


def _command(book: FleetBook, report: Report) -> bool:
    target, command = report.target, report.command
    return book.command(
        target.dataset,
        target.request,
        command.instances,
        command.offers,
        command.pause,
        report.memory,
        figures(report),
    )


def _tell(
    book: FleetBook,
    config: AlertConfig | None,
    reports: Sequence[Report],
    ended: Sequence[DatasetTarget],
    more: Sequence[Alert],
) -> None:
    """Alerts, after all commands: a webhook that hangs holds up no instance. What was told is kept in the books."""
    if config is None:
        return
    now = book.now()
    before = {one.dataset: one.memory.get("alerts", {}) for one in (*[each.target for each in reports], *ended)}
    state = {dataset: dict(told) for dataset, told in before.items() if told}
    alerts = [*more, *(alert for report in reports for alert in alerts_of(report))]
    alerts += [Alert("on_time", one.dataset, f"{one.dataset}: the request has ended") for one in ended]
    Alerts(config, state, clock=lambda: now).tell(alerts)
    for report in reports:
        if state.get(report.dataset, {}) != report.memory["alerts"]:
            report.memory["alerts"] = state.get(report.dataset, {})
            _command(book, report)


def _bounded(target: DatasetTarget) -> bool:
    """Time or money of the request are bounded: then nothing stays warm for whoever may come."""
    return target.deadline_at is not None or target.budget_usd is not None


def _finish(
    context: dg.SensorEvaluationContext, book: FleetBook, target: DatasetTarget, missing: int
) -> list[dg.AssetObservation]:
    """Nothing more is made: one instance may be leased again. Warm ones end at once where time or money was bounded, so
    that they cost nothing beyond the budget; else when they are idle for long enough."""
    if _bounded(target):
        for one in book.fleet():
            if one.dataset == target.dataset and not one.leased:
                book.retire(one.name, "the request has ended")
    story, now = request_status(book, target.dataset), book.now()
    met = None if target.deadline_at is None or missing else now <= target.deadline_at
    ended = dataclasses.replace(
        story, finished_at=now, on_time=met, finish_p50=None, finish_p95=None, paused="", missing=missing
    )
    if not book.end_request(target.dataset, target.request, dataclasses.asdict(ended)):
        return []
    set_pool(context.instance, target.dataset, 1 + SPARE_SLOTS)
    return [] if target.updated_age is None else [done_event(target, ended, now)]
