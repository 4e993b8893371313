"""What the command line sees of a request: the state of a dataset, read from Dagster, store and fleet, until its end.

`dataset_status` reads one state, and whether the last refresh failed; `request_monitor` follows a
request until it has ended and `final_check` compares the store with the ledger then; `display` puts it into lines.
`run`, `status` and the demos use it.
"""

__all__ = ["dataset_status", "display", "final_check", "machines_left", "request_monitor"]
