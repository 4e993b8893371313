"""The first definitions server is a fork of its code server, serves once, and does not outlive it unasked."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from support.timing import PATIENCE

PRELUDE = (
    "import json, os, sys, threading, time\n"
    "from batch_assets.local_dagster import first_server\n"
    "def say(**found):\n"
    "    print(json.dumps(found), flush=True)\n"
)


def said_by(program: str, tmp_path: Path) -> list[dict[str, Any]]:
    """What a process says that runs this program, which has one thread."""
    words = [sys.executable, "-c", PRELUDE + program, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_it_gets_arguments_and_environment_and_its_exit_status_is_seen(tmp_path: Path):
    told, seen = said_by(
        "def serve():\n"
        "    say(argv=sys.argv[1:], value=os.environ['GIVEN'], path='PATH' in os.environ)\n"
        "    sys.exit(7)\n"
        "first = first_server.fork(serve)\n"
        "assert first.poll() is None\n"
        "assert first.begin(['api', 'grpc', '--socket', 'a b'], {'GIVEN': 'é\\n'})\n"
        "assert not first.begin([], {})\n"
        "say(status=first.wait(timeout=60), again=first.poll(), code=first.returncode)\n"
        "first.terminate()\n",
        tmp_path,
    )
    assert told == {"argv": ["api", "grpc", "--socket", "a b"], "value": "é\n", "path": False}
    assert seen == {"status": 7, "again": 7, "code": 7}


def test_one_that_was_killed_cannot_be_told_to_serve(tmp_path: Path):
    (seen,) = said_by(
        "first = first_server.fork(lambda: say(served=True))\n"
        "first.kill()\n"
        "say(status=first.wait(), begun=first.begin([], {}))\n",
        tmp_path,
    )
    assert seen == {"status": -9, "begun": False}


def test_it_holds_nothing_open_that_its_code_server_holds(tmp_path: Path):
    (seen,) = said_by(
        "held = open(sys.argv[1] + '/held', 'w')\n"
        "os.set_inheritable(held.fileno(), True)\n"
        "first = first_server.fork(lambda: say(open=sorted(os.listdir('/proc/self/fd'), key=int)[:-1]))\n"
        "first.begin([], {})\n"
        "first.wait()\n",
        tmp_path,
    )
    assert seen == {"open": ["0", "1", "2"]}


def test_it_ends_with_a_code_server_that_dies_before_it_was_told_to_serve(tmp_path: Path):
    (seen,) = said_by("say(pid=first_server.fork(lambda: say(served=True)).pid)\nos._exit(0)\n", tmp_path)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(seen["pid"]).wait(timeout=20 * PATIENCE) in (None, 0)


def test_a_process_of_two_threads_is_not_forked(tmp_path: Path):
    (seen,) = said_by(
        "threading.Thread(target=time.sleep, args=[300], daemon=True).start()\n"
        "try:\n"
        "    first_server.fork(lambda: None)\n"
        "except first_server.worker_template.TemplateError as error:\n"
        "    say(error=str(error))\n"
        "os._exit(0)\n",
        tmp_path,
    )
    assert seen == {"error": "expected a process of one thread, found 2: it cannot be forked"}
