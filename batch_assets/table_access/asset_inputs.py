"""Published tables as inputs of assets in other Dagster projects, in the type that the asset's annotation names.

No postponed annotations: Dagster reads those of resources.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset

from batch_assets.catalog.ledger import table_key
from batch_assets.table_access.opened_table import Table, table
from batch_assets.tags import DATA_VERSION_TAG

IO_MANAGER = "published_tables"
_READ: Mapping[Any, Callable[[Table], Any]] = {
    Table: lambda found: found,
    pl.LazyFrame: Table.lazy,
    pl.DataFrame: lambda found: found.lazy().collect(),
    pa.Table: Table.arrow,
    pyarrow.dataset.Dataset: Table.dataset,
    duckdb.DuckDBPyRelation: Table.relation,
}


def published_tables(*names: str, store: str | None = None) -> dg.Definitions:
    """What another Dagster project needs to read these datasets' tables: they, as external assets, and their reader.

    `dg.Definitions.merge(published_tables("capitals"), dg.Definitions(assets=[mine]))`. In a workspace where the
    platform is another code location, both are one asset, with one lineage. `store`: as of `PublishedTables`.
    """
    tables = [dg.AssetSpec(table_key(name), kinds={"parquet", "table"}) for name in names]
    return dg.Definitions(assets=tables, resources={IO_MANAGER: table_reader(store)})


def table_input(name: str) -> dg.AssetIn:
    """The table of a dataset as an input: `@dg.asset(ins={"rows": table_input("capitals")})`.

    The project has `published_tables("capitals")`, too.
    """
    return dg.AssetIn(key=table_key(name), input_manager_key=IO_MANAGER)


class PublishedTables(dg.ConfigurableIOManager):
    """Reads published tables; it writes nothing. `store`: a folder or s3://bucket/prefix; BATCH_ASSETS_STORE without.

    An input is the version that the newest materialization of the table names, so that it stays what Dagster's lineage
    says; where this instance knows none, the newest in the store. The asset's page shows which version was read.
    Annotations: polars.LazyFrame, polars.DataFrame, pyarrow.Table, pyarrow.dataset.Dataset, duckdb.DuckDBPyRelation
    or batch_assets.table_access.opened_table.Table; without any a LazyFrame.
    """

    store: str | None = None

    def load_input(self, context: dg.InputContext) -> Any:
        """Raises dg.Failure for another annotation, or a version that is gone."""
        wanted = context.dagster_type.typing_type
        read = _READ.get(pl.LazyFrame if wanted in (Any, None) else wanted)
        if read is None:
            known = ", ".join(f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in _READ)
            raise dg.Failure(f"{context.name}: expected an annotation of {known}, found {wanted}", allow_retries=False)
        found = table(context.asset_key.path[0], _materialized(context), store=self.store)
        context.add_input_metadata({"version": found.version, "dagster/row_count": found.rows})
        return read(found)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Raises dg.Failure."""
        raise dg.Failure(f"{IO_MANAGER} reads tables; give this asset another IO manager", allow_retries=False)


@functools.cache
def table_reader(store: str | None = None) -> PublishedTables:
    """The reader of a store: the same object each time, as Dagster merges definitions only where it is."""
    return PublishedTables(store=store)


def _materialized(context: dg.InputContext) -> str | None:
    """Version that the newest materialization names."""
    event = context.instance.get_latest_materialization_event(context.asset_key)
    materialization = event.asset_materialization if event is not None else None
    return (materialization.tags or {}).get(DATA_VERSION_TAG) if materialization is not None else None
