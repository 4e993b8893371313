"""The clock of the database is set while things run: no lease expires, no hour is billed, and it is said once."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fleet_databases import intended, ready, sqlite_url

from gpu_runner.boot_clock import ClockReading, JumpWatch, boot_name, boot_seconds, jump
from gpu_runner.cost_meter import LeaseUsage
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.wait_reason import RunActivity

TTL, HOUR = 10.0, 3600.0
PRICE = 60 * 3.6 / 3600  # of a real second
STEPS = [HOUR, -HOUR, 24 * HOUR, -30.0]


class Clocks:
    """A wall clock that can be set and a steady one that cannot."""

    def __init__(self, wall: float = 1_000_000.0, steady: float = 5_000.0) -> None:
        self.wall, self.steady = wall, steady

    def forward(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds

    def set_by(self, seconds: float) -> None:
        self.wall += seconds


Open = Callable[..., FleetDatabase]


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def opened(url: str, clocks: Clocks) -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def another(host: str = "host") -> FleetDatabase:
            fleet_db = FleetDatabase(url, now=lambda: clocks.wall, steady=lambda: clocks.steady, host=host)
            return stack.enter_context(contextlib.closing(fleet_db))

        yield another


@pytest.mark.slow
@pytest.mark.parametrize("seconds", STEPS)
def test_a_step_of_the_clock_keeps_what_over_leases_cost_by_the_token_with_their_request(
    opened: Open, clocks: Clocks, seconds: float
):
    fleet_db = opened()
    before = fleet_db.try_lease("api", "run", "d", TTL)
    assert before is not None and fleet_db.release(before, LeaseUsage(useful_usd=0.4))
    clocks.forward(5)
    fleet_db.begin_request("d", "r", budget_usd=1.0)
    clocks.forward(5)
    lease = fleet_db.try_lease("api", "run", "d", TTL)
    assert lease is not None and fleet_db.release(lease, LeaseUsage(useful_usd=0.9))
    clocks.forward(5)
    clocks.set_by(seconds)
    assert fleet_db.spend("d").usd == pytest.approx(0.9)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", STEPS)
def test_a_step_of_the_clock_leaves_leases_runs_and_bills_as_long_as_they_were(
    opened: Open, clocks: Clocks, seconds: float
):
    fleet_db = opened()
    fleet_db.begin_run("run", "d", "0", "9")
    fleet_db.begin_request("d", "r", budget_usd=100.0)
    lease = ready(fleet_db)
    clocks.forward(5)
    assert fleet_db.renew(lease, TTL, LeaseUsage(4.0))
    before = fleet_db.spend("d").usd
    clocks.set_by(seconds)
    assert fleet_db.spend("d").usd == pytest.approx(before)  # whoever looks first, a reader or a writer
    assert fleet_db.end_overdue(idle_seconds=60) == []  # no lease has expired
    clocks.forward(4)
    assert fleet_db.renew(lease, TTL, LeaseUsage(8.0))
    assert [beat.age for beat in fleet_db.runs()] == [pytest.approx(9)]
    assert fleet_db.target("d").age == pytest.approx(9)
    (bill,) = fleet_db.costs()
    assert bill.seconds.total == pytest.approx(9) and bill.usd.wasted == 0
    assert fleet_db.spend("d").usd == pytest.approx(9 * PRICE)
    fleet_db.release(lease, LeaseUsage(9.0), retire=True)
    fleet_db.ended("ba-1", 0.0)
    clocks.set_by(-seconds)
    clocks.forward(60)
    assert fleet_db.spend("d").usd == pytest.approx(9 * PRICE)
    assert sum(charge.usd.total for charge in fleet_db.charges(0.0)) == pytest.approx(9 * PRICE)


def test_what_ended_earlier_in_the_request_still_counts_against_its_budget(opened: Open, clocks: Clocks):
    fleet_db = opened()
    fleet_db.begin_request("d", "r", budget_usd=1000.0)
    fleet_db.release(ready(fleet_db), retire=True)
    clocks.forward(50)
    fleet_db.ended("ba-1", 0.0)
    clocks.forward(50)
    for seconds in (HOUR, -2 * HOUR, 0.5 * HOUR):
        clocks.set_by(seconds)
        assert fleet_db.spend("d").usd == pytest.approx(50 * PRICE)


def test_a_jump_is_settled_once_whichever_process_or_host_sees_it(
    opened: Open, clocks: Clocks, caplog: pytest.LogCaptureFixture
):
    fleet_dbs = [opened("host-1"), opened("host-1"), opened("host-2"), opened("")]
    lease = ready(fleet_dbs[0], ttl=30)
    for fleet_db in fleet_dbs:
        fleet_db.beat("nobody", "waiting", RunActivity(), 0)  # each has looked once
    with caplog.at_level(logging.WARNING, "gpu_runner.fleet_database.clock_jumps"):
        clocks.set_by(-HOUR)
        for fleet_db in [*fleet_dbs, opened("host-1"), opened("host-3")]:
            assert fleet_db.leases_of("d") == 1
            assert fleet_db.end_overdue(60) == []
            assert [one.seconds for one in fleet_db.clock_jumps(HOUR)] == [pytest.approx(-HOUR)]
    assert [record.getMessage() for record in caplog.records] == [
        "the clock of the fleet's database jumped by -3600 s: leases and bills go on without it"
    ]
    clocks.forward(29)
    assert fleet_dbs[2].renew(lease, TTL)
    clocks.forward(2 * HOUR)
    assert fleet_dbs[1].clock_jumps(HOUR) == []


def test_a_process_that_starts_after_the_jump_finds_it_by_what_an_earlier_one_of_its_host_kept(
    opened: Open, clocks: Clocks
):
    with contextlib.closing(opened()) as first:
        ready(first, ttl=30)
    clocks.set_by(HOUR)
    clocks.forward(5)
    assert opened().end_overdue(60) == []
    clocks.forward(26)
    assert "expired" in opened().end_overdue(60)[0]  # no false expiry, and no lease that never ends


def test_a_transaction_that_fails_right_after_the_jump_does_not_forget_it(opened: Open, clocks: Clocks):
    fleet_db = opened()
    lease = ready(fleet_db)
    clocks.set_by(HOUR)
    with pytest.raises(ZeroDivisionError), fleet_db._transaction():
        raise ZeroDivisionError
    assert fleet_db.renew(lease, TTL)
    clocks.set_by(-HOUR)
    with pytest.raises(Exception, match=r"UNIQUE|duplicate"):
        intended(fleet_db)
    assert fleet_db.renew(lease, TTL)


def test_a_machine_that_slept_is_no_jump_and_its_leases_have_expired(opened: Open, clocks: Clocks):
    fleet_db = opened()
    ready(fleet_db)
    clocks.forward(600)
    assert any("expired" in said for said in fleet_db.end_overdue(60))
    assert fleet_db.clock_jumps(HOUR) == []


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(steps=st.lists(st.tuples(st.floats(0.1, 9.0), st.sampled_from([0.0, 0.0, *STEPS, -24 * HOUR])), max_size=6))
def test_whenever_the_clock_is_set_a_lease_lives_as_long_as_it_is_renewed_and_the_bill_is_what_passed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, float]]
):
    clocks, folder = Clocks(), tmp_path_factory.mktemp("books")
    with sqlite_url(folder) as url, contextlib.ExitStack() as stack:
        fleet_dbs = [
            stack.enter_context(
                contextlib.closing(FleetDatabase(url, now=lambda: clocks.wall, steady=lambda: clocks.steady, host=host))
            )
            for host in ("host-1", "host-1", "host-2")
        ]
        fleet_dbs[0].begin_request("d", "r", budget_usd=1e9)
        lease = ready(fleet_dbs[0])
        began = clocks.steady
        for fleet_db in fleet_dbs:  # a host that never looked before the clock was set has nothing to compare it with
            fleet_db.end_overdue(60)
        for number, (passes, seconds) in enumerate(steps):
            clocks.forward(passes)
            clocks.set_by(seconds)
            fleet_db = fleet_dbs[number % 3]
            assert not [said for said in fleet_db.end_overdue(60) if "expired" in said]
            assert fleet_db.renew(lease, TTL)
            assert fleet_db.spend("d").usd == pytest.approx(PRICE * (clocks.steady - began))
        clocks.forward(TTL + 0.1)
        assert not fleet_dbs[1].renew(lease, TTL)


def test_a_process_that_is_stopped_between_two_clocks_sees_no_jump():
    before = ClockReading(1000.0, 50.0, 50.0)
    assert jump(before, ClockReading(1010.0, 60.0, 75.0)) == 0.0  # stopped for 15 s after it had read the wall clock
    assert jump(before, ClockReading(1025.0, 60.0, 75.0)) == 0.0  # or before
    assert jump(before, ClockReading(1032.0, 60.0, 75.0)) == pytest.approx(7.0)
    assert jump(before, ClockReading(1000.0 - HOUR, 60.0, 60.0)) == pytest.approx(-HOUR - 10)
    assert jump(before, ClockReading(1011.0, 60.0, 60.0)) == 0.0  # a leap second


def test_the_steady_clock_is_real_and_names_its_boot():
    assert boot_seconds() <= boot_seconds()
    assert boot_name() == boot_name()
    assert JumpWatch().jumped() == 0.0


LIBRARY = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)
MOVED = """
import contextlib, json, sys, time
from support.fleet_databases import ready
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.machine_host.registry import MachineRegistry
from gpu_runner.boot_clock import JumpWatch
folder, found = sys.argv[1], []
with contextlib.closing(FleetDatabase(f"sqlite:///{folder}/fleet.db")) as fleet_db:
    fleet_db.begin_request("d", "r", budget_usd=1000.0)
    lease, watch, register = ready(fleet_db, ttl=60), JumpWatch(), MachineRegistry(folder)
    for step in ("+3600", "+0", "-3600"):
        before, billed = time.time(), register.now()
        open(f"{folder}/offset", "w").write(step)
        while abs(time.time() - before) < 1800:
            time.sleep(0.01)
        found.append({
            "wall": time.time() - before, "watch": watch.jumped(), "said": fleet_db.end_overdue(60),
            "renewed": fleet_db.renew(lease, 60), "billed": fleet_db.costs()[0].seconds.total,
            "provider": register.now() - billed,
            "jumps": [one.seconds for one in fleet_db.clock_jumps(60)],
        })
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed (Debian: faketime)")
def test_a_real_clock_that_is_set_in_mid_run_expires_no_lease_and_bills_no_hour(tmp_path: Path):
    """SQLite's own clock, the kernel's boot time, and a wall clock that libfaketime sets: forward, back, back."""
    (tmp_path / "offset").write_text("+0")
    faked = {"LD_PRELOAD": str(LIBRARY), "FAKETIME_TIMESTAMP_FILE": str(tmp_path / "offset"), "FAKETIME_NO_CACHE": "1"}
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[3])])
    child = subprocess.run(
        [sys.executable, "-c", MOVED, str(tmp_path)],
        env={**os.environ, **faked, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    steps = json.loads(child.stdout)
    for step, seconds in zip(steps, (HOUR, -HOUR, -HOUR), strict=True):
        assert step["wall"] == pytest.approx(seconds, abs=60) and step["watch"] == pytest.approx(seconds, abs=60)
        assert (step["said"], step["renewed"]) == ([], True)
        assert 0 <= step["billed"] < 60 and 0 <= step["provider"] < 60
        assert step["jumps"][0] == pytest.approx(seconds, abs=60)
    assert len(steps[-1]["jumps"]) == 3
