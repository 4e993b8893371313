"""kill -9 on everything that one `batch-assets run` consists of, in random order; twenty times when there is time."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import yaml
from support.processes import command_line, environment, runs
from support.timing import PATIENCE, SOAK

from batch_assets.local_dagster import first_daemon, first_server
from batch_assets.local_dagster.worker_template import TEMPLATE, WORKER
from e2e.command_line import NAME, SPEC, Command, CommandProject, site
from e2e.harness import Simulator, eventually

pytestmark = [pytest.mark.soak("losses"), pytest.mark.timeout(600)]

# The same seed kills in the same order: BATCH_ASSETS_TEST_SEED=…
SEED = int(os.environ.get("BATCH_ASSETS_TEST_SEED") or random.randrange(1_000_000))
GUARD = "gpu_runner.providers.process_guard"
SLOTS = 16
WINDOW = 4 * SLOTS
JOURNAL_SECONDS = 2.0
ROWS_PER_SECOND = 20  # of the slow engine, 16 at once
ROWS = 9000
END_SECONDS = 12.0  # two grace periods of a guard, and a look
KILLS = {
    "command": 2,
    "command and all guards": 1,
    "daemon": 2,
    "daemon's guard": 1,
    "daemon's inner guard": 1,
    "code server": 1,
    "definitions server": 1,
    "worker template": 1,
    "code server's guard": 1,
    "code server's inner guard": 1,
    "webserver": 2,
    "webserver's guard": 2,
    "run worker": 4,
}
FORKED = (TEMPLATE, WORKER, first_daemon.NAME)  # with the command line of the code server, or of what it started
FIRST = first_server.NAME  # forked from the code server, with its command line
SERVER = "batch_assets.local_dagster.definitions_server"
CHILDREN = {
    "daemon": "batch_assets.dagster_internals.daemon",
    "code server": "batch_assets.local_dagster.code_server",
    "webserver": "batch_assets.webserver.server",
}
NO_ROWS = ("daemon", "webserver")  # whatever of them is killed, no row is asked again


def plan(rng: random.Random) -> list[str]:
    """All kinds; each once, and workers twice, without SOAK."""
    most = {kind: max(KILLS.values()) if SOAK else 2 if kind == "run worker" else 1 for kind in KILLS}
    found = [kind for kind, count in KILLS.items() for _ in range(min(count, most[kind]))]
    rng.shuffle(found)
    return found


def words(process: psutil.Process) -> str:
    return " ".join(command_line(process))


def name(process: psutil.Process) -> str:
    """Its own name; "" of one that has ended since it was listed."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def of_home(home: Path) -> list[psutil.Process]:
    """Every process with this home in its environment: the command, its stack, and what that has started."""
    return [
        process
        for process in psutil.process_iter()
        if any(value.endswith(str(home)) for value in environment(process).values()) and runs(process)
    ]


@dataclass
class Series:
    """One command after the other on a project, and what is killed of them."""

    here: CommandProject
    rng: random.Random
    command: Command
    engine: Simulator
    killed: list[str] = field(default_factory=list)
    asked: int = 0
    statuses: list[int] = field(default_factory=list)

    def kill(self, kind: str) -> bool:
        """Kill one of this kind, and see that what depended on it ends. False when there is none now."""
        if kind.startswith("command"):
            self._kill_command(kind)
        elif kind == "run worker":
            workers = [one for one in of_home(self.here.home) if name(one) == WORKER]
            asked = sum(self.engine.received().values())
            if not workers or asked == self.asked:
                return False  # none, or none that has asked for a row since the last one was killed
            self.asked = asked
            self._kill(workers[:1], workers[:1])
        elif not self._kill_part(kind):
            return False
        self.killed.append(kind)
        return True

    def _kill_part(self, kind: str) -> bool:
        child, _, part = kind.partition("'s ")
        if kind in ("definitions server", "worker template"):
            child, part = "code server", kind
        guards = self._guards(child)
        if len(guards) != 2:
            return False  # it is being started again
        below = guards[0].children(recursive=True)
        named = {
            "guard": guards[:1],
            "inner guard": guards[1:],
            "definitions server": [
                one for one in below if name(one) == FIRST or (SERVER in words(one) and name(one) not in FORKED)
            ],
            "worker template": [one for one in below if name(one) == TEMPLATE],
            "": [
                one
                for one in below
                if CHILDREN[child] in words(one) and GUARD not in words(one) and name(one) not in (*FORKED, FIRST)
            ],
        }
        if not named[part]:
            return False
        self._kill(named[part], [*guards, *below])
        return True

    def _guards(self, child: str) -> list[psutil.Process]:
        """The outer and the inner guard of a child."""
        found = [one for one in of_home(self.here.home) if GUARD in words(one) and CHILDREN[child] in words(one)]
        return sorted(found, key=lambda one: one.ppid() != self.command.process.pid)

    def _kill(self, victims: list[psutil.Process], family: list[psutil.Process]) -> None:
        for victim in victims:
            victim.kill()
        eventually(lambda: not any(runs(one) for one in family), END_SECONDS, f"the end of {family}")

    def _kill_command(self, kind: str) -> None:
        family = of_home(self.here.home)
        guards = [one for one in family if GUARD in words(one)] if "guards" in kind else []
        for victim in guards:
            victim.suspend()  # nobody acts between two kills
        self.command.process.kill()
        for victim in guards:
            victim.kill()
        self.command.process.wait()
        if self.rng.random() < 0.5 and not guards:
            eventually(
                lambda: of_home(self.here.home) == [], END_SECONDS, "the end of what a killed command had started"
            )
        self.go_on()
        eventually(lambda: "Dagster's UI" in self.command.said() or self.ended(), 90, "another stack")
        assert [one for one in family if runs(one)] == []

    def go_on(self) -> None:
        self.command = self.here.start("run", NAME, "--no-progress")

    def ended(self) -> bool:
        """Whether the command has ended by itself: what it said then was true."""
        if (status := self.command.process.poll()) is None:
            return False
        found = self.here.status()
        complete = found["table_current"] and found["batches_done"] == found["batches"] > 0
        assert (status == 0) == complete, self.command.said()
        self.statuses.append(status)
        return True


