"""Rows of many open batches through engines, continuously: no barrier between batches.

`feed` is the whole; `engine_worker` one engine in it, and `worker_state` its life; `engine_monitor` watches the engine,
and `engine_liveness` is what is known of it; `row_state` the states of a row and their transitions, and requests for
rows; `row_queue` the rows that are left, and `prefix_order` which of them share beginnings; `row_outcomes` what becomes
of those that were answered, and of those that an engine still had when it ended; `failed_requests` those whose request
failed, until it is known why: `failures/` says what a failure means. `late_rows` learns how long requests take and says
which rows are late, and `second_requests` asks once more for them. `poison_rows` finds those that end engines.
`windows/` says how many rows are in flight.
"""

__all__ = ["answer_memory", "engine_monitor", "failures", "feed", "late_rows", "prefix_order", "windows"]
