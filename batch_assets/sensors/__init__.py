"""Dagster's sensors: each looks at all datasets, a bounded piece of work at a tick, and remembers nothing itself.

`launcher` starts runs, `publisher` publishes complete tables, `capacity` asks the controller for instances for the
`open_datasets`, `liveness` ends runs whose worker is gone, `reaper` ends what is rented and of no more use, `reconcile`
compares store and catalog.
"""

__all__ = ["capacity", "launcher", "liveness", "open_datasets", "publisher", "reaper", "reconcile"]
