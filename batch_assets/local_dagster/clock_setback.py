"""The machine's clock was set back: Dagster's sensors wait until it is as late again as when each was evaluated last.

A sensor's last tick is a Unix time in Dagster's storage, so starting the daemon again is not enough; and the daemon's
own loops wait by the same clock (run queue, sensors), so moving the ticks is not enough either. Both together are.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

log = logging.getLogger(__name__)

AHEAD_SECONDS = 5.0  # a file that was written so much later than now was written by another clock


def set_back_meanwhile(home: Path) -> bool:
    """Whether Dagster's storage of this home was written later than it is now: its clock was set back since."""
    files = (home / "schedules").glob("schedules.db*")
    return any(file.stat().st_mtime > time.time() + AHEAD_SECONDS for file in files)


def wake_sensors(home: Path) -> int:
    """Say of each sensor with a last tick in the future that it was now; returns how many there were.

    Only while no daemon of this home runs: a tick that is under way writes its own time when it ends.
    """
    import dagster as dg

    from batch_assets.dagster_internals import InstigatorType, SensorInstigatorData

    woken = 0
    with dg.DagsterInstance.from_config(str(home)) as instance:
        now = time.time()
        for state in instance.all_instigator_state(instigator_type=InstigatorType.SENSOR):
            data = state.instigator_data
            if not isinstance(data, SensorInstigatorData):
                continue
            times = {name: value for name, value in data._asdict().items() if name.endswith("_timestamp")}
            late = {name: now for name, value in times.items() if value is not None and value > now}
            if late:
                instance.update_instigator_state(state.with_data(SensorInstigatorData(**{**data._asdict(), **late})))
                woken += 1
    return woken
