"""Hosts of machines: whatever is killed, nothing is left running and the bill is closed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.machines import ORDER, ended_machines, eventually, first_offer, get, local_provider, part, parts, processes
from support.processes import command_line
from support.timing import PATIENCE

from gpu_runner.providers.base import Provider, ProviderError
from gpu_runner.providers.machine_host import registry as register_module
from gpu_runner.providers.machine_host.manager import Hosting, keep_alive
from gpu_runner.providers.machine_host.registry import MARK, MachineRegistry
from gpu_runner.providers.simulated.meter import CloudMeter


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose machines end with the test."""
    with ended_machines(tmp_path / "home"):
        yield tmp_path / "home"


def running(provider: Provider, name: str = "ba-1") -> str:
    """Order a machine, wait until it runs, and return its id."""
    machine_id = provider.create(first_offer(provider), name, ORDER)
    provider.wait_ready(name, 20 * PATIENCE, time.sleep)
    return machine_id


ORDERS = """
import contextlib, os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from support.machines import ORDER, first_offer, local_provider
from gpu_runner.providers.machine_host.registry import MachineRegistry
provider = local_provider(Path(sys.argv[1]))
if sys.argv[3] == "before":
    MachineRegistry.add = lambda *_: os.kill(os.getpid(), 9)
if sys.argv[3] == "after":
    entered = MachineRegistry.transaction
    @contextlib.contextmanager
    def killed(self):
        with entered(self) as connection:
            yield connection
            found = connection.execute("SELECT count(*) FROM machines").fetchone()[0]
        if found:
            os.kill(os.getpid(), 9)
    MachineRegistry.transaction = killed
provider.create(first_offer(provider), "ba-1", ORDER)
print("ordered", flush=True)
time.sleep(float(sys.argv[4]))
"""


def orderer(home: Path, killed: str, seconds: float = 0.0, guarded: bool = False) -> subprocess.Popen[bytes]:
    """A process that orders ba-1 and is killed before its record is entered, right after, or ends by itself."""
    tests = str(Path(__file__).parents[3])
    guard = [sys.executable, "-m", "gpu_runner.providers.process_guard", "--"] if guarded else []
    command = [*guard, sys.executable, "-c", ORDERS, str(home), tests, killed, str(seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> int:
    """Close its pipes and wait for it."""
    assert process.stdin and process.stdout
    process.stdin.close()
    status = process.wait(timeout=20 * PATIENCE)
    process.stdout.close()
    return status


def hosts_of(home: Path) -> list[psutil.Process]:
    """Hosts below a home."""
    found = []
    for process in psutil.process_iter():
        words = command_line(process)
        if "gpu_runner.providers.machine_host.daemon" in words and str(home) in words:
            found.append(process)
    return found


@pytest.mark.slow
def test_a_caller_killed_before_its_order_is_entered_has_rented_nothing(home: Path):
    assert finish(orderer(home, "before")) == -signal.SIGKILL
    eventually(lambda: not hosts_of(home))
    assert not CloudMeter(home).bills()
    assert not list((home / "machines").glob("*.lock"))


def test_a_host_whose_caller_was_killed_while_it_started_leaves_no_lock(home: Path):
    register = MachineRegistry(home)
    command = [sys.executable, "-m", "gpu_runner.providers.machine_host.daemon", str(home), "i-1"]
    read, write = os.pipe()
    os.close(read)
    try:
        host = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=write, start_new_session=True)
    finally:
        os.close(write)
    assert host.wait(timeout=20 * PATIENCE) == 0
    eventually(lambda: not hosts_of(home))
    assert not list(register.folder.glob("*.lock"))


@pytest.mark.slow
def test_a_caller_killed_right_after_has_rented_a_machine_that_boots(home: Path):
    assert finish(orderer(home, "after")) == -signal.SIGKILL
    provider = local_provider(home)
    machine = provider.wait_ready("ba-1", 20 * PATIENCE, time.sleep)
    assert provider.create(first_offer(provider), "ba-1", ORDER) == machine.id
    provider.terminate("ba-1")
    eventually(lambda: not processes(machine.id))


@pytest.mark.slow
def test_a_machine_outlives_the_guarded_process_tree_that_ordered_it(home: Path):
    process = orderer(home, "never", 60, guarded=True)
    assert process.stdout is not None and process.stdout.readline() == b"ordered\n"
    machine = local_provider(home).wait_ready("ba-1", 20 * PATIENCE, time.sleep)
    finish(process)  # the guard does not wait for the host
    assert len(processes(machine.id)) == 4  # host, the guard's two, engine
    local_provider(home).terminate("ba-1")
    eventually(lambda: not processes(machine.id))


def test_a_killed_host_takes_its_engine_along_and_its_bill_ends_with_its_last_sign(home: Path):
    provider = local_provider(home)
    machine_id = running(provider)
    host = part(machine_id, "gpu_runner.providers.machine_host.daemon")
    host.kill()
    killed_at = time.time()
    eventually(lambda: not processes(machine_id))
    eventually(lambda: get(provider, "ba-1").state == "ended")  # a process lets its lock go after its memory
    machine = get(provider, "ba-1")
    assert (machine.reason, machine.endpoint) == ("interrupted", None)
    (bill,) = CloudMeter(home).bills()
    assert bill.ended_at is not None and killed_at - 10 < bill.ended_at <= killed_at
    assert first_offer(provider).capacity == 1
    provider.terminate("ba-1")
    assert CloudMeter(home).bills() == [bill]


def test_host_and_guard_killed_together_take_the_engine_along(home: Path):
    provider = local_provider(home)
    machine_id = running(provider)
    owners = [
        part(machine_id, "gpu_runner.providers.machine_host.daemon"),
        *parts(machine_id, "gpu_runner.providers.process_guard"),
    ]
    for process in owners:
        process.suspend()
    for process in owners:
        process.kill()
    eventually(lambda: not processes(machine_id))
    eventually(lambda: get(provider, "ba-1").state == "ended")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["gpu_runner.providers.process_guard", "gpu_runner.simulator"])
