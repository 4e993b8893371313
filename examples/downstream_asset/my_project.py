"""A Dagster project of your own: an asset that reads the table of the dataset `slogans`."""

import os
from pathlib import Path

import dagster as dg
import polars as pl

TABLE = dg.AssetKey(["slogans", "dataset"])  # of the code location `batch_assets`


def read_table(store: str, name: str) -> pl.LazyFrame:
    """The newest published table of a dataset in a folder."""
    published = Path(store) / name / "published"
    return pl.scan_parquet(published / (published / "CURRENT").read_text().strip() / "part-*.parquet")


@dg.asset(deps=[TABLE], automation_condition=dg.AutomationCondition.eager())
def longest_slogans() -> dg.MaterializeResult:
    """The longest slogan of each product, as `longest_slogans.csv` beside the store."""
    store = os.environ.get("BATCH_ASSETS_STORE", "data")
    rows = read_table(store, "slogans").filter(pl.col("error").is_null())
    longest = (
        rows.sort(pl.col("output").str.len_chars(), descending=True).unique("product", keep="first").sort("product")
    )
    found = longest.select("product", "tone", "output").collect()
    found.write_csv(Path(store) / "longest_slogans.csv")
    return dg.MaterializeResult(metadata={"products": len(found)})


defs = dg.Definitions(assets=[longest_slogans])
