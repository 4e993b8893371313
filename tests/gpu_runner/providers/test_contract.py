"""What every provider must do. A new one is added to the fixture, with its counterpart in `support.provider_clouds`.

What only one of them has (slots, zones, tunnels, quotas, late lists) is tested beside it.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import iscoroutinefunction
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import AsyncMock

import pytest
from support.machines import ORDER, eventually, first_offer, get
from support.provider_clouds import SITES, ProviderCloud, ec2, ssh
from support.ssh_hosts import Hosts, missing, ssh_hosts
from support.timing import PATIENCE

from gpu_runner.providers.base import EndReason, EngineAccess, ProviderError, open_access
from gpu_runner.providers.checks import CheckedProvider
from gpu_runner.providers.engine_process import EngineStartError

NO_HOSTS = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    from support.fake_ec2 import moto_server

    with moto_server() as url:
        yield url


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), 1) as found:
        yield found


@pytest.fixture(
    params=[
        *SITES,
        pytest.param("ssh", marks=[pytest.mark.slow, NO_HOSTS]),
        pytest.param("ec2", marks=pytest.mark.slow),  # moto: half a second of CPU for each account
    ]
)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProviderCloud]:
    """The counterpart of a provider, without machines."""
    name = request.param
    if name == "ssh":
        with ssh(tmp_path, request.getfixturevalue("hosts")) as made:
            yield made
    elif name == "ec2":
        with ec2(tmp_path, request.getfixturevalue("moto")) as made:
            yield made
    else:
        with SITES[name](tmp_path) as made:
            yield made


def served(access: EngineAccess, key: str | None) -> str:
    """The model that the engine says it serves."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{access.endpoint}/v1/models", headers=headers)
    with urllib.request.urlopen(request, timeout=5) as page:
        return str(json.load(page)["data"][0]["id"])


def refused(access: EngineAccess, key: str | None) -> bool:
    """Whether the engine does not take this key."""
    try:
        served(access, key)
    except urllib.error.HTTPError as error:
        with error:
            return error.code == 401
    return False


@pytest.mark.slow
def test_a_machine_boots_serves_and_ends_and_its_name_stays_its_own(site: ProviderCloud):
    provider = site.make()
    machine_id = provider.create(first_offer(provider), "ba-1-a", ORDER)
    assert get(provider, "ba-1-a").state == "booting"
    site.boots("ba-1-a")
    machine = site.make().wait_ready("ba-1-a", 20 * PATIENCE, time.sleep)
    assert (machine.name, machine.id, machine.state, machine.max_num_seqs) == ("ba-1-a", machine_id, "running", 8)
    assert machine.endpoint is not None and len(machine.endpoint) <= 300
    assert get(site.make(), "ba-1-a").state == "running"
    assert site.alive() == [machine_id]

    access = open_access(site.make(), "ba-1-a", machine.endpoint)
    assert served(access, access.api_key)
    assert access.api_key is None or access.api_key not in repr(EngineAccess(access.endpoint, access.api_key))
    if site.keys:
        assert refused(access, None) and refused(access, "x" * 64)
    access.close()
    access.close()

    other = site.make()
    other.terminate("ba-1-a")
    site.ends("ba-1-a")
    ended = get(other, "ba-1-a")
    assert (ended.state, ended.reason, ended.endpoint) == ("ended", EndReason.TERMINATED, None)
    assert ended.ended_seconds is not None and 0 <= ended.ended_seconds < 20
    eventually(lambda: not site.alive())
    provider.terminate("ba-1-a")
    provider.terminate("ba-1-never")
    assert provider.create(first_offer(provider), "ba-1-a", ORDER) == machine_id
    assert not site.alive()


@pytest.mark.slow
def test_a_name_is_one_machine_and_is_listed_and_ended_by_itself(site: ProviderCloud):
    offer = first_offer(site.make())
    names = ["ba-1-a"] * 4 + ["ba-1-ab", "ba-2-a"]
    providers = [site.make() for _ in names]
    with ThreadPoolExecutor(6) as pool:
        ids = list(pool.map(lambda one, name: one.create(offer, name, ORDER), providers, names))
    assert len(set(ids[:4])) == 1 and len(set(ids)) == 3
    eventually(lambda: site.alive() == sorted(set(ids)))
    provider = site.make()
    assert sorted(machine.name for machine in provider.list("ba-1-")) == ["ba-1-a", "ba-1-ab"]
    assert sorted(machine.name for machine in provider.list("")) == ["ba-1-a", "ba-1-ab", "ba-2-a"]
    assert not provider.list("ba-%") and not provider.list("ba-*")
    provider.terminate("ba-1-a")
    site.ends("ba-1-a")
    assert sorted(one.name for one in provider.list("") if one.state != "ended") == ["ba-1-ab", "ba-2-a"]
    eventually(lambda: site.alive() == sorted(ids[4:]))


@pytest.mark.slow
def test_waiting_for_an_engine_ends_with_the_time_the_machine_or_the_waiter(
    site: ProviderCloud, monkeypatch: pytest.MonkeyPatch
):
    class GivesUp(Exception):
        pass

    def give_up(seconds: float) -> None:
        assert seconds <= 0.5
        raise GivesUp

    provider = site.make()
    with pytest.raises(EngineStartError, match="has no machine ba-never"):
        provider.wait_ready("ba-never", 20 * PATIENCE, time.sleep)
    if site.mute:
        awaited = iscoroutinefunction(resolve_name(site.mute))
        monkeypatch.setattr(site.mute, AsyncMock(return_value=False) if awaited else lambda endpoint: False)
    provider.create(first_offer(provider), "ba-slow", ORDER)
    with pytest.raises(GivesUp):
        provider.wait_ready("ba-slow", 20 * PATIENCE, give_up)
    with pytest.raises(EngineStartError, match="not ready after 0 s"):
        provider.wait_ready("ba-slow", 0, time.sleep)
    provider.terminate("ba-slow")
    site.ends("ba-slow")
    with pytest.raises(EngineStartError, match=r"ba-slow at .* has ended: terminated"):
        provider.wait_ready("ba-slow", 20 * PATIENCE, time.sleep)


def test_an_order_that_cannot_be_taken_starts_nothing(site: ProviderCloud):
    provider = site.make()
    offer = first_offer(provider)
    for wrong, name in (
        (replace(offer, price_per_hour=1.0), "ba-1"),
        (replace(offer, instance_type="other"), "ba-1"),
        *((offer, name) for name in ("../ba", "BA", "", "-ba", "x" * 64)),
    ):
        with pytest.raises(ProviderError):
            provider.create(wrong, name, ORDER)
    assert not provider.list("") and not site.alive()


def test_it_can_be_looked_at_without_renting(site: ProviderCloud):
    provider = site.make()
    assert provider.clock >= 1 and {offer.provider for offer in provider.offers()} == {provider.name}
    if isinstance(provider, CheckedProvider):
        assert provider.check()
    assert not site.alive()
