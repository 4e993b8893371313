"""Where the rows of a dataset come from, as Dagster's lineage shows it: `NAME/source`, and the files before it."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import dagster as dg

from batch_assets.snapshot.ingest import source_name
from batch_assets.spec.discovery import Datasets, defs_folder
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.source import GridColumn, SourceSpec, table_read_by
from resources.objects.hub_client import HubAddress, hub_address
from resources.objects.opening import bucket_address

GROUP = "sources"
_KINDS_OF_ADDRESSES = {"s3": "s3", "gs": "gcs", "hf": "huggingface"}
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Place:
    """A file, or the folder of a glob, that is read: `parts` are those of its asset key, `uri` its address."""

    parts: tuple[str, ...]
    uri: str
    kinds: frozenset[str]

    @property
    def key(self) -> dg.AssetKey:
        """Key of the asset that stands for it."""
        return dg.AssetKey(self.parts)


def source_asset(spec: GeneratedDatasetSpec, folder: Path) -> dg.AssetSpec:
    """What the dataset reads, and how: shown in the lineage, never materialized here. `folder`: of its file."""
    source = spec.source
    before = [place.key for place in places(source, folder)]
    if (read := table_read_by(source)) is not None:
        before = [dg.AssetKey.from_user_string(read)]
    return dg.AssetSpec(
        key=[spec.name, "source"],
        deps=before,
        group_name=spec.name,
        kinds={"yaml"} if source.grid is not None else _kinds(source.path or ".table", source.format),
        description=f"Read by `prompts`: {source_name(spec)}.",
    )


def files_assets(datasets: Datasets, taken: Collection[dg.AssetKey]) -> list[dg.AssetSpec]:
    """One external asset for each place that datasets read, where lineage begins; none for keys that are `taken`."""
    readers: dict[tuple[str, ...], list[tuple[str, Place]]] = defaultdict(list)
    for name, (spec, folder) in sorted(datasets.items()):
        for place in places(spec.source, folder):
            readers[place.parts].append((name, place))
    return [_files_asset(found) for parts, found in readers.items() if dg.AssetKey(parts) not in taken]


def _files_asset(readers: list[tuple[str, Place]]) -> dg.AssetSpec:
    place = readers[0][1]
    names = ", ".join(dict.fromkeys(name for name, _ in readers))
    return dg.AssetSpec(
        key=place.key,
        group_name=GROUP,
        kinds=set(sorted({kind for _, one in readers for kind in one.kinds})[:3]),
        description=f"Files that others write. Read by: {names}.",
        metadata={"dagster/uri": place.uri},
    )


def places(source: SourceSpec, folder: Path) -> Iterator[Place]:
    """The files, or folders of globs, that a source reads. `folder`: where relative paths start. Opens nothing."""
    read = {} if source.path is None else {source.path: _kinds(source.path, source.format)}
    columns = [values for values in (source.grid or {}).values() if isinstance(values, GridColumn)]
    read |= {one.csv: _kinds(one.csv, None) for one in columns}
    yield from {place.parts: place for place in (_place(path, folder, kinds) for path, kinds in read.items())}.values()


def _place(path: str, folder: Path, kinds: set[str]) -> Place:
    """A local file below the folder of the datasets is named as it lies there, any other by its whole path."""
    if (address := bucket_address(path)) is not None:
        scheme, bucket, key = address
        parts = _fixed([part for part in key.split("/") if part])
        return Place((scheme, bucket, *parts), "/".join([f"{scheme}://{bucket}", *parts]), frozenset(kinds))
    if (on_hub := hub_address(path)) is not None:
        parts = _fixed(on_hub.path.split("/")) if on_hub.path else []
        uri = HubAddress(on_hub.repo, on_hub.revision, "/".join(parts))
        return Place(("hf", "datasets", *on_hub.name.split("/"), *parts), str(uri), frozenset(kinds))
    try:
        whole = Path(path).expanduser()
    except RuntimeError:  # no such home: the reader says so
        whole = Path(path)
    whole = Path(os.path.normpath(folder.resolve() / whole))
    fixed = Path(*_fixed(list(whole.parts)))
    root = defs_folder().resolve()
    shown = fixed.relative_to(root) if fixed.is_relative_to(root) else fixed.relative_to(fixed.anchor)
    return Place(("file", *shown.parts), fixed.as_uri(), frozenset(kinds))


def _fixed(parts: list[str]) -> list[str]:
    """The parts before the first wildcard."""
    return parts[: next((number for number, part in enumerate(parts) if _WILD.search(part)), len(parts))]


def _kinds(path: str, given: str | None) -> set[str]:
    kind = _KINDS_OF_ADDRESSES.get(path.partition("://")[0].lower())
    return {given or _ending(path), *([kind] if kind else [])}


def _ending(path: str) -> str:
    """Format in a file name, without what packed it."""
    endings = [ending.lstrip(".") for ending in PurePosixPath(path.lower()).suffixes]
    return next((ending for ending in reversed(endings) if ending.isalnum() and ending not in ("gz", "zst")), "file")
