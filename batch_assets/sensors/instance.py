"""What all sensors share: how often they look, and the Dagster instance and the fleet's database that they look at.

Dagster opens an instance anew for each tick, also for one that only wants its resources: 123 of 142 samples of a tick's
time in the code server (py-spy, SQLite). So the code server keeps one, and sensors get store and fleet as arguments.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import dagster as dg

from batch_assets.catalog.ledger import remember_entries
from batch_assets.dagster_internals.kept_connections import keep_connections, use_instance
from gpu_runner.fleet_database.database import FleetDatabase
from resources.fleet.resource import GpuFleet

# The daemon looks for due sensors every five seconds: an interval of just that would often miss a turn.
SECONDS = 4
WOKEN_SECONDS = 1  # of those that go on after a run: our daemon looks at once when one has ended

_lock = threading.Lock()
_kept: dict[str, dg.DagsterInstance] = {}
_kept_databases: dict[str, FleetDatabase] = {}


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
            remember_entries(_kept[key])
        use_instance(context, _kept[key])
        return _kept[key]


@contextlib.contextmanager
def fleet_database_of(context: dg.SensorEvaluationContext, fleet: GpuFleet) -> Iterator[FleetDatabase]:
    """The fleet's database of a tick: in a code server, on Postgres, one that is kept until the process ends.

    A connection there is a process of the server and a password that is proved, and each look asked for several. A file
    of SQLite is opened anew: it may have been restored meanwhile.
    """
    if context.code_location_origin is not None:
        instance_of(context)  # what the tick logs goes there, too
    if context.code_location_origin is None or not fleet.database.startswith("postgresql"):
        with fleet.open_database() as fleet_db:
            yield fleet_db
        return
    with _lock:
        if fleet.database not in _kept_databases:
            _kept_databases[fleet.database] = FleetDatabase(fleet.database)
        fleet_db = _kept_databases[fleet.database]
    yield fleet_db
