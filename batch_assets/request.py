"""One `batch-assets run`: ask Dagster for a refresh, follow it to the table, give it up in good order when asked to."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from batch_assets import settings
from batch_assets.display import Display
from batch_assets.launcher import ENDPOINT_TAG
from batch_assets.signals import Interrupted, Signals
from batch_assets.stack import LOGS, StackAddress, prepare_home, running_stack, stack

if TYPE_CHECKING:
    from batch_assets.dagster_client import DagsterClient
    from batch_assets.follow import Ending, Follower
    from batch_assets.status import Observer

LAUNCH_TAG = "batch/launch"  # of one launch, to know its run by
LOOK_SECONDS = 0.5
ALIVE_SECONDS = 5.0
SILENT_SECONDS = 60.0
TAKEOVERS = 5


@dataclass(frozen=True, slots=True)
class Request:
    """What `run` was asked for. `endpoint` and `model` override fleet.yaml and the spec; `wishes`: tags (wishes.py)."""

    dataset: str
    endpoint: str | None = None
    model: str | None = None
    wishes: Mapping[str, str] = field(default_factory=dict)

    @property
    def job(self) -> str:
        """Job that reads the source; the sensors do the rest."""
        return f"{self.dataset}_refresh"

    def tags(self) -> dict[str, str]:
        """Run tags of the launch."""
        return {**self.wishes, **({ENDPOINT_TAG: self.endpoint} if self.endpoint else {})}

    def run_config(self) -> Mapping[str, object]:
        """Run config of the launch."""
        from batch_assets import ledger

        op = ledger.prompts_key(self.dataset).to_python_identifier()
        return {"ops": {op: {"config": {"model": self.model}}}} if self.model else {}


@dataclass
class Runner:
    """Carries out one request. `run_id` is known once Dagster has accepted it."""

    request: Request
    display: Display
    signals: Signals
    run_id: str | None = None
    url: str = ""
    own: bool = True
    seconds: float = 0.0
    generated: int = 0
    _first: int | None = field(default=None)

    def run(self) -> Ending:
        """From launch to end. Raises Interrupted after a signal, StackError and LaunchError when nothing can start."""
        home = prepare_home()
        for _ in range(TAKEOVERS):
            attached = running_stack(home) is not None
            self.display.say(_attaching(home) if attached else f"Starting Dagster on {home}")
            with stack(meanwhile=_import_the_rest) as address, _observing(self.request.dataset) as seen:
                self.url, self.own = address.url, address.pid == os.getpid()
                self.display.say(f"Dagster's UI: {address.url}")
                with self.signals.deferred():
                    ending = self._carry_out(address, seen)
            if ending is not None:
                return ending
            self.display.say("The Dagster that this command used has ended; going on with one of its own")
        from batch_assets.follow import Ending

        return Ending(False, f"Dagster ended {TAKEOVERS} times before the work did")

    def _carry_out(self, address: StackAddress, seen: Observer) -> Ending | None:
        """Launch unless that is done, then follow. None when a Dagster that is not ours has ended."""
        from batch_assets.dagster_client import DagsterClient
        from batch_assets.follow import Follower

        dagster = DagsterClient(address)
        began = time.monotonic()
        if self.run_id is None:
            self.run_id = self._launch(dagster, seen)
        follower = Follower(seen, self.run_id)
        try:
            return self._follow(dagster, follower)
        finally:
            self.run_id = follower.request
            self.seconds += time.monotonic() - began

    def _launch(self, client: DagsterClient, seen: Observer) -> str:
        """Ask until there is an answer: a webserver that was killed is there again within seconds.

        The run may have been made although its answer was lost, so it is looked for before it is asked for again.
        """
        import dagster as dg

        from batch_assets.dagster_client import LaunchError

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

    def _follow(self, dagster: DagsterClient, follower: Follower) -> Ending | None:
        from batch_assets.follow import Ending

        answered = time.monotonic()
        while not self.signals.asked:
            looked = time.monotonic()
            moment = follower.look()
            if moment.figures is not None:
                self._first = moment.figures.rows_generated if self._first is None else self._first
                self.generated = max(0, moment.figures.rows_generated - self._first)
            self.display.show(moment)
            if moment.ending is not None:
                return moment.ending
            if looked - answered > ALIVE_SECONDS:
                if dagster.alive():
                    answered = looked
                elif not self.own and running_stack(settings.dagster_home()) is None:
                    return None
                elif looked - answered > SILENT_SECONDS:
                    logs = settings.dagster_home() / LOGS
                    return Ending(False, f"Dagster at {dagster.url} does not answer any more; its logs: {logs}")
            # A look at 80,000 batches takes its time: looking never takes more than a third of it.
            self._pause(max(LOOK_SECONDS, 2 * (time.monotonic() - looked)))
        self._give_up(dagster, follower)
        raise Interrupted

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.signals.asked and time.monotonic() < until:
            time.sleep(0.1)

    def _give_up(self, dagster: DagsterClient, follower: Follower) -> None:
        from batch_assets.follow import Moment, give_up

        self.display.show(Moment("end", "canceling"))
        self.display.say("Canceling: waiting until the runs have ended and their leases are given back …")
        left = give_up(dagster, follower.observer, follower.request, every_request=self.own)
        for line in left:
            self.display.say(f"  {line}; its lease ends by itself")
        if not left:
            self.display.say("Canceled. What was committed is kept: the same command goes on from there.")


def _import_the_rest() -> None:
    """What following a request needs takes a second to import: done while the stack starts."""
    import batch_assets.dagster_client
    import batch_assets.follow  # noqa: F401


@contextlib.contextmanager
def _observing(dataset: str) -> Iterator[Observer]:
    from batch_assets.status import observing

    with observing([dataset]) as (seen,):
        yield seen


def _attaching(home: Path) -> str:
    text = f"Using the Dagster that already runs on {home}"
    if os.environ.get("BATCH_ASSETS_API_KEY"):
        text += (
            "\nBATCH_ASSETS_API_KEY is set here, but runs see only the environment that this Dagster was started with: "
            "if the engine needs the key, end that Dagster first, or start it with the key"
        )
    return text
