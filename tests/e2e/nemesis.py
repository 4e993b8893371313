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
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from machines import part

from e2e.customer import Customer
from e2e.harness import Platform
from e2e.recovery import Recovery
from e2e.witness import ObjectWatch
from gpu_runner.fleet import Lease, RunBeat
from gpu_runner.providers.register import MachineRecord, MachineRegister
from gpu_runner.providers.simulated.cloud import Call, SimulatedCloud
from gpu_runner.providers.simulated.config import FaultRule
from resources.fleet import GpuFleet

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


def plan(faults: int, rng: random.Random) -> list[str]:
    """Kinds in the order in which they come: each at least once, else by their shares."""
    whole = sum(KINDS.values())
    found = [kind for kind, share in KINDS.items() for _ in range(max(1, share * faults // whole))]
    found += rng.choices(list(KINDS), list(KINDS.values()), k=max(0, faults - len(found)))
    rng.shuffle(found)
    return found


def sweep_for_ever(database: str, home: str, config_path: str) -> None:
    """A reaper as a process of its own that does nothing but sweep, to be killed in the middle of it."""
    fleet = GpuFleet(database=database, home=home, config_path=config_path)
    with fleet.open_book() as book:
        while True:
            fleet.sweep(book)


@dataclass(eq=False)
class Fault:
    """One that was committed. `took`: seconds until `recovered` first said yes."""

    kind: str
    target: str
    at: float
    recovered: Callable[[], bool]
    took: float | None = None


@dataclass(eq=False)
class Stopped:
    """A run worker under SIGSTOP."""

    beat: RunBeat
    until: float


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

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.objects = ObjectWatch(self.site.home.parent / "store" / self.site.name / "batches")
        self.register = MachineRegister(self.site.home)
        self.recovery = Recovery(self.site.store, self.cloud, self.objects, self.register)
        self.book = self.site.book()
        self._plan = plan(self.wanted, self.rng)
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
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped.beat.pid, signal.SIGCONT)
        self.book.close()

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
        for kind in KINDS:
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
        hit: dict[str, Callable[[], Fault | None]] = {
            "run worker killed": self._kill_worker,
            "run worker stopped": self._stop_worker,
            "daemon killed": lambda: self._kill_child(kind, "daemon"),
            "code server killed": lambda: self._kill_child(kind, "code-server"),
            "engine killed": lambda: self._kill_part(kind, "gpu_runner.simulator"),
            "host killed": lambda: self._kill_part(kind, "gpu_runner.providers.host"),
            "reaper killed": self._kill_reaper,
            "spot lost": lambda: self._interrupt(kind, None),
            "spot lost with notice": lambda: self._interrupt(kind, self.rng.uniform(4, 12)),
        }
        if (fault := hit[kind]()) is not None:
            self.faults.append(fault)
        else:
            self._plan.insert(0, kind)  # there was nothing to hit: later again

    def _workers(self) -> list[RunBeat]:
        stopped = {one.beat.run_id for one in self._stopped}
        beats = [beat for beat in self.book.runs() if beat.first_key and beat.age < TTL and beat.run_id not in stopped]
        return sorted((beat for beat in beats if psutil.pid_exists(beat.pid)), key=lambda beat: beat.first_key)

    def _worker(self) -> RunBeat | None:
        workers = self._workers()
        leased = [beat for beat in workers if beat.state == "leased"]
        return self.rng.choice(leased or workers) if workers else None

    def _kill_worker(self) -> Fault | None:
        if (beat := self._worker()) is None:
            return None
        os.kill(beat.pid, signal.SIGKILL)
        return Fault("run worker killed", beat.run_id[:8], time.time(), self.recovery.continued([beat], by_others=True))

    def _stop_worker(self) -> Fault | None:
        if (beat := self._worker()) is None:
            return None
        os.kill(beat.pid, signal.SIGSTOP)
        now = time.time()
        self._stopped.append(Stopped(beat, now + self.rng.uniform(TTL + 3, 3 * TTL)))
        return Fault("run worker stopped", beat.run_id[:8], now, self.recovery.continued([beat]))

    def _continue(self, stopped: Stopped) -> None:
        """Its leases have lapsed. What it may still try in their name must be refused, and is tried here too."""
        for lease in self._leases(stopped.beat.run_id):
            tries = {
                "renew": self.book.renew(lease, TTL),
                "drain": self.book.drain(lease),
                "created": self.book.created(lease, "i-zombie"),
                "ready": self.book.ready(lease, "http://127.0.0.1:1", 1),
                "refused": self.book.refused(lease, "zombie"),
                "release": self.book.release(lease),
                "give up": self.book.give_up(lease, "zombie"),
            }
            self.tried += len(tries)
            self.accepted += [f"{lease}: {name}" for name, accepted in tries.items() if accepted]
        self._stopped.remove(stopped)
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped.beat.pid, signal.SIGCONT)

    def _leases(self, run_id: str) -> list[Lease]:
        return [Lease(name, epoch, run_id, self.site.name) for name, epoch, _ in self.book.history(run_id)]

    def _kill_child(self, kind: str, name: str) -> Fault | None:
        """The process itself, not its guard: the stack starts it again."""
        with contextlib.suppress(psutil.NoSuchProcess):
            guard = psutil.Process(self.site.stack.pids()[name])
            found = guard.children(recursive=True)
            child = next((one for one in found if "gpu_runner.providers.guard" not in one.cmdline()), None)
            if child is not None:
                beats = self._workers() if name == "code-server" else []
                child.kill()
                now, continued = time.time(), self.recovery.continued(beats, by_others=True)
                return Fault(kind, str(child.pid), now, lambda: self.recovery.swept(now + 1) and continued())
        return None

    def _kill_part(self, kind: str, module: str) -> Fault | None:
        if (record := self._machine()) is None:
            return None
        beats = self._users(record)
        try:
            part(record.id, module).kill()
        except (ValueError, psutil.Error):
            return None  # it has ended just now
        return Fault(kind, record.name, time.time(), self.recovery.over(record, beats))

    def _interrupt(self, kind: str, notice_seconds: float | None) -> Fault | None:
        record = self._machine()
        if record is None or not self.cloud.interrupt(record.provider, record.name, notice_seconds=notice_seconds):
            return None
        return Fault(kind, record.name, time.time(), self.recovery.over(record, self._users(record)))

    def _machine(self) -> MachineRecord | None:
        """A machine whose engine answers; rather one that is leased."""
        running = [one for one in self.register.machines() if one.ended_at is None and one.ready_at is not None]
        running = [one for one in running if one.take_at is None]
        leased = {one.name for one in self.book.fleet() if one.leased}
        wanted = [one for one in running if one.name in leased] or running
        return self.rng.choice(sorted(wanted, key=lambda one: one.name)) if wanted else None

    def _users(self, record: MachineRecord) -> list[RunBeat]:
        instance = self.book.instance(record.name)
        held = [] if instance is None else [*([instance.lease] if instance.lease else []), *instance.draining]
        runs = {lease.run_id for lease in held}
        return [beat for beat in self.book.runs() if beat.run_id in runs]

    def _kill_reaper(self) -> Fault:
        home = self.site.home
        words = (f"sqlite:///{home}/fleet.db", str(home), str(home / "fleet.yaml"))
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
