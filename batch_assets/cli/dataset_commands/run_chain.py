"""`batch-assets run NAME --upstream`: all datasets before one, and it itself, brought up to date one after the other.

The first is asked for here; each further one is asked for by the sensor `chain`, in this Dagster or another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from batch_assets import settings
from batch_assets.cli.dataset_commands.run import (
    TAKEN_OVER,
    TAKEOVERS,
    Request,
    Runner,
    await_round,
    import_the_rest,
    next_round_of,
    observing_one,
    starting,
)
from batch_assets.cli.dataset_commands.run_summary import summary
from batch_assets.cli.interrupts import EXIT_STATUS, Interrupted, Signals
from batch_assets.local_dagster.home import StackAddress, prepare_home, running_stack
from batch_assets.local_dagster.stack import Stack, stack
from batch_assets.request_status.display import display
from batch_assets.tags import CANCELED_TAG, CHAIN_SINCE_TAG, CHAIN_TAG, REFRESH_TAG, REQUEST_TAG, STREAMING_TAG
from gpu_runner.money import format_usd

if TYPE_CHECKING:
    from batch_assets.request_status.dataset_status import Observer
    from batch_assets.request_status.request_monitor import RunResult

LOOK_SECONDS = 0.5
QUIET_SECONDS = 120.0  # from a published table to the run that reads it


@dataclass
class ChainRun:
    """Carries out the steps. `request`: of the first; the others are like it."""

    steps: Sequence[str]
    request: Request
    console: Console
    signals: Signals
    progress: bool
    as_json: bool
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: str | None = None
    _run_ids: dict[str, str] = field(default_factory=dict)
    _past: set[str] = field(default_factory=set)  # refreshes of rounds that are over
    _back: int | None = None  # the step with which the next round begins

    def run(self) -> int:
        """From the first step to the last, or to one that does not end well; returns the exit status.

        Raises Interrupted after a signal, StackError and LaunchError when nothing can start.
        """
        home, number = prepare_home(), 0
        for _ in range(TAKEOVERS):
            self.console.print(starting(home), markup=False, highlight=False, soft_wrap=True)
            with stack(import_the_rest) as (address, own):
                while number < len(self.steps):
                    status = self._step(number, address, own)
                    if status is None:
                        break
                    if status:
                        self.failed = self.steps[number]
                        self._cancel_following(number, own)
                        return status
                    number, self._back = number + 1 if self._back is None else self._back, None
                else:
                    return 0
            self.console.print(TAKEN_OVER, markup=False, highlight=False, soft_wrap=True)
        self.failed = self.steps[number]
        self._complain(f"Dagster ended {TAKEOVERS} times before the work did")
        return 1

    def _step(self, number: int, address: StackAddress, own: Stack | None) -> int | None:
        """One step, from its launch to its table; its exit status. None when a Dagster that is not ours has ended."""
        name = self.steps[number]
        options: Mapping[str, str] = {} if number else self.request.request_options
        if number and name not in self._run_ids:
            found, others = self._started(self.steps[number - 1], name, own=own is not None)
            if found is None:
                return None
            if not found and not others:
                self._complain(
                    f"{name}: not started {QUIET_SECONDS:.0f} s after the table that it reads was published: "
                    "is the sensor `chain` on (UI: Automation), and is the daemon running?"
                )
                return 1
            if found:
                self._run_ids[name] = found
            options = others
        request = replace(self.request, dataset=name, request_options=options)
        with display(self.console, name, progress=self.progress) as shown:
            runner = Runner(request, shown, self.signals, self._run_ids.get(name))
            try:
                ending = runner.run_in(address, own)
                if ending is not None and ending.ok:
                    ending = self._one_more_round(number, runner, ending)
            except Interrupted:
                self._cancel_following(number, own)
                raise
            finally:
                if runner.run_id is not None and self._back is None:
                    self._run_ids[name] = runner.run_id
        if ending is None:
            return None
        return self._said(request, runner, ending)

    def _one_more_round(self, number: int, runner: Runner, ending: RunResult) -> RunResult:
        """Where the step accepts rows that one before it wants, and more are to be made: go back to that one."""
        name = self.steps[number]
        with observing_one(name) as seen:
            found = next_round_of(name, seen)
            if found is None or found[0] not in self.steps[:number]:
                return ending
            more = await_round(runner, seen, found, ending)
        if not isinstance(more, str):
            return more
        self._back = self.steps.index(found[0])
        for one in self.steps[self._back : number + 1]:
            self._past.add(self._run_ids.pop(one, ""))
        self._past.add(runner.run_id or "")
        self._run_ids[found[0]] = more
        return ending

    def _said(self, request: Request, runner: Runner, ending: RunResult) -> int:
        status, found = summary(request, runner, ending, self.console, as_json=self.as_json)
        self.done[request.dataset] = found
        return status

    def _started(self, before: str, name: str, *, own: bool) -> tuple[str | None, Mapping[str, str]]:
        """The run that the sensor has started for a step; "" where there is none for long. None: Dagster has ended.

        With "", the tags to start it with, where the sensor will not: somebody else has refreshed `before` since.
        """
        began = time.monotonic()
        with observing_one(before) as seen:
            while time.monotonic() - began < QUIET_SECONDS:
                if self.signals.asked:
                    seen.instance.add_run_tags(self._run_ids[before], {CANCELED_TAG: "true"})
                    raise Interrupted
                if found := self._run_of(seen, before, name):
                    return found, {}
                if tags := handed_on_by_others(seen, self._run_ids[before], before):
                    return "", tags
                if not own and running_stack(settings.dagster_home()) is None:
                    return None, {}
                if self._refreshing(seen, before):  # rows so far are read, before the table
                    began = time.monotonic()
                time.sleep(LOOK_SECONDS)
        return "", {}

    def _refreshing(self, seen: Observer, before: str) -> bool:
        """Whether a step of this chain reads its source."""
        import dagster as dg

        from batch_assets.catalog.backfills import UNFINISHED

        asked = seen.instance.get_run_by_id(self._run_ids[before])
        chain = asked.tags.get(CHAIN_TAG) if asked is not None else None
        found = dg.RunsFilter(tags={CHAIN_TAG: chain}, statuses=UNFINISHED) if chain is not None else None
        return found is not None and any(REFRESH_TAG in run.tags for run in seen.instance.get_runs(found))

    def _run_of(self, seen: Observer, before: str, name: str) -> str | None:
        """The run that reads the table of `before` for this chain."""
        import dagster as dg

        asked = seen.instance.get_run_by_id(self._run_ids[before])
        chain = asked.tags.get(CHAIN_TAG) if asked is not None else None
        if chain is None:
            return None
        runs = seen.instance.get_runs(dg.RunsFilter(tags={CHAIN_TAG: chain, REFRESH_TAG: name}))
        new = (run.run_id for run in runs if STREAMING_TAG not in run.tags and run.run_id not in self._past)
        return next(new, None)

    def _cancel_following(self, number: int, own: Stack | None) -> None:
        """Steps below may be at work: on rows that were read so far, or as the sensor has gone on while the table of
        this step was verified."""
        from batch_assets.local_dagster.dagster_client import OwnDagster
        from batch_assets.request_status.request_monitor import give_up

        if (first := self._run_ids.get(self.steps[number])) is None:
            return
        for name in self.steps[number + 1 :]:
            with observing_one(name) as seen:
                for run_id in self._at_work(seen, first, name):
                    give_up(OwnDagster(seen.instance), seen, run_id, every_request=own is not None)

    def _at_work(self, seen: Observer, first: str, name: str) -> list[str]:
        """The refreshes of a step that this chain has asked for, newest first: all of which runs are under way, and the
        newest, for which more might be started."""
        import dagster as dg

        from batch_assets.request_status.dataset_status import unfinished

        asked = seen.instance.get_run_by_id(first)
        chain = asked.tags.get(CHAIN_TAG) if asked is not None else None
        if chain is None:
            return []
        found = [
            run.run_id for run in seen.instance.get_runs(dg.RunsFilter(tags={CHAIN_TAG: chain, REFRESH_TAG: name}))
        ]
        runs = [record.dagster_run for record in unfinished(seen.instance, name)]
        working = {run.tags.get(REQUEST_TAG, run.run_id) for run in runs}
        return [run_id for number, run_id in enumerate(found) if not number or run_id in working]

    def _complain(self, text: str) -> None:
        self.console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)

    @property
    def run_of_first(self) -> str:
        """The refresh with which the chain began."""
        return self._run_ids.get(self.steps[0], "")

    def not_started(self) -> list[str]:
        """Steps below the one that did not end well."""
        return [] if self.failed is None else list(self.steps[self.steps.index(self.failed) + 1 :])


def handed_on_by_others(seen: Observer, run_id: str, dataset: str) -> dict[str, str]:
    """What the sensor hands on from a refresh of a chain, where it will not, as a newer refresh of the dataset is of
    another chain or of none. Else empty."""
    from batch_assets.sensors.chain_sensor import HANDED_ON, newest_refresh

    mine, newest = seen.instance.get_run_by_id(run_id), newest_refresh(seen.instance, dataset)
    if mine is None or newest is None or newest.tags.get(CHAIN_TAG) == mine.tags.get(CHAIN_TAG):
        return {}
    return {tag: mine.tags[tag] for tag in HANDED_ON if tag in mine.tags}


def carry_out_chain(steps: Sequence[str], request: Request, *, as_json: bool, progress: bool) -> int:
    """Run all steps with their display; returns the exit status: of the one that did not end well, else 0."""
    console = Console(stderr=True)
    last = steps[-1]
    with Signals() as signals:
        chain = ChainRun(steps, replace(request, dataset=steps[0], upstream=last), console, signals, progress, as_json)
        try:
            status = chain.run()
        except Interrupted:
            return EXIT_STATUS
    if chain.done:
        with observing_one(last) as seen:
            final_bills(seen, chain.run_of_first, chain.done)
    found = _as_json(last, chain)
    if as_json:
        from batch_assets.cli.output import print_json

        print_json(found)
    elif not status:
        each = ", ".join(f"{name} {format_usd(one['request']['usd_spent'])} $" for name, one in chain.done.items())
        print(f"{last}: all {len(steps)} steps are up to date; {format_usd(found['usd_spent'])} $ spent: {each}")
    if waiting := chain.not_started():
        todo = f"`batch-assets run {last} --upstream` goes on from there"
        said = f"not started, as {'they need' if len(waiting) > 1 else 'it needs'} {chain.failed}: {', '.join(waiting)}"
        console.print(f"{said}; {todo}", style="red", markup=False, highlight=False, soft_wrap=True)
    return status


def final_bills(seen: Observer, run_id: str, done: Mapping[str, dict[str, Any]]) -> None:
    """What each step was charged since the chain began, in place of what it was when it ended: a bill goes on until its
    instance has ended, is handed on, or turns out never to have been there. `run_id`: of the first step."""
    from batch_assets.orchestration.chain_shares import spent_since

    run = seen.instance.get_run_by_id(run_id)
    if run is None or CHAIN_SINCE_TAG not in run.tags:
        return
    for name, found in done.items():
        found["request"]["usd_spent"] = spent_since(seen.fleet_db, [name], float(run.tags[CHAIN_SINCE_TAG]))


def _as_json(last: str, chain: ChainRun) -> dict[str, Any]:
    steps = list(chain.done.values())
    return {
        "dataset": last,
        "complete": len(steps) == len(chain.steps) and all(one["complete"] for one in steps),
        "steps": steps,
        "not_started": chain.not_started(),
        "usd_spent": round(sum(one["request"]["usd_spent"] for one in steps), 6),
    }
