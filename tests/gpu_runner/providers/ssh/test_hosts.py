"""The provider on real sshd hosts, each in a network namespace of its own. The engine is the simulator."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.machines import ORDER, eventually, first_offer, get
from support.ssh_hosts import Hosts, missing, ssh_hosts
from support.timing import PATIENCE

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.base import EngineAccess, NoCapacity, ProviderError, ProviderUnclear
from gpu_runner.providers.checks import CheckOutcome, CheckSubject
from gpu_runner.providers.engine_process import EngineStartError
from gpu_runner.providers.ssh.connections import REQUEST_SECONDS, SHELL_HANGS
from gpu_runner.providers.ssh.login import NotConnected
from gpu_runner.providers.ssh.provider import SshProvider

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]

Make = Callable[..., SshProvider]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), 2) as found:
        yield found


@pytest.fixture
def make(hosts: Hosts, tmp_path: Path) -> Iterator[Make]:
    """Makes the provider with a number of slots on its first host only; each call opens it again."""

    def provider(slots: int = 2, count: int = 1, **settings: Any) -> SshProvider:
        folder = str(tmp_path / "the machines' $HOME")
        config = hosts.config(folder=folder, host={"gpus": slots, **settings.pop("host", {})}, **settings)
        return SshProvider(tmp_path, config.model_copy(update={"hosts": config.hosts[:count]}))

    yield provider
    for machine in provider(count=2).list(""):
        provider(count=2).terminate(machine.name)
    eventually(lambda: not hosts.processes())


def root(folder: Path) -> Path:
    """Where the first host writes down its machines."""
    (found,) = folder.glob("the machines*/*1")
    return found


def served(access: EngineAccess, key: str | None = None) -> Any:
    """What /v1/models answers with the key."""
    headers = {"Authorization": f"Bearer {access.api_key if key is None else key}"}
    request = urllib.request.Request(f"{access.endpoint}/v1/models", headers=headers)
    with urllib.request.urlopen(request, timeout=5) as answer:
        return json.load(answer)["data"][0]["id"]


def test_an_engine_has_its_gpu_a_session_and_a_key_that_nobody_is_shown(hosts: Hosts, make: Make, tmp_path: Path):
    provider = make()
    ordered_at = time.monotonic()
    machine_id = provider.create(first_offer(provider), "ba-1-a", ORDER)
    made_at = time.monotonic()
    machine = make().wait_ready("ba-1-a", 20 * PATIENCE, time.sleep)
    assert machine.endpoint is not None
    asked_at = time.monotonic()
    billed = get(provider, "ba-1-a").billed_seconds
    assert billed is not None  # in hundredths, as is the host's clock
    assert asked_at - made_at - 0.02 <= billed <= time.monotonic() - ordered_at + 0.02
    access = make().access("ba-1-a", machine.endpoint)
    assert access.api_key is not None and served(access) == "tiny"
    (engine,) = hosts.processes(machine_id)
    assert engine.environ()["CUDA_VISIBLE_DEVICES"] == "0"
    assert os.getsid(engine.pid) == engine.pid != os.getsid(0)
    told = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert "gpu_runner.simulator" in told and access.api_key not in told
    folder = root(tmp_path) / "machines" / "ba-1-a"
    assert not [file for file in folder.iterdir() if access.api_key in file.read_text(errors="replace")]

    make().terminate("ba-1-a")
    ended = get(provider, "ba-1-a")
    assert ended.ended_seconds is not None and 0 <= ended.ended_seconds < 5 * PATIENCE
    time.sleep(0.05)
    assert get(provider, "ba-1-a").billed_seconds == ended.billed_seconds, "its bill has ended, too"
    eventually(lambda: not hosts.processes(machine_id))
    eventually(lambda: first_offer(provider).capacity == 2)
    with pytest.raises(OSError, match=r"closed connection|reset by peer"):
        served(access)
    access.close()
    access.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        served(access)


def created(provider: SshProvider, offer: Offer, name: str) -> str:
    """The id of a machine. Its host serves one request after another, and whoever waited too long on a busy computer
    asks again by the same name, as the fleet does.
    """
    deadline = time.monotonic() + 20 * PATIENCE
    while True:
        try:
            return provider.create(offer, name, ORDER)
        except NoCapacity:
            raise
        except (ProviderError, ProviderUnclear):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_creates_of_one_name_at_once_are_one_machine(hosts: Hosts, make: Make):
    offer = first_offer(make())
    with ThreadPoolExecutor(6) as pool:
        ids = set(pool.map(lambda _: created(make(), offer, "ba-1"), range(6)))
    assert len(ids) == 1 and len(make().list("")) == 1
    assert first_offer(make()).capacity == 1


def test_of_many_who_want_the_last_gpus_one_gets_them_and_they_are_free_when_its_processes_are_gone(
    hosts: Hosts, make: Make
):
    provider = make(4, host={"gpus_per_instance": 2})
    offer = first_offer(provider)

    def order(name: str) -> str:
        try:
            return created(make(4, host={"gpus_per_instance": 2}), offer, name)
        except NoCapacity:
            return ""

    with ThreadPoolExecutor(5) as pool:
        got = [one for one in pool.map(order, [f"ba-{number}" for number in range(5)]) if one]
    assert len(got) == 2 and first_offer(provider).capacity == 0
    eventually(lambda: len(hosts.processes()) == 2)
    assert sorted(one.environ()["CUDA_VISIBLE_DEVICES"] for one in hosts.processes()) == ["0,1", "2,3"]
    one_gpu_each = make(4)
    assert first_offer(one_gpu_each).capacity == 0, "whoever divides the GPUs otherwise sees them taken too"
    first = next(machine for machine in provider.list("") if machine.id == got[0])
    provider.terminate(first.name)
    eventually(lambda: first_offer(provider).capacity == 1)
    assert not hosts.processes(got[0]), provider.list("")
    provider.create(offer, "ba-next", ORDER)


def test_a_boot_that_fails_names_its_log(hosts: Hosts, make: Make):
    provider = make()
    dead_id = provider.create(first_offer(provider), "ba-dead", replace(ORDER, arguments=("--no-such-option",)))
    with pytest.raises(EngineStartError, match=r"ba-dead .* has ended: boot failed; its log: .*ba-dead\.log"):
        provider.wait_ready("ba-dead", 20 * PATIENCE, time.sleep)
    assert not hosts.processes(dead_id)
    provider = make(command=["sh", "-c", "exec sleep 600", "{port}"])
    provider.create(first_offer(provider), "ba-slow", ORDER)
    with pytest.raises(EngineStartError, match=r"not ready after 0 s; its log: .*ba-slow\.log"):
        provider.wait_ready("ba-slow", 0, time.sleep)


def test_machines_are_listed_on_all_hosts(hosts: Hosts, make: Make):
    provider = make(1, count=2)
    first, second = provider.offers()
    assert (first.name, second.name) == ("lab/host1/1xH100", "lab/host2/1xH100")
    provider.create(first, "ba-1-a", ORDER)
    provider.create(second, "ba-2-a", ORDER)
    assert [machine.name for machine in provider.list("ba-1-")] == ["ba-1-a"]
    assert [machine.name for machine in provider.list("")] == ["ba-1-a", "ba-2-a"]
    for name in ("ba-1-a", "ba-2-a"):
        provider.terminate(name)
    eventually(lambda: [one.capacity for one in provider.offers()] == [1, 1])


def test_a_machine_without_a_sign_of_life_or_whose_supervisor_was_killed_ends(hosts: Hosts, make: Make, tmp_path: Path):
    provider = make(orphan_seconds=5)
    offer = first_offer(provider)
    forgotten = provider.create(offer, "ba-forgotten", ORDER)
    eventually(lambda: hosts.processes(forgotten))
    eventually(lambda: not hosts.processes(forgotten))
    assert get(provider, "ba-forgotten").reason == "orphaned"

    other = make()
    lost = other.create(offer, "ba-lost", ORDER)
    other.wait_ready("ba-lost", 20 * PATIENCE, time.sleep)
    hosts.run(1, 'kill -KILL "$(cat "$1"/machines/ba-lost/supervisor)"', str(root(tmp_path)))
    eventually(lambda: get(other, "ba-lost").state == "ended")
    assert get(other, "ba-lost").reason == "interrupted"
    assert not hosts.processes(lost) and first_offer(other).capacity == 2


def test_only_a_pinned_host_key_and_our_own_key_are_taken(hosts: Hosts, make: Make, tmp_path: Path):
    for name in ("wrong", "own"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    stranger = " ".join((tmp_path / "wrong.pub").read_text().split()[:2])
    with pytest.raises(NotConnected, match="expected one of the pinned host keys") as refused:
        make(known_hosts=None, host={"host_keys": [stranger]}).offers()
    assert "AAAA" not in str(refused.value)
    (tmp_path / "known").write_text(f"other.example {stranger}\n")
    with pytest.raises(NotConnected, match="expected one of the pinned host keys"):
        make(known_hosts=str(tmp_path / "known")).offers()
    with pytest.raises(NotConnected, match="may log in"):
        make(key_file=str(tmp_path / "own")).offers()
    with pytest.raises(NotConnected, match="NO_SUCH_KEY: expected the private key"):
        make(key_file=None, key_env="NO_SUCH_KEY").offers()
    looked = make(key_file=str(tmp_path / "own")).check()
    assert [(one.subject, one.outcome) for one in looked] == [(CheckSubject.CREDENTIALS, CheckOutcome.FAILED)]


def test_a_check_tells_what_is_there_and_what_is_not(hosts: Hosts, make: Make, monkeypatch: pytest.MonkeyPatch):
    key = Path(make().config.key_file or "").read_text()
    monkeypatch.setenv("SSH_TEST_KEY", key)
    looked = make(key_file=None, key_env="SSH_TEST_KEY", command=["no such engine", "{port}"]).check()
    told = {
        one.found.split(": ")[1].split(" ")[0]: one.outcome for one in looked if one.found.startswith("host host1:")
    }
    failed = [one for one in looked if one.outcome is CheckOutcome.FAILED]
    assert [(one.subject, "no such engine not found" in one.found) for one in failed] == [(CheckSubject.IMAGE, True)]
    assert {"all", "no", "its"} <= set(told)
    assert CheckOutcome.FAILED not in {one.outcome for one in make().check()}


@pytest.mark.skipif(
    not (Path.home() / ".bashrc").exists(), reason="needs a ~/.bashrc in whose place another can be put"
)
@pytest.mark.soak("providers")
def test_a_login_shell_that_hangs_is_told_and_what_it_was_to_do_is_not_done_late(
    hosts: Hosts, make: Make, tmp_path: Path
):
    provider = make()
    offer = first_offer(provider)
    began = tmp_path / "shell began"
    try:
        hosts.startup_file.write_text(f"echo >'{began}'\nsleep {REQUEST_SECONDS + 3}\n")
        with pytest.raises(ProviderUnclear, match=re.escape(SHELL_HANGS)):
            provider.create(offer, "ba-late", ORDER)
        hung_at = began.stat().st_mtime
        (found,) = provider.check()
        assert found.outcome is CheckOutcome.FAILED and SHELL_HANGS in found.found and "startup files" in found.remedy
    finally:
        hosts.startup_file.write_text("")
    time.sleep(max(0.0, hung_at + REQUEST_SECONDS + 5 - time.time()))  # the shell that hung goes on meanwhile
    assert provider.list("ba-late") == [] and not hosts.processes() and first_offer(provider).capacity == 2


async def _get(endpoint: str, key: str | None, count: int) -> list[int]:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def one() -> int:
            async with session.get(f"{endpoint}/v1/models") as answer:
                return answer.status

        return await asyncio.gather(*(one() for _ in range(count)))


@pytest.mark.soak("providers")
def test_a_tunnel_carries_many_requests_and_keeps_its_port_when_its_host_comes_back(hosts: Hosts, make: Make):
    provider = make(1, orphan_seconds=600)
    provider.create(first_offer(provider), "ba-1", ORDER)
    machine = provider.wait_ready("ba-1", 20 * PATIENCE, time.sleep)
    assert machine.endpoint is not None
    access = provider.access("ba-1", machine.endpoint)
    assert set(asyncio.run(_get(access.endpoint, access.api_key, 300))) == {200}
    hosts.do("cut", 1)
    try:
        began = time.monotonic()
        with pytest.raises((ProviderUnclear, ProviderError)):
            provider.list("")
        with pytest.raises((ProviderUnclear, ProviderError)):
            provider.terminate("ba-1")
        assert time.monotonic() - began < 15 * PATIENCE
        eventually(lambda: _refused(access))
        assert time.monotonic() - began < 15 * PATIENCE
    finally:
        hosts.do("heal", 1)
    eventually(lambda: not _refused(access))
    assert served(access) == "tiny"
    access.close()


def _refused(access: EngineAccess) -> bool:
    try:
        served(access)
    except urllib.error.URLError as error:
        return "refused" in str(error)
    except OSError:
        return False
    return False
