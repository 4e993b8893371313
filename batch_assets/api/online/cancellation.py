"""Loops and requests that end when they are cancelled, whatever a library does with the cancel."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raises CancelledError where this task was told to end and a library has swallowed that.

    redis-py looks for old bytes under a time-out of zero seconds. A cancel that comes in the same turn of the loop is
    taken for that time-out. `asyncio.wait_for` before Python 3.12, by which it sends, drops one that comes in the turn
    in which the bytes are out; `asyncio.gather` tells of a failure of its children instead. A loop around them would go
    on for ever, and who waits for its end with it.

    No `asyncio.TaskGroup` may be beneath: in Python 3.11 it leaves its task marked as told to end when a child fails
    while the group waits for its children. Time-outs of asyncio take their mark back.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
