"""Dagster's asset catalog as the ledger of what is done: one materialization per committed batch.

`ledger` writes entries and defines what they say; `catalog_reader` reads them fast; `backfills` and `ranges` are
requests and runs as the instance knows them; `progress` makes figures of them. `asset_places` finds the tables of other
assets.
"""

__all__ = ["asset_places", "backfills", "catalog_reader", "ledger", "progress", "publications", "ranges", "run_errors"]
