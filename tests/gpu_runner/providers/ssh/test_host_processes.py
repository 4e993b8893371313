"""What a host knows of a machine's processes, by the scripts that run there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.machines import eventually
from support.processes import environment, runs

from gpu_runner.providers.ssh.host_requests import (
    EnginePlan,
    HostRequest,
    create_request,
    list_request,
    parse_reply,
    terminate_request,
)

NOBODY = 65534
USER = NOBODY if os.geteuid() == 0 else None
FUNCTIONS = list_request("/nowhere", "", sign_of_life=False).text.removesuffix(b"main </dev/null\n").decode()


@contextlib.contextmanager
def running(
    command: list[str], variables: dict[str, str], user: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=variables, user=user)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="host-", dir="/tmp") as made:
        Path(made).chmod(0o777)
        yield Path(made)


def test_what_a_dead_supervisor_left_is_ended_by_an_ordinary_user(folder: Path):
    """Other users' processes cannot be looked at by one, and grep says so by its exit status."""
    machine = folder / "machines" / "ba-1"
    machine.mkdir(parents=True)
    (folder / "gpus").mkdir()
    (folder / "gpus" / "0").symlink_to("ba-1")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (machine / "settings").write_text(
        f"name=ba-1 machine_id=i-{os.getpid()} port=1 gpus=0 root={folder} boot={boot} made_at=1\n"
    )
    (machine / "lock").touch()
    if USER is not None:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, USER, USER, follow_symlinks=False)
    with running(["/bin/sleep", "60"], {"GPU_RUNNER_MACHINE": f"i-{os.getpid()}"}, USER) as left:
        time.sleep(0.2)
        script = f"{FUNCTIONS}\nroot={folder} boot={boot}\nseconds_up\nsettle {machine}\n"
        subprocess.run(["sh"], input=script.encode(), check=True, timeout=60, user=USER, cwd="/")
        assert left.wait(10) == -9
    assert (machine / "gone").exists() and list((folder / "gpus").iterdir()) == []


@pytest.mark.slow
def test_an_ordinary_account_makes_and_ends_machines_and_takes_over_after_a_killed_supervisor(folder: Path):
    def ask(request: HostRequest) -> dict[str, str]:
        done = subprocess.run(
            ["sh"], input=request.text, capture_output=True, timeout=60, user=USER, group=USER, cwd="/"
        )
        return {machine.name: machine.state for machine in parse_reply(request.nonce, done.stdout).machines}

    def plan(name: str, script: str) -> EnginePlan:
        mark = {"TEST_FOLDER": str(folder)}
        return EnginePlan(name, "m", ("/bin/sh", "-c", script), (), mark, (("0",),), None, 600, 18000)

    def ours() -> list[psutil.Process]:
        marked = (one for one in psutil.process_iter() if environment(one).get("TEST_FOLDER") == str(folder))
        return [process for process in marked if runs(process)]

    root = str(folder / "hosts")
    assert ask(create_request(root, plan("ba-1", "sleep 1000 & sleep 1000"))) == {"ba-1": "booting"}
    eventually(lambda: len(ours()) >= 3)
    (supervisor,) = folder.rglob("supervisor")
    os.kill(int(supervisor.read_text()), signal.SIGKILL)
    eventually(lambda: ask(list_request(root, "", sign_of_life=True)) == {"ba-1": "ended"})
    assert ours() == []
    assert ask(create_request(root, plan("ba-2", "trap : TERM; sleep 1000 & wait; wait"))) == {"ba-2": "booting"}
    eventually(lambda: len(ours()) >= 2)
    assert ask(terminate_request(root, "ba-2")) == {"ba-2": "ended"}
    eventually(lambda: ours() == [] and not list(folder.rglob("gpus/*")))


def test_only_a_program_that_has_just_begun_may_be_anybodys():
    with running(["/bin/sleep", "60"], {}) as without, running(["/bin/sleep", "60"], {"A": "1"}) as plain:
        zombie = subprocess.Popen(["/bin/true"], env={})
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        time.sleep(0.2)
        done = subprocess.run(["sh"], input=f"{FUNCTIONS}\nbegun\n".encode(), capture_output=True, check=True)
        zombie.wait()
        assert not {str(one.pid) for one in (without, plain, zombie)} & set(done.stdout.decode().split())


@pytest.mark.slow
def test_a_process_that_has_just_begun_is_not_taken_for_gone():
    """subprocess returns in the middle of execve(2), and a busy machine keeps the process there for a while."""
    look = f'{FUNCTIONS}\nwhile read -r mark; do [ -n "$(begun)$(marked "$mark")" ] && echo seen || echo missed; done\n'
    with contextlib.ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            stack.enter_context(running([sys.executable, "-c", "while True: pass"], {}))
        shell = subprocess.Popen(["sh", "-c", look], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert shell.stdin is not None and shell.stdout is not None
        with shell:
            for number in range(30):
                mark = f"i-{os.getpid()}-{number}"
                with running(["/bin/sleep", "60"], {"GPU_RUNNER_MACHINE": mark}):
                    shell.stdin.write(f"{mark}\n".encode())
                    shell.stdin.flush()
                    assert shell.stdout.readline() == b"seen\n"
