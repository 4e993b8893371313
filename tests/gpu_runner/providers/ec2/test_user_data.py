"""What a VM of EC2 is told to do: tried with OpenSSH's and the shell's own programs."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpu_runner.providers.base import ProviderError
from gpu_runner.providers.ec2.machines import rebalance_recommended
from gpu_runner.providers.ec2.ssh_keys import ssh_keys
from gpu_runner.providers.ec2.user_data import LARGEST, Boot, environment_file, unit_words, user_data, watch_script

SECRET = "s" * 64
PERCENT = '100% of $HOME "and" \\ more'


def boot(**settings: Any) -> Boot:
    given: dict[str, Any] = {
        "image": "vllm/vllm-openai@sha256:0",
        "words": ("--model", "org/model", "--chat-template", PERCENT),
        "environment": {"VLLM_API_KEY": "key-of-the-engine"},
        "keys": ssh_keys(SECRET, "ba-1"),
        "orphan_seconds": 1800.0,
        **settings,
    }
    return Boot(**given)


def document(given: Boot) -> dict[str, Any]:
    head, text = user_data(given).split("\n", 1)
    assert head == "#cloud-config"
    return json.loads(text)


def files(given: Boot) -> dict[str, dict[str, str]]:
    return {one["path"]: one for one in document(given)["write_files"]}


def test_the_same_order_gives_the_same_bytes_and_another_machine_has_other_keys():
    assert user_data(boot()) == user_data(boot())
    mine, other = ssh_keys(SECRET, "ba-1"), ssh_keys(SECRET, "ba-2")
    keys = {one.public for one in (mine.host, mine.client, other.host, other.client)}
    assert len(keys) == 4
    assert ssh_keys("t" * 64, "ba-1").host.public not in keys


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen of OpenSSH")
def test_openssh_reads_the_private_key_and_finds_the_public_one_in_it(tmp_path: Path):
    keys = ssh_keys(SECRET, "ba-1")
    for number, key in enumerate((keys.host, keys.client)):
        path = tmp_path / f"key-{number}"
        path.touch(0o600)
        path.write_text(key.private)
        found = subprocess.run(["ssh-keygen", "-y", "-f", path], capture_output=True, text=True, check=True)
        assert found.stdout.split()[:2] == key.public.split()


def test_the_key_stands_in_a_file_of_root_only_and_nowhere_on_a_command_line():
    given = boot()
    found = files(given)
    environment = found["/etc/batch-assets/engine.env"]
    assert (environment["permissions"], environment["owner"]) == ("0600", "root:root")
    assert environment["content"] == "VLLM_API_KEY=key-of-the-engine\n"
    others = [one["content"] for path, one in found.items() if path != "/etc/batch-assets/engine.env"]
    assert not any("key-of-the-engine" in content for content in others)
    assert "key-of-the-engine" not in repr(given) and "PRIVATE" not in repr(given)


def test_the_engine_listens_on_loopback_and_only_its_port_is_let_through():
    given = boot()
    unit = files(given)["/etc/systemd/system/batch-assets-engine.service"]["content"]
    assert '"--publish" "127.0.0.1:8000:8000"' in unit
    (user,) = document(given)["users"]
    (line,) = user["ssh_authorized_keys"]
    forced = 'command="/usr/local/sbin/batch-assets-risk"'
    assert line.startswith(f'restrict,port-forwarding,permitopen="127.0.0.1:8000",{forced} ssh-ed25519 ')
    assert user["lock_passwd"] is True and files(given)["/usr/local/sbin/batch-assets-risk"]["permissions"] == "0755"


def test_words_reach_the_engine_as_they_are():
    """systemd's own rules, applied backwards: no specifier, no variable and no quote is left to it."""
    words = ("plain", PERCENT, "%n", "${HOME}", 'say "hi"', "back\\slash")
    line = unit_words(words)
    unquoted = line.replace("%%", "%").replace("$$", "$")
    assert tuple(json.loads("[" + unquoted.replace('" "', '", "') + "]")) == words
    assert not [word for word in line.replace("%%", "").replace("$$", "") if word in "%$"]


