"""One `batch-assets run`: ask Dagster for a refresh, follow it to the table, give it up in good order when asked to."""

from __future__ import annotations

import contextlib
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from batch_assets import settings
from batch_assets.cli.interrupts import Interrupted, Signals
from batch_assets.local_dagster.home import LOGS, StackAddress, prepare_home, running_stack
from batch_assets.local_dagster.stack import Stack, stack
from batch_assets.request_status.display import Display
from batch_assets.tags import CHAIN_TAG, ENDPOINT_TAG, LAUNCH_TAG
from gpu_runner.request_limits import NO_LIMITS, RequestLimits

if TYPE_CHECKING:
    from batch_assets.filtering.wanted_rows import Standing
    from batch_assets.local_dagster.dagster_client import DagsterClient
    from batch_assets.request_status.dataset_status import Observer
    from batch_assets.request_status.request_monitor import ProgressUpdate, RequestMonitor, RunResult

LOOK_SECONDS = 0.5
SHOW_SECONDS = 0.2
ALIVE_SECONDS = 5.0
SILENT_SECONDS = 60.0
PAGE_SECONDS = 15.0  # after the launch the webserver is started: it takes as much processor time as the rest of a start
TAKEOVERS = 5
TAKEN_OVER = "The Dagster that this command used has ended; going on with one of its own"


@dataclass(frozen=True, slots=True)
class Request:
    """What `run` was asked for. `endpoint` and `model` override fleet.yaml and the spec; `request_options`: tags.

    `verifies`: read everything at the end, as `verify` does; without, compare names and sizes.
    `rows`: only the first batches, which hold so many (trial.py). `simulate`: made-up texts will do.
    `redrive_error`: only dead letters are tried again, those of this error, or with "" all.
    `regenerate`: which rows are asked again, as the tag batch/regenerate says it.
    `waits`: what its budget pauses is waited for. `limits`: what the endpoint may be asked.
    `upstream`: it is a step of a chain, which ends with this dataset.
    """

    dataset: str
    endpoint: str | None = None
    model: str | None = None
    request_options: Mapping[str, str] = field(default_factory=dict)
    verifies: bool = True
    rows: int | None = None
    simulate: bool = False
    redrive_error: str | None = None
    regenerate: str | None = None
    waits: bool = False
    limits: RequestLimits = NO_LIMITS
    upstream: str | None = None

    @property
    def job(self) -> str:
        """Job that reads the source, or lists the dead letters; the sensors do the rest."""
        return f"{self.dataset}_refresh" if self.redrive_error is None else f"{self.dataset}_redrive"

    def tags(self) -> dict[str, str]:
        """Run tags of the launch."""
        from batch_assets.spec.endpoint_limits import limit_tags
        from batch_assets.tags import REDRIVE_ERROR_TAG, REGENERATE_TAG, ROWS_TAG, SIMULATE_TAG, UPSTREAM_TAG

        trial = {ROWS_TAG: str(self.rows)} if self.rows is not None else {}
        trial |= {SIMULATE_TAG: "true"} if self.simulate else {}
        trial |= {REDRIVE_ERROR_TAG: self.redrive_error} if self.redrive_error else {}
        trial |= {REGENERATE_TAG: self.regenerate} if self.regenerate else {}
        trial |= {UPSTREAM_TAG: self.upstream} if self.upstream else {}
        endpoint = {ENDPOINT_TAG: self.endpoint} if self.endpoint else {}
        return {**self.request_options, **trial, **endpoint, **limit_tags(self.limits)}

    def run_config(self) -> Mapping[str, object]:
        """Run config of the launch."""
        from batch_assets.catalog import ledger

        op = ledger.prompts_key(self.dataset).to_python_identifier()
        return {"ops": {op: {"config": {"model": self.model}}}} if self.model else {}


