"""Dagster on one machine: code server, daemon and webserver as children that cannot outlive us.

`home` is where it lives; `stack` starts and keeps its processes; `leftover_processes` ends what an earlier stack left
behind; `dagster_client` is what the command line asks of a running one; `worker_template` is what run workers are
forked from.
"""

__all__ = ["dagster_client", "home", "local_fleet", "loopback", "stack"]
