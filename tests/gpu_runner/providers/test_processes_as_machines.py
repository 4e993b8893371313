"""Machines that are processes of this computer: no trace, a bill, slots, and why a boot failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.machines import (
    H100,
    ORDER,
    command_line,
    ended_machines,
    eventually,
    first_offer,
    get,
    local_provider,
    processes,
    simulated_cloud,
)

from gpu_runner.providers.base import EndReason, NoCapacity, Provider
from gpu_runner.providers.engine_process import EngineStartError
from gpu_runner.providers.simulated.meter import CloudMeter

Make = Callable[..., Provider]


@pytest.fixture(params=["simulated", "local"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes the provider with a number of slots; each call opens it again."""

    def provider(slots: int = 2) -> Provider:
        if request.param == "local":
            return local_provider(tmp_path, capacity=slots)
        return simulated_cloud(tmp_path, offers=[{**H100, "capacity": slots}]).providers["sim-a"]

    with ended_machines(tmp_path):
        yield provider


@pytest.mark.slow
def test_a_machine_that_boots_in_vain_says_why_and_leaves_a_log_and_a_bill(make: Make, tmp_path: Path):
    provider = make()
    asked_at = time.time()
    machine_id = provider.create(first_offer(provider), "ba-dead", replace(ORDER, arguments=("--no-such-option",)))
    had_at = time.time()
    with pytest.raises(EngineStartError, match=r"not ready after 0 s; its log: .*ba-dead\.log"):
        provider.wait_ready("ba-dead", 0, time.sleep)
    with pytest.raises(EngineStartError, match=r"ba-dead .* has ended: boot failed; its log: "):
        make().wait_ready("ba-dead", 20, time.sleep)
    ended_at = time.time()
    assert get(provider, "ba-dead").reason is EndReason.BOOT_FAILED
    eventually(lambda: not processes(machine_id))
    assert [path.suffix for path in (tmp_path / "machines").iterdir()] == [".log"]
    (bill,) = CloudMeter(tmp_path).bills()
    provider.terminate("ba-dead")
    assert CloudMeter(tmp_path).bills() == [bill]
    assert 0 < bill.seconds / provider.clock <= ended_at - asked_at
    assert bill.created_at <= had_at
    assert bill.usd == pytest.approx(0.001 * bill.seconds)  # 3.6 $ an hour


@pytest.mark.slow
def test_of_many_who_want_the_last_slot_one_gets_it_and_it_is_free_when_the_machine_is_gone(make: Make, tmp_path: Path):
    provider = make(1)
    offer = first_offer(provider)
    assert offer.capacity == 1

    def order(name: str) -> str:
        try:
            return make(1).create(offer, name, ORDER)
        except NoCapacity:
            return ""

    with ThreadPoolExecutor(4) as pool:
        (got,) = filter(None, pool.map(order, [f"ba-{number}" for number in range(4)]))
    assert first_offer(provider).capacity == 0
    (machine,) = provider.list("ba-")
    provider.terminate(machine.name)
    eventually(lambda: first_offer(provider).capacity == 1)
    left = [words for process in processes(got) if (words := command_line(process))]
    assert all("gpu_runner.providers.machine_host.daemon" in words for words in left)
    provider.create(offer, "ba-next", ORDER)
    provider.terminate("ba-next")
    eventually(lambda: not list((tmp_path / "machines").glob("*.lock")))