@dataclass
class Runner:
    """Carries out one request. `run_id` is known once Dagster has accepted it. `generated`: rows that runs of it asked
    for; `taken_over`: those that were asked for before, and were not in the catalog yet when it began."""

    request: Request
    display: Display
    signals: Signals
    run_id: str | None = None
    url: str = ""
    own: bool = True
    seconds: float = 0.0
    generated: int = 0
    taken_over: int = 0
    dead_before: int | None = None
    _asked_by: Mapping[str, int] | None = field(default=None)
    _own_runs: dict[str, bool] = field(default_factory=dict)
    _first_run: int | None = field(default=None)
    _shown_at: float = field(default=float("-inf"))
    _first: int | None = field(default=None)
    _stack: Stack | None = field(default=None)
    _page_said: bool = field(default=False)

    def run(self) -> RunResult:
        """From launch to end. Raises Interrupted after a signal, StackError and LaunchError when nothing can start."""
        home = prepare_home()
        for _ in range(TAKEOVERS):
            self.display.say(starting(home))
            with stack(import_the_rest) as (address, own):
                ending = self.run_in(address, own)
            if ending is not None:
                return ending
            self.display.say(TAKEN_OVER)
        from batch_assets.request_status.request_monitor import RunResult

        return RunResult(False, f"Dagster ended {TAKEOVERS} times before the work did")

    def run_in(self, address: StackAddress, own: Stack | None) -> RunResult | None:
        """The same in a Dagster that runs. None when it is not ours (`own`) and has ended."""
        from batch_assets.request_status.request_monitor import RunResult

        with observing_one(self.request.dataset) as seen:
            self.url, self.own, self._stack, self._page_said = address.url, own is not None, own, False
            if own is not None:
                own.wait_definitions()
            with self.signals.deferred():
                ending = self._carry_out(address, seen)
                while ending is not None and ending.ok and ending.trial is None and self.request.redrive_error is None:
                    more = self._next_round(seen, ending)
                    if isinstance(more, RunResult):
                        return more
                    self.run_id = more
                    ending = self._carry_out(address, seen)
                return ending

    def _next_round(self, seen: Observer, ending: RunResult) -> RunResult | str:
        """The refresh that the sensor `chain` starts where the dataset wants more accepted rows; else how it ended."""
        found = next_round_of(self.request.dataset, seen)
        if found is None or found[0] != self.request.dataset:  # rounds of several datasets are those of a chain
            return ending
        return await_round(self, seen, found, ending)

    def _carry_out(self, address: StackAddress, seen: Observer) -> RunResult | None:
        """Launch unless that is done, then follow. None when a Dagster that is not ours has ended."""
        from batch_assets.local_dagster.dagster_client import DagsterClient
        from batch_assets.request_status.request_monitor import RequestMonitor

        dagster = DagsterClient(address)
        began = time.monotonic()
        if self.run_id is None:
            self.run_id = self._launch_at_once() or self._launch(dagster, seen)
        follower = RequestMonitor(
            seen,
            self.run_id,
            progress=self._verifying,
            verifies=self.request.verifies,
            redrive_error=self.request.redrive_error,
            waits=self.request.waits,
        )
        try:
            return self._follow(dagster, follower)
        finally:
            self.run_id = follower.request
            self.seconds += time.monotonic() - began

    def _launch_at_once(self) -> str | None:
        """Launch on a Dagster of our own, which has no webserver yet. None where the webserver must do it."""
        if self._stack is None:
            return None
        found = self._stack.launch(self.request.job, self.request.tags(), self.request.run_config())
        if found is None:
            self._stack.start_webserver()
        return found

    def _show_page(self, dagster: DagsterClient, launched: float) -> None:
        """Start the webserver of work that takes longer than to start it; say its URL."""
        if self._stack and time.monotonic() - launched > PAGE_SECONDS:
            self._stack.start_webserver()
        if not self._page_said and self._has_page() and dagster.alive():
            self._page_said = True
            self.display.say(f"Dagster's UI: {dagster.url}")

    def _has_page(self) -> bool:
        return self._stack is None or self._stack.has_webserver

    def _launch(self, client: DagsterClient, seen: Observer) -> str:
        """Ask until there is an answer: a webserver that was killed is there again within seconds.

        The run may have been made although its answer was lost, so it is looked for before it is asked for again.
        """
        import dagster as dg

        from batch_assets.local_dagster.dagster_client import LaunchError

        tags = {**self.request.tags(), LAUNCH_TAG: uuid.uuid4().hex}
        deadline, refused = time.monotonic() + SILENT_SECONDS, 0
        while True:
            try:
                return client.launch(self.request.job, tags, self.request.run_config())
            except LaunchError:
                made = seen.instance.get_runs(dg.RunsFilter(tags={LAUNCH_TAG: tags[LAUNCH_TAG]}), limit=1)
                if made:
                    return made[0].run_id
                refused += client.alive()
                if refused > 1 or time.monotonic() > deadline:
                    raise
            if self.signals.asked:
                raise Interrupted
            self._pause(LOOK_SECONDS)

    def _follow(self, dagster: DagsterClient, follower: RequestMonitor) -> RunResult | None:
        from batch_assets.request_status.request_monitor import RunResult

        answered = began = time.monotonic()
        while not self.signals.asked:
            looked = time.monotonic()
            try:
                moment = follower.look()
            except Interrupted:
                break
            if moment.figures is not None:
                self._count(moment.figures.asked_by, follower.observer)
                self.dead_before = moment.figures.dead if self.dead_before is None else self.dead_before
            self.display.show(moment)
            if moment.remark:
                self.display.say(moment.remark)
            if moment.ending is not None:
                if moment.ending.pause is not None and self.own:
                    self._give_up(dagster, follower)
                return moment.ending
            self._show_page(dagster, began)
            if not self._has_page():
                answered = looked
            elif looked - answered > ALIVE_SECONDS:
                if dagster.alive():
                    answered = looked
                elif not self.own and running_stack(settings.dagster_home()) is None:
                    return None
                elif looked - answered > SILENT_SECONDS:
                    logs = settings.dagster_home() / LOGS
                    return RunResult(False, f"Dagster at {dagster.url} does not answer any more; its logs: {logs}")
            # A look at 80,000 batches takes its time: looking never takes more than a third of it. A verification is no
            # look: what it has made again is to be seen while it is missing, so that it is counted.
            verified = moment.phase == "verify"
            self._pause(LOOK_SECONDS if verified else max(LOOK_SECONDS, 2 * (time.monotonic() - looked)))
        self._give_up(dagster, follower)
        raise Interrupted

    def _count(self, asked_by: Mapping[str, int], seen: Observer) -> None:
        """Sums of what was added: batches that are void are generated once more."""
        before = self._asked_by
        for run_id, rows in asked_by.items():
            more, own = rows - (before or {}).get(run_id, 0), self._is_own(run_id, seen)
            if more > 0 and own:
                self.generated += more
            elif more > 0 and before is not None:
                self.taken_over += more
        self._asked_by = asked_by

    def _is_own(self, run_id: str, seen: Observer) -> bool:
        """Whether a run was made since this was asked for, or since the chain was of which it is a step.

        By Dagster's numbers of runs: times of runs may be whole seconds, and those of tags are of another clock.
        """
        if self._first_run is None:
            asked = seen.instance.get_run_record_by_id(self.run_id or "")
            chain = None if asked is None else asked.dagster_run.tags.get(CHAIN_TAG)
            first = asked if chain is None else seen.instance.get_run_record_by_id(chain) or asked
            self._first_run = None if first is None else first.storage_id
        if run_id not in self._own_runs:
            made = seen.instance.get_run_record_by_id(run_id)
            self._own_runs[run_id] = made is not None and made.storage_id >= (self._first_run or math.inf)
        return self._own_runs[run_id]

    def _verifying(self, moment: ProgressUpdate) -> None:
        """Where the verification is. Raises Interrupted after a signal."""
        if self.signals.asked:
            raise Interrupted
        if time.monotonic() - self._shown_at > SHOW_SECONDS:
            self._shown_at = time.monotonic()
            self.display.show(moment)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.signals.asked and time.monotonic() < until:
            time.sleep(0.1)

    def _give_up(self, dagster: DagsterClient, follower: RequestMonitor) -> None:
        from batch_assets.local_dagster.dagster_client import OwnDagster
        from batch_assets.request_status.request_monitor import ProgressUpdate, give_up

        asked = OwnDagster(follower.observer.instance) if self._stack else dagster
        self.display.show(ProgressUpdate("end", "canceling"))
        self.display.say("Canceling: waiting until the runs have ended and their leases are given back …")
        left = give_up(asked, follower.observer, follower.request, every_request=self.own)
        for line in left:
            self.display.say(f"  {line}; its lease ends by itself")
        if not left:
            self.display.say("Canceled. What was committed is kept: the same command goes on from there.")
        for line in _machines_left(follower.observer, own=self._stack is not None):
            self.display.say(f"  {line}")


