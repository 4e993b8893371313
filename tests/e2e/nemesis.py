"""A seeded nemesis: it kills, stops and lies to a platform that generates a dataset, and times each recovery.

The seed decides which faults come in which order, how long it waits between them, and which of the possible victims it
takes. What is there to be hit at that moment depends on the machine's speed, so a replay is alike, not identical.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import psutil
from support.machines import part

from e2e.customer import Customer
from e2e.harness import Platform
from e2e.recovery import Recovery
from e2e.witness import ObjectWatch
from gpu_runner.fleet_database.database import Lease, RunBeat
from gpu_runner.providers.machine_host.registry import MachineRecord, MachineRegistry
from gpu_runner.providers.simulated.cloud import Call, SimulatedCloud
from gpu_runner.providers.simulated.config import FaultRule
from resources.fleet.resource import GpuFleet

TTL = 10.0

# Kinds of fault and how many of 300 each is.
KINDS = {
    "run worker killed": 36,
    "run worker stopped": 14,
    "daemon killed": 18,
    "code server killed": 10,
    "engine killed": 30,
    "host killed": 28,
    "reaper killed": 36,
    "spot lost": 24,
    "spot lost with notice": 20,
    "create: reply lost": 18,
    "create: timed out": 14,
    "API error": 18,
    "empty list": 18,
    "deaf terminate": 16,
}
LIES = {
    "create: reply lost": FaultRule(kind="lost_reply", calls=("create",), times=1, delay_seconds=1.0),
    "create: timed out": FaultRule(kind="time_out", calls=("create",), times=1, delay_seconds=2.0),
    "empty list": FaultRule(kind="empty_list", times=1),
    "deaf terminate": FaultRule(kind="deaf_terminate", times=1),
}
CALLS = ("offers", "create", "list", "terminate")


def plan(faults: int, rng: random.Random, kinds: Mapping[str, int] = KINDS) -> list[str]:
    """Kinds in the order in which they come: each at least once, else by their shares."""
    whole = sum(kinds.values())
    found = [kind for kind, share in kinds.items() for _ in range(max(1, share * faults // whole))]
    found += rng.choices(list(kinds), list(kinds.values()), k=max(0, faults - len(found)))
    rng.shuffle(found)
    return found


def sweep_for_ever(database: str, home: str, config_path: str, environment: dict[str, str]) -> None:
    """A reaper as a process of its own that does nothing but sweep, to be killed in the middle of it."""
    os.environ.update(environment)
    fleet = GpuFleet(database=database, home=home, config_path=config_path)
    with fleet.open_database() as fleet_db:
        while True:
            fleet.sweep(fleet_db)


@dataclass(eq=False)
class Fault:
    """One that was committed. `took`: seconds until `recovered` first said yes. `instances`: whose rows it hit."""

    kind: str
    target: str
    at: float
    recovered: Callable[[], bool]
    took: float | None = None
    instances: frozenset[str] = frozenset()


@dataclass(eq=False)
class Stopped:
    """A run worker under SIGSTOP."""

    beat: RunBeat
    until: float


def signalled(beat: RunBeat, number: signal.Signals) -> bool:
    """Whether the worker's process was there to get the signal: it may have ended since it was looked for."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(beat.pid, number)
        return True
    return False


