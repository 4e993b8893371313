"""What all sensors share: how often they look, and the Dagster instance that they look at.

Dagster opens an instance anew for each tick, also for one that only wants its resources: 123 of 142 samples of a tick's
time in the code server (py-spy, SQLite). So the code server keeps one, and sensors get store and fleet as arguments.
"""

from __future__ import annotations

import threading

import dagster as dg

from batch_assets.dagster_internals.kept_connections import keep_connections

# The daemon looks for due sensors every five seconds: an interval of just that would often miss a turn.
SECONDS = 4

_lock = threading.Lock()
_kept: dict[str, dg.DagsterInstance] = {}


def instance_of(context: dg.SensorEvaluationContext) -> dg.DagsterInstance:
    """The instance of a tick: in a code server one that is kept until the process ends, else the context's own."""
    reference = context.instance_ref
    if reference is None or context.code_location_origin is None:
        return context.instance
    with _lock:
        key = repr(reference)
        if key not in _kept:
            _kept[key] = dg.DagsterInstance.from_ref(reference)
            keep_connections(_kept[key])
        return _kept[key]
