"""A Dagster project of your own: an asset that reads the table of the dataset `slogans`."""

import os
from pathlib import Path

import dagster as dg
import polars as pl

from batch_assets import published_tables, table_input


@dg.asset(ins={"slogans": table_input("slogans")}, automation_condition=dg.AutomationCondition.eager())
def longest_slogans(slogans: pl.LazyFrame) -> dg.MaterializeResult:
    """The longest slogan of each product, as `longest_slogans.csv` beside the store."""
    rows = slogans.filter(pl.col("error").is_null())
    longest = (
        rows.sort(pl.col("output").str.len_chars(), descending=True).unique("product", keep="first").sort("product")
    )
    found = longest.select("product", "tone", "output").collect()
    found.write_csv(Path(os.environ.get("BATCH_ASSETS_STORE", "data")) / "longest_slogans.csv")
    return dg.MaterializeResult(metadata={"products": len(found)})


defs = dg.Definitions.merge(published_tables("slogans"), dg.Definitions(assets=[longest_slogans]))