def _machines_left(seen: Observer, *, own: bool) -> list[str]:
    """Which machines stay and until when. `own`: this command's Dagster ends with it, and what it alone looks after.

    Nothing where fleet.yaml cannot be read, or the fleet's database does not answer: the work is canceled all the same.
    """
    from batch_assets.local_dagster.local_fleet import the_fleet
    from batch_assets.request_status.machines_left import machines_left
    from gpu_runner.fleet_database.database import FleetDatabaseError
    from resources.fleet.resource import FleetConfigError

    try:
        config, instances = the_fleet().config(), seen.fleet_db.fleet()
    except (FleetConfigError, FleetDatabaseError):
        return []
    here = {one.name for one in config.local}
    here |= {one.name for one in config.simulated.providers} if config.simulated else set()
    shared = settings.fleet_is_shared()
    return machines_left(
        instances,
        seen.store.dataset,
        idle_seconds=config.idle_minutes * 60,
        ends_now=lambda one: own and (not shared or one.provider in here),
        now=time.time(),
    )


def next_round_of(accepts: str, seen: Observer) -> tuple[str, Standing] | None:
    """The dataset that wants rows which one accepts, and where it stands; None where none does."""
    from batch_assets.filtering.wanted_rows import standing
    from batch_assets.spec.chain import wanting
    from batch_assets.spec.discovery import declared_specs
    from resources.store.dataset_store import DatasetStore

    specs = declared_specs()
    wants = wanting(specs, accepts)
    found = None if wants is None else standing(wants, DatasetStore(seen.store.objects, wants.name), specs)
    return None if found is None or wants is None else (wants.name, found)


