"""What Dagster shows of the front door (`batch-assets serve`): its batches, and what its tenants are charged.

`api_batches` re-drives batches of the Batch API, `billing_report` is the table of what tenants are charged.
"""

__all__ = ["api_batches", "billing_report"]
