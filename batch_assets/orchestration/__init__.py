"""What Dagster shows of a dataset: its assets, checks and jobs, and what is decided for it between runs.

`source_assets` defines the source and the files before it, `source_place` says where its rows lie now; `assets` are
prompts, rows, dataset and dead letters; `automation` refreshes a dataset when the table that it reads changes,
`freshness` is by when a table is due; `broken_files` shows what cannot be used.
`active_request` is what is being made now, `launch_plan` what to start next, `reconcile` makes catalog and store agree
again, `made_anew` marks batches that are made once more. `chain_shares` is what each step of a chain may take of its
deadline and budget. `cost_report` is the table of costs. `front_door/` shows batches of the Batch API and what tenants
are charged.
"""

__all__ = [
    "active_request",
    "asset_checks",
    "assets",
    "automation",
    "broken_files",
    "capacity_report",
    "chain_shares",
    "cost_report",
    "freshness",
    "front_door",
    "launch_plan",
    "made_anew",
    "reconcile",
    "repair",
    "request_summary",
    "source_assets",
    "source_place",
    "store_check",
    "trial",
]
