"""Published tables for other programs: `opened_table` opens one for Polars, Arrow and DuckDB, `asset_inputs` hands
it to assets of other Dagster projects.
"""

__all__ = ["asset_inputs", "opened_table"]
