"""Rows of many open batches through engines, continuously: no barrier between batches.

`feed` is the whole; `engine_worker` one engine in it, and `worker_state` its life; `engine_monitor` watches the engine,
and `engine_liveness` is what is known of it; `row_state` the states of a row and their transitions; `row_request` a
request for rows; `row_queue` the rows that are left; `row_outcomes` what becomes of those that were answered;
`failed_requests` those whose request failed, until it is known why: `failures/` says what a failure means. `hedging/`
says which rows are late, and `second_requests` asks once more for them. `engine_death` gives the rows of an engine back
when it ends, `poison_rows` finds those that end engines. `windows/` says how many rows are in flight.
"""

__all__ = ["answer_memory", "engine_monitor", "failures", "feed", "hedging", "windows"]
