"""How often Dagster's daemon and webserver ask the code server whether it is still the one whose definitions they hold.

Each asks once a second, over a new gRPC channel each time (dagster/_grpc/server_watcher.py, WATCH_INTERVAL). While
nobody answers that is right: who waits for the code server must not wait longer. While it does answer, five seconds
are enough: the sensor daemon does not look more often either.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from dagster._grpc.client import DEFAULT_GRPC_TIMEOUT, DagsterGrpcClient

ASK_SECONDS = 5.0


def ask_seldom(clock: Callable[[], float] = time.monotonic) -> None:
    """From now on a client's answer to "which server are you" counts for ASK_SECONDS. An error never counts."""
    ask = DagsterGrpcClient.get_server_id
    answers: weakref.WeakKeyDictionary[DagsterGrpcClient, tuple[float, str]] = weakref.WeakKeyDictionary()

    def get_server_id(client: DagsterGrpcClient, timeout: int = DEFAULT_GRPC_TIMEOUT) -> str:
        known, now = answers.pop(client, None), clock()
        if known is None or now - known[0] >= ASK_SECONDS:
            known = now, ask(client, timeout)
        answers[client] = known
        return known[1]

    DagsterGrpcClient.get_server_id = get_server_id  # type: ignore[assignment,method-assign]
