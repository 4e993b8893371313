"""The first daemon of a stack is a fork of the code server: it and its stand-in live and die together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.machines import eventually
from support.timing import PATIENCE

from batch_assets.local_dagster import first_daemon

SECONDS = 20 * PATIENCE
DAEMON = (  # says what it was given, then waits for SIGTERM, or for ever
    "import os, signal, sys, time\n"
    "def main():\n"
    "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0 if print('ended', flush=True) else 3))\n"
    "    print(os.getpid(), sys.argv[1:], os.environ['GIVEN'], 'ONLY_SERVER' in os.environ, flush=True)\n"
    "    print(*(os.path.realpath(f'/proc/self/fd/{one}') for one in os.listdir('/proc/self/fd')), flush=True)\n"
    "    time.sleep(300)\n"
    "if __name__ == '__main__':\n"
    "    main()\n"
)
SERVER = (  # what forks the daemon, as the code server does
    "import os, sys, time\n"
    "from pathlib import Path\n"
    "from batch_assets.local_dagster import first_daemon\n"
    "first_daemon.FORKS_SECONDS = float(sys.argv[3])\n"
    "listener = first_daemon.listen(Path(sys.argv[1]))\n"
    "held = open(sys.argv[1] + '/held', 'w')\n"
    "print(first_daemon.fork(listener) if sys.argv[2] == 'forks' else 0, flush=True)\n"
    "listener.close()\n"
    "time.sleep(300)\n"
)


@dataclass
class Place:
    """A folder with the module of a daemon, and the processes that a test has started there."""

    folder: Path
    opened: contextlib.ExitStack

    def start(self, *words: str, **given: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(self.folder), **given}
        process = subprocess.Popen([sys.executable, *words], env=env, stdout=subprocess.PIPE, text=True)
        self.opened.enter_context(process)
        self.opened.callback(process.kill)
        return process

    def server(self, does: str, seconds: float = 120.0) -> tuple[subprocess.Popen[str], int]:
        """A code server, and the pid of what it has forked, which waits so long to be asked."""
        server = self.start("-c", SERVER, str(self.folder), does, str(seconds), ONLY_SERVER="1")
        return server, int(line(server))

    def stand_in(self) -> subprocess.Popen[str]:
        """What the stack starts as its daemon."""
        address = str(self.folder / first_daemon.ADDRESS)
        words = ["-m", "batch_assets.local_dagster.first_daemon", address, "some_daemon", "--workspace", "a b"]
        return self.start(*words, GIVEN="é")


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "some_daemon.py").write_text(DAEMON)
    with contextlib.ExitStack() as opened:
        yield Place(tmp_path, opened)


def test_it_runs_the_module_with_the_options_environment_and_output_of_its_stand_in(place: Place):
    _, forked = place.server("forks")
    assert line(place.stand_in()) == f"{forked} ['--workspace', 'a b'] é False"
    assert psutil.Process(forked).name() == first_daemon.NAME
    assert (place.folder / first_daemon.ADDRESS).stat().st_mode & 0o777 == 0o600


def test_it_holds_nothing_open_that_its_code_server_holds(place: Place):
    place.server("forks")
    stand_in = place.stand_in()
    line(stand_in)
    assert "held" not in line(stand_in)


def test_one_that_nobody_asks_for_ends(place: Place):
    _, forked = place.server("forks", seconds=0.2)
    eventually(lambda: is_gone(forked))


def test_the_stand_in_is_the_daemon_where_nothing_was_forked(place: Place):
    place.server("does not fork")
    alone = place.stand_in()
    assert line(alone) == f"{alone.pid} ['--workspace', 'a b'] é False"


def test_a_signal_is_passed_on_and_the_end_is_seen(place: Place):
    _, forked = place.server("forks")
    stand_in = place.stand_in()
    line(stand_in)
    line(stand_in)
    stand_in.terminate()
    assert line(stand_in) == "ended"
    assert stand_in.wait(SECONDS) == 1
    eventually(lambda: is_gone(forked))


@pytest.mark.parametrize("killed", ["the stand-in", "the daemon", "the code server"])
def test_when_one_is_killed_none_is_left(place: Place, killed: str):
    server, forked = place.server("forks")
    stand_in = place.stand_in()
    line(stand_in)
    os.kill({"the stand-in": stand_in.pid, "the daemon": forked, "the code server": server.pid}[killed], signal.SIGKILL)
    stand_in.wait(SECONDS)
    eventually(lambda: is_gone(forked))


def test_a_second_stand_in_waits_for_the_end_of_the_first_daemon_and_is_the_daemon_then(place: Place):
    _, forked = place.server("forks")
    first = place.stand_in()
    line(first)
    os.kill(forked, signal.SIGSTOP)  # a daemon that takes long to end
    eventually(lambda: psutil.Process(forked).status() == psutil.STATUS_STOPPED)
    first.kill()
    second = place.stand_in()
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.5)
    assert psutil.Process(second.pid).cmdline()[2] == "batch_assets.local_dagster.first_daemon"
    os.kill(forked, signal.SIGCONT)
    assert line(second).startswith(f"{second.pid} ")
    assert is_gone(forked)
