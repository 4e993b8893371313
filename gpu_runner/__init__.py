"""Rows through engines, the fleet's database, the planner, providers and a simulator. No Dagster.

May import neither `resources` nor `batch_assets`. `rows` has the words that every floor shares.
"""

__all__ = [
    "answers",
    "boot_clock",
    "bounded_postgres",
    "cost_meter",
    "errors",
    "money",
    "reachability",
    "repeated_task",
    "request_limits",
    "rows",
    "sqlite_files",
    "table_versions",
    "token_price",
]
