"""Every hostile input ends in one clear error, or is accepted safely, and without much memory."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hostile.judge import CASES

MEGABYTES = 700
HANGS = 240.0  # seconds for all of them: they take five, and one that goes on for ever is to be named

Verdict = tuple[str, str]


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Verdict]:
    """What became of each case. Workers of one pytest share them: the first one that needs them finds them out."""
    place = tmp_path_factory.getbasetemp()
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    file = place / "verdicts.json"
    with (place / "verdicts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_text(json.dumps([verdict for _, verdict in sorted(_judged().items())]))
    return {number: (said, words) for number, (said, words) in enumerate(json.loads(file.read_text()))}


def _judged() -> dict[int, Verdict]:
    """In one process with a limit on its memory; another one goes on after a crash."""
    found: dict[int, Verdict] = {}
    while len(found) < len(CASES):
        command = [sys.executable, "-m", "hostile.judge", str(len(found)), str(MEGABYTES)]
        tests = str(Path(__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": tests}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as judge:
            try:
                printed, errors = judge.communicate(timeout=HANGS)
            except subprocess.TimeoutExpired:
                judge.kill()
                printed, errors = judge.communicate()
                errors += f"\nit was killed after {HANGS:.0f} s"
        before = len(found)
        for line in printed.splitlines():
            number, said, words = json.loads(line)
            found[number] = (said, words)
        if len(found) < len(CASES):
            last = (errors.strip().splitlines() or [""])[-1]
            found[len(found)] = ("crashed", f"status {judge.returncode} {last}")
            assert before > 0 or found[0][0] != "crashed", errors
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{case.kind}: {case.name}"[:80] for case in CASES])
def test_a_hostile_input_ends_in_one_clear_error_or_is_accepted_safely(
    number: int, verdicts: dict[int, Verdict]
) -> None:
    case, (said, words) = CASES[number], verdicts[number]
    assert said == ("accepted" if case.words is None else "error"), words
    assert case.words is None or case.words in words, words
    assert "Traceback" not in words and " at 0x" not in words and "<built-in" not in words
