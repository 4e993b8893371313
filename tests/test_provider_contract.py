"""What every provider must do, shown on the simulated cloud and on this computer."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from machines import (
    H100,
    ORDER,
    ended_machines,
    eventually,
    first_offer,
    get,
    local_provider,
    processes,
    simulated_cloud,
)

from gpu_runner.providers.base import NoCapacity, Provider, ProviderError
from gpu_runner.providers.local import EngineStartError
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


def test_a_machine_boots_serves_and_ends_without_a_trace(make: Make, tmp_path: Path):
    provider = make()
    asked_at = time.time()
    machine_id = provider.create(first_offer(provider), "ba-1-a", ORDER)
    had_at = time.time()
    assert get(provider, "ba-1-a").state == "booting"
    machine = make().wait_ready("ba-1-a", 20, time.sleep)
    assert (machine.name, machine.id, machine.state, machine.max_num_seqs) == ("ba-1-a", machine_id, "running", 8)
    with urllib.request.urlopen(f"{machine.endpoint}/v1/models", timeout=5) as answer:
        assert json.load(answer)["data"][0]["id"] == "tiny"
    assert len(processes(machine_id)) == 4

    other = make()
    returned_at = time.time()
    other.terminate("ba-1-a")
    ended_at = time.time()
    ended = get(other, "ba-1-a")
    assert (ended.state, ended.reason, ended.endpoint) == ("ended", "terminated", None)
    assert ended.ended_seconds is not None and 0 <= ended.ended_seconds < 5
    eventually(lambda: not processes(machine_id))
    assert [path.suffix for path in (tmp_path / "machines").iterdir()] == [".log"]

    (bill,) = CloudMeter(tmp_path).bills()
    provider.terminate("ba-1-a")
    provider.terminate("ba-1-never")
    assert provider.create(first_offer(provider), "ba-1-a", ORDER) == machine_id
    assert CloudMeter(tmp_path).bills() == [bill]
    assert returned_at - had_at <= bill.seconds / provider.clock <= ended_at - asked_at
    assert bill.usd == pytest.approx(0.001 * bill.seconds)  # 3.6 $ an hour


def test_creates_of_one_name_at_once_are_one_machine_billed_once(make: Make, tmp_path: Path):
    offer = first_offer(make())
    with ThreadPoolExecutor(6) as pool:
        ids = list(pool.map(lambda _: make(1).create(offer, "ba-1", ORDER), range(6)))
    assert len(set(ids)) == 1
    assert len(CloudMeter(tmp_path).bills()) == 1
    make(1).terminate("ba-1")
    eventually(lambda: not list((tmp_path / "machines").glob("*.lock")))


def test_of_many_who_want_the_last_slot_one_gets_it_and_it_is_free_when_the_machine_is_gone(make: Make):
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
    assert all("gpu_runner.providers.host" in process.cmdline() for process in processes(got))
    provider.create(offer, "ba-next", ORDER)
    provider.terminate("ba-next")


def test_waiting_for_an_engine_ends_with_the_time_the_machine_or_the_waiter(make: Make):
    class GivesUp(Exception):
        pass

    def give_up(seconds: float) -> None:
        assert seconds <= 0.5
        raise GivesUp

    provider = make()
    offer = first_offer(provider)
    dead_id = provider.create(offer, "ba-dead", replace(ORDER, arguments=("--no-such-option",)))
    with pytest.raises(GivesUp):
        provider.wait_ready("ba-dead", 20, give_up)
    with pytest.raises(EngineStartError, match=r"not ready after 0 s; its log: .*ba-dead\.log"):
        provider.wait_ready("ba-dead", 0, time.sleep)
    with pytest.raises(EngineStartError, match=r"ba-dead .* has ended: boot failed; its log: "):
        provider.wait_ready("ba-dead", 20, time.sleep)
    with pytest.raises(EngineStartError, match="has no machine ba-never"):
        provider.wait_ready("ba-never", 20, time.sleep)
    assert get(provider, "ba-dead").reason == "boot failed"
    eventually(lambda: not processes(dead_id))


def test_an_order_that_cannot_be_taken_starts_nothing(make: Make, tmp_path: Path):
    provider = make()
    offer = first_offer(provider)
    for wrong, name in (
        (replace(offer, price_per_hour=1.0), "ba-1"),
        (replace(offer, instance_type="other"), "ba-1"),
        (offer, "../ba"),
        (offer, "BA"),
        (offer, ""),
    ):
        with pytest.raises(ProviderError):
            provider.create(wrong, name, ORDER)
    assert not provider.list("")
    assert not list((tmp_path / "machines").iterdir())


def test_machines_are_listed_by_tag(make: Make):
    provider = make()
    offer = first_offer(provider)
    for name in ("ba-1-a", "ba-2-a"):
        provider.create(offer, name, ORDER)
    assert [machine.name for machine in provider.list("ba-1-")] == ["ba-1-a"]
    assert [machine.name for machine in provider.list("")] == ["ba-1-a", "ba-2-a"]
    assert not provider.list("ba-%")
    for name in ("ba-1-a", "ba-2-a"):
        provider.terminate(name)
    eventually(lambda: first_offer(provider).capacity == 2)