def test_what_cannot_be_in_it_is_refused_and_not_quoted():
    with pytest.raises(ProviderError, match=r"one line in TOKEN$") as raised:
        environment_file({"TOKEN": "secret\nOTHER=1"})
    assert "secret" not in str(raised.value)
    with pytest.raises(ProviderError, match="expected no line break"):
        user_data(boot(words=("--model", "a\nExecStart=/bin/sh")))
    with pytest.raises(ProviderError, match=f"expected at most {LARGEST:,} bytes"):
        user_data(boot(environment={"LONG": "x" * LARGEST}))


class Machine:
    """What the watch script sees of a VM: seconds since boot, and whether sshd has a connection of its user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "watch"
        self.script.write_text(watch_script(100))
        (folder / "bin").mkdir()
        self._program("shutdown", 'echo "$@" >> "$MARKS/ended"')
        self._program("pgrep", '[ "$1 $2" = "-u batch-assets" ] && [ -e "$MARKS/connected" ]')

    def _program(self, name: str, line: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def look(self, up: float, connected: bool) -> bool:
        """One look at a moment; whether the VM was told to power off."""
        mark = self.folder / "connected"
        mark.touch() if connected else mark.unlink(missing_ok=True)
        (self.folder / "uptime").write_text(f"{up:.2f} 1.00\n")
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "MARKS": str(self.folder),
            "WATCH_STATE": str(self.folder / "seen"),
            "WATCH_UPTIME": str(self.folder / "uptime"),
        }
        subprocess.run(["/bin/sh", self.script], env=environment, check=True)
        return (self.folder / "ended").exists()


def test_a_vm_without_a_tunnel_for_long_powers_itself_off_and_not_before(tmp_path: Path):
    machine = Machine(tmp_path)
    assert not machine.look(30, connected=False)  # nobody came yet: counted from the first look
    assert not machine.look(125, connected=False)
    assert not machine.look(129, connected=True)
    assert not machine.look(228, connected=False)
    assert machine.look(229, connected=False)
    assert (tmp_path / "ended").read_text().startswith("-h now")


class MetadataService(BaseHTTPRequestHandler):
    """EC2's, version 2: nothing without a token. `pages`: what there is."""

    pages: ClassVar[dict[str, str]] = {}

    def do_PUT(self) -> None:
        right = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200 if right else 400, "token")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "token":
            return self._answer(401, "no token")
        page = self.pages.get(self.path)
        return self._answer(404, "<html>404</html>") if page is None else self._answer(200, page)

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl, as the VM does")
def test_a_vm_says_whether_ec2_recommends_to_leave_it(tmp_path: Path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), MetadataService)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
    thread.start()
    script = tmp_path / "risk"
    script.write_text(files(boot())["/usr/local/sbin/batch-assets-risk"]["content"])
    address = f"http://127.0.0.1:{server.server_address[1]}"

    def said() -> str:
        environment = {**os.environ, "METADATA_SERVICE": address, "SSH_ORIGINAL_COMMAND": "id"}
        return subprocess.run(["sh", script], env=environment, capture_output=True, text=True, timeout=20).stdout

    try:
        assert said() == "" and not rebalance_recommended(said())
        notice = json.dumps({"noticeTime": "2026-11-23T08:00:00Z"})
        MetadataService.pages["/latest/meta-data/events/recommendations/rebalance"] = notice
        assert said() == notice and rebalance_recommended(said())
    finally:
        MetadataService.pages.clear()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("said", ["", "{}", "[]", "null", "x", '{"noticeTime": 1}', "[" * 4000, " " * 5000])
def test_what_is_no_recommendation_is_none(said: str):
    assert not rebalance_recommended(said)
