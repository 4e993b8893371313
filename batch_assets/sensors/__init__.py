"""Dagster's sensors: each looks at all datasets, a bounded piece of work at a tick, and remembers nothing itself.

`launcher_sensor` starts runs, `publisher_sensor` publishes complete tables, `chain_sensor` goes on to the dataset that
reads one. `capacity_sensor` asks the controller for instances for the `open_datasets`, `liveness_sensor` ends runs
whose worker is gone, `reaper_sensor` ends what is rented and of no more use, `reconcile_sensor` compares store and
catalog.
"""

__all__ = [
    "capacity_sensor",
    "chain_sensor",
    "launcher_sensor",
    "liveness_sensor",
    "open_datasets",
    "publisher_sensor",
    "reaper_sensor",
    "reconcile_sensor",
]