def test_a_killed_engine_leaves_the_machine_running_as_a_vm_would(home: Path, module: str):
    provider = local_provider(home)
    machine_id = running(provider)
    parts(machine_id, module)[0].kill()
    eventually(lambda: len(processes(machine_id)) == 1)
    time.sleep(0.3)
    assert get(provider, "ba-1").state == "running"
    provider.terminate("ba-1")
    eventually(lambda: not processes(machine_id))


def test_a_host_that_does_not_react_to_the_end_of_its_machine_is_ended(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(register_module, "ENFORCE_SECONDS", 0.5)
    provider = local_provider(home)
    machine_id = running(provider)
    part(machine_id, "gpu_runner.providers.machine_host.daemon").suspend()
    provider.terminate("ba-1")
    assert len(processes(machine_id)) == 4
    eventually(lambda: provider.list("ba-") and not processes(machine_id))
    eventually(lambda: first_offer(provider).capacity == 1)
    assert get(provider, "ba-1").reason == "terminated"


@pytest.mark.slow
def test_machines_without_a_living_fleet_end_and_those_with_one_do_not(home: Path):
    provider = local_provider(home, orphan_seconds=2.0)
    silent = threading.Event()

    def fleet() -> None:
        keep_alive(home)
        while not silent.wait(0.1):
            keep_alive(home)

    alive = threading.Thread(target=fleet)
    alive.start()
    try:
        machine_id = running(provider)
        time.sleep(2.5)
        assert get(provider, "ba-1").state == "running"
    finally:
        silent_since = time.time()
        silent.set()
        alive.join()
    eventually(lambda: not processes(machine_id))
    machine = get(provider, "ba-1")
    assert (machine.state, machine.reason) == ("ended", "orphaned")
    (bill,) = CloudMeter(home).bills()
    assert bill.ended_at is not None and bill.ended_at - silent_since > 0.5


@pytest.mark.slow
def test_machines_end_when_their_home_is_deleted(home: Path):
    machine_id = running(local_provider(home))
    assert processes(machine_id)
    shutil.rmtree(home)
    eventually(lambda: not processes(machine_id))
    assert not home.exists()  # nor does a dying host make it again


@pytest.mark.slow
def test_a_host_asked_to_end_takes_its_machine_away(home: Path):
    provider = local_provider(home)
    machine_id = running(provider)
    part(machine_id, "gpu_runner.providers.machine_host.daemon").terminate()
    eventually(lambda: get(provider, "ba-1").state == "ended")
    assert get(provider, "ba-1").reason == "interrupted"
    eventually(lambda: not processes(machine_id))


def test_a_host_that_does_not_start_is_an_order_refused(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    provider = local_provider(home)
    with pytest.raises(ProviderError, match=r"no host within .* for ba-1; see .*ba-1\.log"):
        provider.create(first_offer(provider), "ba-1", ORDER)
    assert not provider.list("")


def test_an_engine_sees_its_own_environment_and_none_of_our_keys(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the store")
    monkeypatch.setenv("BATCH_ASSETS_HOME", "ours")
    provider = local_provider(home, environment={"HF_TOKEN": "of the hub", "AWS_REGION": "for the engine"})
    machine_id = running(provider)
    seen = part(machine_id, "gpu_runner.simulator").environ()
    assert (seen["HF_TOKEN"], seen["AWS_REGION"], seen[MARK]) == ("of the hub", "for the engine", machine_id)
    assert not {"AWS_SECRET_ACCESS_KEY", "BATCH_ASSETS_HOME"} & seen.keys()
    assert b"of the hub" not in b"".join(path.read_bytes() for path in home.glob("cloud.db*"))
    assert all("of the hub" not in word for process in processes(machine_id) for word in process.cmdline())
    provider.terminate("ba-1")
    eventually(lambda: not processes(machine_id))


@pytest.mark.slow
def test_a_waiting_host_costs_next_to_nothing(home: Path):
    provider = local_provider(home)
    machine_id = running(provider)
    host = part(machine_id, "gpu_runner.providers.machine_host.daemon")
    before = sum(host.cpu_times()[:2])
    time.sleep(3)
    assert sum(host.cpu_times()[:2]) - before < 0.1
    assert host.memory_info().rss < 60e6
    provider.terminate("ba-1")
    eventually(lambda: not processes(machine_id))


def test_old_logs_are_forgotten(home: Path):
    provider = local_provider(home)
    folder = home / "machines"
    for name, days in (("old", 8), ("young", 6)):
        (folder / f"local.{name}.log").touch()
        at = time.time() - days * 86400
        os.utime(folder / f"local.{name}.log", (at, at))
    Hosting(provider._register, "local")._forget_old_logs()
    assert [path.name for path in folder.iterdir()] == ["local.young.log"]


@pytest.mark.soak("losses")
def test_after_a_hundred_random_kills_every_bill_is_closed_and_nothing_runs(home: Path):
    rng = random.Random(3)
    provider = local_provider(home, capacity=6)
    orderers: list[subprocess.Popen[bytes]] = []
    for step in range(400):
        if step >= 100 and len(CloudMeter(home).bills()) > 10:  # a slow machine needs more steps for as many orders
            break
        chance = rng.random()
        alive = [record for record in MachineRegistry(home).machines() if record.gone_at is None]
        if chance < 0.35 or not alive:
            tests = str(Path(__file__).parents[3])
            code = ORDERS.replace("ba-1", f"ba-{step}")
            command = [sys.executable, "-c", code, str(home), tests, rng.choice(["before", "after", "never"]), "0"]
            quiet = subprocess.DEVNULL
            orderers.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))
        elif chance < 0.5:
            provider.terminate(rng.choice(alive).name)
        elif chance < 0.6 and orderers:
            rng.choice(orderers).kill()
        else:
            for victim in rng.sample(
                family := processes(rng.choice(alive).id), min(len(family), rng.choice([1, 1, 2]))
            ):
                with contextlib.suppress(psutil.Error):
                    rng.choice([victim.kill, victim.kill, victim.suspend])()
        time.sleep(rng.uniform(0, 0.3))
        assert len([one for one in provider.list("") if one.state != "ended"]) <= 6
    for process in orderers:
        process.wait(timeout=60 * PATIENCE)
    records = MachineRegistry(home).machines()
    for record in records:
        provider.terminate(record.name)
    # A host that was stopped is ended by force, 15 s after its machine's end, by whoever looks.
    eventually(lambda: provider.list("") is not None and not list((home / "machines").glob("*.lock")))
    # A process is still there for a moment after its last act, and a host whose orderer was killed gives up by itself.
    # One that we have stopped after its last act is told to go on: no record speaks of it any more.
    for host in hosts_of(home):
        with contextlib.suppress(psutil.Error):
            host.resume()
    eventually(lambda: not hosts_of(home), 60)
    eventually(lambda: not any(processes(record.id) for record in records), 60)
    bills = CloudMeter(home).bills()
    assert len({bill.name for bill in bills}) == len(bills) > 10
    assert all(bill.ended_at is not None for bill in bills)
    assert {bill.reason for bill in bills} <= {"terminated", "interrupted", "boot failed"}
