"""Every hostile input ends in one clear error, or is accepted safely: soon, and without much memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pace import PATIENCE

from hostile.judge import CASES

MEGABYTES = 700
SECONDS = 20.0  # of CPU; on a quiet machine none takes more than one or two

SECONDS_OF_ALL = 110 * PATIENCE

Verdict = tuple[str, str, float]


@pytest.fixture(scope="session")
def verdicts() -> dict[int, Verdict]:
    """What became of each case, in one process with a limit on its memory; another one goes on after a crash."""
    found: dict[int, Verdict] = {}
    while len(found) < len(CASES):
        command = [sys.executable, "-m", "hostile.judge", str(len(found)), str(MEGABYTES)]
        tests = str(Path(__file__).parent.parent)
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_OF_ALL, env={**os.environ, "PYTHONPATH": tests}
        )
        before = len(found)
        for line in ended.stdout.splitlines():
            number, said, words, seconds = json.loads(line)
            found[number] = (said, words, seconds)
        if len(found) < len(CASES):
            last = (ended.stderr.strip().splitlines() or [""])[-1]
            found[len(found)] = ("crashed", f"status {ended.returncode} {last}", 0.0)
            assert before > 0 or found[0][0] != "crashed", ended.stderr
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{case.kind}: {case.name}"[:80] for case in CASES])
def test_a_hostile_input_ends_in_one_clear_error_or_is_accepted_safely(
    number: int, verdicts: dict[int, Verdict]
) -> None:
    case, (said, words, seconds) = CASES[number], verdicts[number]
    assert said == ("accepted" if case.words is None else "error"), words
    assert case.words is None or case.words in words, words
    assert "Traceback" not in words and " at 0x" not in words and "<built-in" not in words
    assert seconds < SECONDS
