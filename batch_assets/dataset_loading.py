"""Dagster's definitions of all datasets: of those that can be used, of those that go on as they were last known, and of
files that are broken, as assets that say what is wrong. Whatever is wrong with one file, the others load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg

from batch_assets.component import chain_jobs, dataset_definitions
from batch_assets.dagster_internals.code_server import leave_out_component_types
from batch_assets.dagster_internals.component_folders import leave_out_folders
from batch_assets.orchestration.broken_files import broken_definitions
from batch_assets.orchestration.source_assets import files_assets
from batch_assets.spec.discovery import (
    BrokenFile,
    Datasets,
    Declarations,
    broken_file,
    declarations,
    defs_folder,
    external_defs,
    last_known,
    read_file,
)
from batch_assets.spec.errors import Problem, SpecError
from batch_assets.spec.last_known import keep
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.scaffold import document_text

PACKAGE = Path(__file__).parent


@dataclass(slots=True)
class LoadedDatasets:
    """`datasets`: those that are looked after, with the folder of their file; `parts`: definitions, to be merged."""

    datasets: Datasets = field(default_factory=dict)
    parts: list[dg.Definitions] = field(default_factory=list)
    broken: list[BrokenFile] = field(default_factory=list)

    def add(self, spec: GeneratedDatasetSpec, folder: Path, error: SpecError | None = None) -> None:
        """One dataset. What Dagster refuses is broken, too."""
        try:
            self.parts.append(dataset_definitions(spec, folder, error))
        except Exception as refused:
            self.refused(folder, refused)
        else:
            self.datasets[spec.name] = (spec, folder)

    def refused(self, path: Path, error: Exception) -> None:
        """Dagster cannot load what lies there."""
        found = f"an error: {type(error).__name__}: {str(error).strip():.800}"
        problem = SpecError(path, [Problem("this folder", "definitions that Dagster can load", found)])
        taken = {*self.datasets, *(one.name for one in self.broken)}
        self.broken.append(broken_file(path, problem, (), taken))


def load_datasets() -> LoadedDatasets:
    """Everything that is declared now."""
    found = declarations()
    keep(found.files, _as_read)
    loaded = LoadedDatasets(broken=[*found.broken])
    if external_defs() is not None or not _load_by_dagster(found, loaded):
        for spec, folder in found.datasets.values():
            loaded.add(spec, folder)
    going_on = defaultdict(list)
    for spec, broken in last_known(found):
        loaded.add(spec, broken.place, broken.error)
        going_on[broken.name].append(spec.name)
    loaded.parts.append(broken_definitions(loaded.broken, going_on))
    loaded.parts.append(dg.Definitions(jobs=chain_jobs({name: spec for name, (spec, _) in loaded.datasets.items()})))
    loaded.parts.append(dg.Definitions(assets=files_assets(loaded.datasets, _keys(loaded.parts))))
    return loaded


def _as_read(file: Path) -> str:
    """A file in which schemas stand in place of classes that it names."""
    return document_text([one.model_dump(mode="json", exclude_unset=True) for one in read_file(file).specs])


def _keys(parts: Sequence[dg.Definitions]) -> set[dg.AssetKey]:
    """Keys that definitions have, also those of others: no key is defined twice."""
    found: set[dg.AssetKey] = set()
    for asset in (asset for part in parts for asset in part.assets or ()):
        if isinstance(asset, dg.AssetsDefinition):
            found |= asset.keys
        elif isinstance(asset, dg.AssetSpec | dg.SourceAsset):
            found.add(asset.key)
    return found


def _load_by_dagster(found: Declarations, loaded: LoadedDatasets) -> bool:
    """Load the project's own folder as Dagster does, with components and modules of others; False when it cannot be."""
    leave_out_component_types()
    try:
        with leave_out_folders([one.place for one in found.broken]) as failed:
            loaded.parts.append(dg.load_from_defs_folder(path_within_project=PACKAGE))
    except Exception as error:  # of what is not ours: our datasets need none of it
        loaded.refused(defs_folder(), error)
        return False
    for path, reason in failed.items():
        loaded.refused(path, reason)
    loaded.datasets = {name: (spec, folder) for name, (spec, folder) in found.datasets.items() if folder not in failed}
    return True
