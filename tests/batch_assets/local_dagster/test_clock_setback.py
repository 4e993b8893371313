"""The machine's clock is set: Dagster's sensors go on, and the providers' bills count what passed."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.scheduler.instigation import (
    SensorInstigatorData,
)
from support.machines import H100
from support.sensor_states import state_of

from batch_assets.local_dagster.clock_setback import set_back_meanwhile, wake_sensors
from batch_assets.request_status.display import clock_lines
from gpu_runner.fleet_database.clock_jumps import ClockJump
from gpu_runner.providers.machine_host.manager import new_record
from gpu_runner.providers.machine_host.registry import HostPlan, MachineRegistry
from gpu_runner.providers.simulated.cloud import SimulatedCloud
from gpu_runner.providers.simulated.config import SimulatedCloudConfig

HOUR = 3600.0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "dagster.yaml").write_text("")
    return tmp_path


def test_a_sensor_whose_last_tick_lies_in_the_future_may_tick_again_and_keeps_its_cursor(home: Path):
    """As the daemon reckons it (dagster/_daemon/sensor.py, get_elapsed)."""
    from dagster._daemon.sensor import get_elapsed

    later = time.time() + HOUR
    ahead = {"last_tick_timestamp": later, "last_tick_start_timestamp": later, "last_tick_success_timestamp": later}
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.add_instigator_state(state_of("ahead", cursor="kept", min_interval=5, **ahead))
        instance.add_instigator_state(state_of("right", cursor="kept", last_tick_timestamp=later - 2 * HOUR))
        before = {one.instigator_name: get_elapsed(one) for one in instance.all_instigator_state()}
    assert before["ahead"] is not None and before["ahead"] < -HOUR / 2
    assert wake_sensors(home) == 1
    assert wake_sensors(home) == 0
    with dg.DagsterInstance.from_config(str(home)) as instance:
        states = {one.instigator_name: one for one in instance.all_instigator_state()}
    elapsed = get_elapsed(states["ahead"])
    assert elapsed is not None and 0 <= elapsed < HOUR / 2
    data = states["ahead"].instigator_data
    assert isinstance(data, SensorInstigatorData) and (data.cursor, data.min_interval) == ("kept", 5)
    assert get_elapsed(states["right"]) == pytest.approx(before["right"], abs=HOUR / 2)


def test_a_home_that_was_written_later_than_now_is_noticed(home: Path):
    assert not set_back_meanwhile(home)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.all_instigator_state()
    assert not set_back_meanwhile(home)
    for file in (home / "schedules").glob("schedules.db*"):
        os.utime(file, (time.time() + HOUR, time.time() + HOUR))
    assert set_back_meanwhile(home)


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_a_provider_bills_what_passed_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
):
    provider = {"name": "sim-a", "boot_seconds": 0.0, "offers": [{**H100, "price_per_hour": 3.6}]}
    config = SimulatedCloudConfig.model_validate({"clock": 1.0, "providers": [provider]})
    cloud, register = SimulatedCloud(tmp_path, config), MachineRegistry(tmp_path)
    (offer,) = cloud.providers["sim-a"].offers()
    machine = new_record(offer, "ba-1", HostPlan(("true",), "m"), provider="sim-a", clock=1.0, max_num_seqs=None)
    began, real = cloud.elapsed(), time.time
    with register.transaction() as connection:
        register.add(connection, replace(machine, created_at=register.now() - 100))
    monkeypatch.setattr(time, "time", lambda: real() + seconds)
    assert MachineRegistry(tmp_path).now() == pytest.approx(real(), abs=30)
    (bill,) = cloud.meter().bills()
    assert bill.seconds == pytest.approx(100, abs=30)
    assert SimulatedCloud(tmp_path, config).elapsed() - began == pytest.approx(0, abs=30)


def test_status_says_that_the_clock_was_set() -> None:
    lines = clock_lines([ClockJump(300.0, -HOUR), ClockJump(4000.0, 90.0)])
    assert lines[0].startswith("the clock was set back by 1 h 00 min, 5 min 00 s ago: leases, bills and ")
    assert lines[1].startswith("the clock was set forward by 1 min 30 s, 1 h 06 min ago")
