"""One run after the other takes an engine over without a pause; `benchmarks/handover.py` does ten longer runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.timing import PATIENCE

from e2e.harness import REPOSITORY

pytestmark = [pytest.mark.soak("fleet"), pytest.mark.timeout(400)]


def test_an_engine_is_handed_on_without_a_second_of_idleness(tmp_path: Path) -> None:
    """The benchmark itself checks that there was one instance and that each row was asked once."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "handover.py"), "--runs", "2", "--no-client"]
    command += ["--seconds", "25", "--rate", "60"]  # the next run has that long to start, also on a busy machine
    subprocess.run([*command, "--json", str(figures)], check=True)
    found = json.loads(figures.read_text())
    assert (found["runs"], found["leases"]) == (2, 2)
    assert found["longest_gap"] < 1.0 * PATIENCE
