"""A whole Dagster whose clock is set back by an hour while it runs: its sensors go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pace import PATIENCE

LIBRARY = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)
MOVED = """
import json, sys, time
from pathlib import Path
import dagster as dg
from batch_assets.stack import Stack, prepare_home
folder, patience = Path(sys.argv[1]), float(sys.argv[2])
home = prepare_home()

def ticks(instance):
    states = [one for one in instance.all_instigator_state() if one.instigator_name in ("capacity", "reaper")]
    found = [tick for one in states for tick in instance.get_ticks(one.instigator_origin_id, one.selector_id, limit=99)]
    return {tick.tick_id for tick in found if tick.status.value != "STARTED"}

def wait_for_new(instance, known):
    began = time.monotonic()
    while len(ticks(instance) - known) < 3 and time.monotonic() - began < patience:
        time.sleep(0.3)
    return len(ticks(instance) - known), time.monotonic() - began

with Stack(home) as stack, dg.DagsterInstance.from_config(str(home)) as instance:
    stack.wait_ready()
    first, _ = wait_for_new(instance, set())
    (folder / "offset").write_text("-3600")
    time.sleep(3)  # what was under way has ended
    again, seconds = wait_for_new(instance, ticks(instance))
    print(json.dumps({"first": first, "again": again, "seconds": seconds}))
"""


@pytest.mark.slow
@pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed (Debian: faketime)")
def test_sensors_tick_on_after_the_clock_was_set_back_by_an_hour(tmp_path: Path):
    (tmp_path / "offset").write_text("+0")
    faked = {"LD_PRELOAD": str(LIBRARY), "FAKETIME_TIMESTAMP_FILE": str(tmp_path / "offset"), "FAKETIME_NO_CACHE": "1"}
    homes = {"DAGSTER_HOME": str(tmp_path / "home"), "BATCH_ASSETS_STORE": str(tmp_path / "store")}
    patience = 60 * PATIENCE
    child = subprocess.run(
        [sys.executable, "-c", MOVED, str(tmp_path), str(patience)],
        env={**os.environ, **homes, **faked, "FAKETIME_DONT_FAKE_MONOTONIC": "1"},
        capture_output=True,
        text=True,
        timeout=4 * patience + 120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert found["first"] >= 3 and found["again"] >= 3, found
    assert "the clock was set back by 3600 s: Dagster's daemon is started again" in child.stderr
