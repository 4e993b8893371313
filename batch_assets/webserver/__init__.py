"""Dagster's webserver behind a guard: only this machine's user, only from pages that it served itself.

`server` is the process; `guard` decides on each request, with `guarded_requests`, `peers` and `token`.
"""

__all__ = ["guard", "peers", "server", "token"]
