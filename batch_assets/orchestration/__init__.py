"""What Dagster shows of a dataset: its assets, checks and jobs, and what is decided for it between runs.

`assets` defines source, prompts, rows, dataset and dead letters; `freshness` is by when a table is due.
`active_request` is what is being made now, `launch_plan` what to start next, `reconcile` makes catalog and store agree
again, `api_batches` re-drives batches of the Batch API (`api_records` opens their records). `cost_report` is the table
of costs, `billing_report` that of what tenants are charged.
"""

__all__ = [
    "active_request",
    "api_batches",
    "assets",
    "billing_report",
    "capacity_report",
    "cost_report",
    "freshness",
    "launch_plan",
    "reconcile",
    "repair",
    "request_summary",
    "store_check",
    "trial",
]
