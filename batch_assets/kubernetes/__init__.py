"""Dagster's run workers as pods of a Kubernetes cluster: a run launcher that never takes "unknown" for "failed".

`run_launcher` is what dagster.yaml names: Dagster's own K8sRunLauncher with another answer to "does the worker live",
and with a sweep of Jobs that are left over. What it decides is pure: `worker_health` of one run's worker,
`leftover_jobs` of all Jobs. `worker_observation` reads both from the API server, `RunFences` the run's heartbeat from
the fleet's database. `rights` has the verbs that each service account needs and asks for them. `run_workers` is what a
run worker gets of CPU and memory, by the size of its range.
"""

__all__ = ["rights", "run_launcher", "run_workers"]