def await_round(runner: Runner, seen: Observer, wants: tuple[str, Standing], ending: RunResult) -> RunResult | str:
    """The run that the sensor `chain` starts for the next round, in the chain of the runner's run; else how it ended.

    Raises Interrupted after a signal.
    """
    import dataclasses

    import dagster as dg

    from batch_assets.request_status.request_monitor import RunResult
    from batch_assets.tags import CANCELED_TAG, CHAIN_TAG, REFRESH_TAG

    (name, found), asked = wants, seen.instance.get_run_by_id(runner.run_id or "")
    chain = None if asked is None else asked.tags.get(CHAIN_TAG)
    if asked is None or chain is None:
        return ending
    if not found.grows:
        return dataclasses.replace(ending, short=found.said())
    made = f"{found.accepted:,} of {found.made:,} rows were accepted, {found.wanted:,} are wanted"
    runner.display.say(f"{name}: {made}: more of the source is asked")
    since = seen.instance.get_run_records(dg.RunsFilter(run_ids=[asked.run_id]), limit=1)[0].create_timestamp
    began = time.monotonic()
    while time.monotonic() - began < SILENT_SECONDS:
        rounds = dg.RunsFilter(tags={REFRESH_TAG: name, CHAIN_TAG: chain}, created_after=since)
        newest = [run for run in seen.instance.get_runs(rounds, limit=1) if run.run_id != asked.run_id]
        if newest:
            return newest[0].run_id
        if runner.signals.asked:
            seen.instance.add_run_tags(asked.run_id, {CANCELED_TAG: "true"})
            raise Interrupted
        time.sleep(LOOK_SECONDS)
    silent = f"nothing was started for {SILENT_SECONDS:.0f} s"
    return RunResult(False, f"{made}, but {silent}: is the sensor `chain` on (UI: Automation)?")


def import_the_rest() -> None:
    """What following a request needs takes a second to import: done while the stack starts."""
    import batch_assets.request_status.request_monitor  # noqa: F401 - for its time, not its names


@contextlib.contextmanager
def observing_one(dataset: str) -> Iterator[Observer]:
    from batch_assets.request_status.dataset_status import observing

    with observing([dataset]) as (seen,):
        yield seen


def starting(home: Path) -> str:
    """What is said before a Dagster is started, or the one that runs is used."""
    return _attaching(home) if running_stack(home) is not None else f"Starting Dagster on {home}"


def _attaching(home: Path) -> str:
    text = f"Using the Dagster that already runs on {home}"
    if os.environ.get("BATCH_ASSETS_API_KEY"):
        text += (
            "\nBATCH_ASSETS_API_KEY is set here, but runs see only the environment that this Dagster was started with: "
            "if the engine needs the key, end that Dagster first, or start it with the key"
        )
    return text