def kill_all(series: Series, kinds: list[str], wait: Callable[[float], None]) -> None:
    """Kill one of each of these; a kind of which there is none waits until later."""
    deadline = time.monotonic() + 200 * PATIENCE
    while kinds:
        assert time.monotonic() < deadline, f"not killed: {kinds}"
        if series.ended():
            series.go_on()
        if not series.kill(kinds[-1]):
            kinds.insert(0, kinds.pop())
            wait(0.2)
            continue
        print(f"  killed: {kinds.pop()}", flush=True)
        wait(series.rng.uniform(0.5, 3.0))


def test_kills_leave_no_process_and_cost_only_rows_in_flight(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    kinds = plan(rng)
    print(f"\nBATCH_ASSETS_TEST_SEED={SEED}")
    began = time.monotonic()
    with site(tmp_path) as here, contextlib.ExitStack() as ended:
        engine = Simulator(tmp_path, ["--speed", "0.5", "--output-tokens", "fixed:32"])  # the work outlasts the kills
        ended.callback(engine.stop)
        engine.start()
        here.declare({**SPEC, "source": {"grid": {"word": list(range(100)), "tone": list(range(ROWS // 100))}}})
        entry = {"name": "engine", "kind": "endpoint", "url": engine.url, "max_num_seqs": SLOTS}
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"engines": [entry]}))
        series = Series(here, rng, here.start("run", NAME, "--no-progress"), engine)
        eventually(lambda: engine.received(), 90, "the first row")
        kill_all(series, kinds, time.sleep)
        asked_before, killed_at = sum(engine.received().values()), time.monotonic()
        assert asked_before < ROWS, "the work was done before the last kill"
        engine.kill()  # the rest by a fast one
        engine.arguments[1] = "20"
        engine.start()
        for _ in range(3):
            eventually(series.ended, 200, "the end of the command")
            if series.statuses[-1] == 0:
                break
            series.go_on()
        assert series.statuses[-1] == 0, series.command.said()
        assert of_home(here.home) == []
        assert here.status()["ok"] == ROWS
        assert here.ask("verify", NAME)[0] == 0
        again = sum(engine.received().values()) - ROWS
        hits = sum(not kind.startswith(NO_ROWS) for kind in [*series.killed, "engine"])
        print(
            f"{len(series.killed)} kills in {killed_at - began:.0f} s, {asked_before} rows asked then; "
            f"{again} of {ROWS} asked twice after {hits} kills of workers or engines; exit statuses {series.statuses}; "
            f"{time.monotonic() - began:.0f} s in all"
        )
        assert len(engine.received()) == ROWS
        assert again <= hits * (WINDOW + 2 * JOURNAL_SECONDS * ROWS_PER_SECOND)
        with here.instance() as instance:
            retries = Counter(run.parent_run_id for run in instance.get_runs() if run.parent_run_id)
            assert max(retries.values(), default=0) <= 1
            assert [run for run in instance.get_runs() if not run.is_finished] == []
