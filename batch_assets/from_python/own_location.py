"""Dagster's definitions of datasets that are declared in Python: a whole code location, with what they share."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import dagster as dg

from batch_assets.component import dataset_definitions
from batch_assets.definitions import platform
from batch_assets.from_python.python_spec import dataset_spec
from batch_assets.orchestration.source_assets import files_assets
from batch_assets.spec.errors import Problem, SpecError
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.source import circle_from, dataset_read_by
from batch_assets.table_access.asset_inputs import IO_MANAGER, table_reader
from resources.fleet.resource import GpuFleet
from resources.store.dataset_store import BatchStore


def generated_dataset(**keys: Any) -> dg.Definitions:
    """One dataset as a code location: `defs = generated_dataset(name=…, source=…, prompt=…, model=…)`.

    The arguments are those of `dataset_spec`. Raises SpecError.
    """
    return generated_datasets(dataset_spec(**keys))


def generated_datasets(
    *specs: GeneratedDatasetSpec, store: BatchStore | None = None, fleet: GpuFleet | None = None
) -> dg.Definitions:
    """Datasets as a code location, with the sensors that launch and publish them, the store and the fleet.

    To be merged with definitions of your own, whose assets take the tables by `table_input`. Store and fleet are those
    of the settings unless others are given.
    Raises SpecError where two datasets have one name, or read each other in a circle.
    """
    names = Counter(spec.name for spec in specs)
    if twice := [name for name, count in names.items() if count > 1]:
        raise SpecError("generated_datasets", [Problem("name", "a name of its own", f"{twice[0]!r} twice")])
    reads = {spec.name: dataset_read_by(spec.source) for spec in specs}
    if circle := next(filter(None, (circle_from(name, reads) for name in reads)), None):
        raise SpecError("generated_datasets", [Problem("source", "datasets that are no circle", " → ".join(circle))])
    found = {spec.name: (spec, Path.cwd()) for spec in specs}
    with warnings.catch_warnings():
        for kind in (dg.BetaWarning, dg.PreviewWarning):  # of Dagster's API as we use it: nothing to a user
            warnings.simplefilter("ignore", kind)
        parts = [dataset_definitions(spec, folder) for spec, folder in found.values()]
        taken = {key for part in parts for asset in part.assets or () for key in _keys(asset)}
        parts.append(dg.Definitions(assets=files_assets(found, taken)))
        reader = table_reader(None if store is None else store.root)
        parts.append(dg.Definitions(resources={IO_MANAGER: reader}))
        datasets = dg.Definitions.merge(*parts)
        return dg.Definitions.merge(datasets, platform(datasets, found, store, fleet, known=lambda: found))


def _keys(asset: Any) -> set[dg.AssetKey]:
    return set(asset.keys) if isinstance(asset, dg.AssetsDefinition) else {asset.key}
