"""What rented hosts say of themselves is asked in the background, and not too often."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from pathlib import Path

from support.machines import eventually
from support.vm_sshd import VmSshd

from gpu_runner.providers.cloud.tunnels import TunnelTarget
from gpu_runner.providers.ec2.ssh_keys import ssh_keys
from gpu_runner.providers.ssh.host_words import ASK_SECONDS, LatestWords, latest_words

KEYS = ssh_keys("s" * 64, "ba-1")


def target(port: int) -> TunnelTarget:
    return TunnelTarget("127.0.0.1", port, "batch-assets", KEYS.host.public, KEYS.client.private, 8000)


def test_the_answer_is_that_of_the_call_before_and_silence_changes_nothing():
    asked: list[Future[str]] = []
    now = [0.0]

    def ask(_: TunnelTarget) -> Future[str]:
        asked.append(Future())
        return asked[-1]

    words = LatestWords(ask, lambda: now[0])
    assert words("i-1", target(1)) == words("i-1", target(1)) == "" and len(asked) == 1
    now[0] += 2 * ASK_SECONDS
    assert words("i-1", target(1)) == "" and len(asked) == 1, "it is still being asked"
    asked[0].set_result("first")
    assert words("i-1", target(1)) == "first" and len(asked) == 2
    asked[1].set_exception(OSError("cut"))
    assert words("i-1", target(1)) == "first" and len(asked) == 2, "not again so soon"
    now[0] += ASK_SECONDS
    assert words("i-1", target(1)) == "first" and len(asked) == 3
    assert words("i-2", target(1)) == "" and len(asked) == 4


def test_a_host_is_asked_over_ssh_and_its_connection_ends(tmp_path: Path):
    (tmp_path / "keys").write_text(KEYS.client.public + "\n")
    with contextlib.closing(VmSshd(KEYS.host.private, tmp_path / "keys", 8000, says=lambda: "at risk")) as vm:
        eventually(lambda: latest_words()(f"vm at {tmp_path}", target(vm.port)) == "at risk")
        eventually(lambda: not vm.alive)
