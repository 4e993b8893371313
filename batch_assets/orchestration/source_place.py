"""Where the rows of a dataset lie now: files, the table of another asset, or the published table of another dataset."""

from __future__ import annotations

from collections.abc import Callable

import dagster as dg

from batch_assets.catalog.asset_places import escaped, of_asset
from batch_assets.publishing.published_table import broken_files, published_table
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.models import GeneratedDatasetSpec
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import DatasetStore


def at_its_place(spec: GeneratedDatasetSpec, instance: dg.DagsterInstance, objects: Objects) -> GeneratedDatasetSpec:
    """The spec with the files that it reads as `source.path`; of a dataset, those of its newest published version.

    `objects`: the store of the datasets. Raises SourceError where nothing was published, or the table is damaged.
    """
    if spec.source.dataset is None:
        return of_asset(spec, instance)
    name = spec.source.dataset
    store = DatasetStore(objects, name)
    try:
        table = published_table(store)
        if table is not None and (gone := broken_files(store, table)):
            raise SourceError(
                f"source.dataset: expected the whole table of {name}, found {gone[0]} gone or of another size; "
                f"`batch-assets verify {name}` says what helps"
            )
    except CorruptObject as error:
        raise SourceError(f"source.dataset: the table of {name} cannot be read: {error}") from error
    if table is None:
        raise SourceError(
            f"source.dataset: expected a published table of {name}, found none; `batch-assets run {name}` makes it"
        )
    path = f"{escaped(table.uri(objects))}/part-*.parquet"
    return spec.model_copy(update={"source": spec.source.model_copy(update={"path": path})})


def refuse_simulated(name: str, version: str | None, objects: Objects, simulation: Callable[[], bool]) -> None:
    """Raise SourceError where a model would be asked about texts that a simulator wrote: the table of dataset `name`,
    in the version that a snapshot read, is simulated, and the rows to come, by `simulation`, are not."""
    table = published_table(DatasetStore(objects, name), version)
    if table is not None and table.simulated and not simulation():
        raise SourceError(
            f"source.dataset: expected a table of {name} that a model wrote, found one of an engine simulator; "
            f"`batch-assets run {name}` with a real engine makes it anew"
        )
