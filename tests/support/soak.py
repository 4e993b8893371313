"""The tests that `make soak` runs, by subject: `@pytest.mark.soak("GROUP")`.

`slow` tests are run by every CI: one for each promise of the README. All others that take long are soak tests, and are
run before a release and after a change of their subject: `make soak GROUP=losses`.

A test may move here when another one, which every CI runs, shows the same promise. Each of these keeps a slow test in
`tests/e2e`: a refresh (`test_refresh`), the kill of a worker, and S3 (`test_s3`), of an engine (`test_losses`), of the
service (`test_front_door`, `test_front_door_kills`), an interrupted command (`test_command_line`), a deadline and
a spot machine that is taken away (`test_deadline`), online requests and Redis (`test_online`), a browser
(`test_browser`, `test_web_guard`), Postgres (`test_scale`) and Kubernetes (`test_kubernetes`).
"""

from __future__ import annotations

import pytest

GROUPS = {
    "api": "the front door call by call: stock clients, schemathesis, several endpoints, budgets",
    "dagster": "runs, sensors, backfills, the command line and the UI on whole platforms; examples",
    "deadline": "windows and deadlines on whole platforms, the deadline benchmark",
    "fleet": "leases, moves, spot machines and hand-over on whole platforms; the fleet's state machine",
    "kubernetes": "a real cluster: provider, faults, growth, the platform on it",
    "losses": "kill -9, faults of engines, stores, clocks and machines, in series and at random",
    "online": "submit and poll, routing, micro-batches, interactive requests",
    "providers": "every provider against its double: local, simulated, ssh, EC2, RunPod",
    "rows": "sources, snapshots, generation, publication and verification, damaged in every place",
}


def group_of(item: pytest.Item) -> str | None:
    """Which group a test belongs to; None: it is no soak test. UsageError: an unknown group."""
    mark = item.get_closest_marker("soak")
    if mark is None:
        return None
    if len(mark.args) != 1 or mark.args[0] not in GROUPS:
        raise pytest.UsageError(f"{item.nodeid}: expected soak(one of {sorted(GROUPS)}), found {mark.args}")
    return str(mark.args[0])
