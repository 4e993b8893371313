"""When Dagster's daemons were last alive, as they write it into the instance's run storage every 30 seconds.

`DagsterInstance.get_daemon_heartbeats` is not documented; tests/batch_assets/dagster_internals checks it.
"""

from __future__ import annotations

import dagster as dg

INTERVAL_SECONDS = 30.0  # dagster/_daemon/controller.py, DEFAULT_HEARTBEAT_INTERVAL_SECONDS


def last_heartbeat(instance: dg.DagsterInstance) -> float | None:
    """The newest heartbeat of any daemon of this instance (Unix seconds by its computer's clock), or None."""
    return max((beat.timestamp for beat in instance.get_daemon_heartbeats().values()), default=None)
