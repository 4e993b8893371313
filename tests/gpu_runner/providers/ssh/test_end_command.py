"""A GPU of a host stays taken until what an engine started elsewhere, such as a container, is known to be gone.

Docker is a script: a container is a file, and the daemon is away while there is a file `away`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pytest
from support.machines import eventually

from gpu_runner.providers.base import EndReason
from gpu_runner.providers.ssh.config import SshProviderConfig
from gpu_runner.providers.ssh.host_requests import (
    EnginePlan,
    HostMachine,
    HostReply,
    HostRequest,
    Result,
    create_request,
    inspect_request,
    list_request,
    parse_inspection,
    parse_reply,
    terminate_request,
)

USER = 65534 if os.geteuid() == 0 else None  # nobody
DOCKER = """#!/bin/sh
cd FOLDER || exit 9
name_of() { while [ "$1" != --name ]; do shift; done; echo "$2"; }
case $1 in
run) name=$(name_of "$@"); echo running >"containers/$name"; exec sleep 1000 ;;
esac
while [ -e hangs ]; do sleep 0.05; done
if [ -e away ]; then echo "Cannot connect to the Docker daemon" >&2; exit 1; fi
case "$1 $2" in
"rm -f")
    [ -e "containers/$3" ] || { echo "Error: No such container: $3" >&2; exit 1; }
    [ ! -e busy ] || { echo "removal of container $3 is already in progress" >&2; exit 1; }
    rm "containers/$3" ;;
"ps "*)
    for word; do case $word in name=*) ls containers | sed 's|^|/|' | grep -E "${word#name=}" ;; esac; done
    exit 0 ;;