@dataclass(eq=False)
class Nemesis:
    """Commits `wanted` faults on a platform, `pause` seconds apart on average, while its customer wants more rows."""

    site: Platform
    cloud: SimulatedCloud
    customer: Customer
    seed: int
    wanted: int
    pause: float
    faults: list[Fault] = field(default_factory=list)
    tried: int = 0
    accepted: list[str] = field(default_factory=list)
    kinds: Mapping[str, int] = field(default_factory=lambda: KINDS)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.objects = ObjectWatch(self.site.home.parent / "store" / self.site.name / "batches")
        self.register = MachineRegistry(self.site.home)
        self.recovery = Recovery(self.site.store, self.cloud, self.objects, self.register)
        self.fleet_db = self.site.fleet_db()
        self._plan = plan(self.wanted, self.rng, self.kinds)
        self._began = time.time()
        self._stopped: list[Stopped] = []
        self._heard: set[Call] = set()
        self._looked_at = self._tended_at = 0.0
        self._weather_at = time.time() + 20
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["e2e.nemesis"])

    # the life of a nemesis

    def rage(self, seconds: float) -> None:
        """Commit faults until there are as many as wanted, at most for so long."""
        began = time.time()
        next_at, told = began + 5, 0
        while len(self.faults) < self.wanted:
            if len(self.faults) // 50 > told:
                told = len(self.faults) // 50
                print(f"{len(self.faults)} faults after {time.time() - began:.0f} s", flush=True)
            assert time.time() < began + seconds, f"{len(self.faults)} of {self.wanted} faults in {seconds:.0f} s"
            self.look()
            if time.time() >= next_at:
                if self._plan:
                    self._commit(self._plan.pop())
                else:
                    self._commit(self.rng.choice(["host killed", "spot lost"]))  # makes the calls that lies wait for
                next_at = time.time() + self.rng.uniform(0.3, 1.7) * self.pause
            time.sleep(0.2)

    def rest(self, done: Callable[[], bool], seconds: float) -> None:
        """No more faults; wait until the work is done and what was hit has recovered."""
        self.cloud.clear_faults()
        for stopped in self._stopped:
            stopped.until = min(stopped.until, time.time() + TTL + 3)
        deadline = time.time() + seconds
        while self._stopped or not done() or any(fault.took is None for fault in self.faults):
            if time.time() > deadline:
                late = [f"{fault.kind} {fault.target}" for fault in self.faults if fault.took is None]
                raise AssertionError(f"not done {seconds:.0f} s after the last fault; not recovered: {late}")
            self.look(grow=False)
            time.sleep(0.2)
        self.objects.look(whole=True)

    def close(self) -> None:
        """Leave nothing stopped."""
        for stopped in self._stopped:
            signalled(stopped.beat, signal.SIGCONT)
        self.fleet_db.close()

    def look(self, *, grow: bool = True) -> None:
        """What there is to do between two faults."""
        now = time.time()
        for stopped in [one for one in self._stopped if now >= one.until]:
            self._continue(stopped)
        if now - self._looked_at > 1:
            self._looked_at = now
            self.objects.look()
            self._hear_lies()
            for fault in self.faults:
                if fault.took is None and fault.recovered():
                    fault.took = time.time() - fault.at
        if now - self._tended_at > 3:
            self._tended_at = now
            self.customer.tend(grow=grow)
        if grow and now > self._weather_at:
            self._weather_at = now + self.rng.uniform(10, 30)
            self._change_a_price()

    def table(self) -> str:
        """Fault kind, count, slowest recovery."""
        lines = [f"{'fault':<24}{'count':>6}{'median s':>10}{'slowest s':>11}"]
        for kind in self.kinds:
            took = sorted(fault.took or 0.0 for fault in self.faults if fault.kind == kind)
            if took:
                lines.append(f"{kind:<24}{len(took):>6}{took[len(took) // 2]:>10.1f}{took[-1]:>11.1f}")
        slowest = sorted(self.faults, key=lambda fault: -(fault.took or 0.0))[:8]
        said = [
            f"{fault.kind} {fault.target} at {fault.at - self._began:.0f} s: {fault.took:.0f} s" for fault in slowest
        ]
        return "\n".join([*lines, f"{'all':<24}{len(self.faults):>6}", "slowest:", *said])

    def _change_a_price(self) -> None:
        provider = self.rng.choice(sorted(self.cloud.providers.values(), key=lambda one: one.name))
        offer = self.rng.choice(provider.config.offers)
        price = round(offer.price_per_hour * self.rng.uniform(0.6, 1.6), 3)
        self.cloud.change(provider.name, offer.instance_type, price_per_hour=price)

    # faults

    def _commit(self, kind: str) -> None:
        if kind in LIES or kind == "API error":
            rule = LIES.get(kind) or FaultRule(kind="error", calls=(self.rng.choice(CALLS),), times=1)
            self.cloud.inject(rule)
            return
        if (fault := self.hits()[kind]()) is not None:
            self.faults.append(fault)
        else:
            self._plan.insert(0, kind)  # there was nothing to hit: later again

    def hits(self) -> dict[str, Callable[[], Fault | None]]:
        """What commits a fault of each kind now; None where there was nothing to hit."""
        return {
            "run worker killed": self._kill_worker,
            "run worker stopped": self._stop_worker,
            "daemon killed": lambda: self._kill_child("daemon killed", "daemon"),
            "code server killed": lambda: self._kill_child("code server killed", "code-server"),
            "engine killed": lambda: self._kill_part("engine killed", "gpu_runner.simulator"),
            "host killed": lambda: self._kill_part("host killed", "gpu_runner.providers.machine_host.daemon"),
            "reaper killed": self._kill_reaper,
            "spot lost": lambda: self._interrupt("spot lost", None),
            "spot lost with notice": lambda: self._interrupt("spot lost with notice", self.rng.uniform(4, 12)),
        }

    def _workers(self) -> list[RunBeat]:
        stopped = {one.beat.run_id for one in self._stopped}
        beats = [
            beat for beat in self.fleet_db.runs() if beat.first_key and beat.age < TTL and beat.run_id not in stopped
        ]
        return sorted((beat for beat in beats if psutil.pid_exists(beat.pid)), key=lambda beat: beat.first_key)

    def _worker(self) -> RunBeat | None:
        workers = self._workers()
        leased = [beat for beat in workers if beat.state == "leased"]
        return self.rng.choice(leased or workers) if workers else None

    def _kill_worker(self) -> Fault | None:
        if (beat := self._worker()) is None:
            return None
        held = self._held_by([beat])
        if not signalled(beat, signal.SIGKILL):
            return None
        continued = self.recovery.continued([beat], by_others=True)
        return Fault("run worker killed", beat.run_id[:8], time.time(), continued, instances=held)

    def _stop_worker(self) -> Fault | None:
        """One with a lease, so that there is something to try in its name once it has lapsed."""
        leased = [beat for beat in self._workers() if beat.state == "leased"]
        if not leased:
            return None
        beat = self.rng.choice(leased)
        if not signalled(beat, signal.SIGSTOP):
            return None
        now = time.time()
        self._stopped.append(Stopped(beat, now + self.rng.uniform(TTL + 3, 3 * TTL)))
        return Fault("run worker stopped", beat.run_id[:8], now, self.recovery.continued([beat]))

    def _continue(self, stopped: Stopped) -> None:
        """Its leases have lapsed. What it may still try in their name must be refused, and is tried here too."""
        for lease in self._leases(stopped.beat.run_id):
            tries = {
                "renew": self.fleet_db.renew(lease, TTL),
                "drain": self.fleet_db.drain(lease),
                "created": self.fleet_db.created(lease, "i-zombie"),
                "ready": self.fleet_db.ready(lease, "http://127.0.0.1:1", 1),
                "refused": self.fleet_db.refused(lease, "zombie"),
                "release": self.fleet_db.release(lease),
                "give up": self.fleet_db.give_up(lease, "zombie"),
            }
            self.tried += len(tries)
            self.accepted += [f"{lease}: {name}" for name, accepted in tries.items() if accepted]
        self._stopped.remove(stopped)
        signalled(stopped.beat, signal.SIGCONT)

    def _leases(self, run_id: str) -> list[Lease]:
        return [Lease(name, epoch, run_id, self.site.name) for name, epoch, _ in self.fleet_db.history(run_id)]

    def _kill_child(self, kind: str, name: str) -> Fault | None:
        """The process itself, not its guard: the stack starts it again."""
        with contextlib.suppress(psutil.NoSuchProcess):
            guard = psutil.Process(self.site.stack.pids()[name])
            found = guard.children(recursive=True)
            child = next((one for one in found if "gpu_runner.providers.process_guard" not in one.cmdline()), None)
            if child is not None:
                beats = self._workers() if name == "code-server" else []
                held = self._held_by(beats)
                child.kill()
                now, continued = time.time(), self.recovery.continued(beats, by_others=True)
                swept = partial(self.recovery.swept, now + 1)
                return Fault(kind, str(child.pid), now, lambda: swept() and continued(), instances=held)
        return None

    def _kill_part(self, kind: str, module: str) -> Fault | None:
        record = self._machine()
        return None if record is None else self._kill_record(kind, record, module)

    def _kill_record(
        self, kind: str, record: MachineRecord, module: str = "gpu_runner.providers.machine_host.daemon"
    ) -> Fault | None:
        beats = self._users(record)
        try:
            part(record.id, module).kill()
        except (ValueError, psutil.Error):
            return None  # it has ended just now
        over = self.recovery.over(record, beats)
        return Fault(kind, record.name, time.time(), over, instances=frozenset([record.name]))

    def _interrupt(self, kind: str, notice_seconds: float | None) -> Fault | None:
        record = self._machine(spot=True)
        if record is None or not self.cloud.interrupt(record.provider, record.name, notice_seconds=notice_seconds):
            return None
        over = self.recovery.over(record, self._users(record))
        return Fault(kind, record.name, time.time(), over, instances=frozenset([record.name]))

    def _held_by(self, beats: Iterable[RunBeat]) -> frozenset[str]:
        """Instances that these runs hold or drain."""
        runs = {beat.run_id for beat in beats}
        return frozenset(
            one.name
            for one in self.fleet_db.fleet()
            if any(lease.run_id in runs for lease in (*([one.lease] if one.lease else []), *one.draining))
        )

    def _machine(self, *, spot: bool = False) -> MachineRecord | None:
        """A machine whose engine answers; rather one that is leased. `spot`: of a cloud that can take it away."""
        machines = [one for one in self.register.machines() if not spot or one.provider in self.cloud.providers]
        running = [one for one in machines if one.ended_at is None and one.ready_at is not None]
        running = [one for one in running if one.take_at is None]
        leased = {one.name for one in self.fleet_db.fleet() if one.leased}
        wanted = [one for one in running if one.name in leased] or running
        return self.rng.choice(sorted(wanted, key=lambda one: one.name)) if wanted else None

    def _users(self, record: MachineRecord) -> list[RunBeat]:
        instance = self.fleet_db.instance(record.name)
        held = [] if instance is None else [*([instance.lease] if instance.lease else []), *instance.draining]
        runs = {lease.run_id for lease in held}
        return [beat for beat in self.fleet_db.runs() if beat.run_id in runs]

    def _kill_reaper(self) -> Fault:
        home = self.site.home
        words = (f"sqlite:///{home}/fleet.db", str(home), str(home / "fleet.yaml"), dict(os.environ))
        reaper = self._processes.Process(target=sweep_for_ever, args=words, daemon=True)
        began = time.time()
        reaper.start()
        time.sleep(self.rng.uniform(0.3, 1.3))
        reaper.kill()
        reaper.join()
        now = time.time()
        self.recovery.sweeps.append((began, now))
        return Fault("reaper killed", str(reaper.pid), now, lambda: self.recovery.swept(now))

    def _hear_lies(self) -> None:
        """Count the calls that met an injected fault, from the cloud's own log."""
        kinds = {
            "(lost_reply)": "create: reply lost",
            "(time_out)": "create: timed out",
            "(error)": "API error",
            "(empty_list)": "empty list",
            "(deaf_terminate)": "deaf terminate",
        }
        for call in self.cloud.calls():
            kind = next((kinds[mark] for mark in kinds if (call.result or "").endswith(mark)), None)
            if kind is not None and call not in self._heard:
                self._heard.add(call)
                self.faults.append(Fault(kind, f"{call.call} {call.name}", call.at, self.recovery.answered(call)))
