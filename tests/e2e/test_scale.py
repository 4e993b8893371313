"""12 batches (or 100) through the whole platform, on both databases; `benchmarks/scale.py` does 2,000,000 rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.timing import SOAK

from e2e.harness import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS, PER_RUN = (25_000, 25) if SOAK else (3_000, 3)  # batches of 250 rows, four runs


@pytest.mark.parametrize("database", [pytest.param("sqlite", marks=pytest.mark.soak("dagster")), "postgres"])
def test_every_row_is_asked_and_published_once_and_every_batch_is_one_ledger_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    """The benchmark itself compares engines, ledger and table with the source; here are the bounds on what it used."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    from postgres import why_not

    if database == "postgres" and (reason := why_not()):
        pytest.skip(reason)
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "scale.py"), "--rows", str(ROWS), "--fast-disk"]
    command += ["--database", database, "--batches-per-run", str(PER_RUN), "--minutes", "10", "--json", str(figures)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(figures.read_text())
    assert (found["rows"], found["batches"]) == (ROWS, ROWS // 250)
    # The refresh, four runs, one publication; towards the end runs are smaller, so that all engines work.
    assert 1 + 4 + 1 <= found["runs"] <= 1 + 12 + 1
    assert all(sensor["ticks"] and not sensor["failed"] for sensor in found["ticks"].values())
    assert max(process["peak_mib"] for process in found["processes"].values()) < 600
