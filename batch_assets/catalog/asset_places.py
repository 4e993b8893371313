"""Where the table of another Dagster asset lies (`source.asset`): as its newest materialization says."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import dagster as dg

from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.files import is_folder
from batch_assets.spec.errors import near_miss, nearest
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.source import may_hold_secret

PLACE_KEYS = ("dagster/uri", "path")  # metadata of a materialization; the first that is there counts


def of_asset(spec: GeneratedDatasetSpec, instance: dg.DagsterInstance) -> GeneratedDatasetSpec:
    """The spec with `source.path` in place of `source.asset`; itself where it names no asset. Raises SourceError."""
    named = spec.source.asset
    if named is None:
        return spec
    path = _files(named, _place(named, instance), spec.source.format or "parquet")
    return spec.model_copy(update={"source": spec.source.model_copy(update={"asset": None, "path": path})})


def _place(named: str, instance: dg.DagsterInstance) -> str:
    """What the newest materialization says: a path, or an address."""
    key = dg.AssetKey.from_user_string(named)
    newest = instance.get_latest_materialization_event(key)
    event = newest.asset_materialization if newest is not None else None
    if event is None:
        known = [one.to_user_string() for one in instance.get_asset_keys()]
        hint = f" {nearest(named, known)}." if near_miss(named, known) else ""
        expected = "an asset that was materialized in this Dagster"
        raise SourceError(f"source.asset: expected {expected}, found none of {named}.{hint} Materialize it first")
    if event.partition is not None:
        raise SourceError(
            f"source.asset: expected an asset without partitions, as one materialization is one place, found {named} "
            "with partitions; name its files with source.path"
        )
    places = _texts(event.metadata)
    place = next((places[one] for one in PLACE_KEYS if one in places), None)
    if place is None:
        names = ", ".join(sorted(event.metadata)[:20]) or "none"
        raise SourceError(
            f"source.asset: expected the place of {named} in the metadata {' or '.join(PLACE_KEYS)} of its newest "
            f"materialization, found neither; its metadata: {names}"
        )
    return place


def _texts(metadata: Mapping[str, dg.MetadataValue[Any]]) -> dict[str, str]:
    found = {name: value.value for name, value in metadata.items() if name in PLACE_KEYS}
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def _files(named: str, place: str, ending: str) -> str:
    """A path that `source.path` takes: of a folder, all files below it with the ending of the format."""
    expected = f"source.asset: expected the place of {named} as"
    if may_hold_secret(place):
        raise SourceError(f"{expected} a path or address without user, password or query, found one with it")
    scheme, found, rest = place.partition("://")
    kind = scheme.lower() if found else "file"
    if kind not in ("file", "s3", "s3a", "gs"):
        raise SourceError(f"{expected} a file, s3://bucket/key or gs://bucket/key, found {scheme:.20}://…")
    if kind == "file":
        path = unquote(urlsplit(place).path) if found else place
        if not Path(path).is_absolute():
            raise SourceError(f"{expected} a whole path, found {path!r:.200}; nobody knows where it starts")
    else:
        path = f"{'gs' if kind == 'gs' else 's3'}://{rest}"
    path = path.rstrip("/")
    if not is_folder(path):
        return path if kind == "file" else escaped(path)  # a local name that exists is meant as it is
    if is_folder(f"{path}/_delta_log"):
        why = "a Delta table, whose files hold deleted rows, too"
        raise SourceError(f"{expected} a table of plain files, found {why}; write its rows to Parquet files")
    return f"{escaped(path)}/**/*.{ending}"


def escaped(path: str) -> str:
    """The path as a glob that means just this path."""
    begin = next((scheme for scheme in ("s3://", "gs://") if path.startswith(scheme)), "")
    return begin + glob.escape(path.removeprefix(begin))
