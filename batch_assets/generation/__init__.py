"""The GPU op: a contiguous range of batches in, one ledger entry per committed batch out.

`op` is the op; `engine_supervisor` leases engines, moves between them and gives them back; `range_run` says which
batches come next, and brings their rows from the store through the feed; `range_job` has their journal and objects.
"""

__all__ = ["op", "range_plan", "store_reads"]
