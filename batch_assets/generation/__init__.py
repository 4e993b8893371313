"""The GPU op: a contiguous range of batches in, one ledger entry per committed batch out.

`op` is the op; `engine_supervisor` leases engines (`pending_lease`), moves between them and gives them back, each an
`engine_session`; `range_run` brings rows from the store through the feed into the journal and batch objects;
`range_source` says which batches come next.
"""

__all__ = ["mixed_rows", "op", "store_wait", "vector_length"]