*) exit 9 ;;
esac
"""
HOST_END = (resources.files("gpu_runner.providers.ssh") / "host_end.sh").read_text()
CONFIG = SshProviderConfig.model_validate(
    {
        "key_env": "KEY",
        "known_hosts": "known_hosts",
        "docker_image": "vllm/vllm-openai",
        "hosts": [{"name": "a", "address": "10.0.0.5", "gpu": "H100", "gpu_memory_gib": 80}],
    }
)


@dataclass(frozen=True)
class Host:
    """One that is asked as an ordinary user, with one GPU."""

    folder: Path

    def ask(self, request: HostRequest) -> HostReply:
        path = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "HOME": "/"}
        done = subprocess.run(
            ["sh"], input=request.text, capture_output=True, timeout=60, user=USER, group=USER, cwd="/", env=path
        )
        return parse_reply(request.nonce, done.stdout)

    def create(self, name: str, end_command: tuple[str, ...] = CONFIG.engine_end_command) -> HostReply:
        plan = EnginePlan(name, "m", CONFIG.engine_command, end_command, {}, (("0",),), None, 600, 18000)
        return self.ask(create_request(str(self.folder / "hosts"), plan))

    def list(self) -> HostReply:
        return self.ask(list_request(str(self.folder / "hosts"), "", sign_of_life=True))

    def machine(self, name: str) -> HostMachine:
        return next(one for one in self.list().machines if one.name == name)

    def begin(self, name: str, end_command: tuple[str, ...] = CONFIG.engine_end_command) -> None:
        assert self.create(name, end_command).result is Result.OK
        eventually(lambda: self.containers() == [name])

    def end(self, name: str, how: str) -> None:
        """By a request, or by the death of its supervisor, so that the next request finds what is left."""
        if how == "terminated":
            self.ask(terminate_request(str(self.folder / "hosts"), name))
            return
        (supervisor,) = self.folder.rglob(f"{name}/supervisor")
        os.kill(int(supervisor.read_text()), signal.SIGKILL)
        eventually(lambda: self.machine(name).state == "ended")

    def containers(self) -> list[str]:
        return sorted(one.name for one in (self.folder / "containers").iterdir())

    def docker_is(self, *states: str) -> None:
        for state in ("away", "hangs", "busy"):
            (self.folder / state).unlink(missing_ok=True)
        for state in states:
            (self.folder / state).touch()

    def told(self) -> dict[str, int]:
        """Failed ends by name, as `fleet check` sees them."""
        reply = self.ask(inspect_request(str(self.folder / "hosts"), "docker", {}))
        return {one.name: one.tries for one in parse_inspection(reply).failed_ends}

    def freed(self) -> bool:
        return not self.list().taken


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="host-", dir="/tmp") as made:
        folder = Path(made)
        for name in ("", "bin", "containers"):
            (folder / name).mkdir(exist_ok=True)
            (folder / name).chmod(0o777)
        (folder / "bin" / "docker").write_text(DOCKER.replace("FOLDER", made))
        (folder / "bin" / "docker").chmod(0o755)
        found = Host(folder)
        yield found
        found.docker_is()
        for machine in found.list().machines:
            found.ask(terminate_request(str(folder / "hosts"), machine.name))
        eventually(lambda: len(list(folder.rglob("machines/*/gone"))) == len(list(folder.rglob("machines/*/settings"))))


HOW = pytest.mark.parametrize("how", ["terminated", "interrupted"])


@pytest.mark.slow
@pytest.mark.soak("providers")
@HOW
@pytest.mark.parametrize("state", ["away", "busy"])
def test_while_docker_refuses_the_gpu_stays_taken_and_then_the_end_is_tried_again(host: Host, how: str, state: str):
    host.begin("ba-1")
    host.docker_is(state)
    host.end("ba-1", how)
    eventually(lambda: host.machine("ba-1").failed_ends >= 2)
    assert host.list().taken == {"0"} and host.create("ba-2").result is Result.NO_CAPACITY
    machine = host.machine("ba-1").machine("a")
    assert (machine.state, machine.reason) == ("ended", EndReason[how.upper()])
    assert "its end command fails" in machine.leftover and "GPUs stay taken" in machine.leftover
    assert host.told()["ba-1"] >= 2
    log = next(host.folder.rglob("ba-1.log")).read_text()
    assert "end command failed with status" in log and "GPUs 0 stay taken" in log
    host.docker_is()
    eventually(host.freed)
    assert host.containers() == [] and host.told() == {}
    assert host.machine("ba-1").machine("a").leftover == ""
    assert host.create("ba-2").result is Result.OK


@pytest.mark.slow
@HOW
def test_while_docker_hangs_the_host_answers_and_the_gpu_stays_taken(host: Host, how: str):
    host.begin("ba-1")
    host.docker_is("hangs")
    host.end("ba-1", how)
    for _ in range(3):
        reply = host.list()
        assert (reply.result, reply.taken) == (Result.OK, {"0"})
    host.docker_is()
    eventually(host.freed)
    assert host.containers() == []


@pytest.mark.slow
@HOW
def test_a_container_that_is_gone_already_holds_no_gpu_whatever_docker_calls_that(host: Host, how: str):
    host.begin("ba-1")
    (host.folder / "containers" / "ba-1").unlink()
    (host.folder / "containers" / "ba-11").touch()  # of somebody else
    host.end("ba-1", how)
    eventually(host.freed)
    assert host.containers() == ["ba-11"] and host.told() == {}
    (host.folder / "containers" / "ba-11").unlink()


@pytest.mark.slow
@HOW
def test_another_end_command_is_tried_again_until_it_succeeds(host: Host, how: str):
    host.begin("ba-1", ("test", "-e", str(host.folder / "gone")))
    host.end("ba-1", how)
    eventually(lambda: host.machine("ba-1").failed_ends >= 1)
    assert host.list().taken == {"0"}
    (host.folder / "gone").touch()
    eventually(host.freed)


@pytest.mark.parametrize("shell", ["sh", "bash", "dash"])
def test_the_log_says_with_which_status_the_end_command_failed(tmp_path: Path, shell: str):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    (tmp_path / "end_command").write_text("exit 7")
    after_the_first_try = "sleep() { rm -f end_command; }"
    text = f"name=ba-1 port=1 gpus=0\n{HOST_END}\n{after_the_first_try}\nend_elsewhere"
    subprocess.run([shell, "-c", text], cwd=tmp_path, check=True, timeout=60)
    assert "end command failed with status 7; GPUs 0 stay taken" in (tmp_path / "ba-1.log").read_text()


@pytest.mark.slow
def test_the_end_command_of_an_earlier_version_ends_too_when_its_container_is_gone(host: Host):
    host.begin("ba-1", ("docker", "rm", "-f", "{name}"))
    host.docker_is("busy")
    host.end("ba-1", "interrupted")
    eventually(lambda: host.machine("ba-1").failed_ends >= 1)
    assert host.list().taken == {"0"} and host.containers() == ["ba-1"]
    (host.folder / "containers" / "ba-1").unlink()  # Docker has removed it, and fails when it is asked for it again
    eventually(host.freed)
    assert host.told() == {}


@pytest.mark.slow
def test_who_looks_after_a_failed_end_may_die_too(host: Host):
    host.begin("ba-1")
    host.docker_is("away")
    host.end("ba-1", "terminated")
    eventually(lambda: host.machine("ba-1").failed_ends >= 1)
    (supervisor,) = host.folder.rglob("ba-1/supervisor")
    os.kill(int(supervisor.read_text()), signal.SIGKILL)
    assert host.list().taken == {"0"}
    host.docker_is()
    eventually(host.freed)
    assert host.containers() == []


@pytest.mark.slow
def test_a_machine_whose_folder_was_removed_by_hand_holds_no_gpu(host: Host):
    host.begin("ba-1")
    host.docker_is("away")
    host.end("ba-1", "terminated")
    eventually(lambda: host.machine("ba-1").failed_ends >= 1)
    (settings,) = host.folder.rglob("ba-1/settings")
    subprocess.run(["rm", "-rf", str(settings.parent)], check=True)
    assert host.freed()
